"""Output of `save_to_disk` of Hugging Face's datasets: `state.json` and Arrow files."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.formats.parquet import ParquetSource
from fireflyer.ffrecord.convert.source import Chain, Source, read_file

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_File] = msgspec.field(name="_data_files")
    indices: Any = msgspec.field(name="_indices_data_files", default=None)
    """Files of row numbers, which older releases saved instead of the selected rows."""


class _Splits(msgspec.Struct):
    splits: list[str]


def open_saved(folder: str | os.PathLike[str], columns: Sequence[str] | None = None) -> Source:
    """Opens the rows of a saved data set, in the order of its files; `columns`: as `ParquetSource`.

    Raises:
        ConfigError: the folder holds several splits, or a data set saved with a selection of rows.
            Also the errors of `ParquetSource`.
        Corrupted: `state.json` is invalid, or a file is damaged.
        StorageError: the data set cannot be read.
    """
    root = Path(folder)
    if (root / SPLITS).exists():
        names = _decoded(root / SPLITS, _Splits).splits
        raise ConfigError(
            f"{folder} holds the splits {', '.join(names)}: use one of them, e.g. {root / names[0]}"
            if names
            else f"{folder} holds no splits"
        )
    state = _decoded(root / STATE, _State)
    if state.indices:
        raise ConfigError(
            f"{folder} was saved with a selection of rows: call flatten_indices() and save it again"
        )
    if not state.files:
        raise ConfigError(f"{folder}: the data set is empty")
    for file in state.files:
        if file.filename in ("", ".", "..") or "/" in file.filename or "\0" in file.filename:
            raise Corrupted(f"{root / STATE}: invalid file name {file.filename!r}")
    files = [ParquetSource(root / file.filename, columns) for file in state.files]
    return Chain(files, str(folder))


def _decoded(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupted(f"{path} does not belong to a saved data set: {error}") from error
