"""What `save_to_disk` of Hugging Face's datasets makes: `state.json` and Arrow files that it names."""

import os
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.convert.parquet import ParquetSource
from fireflyer.ffrecord.convert.source import Chain, Source, read_file

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_File] = msgspec.field(name="_data_files")
    indices: Any = msgspec.field(name="_indices_data_files", default=None)
    """Files of row numbers, which older releases saved instead of the rows alone."""


class _Splits(msgspec.Struct):
    splits: list[str]


def open_saved(folder: str | os.PathLike[str]) -> Source:
    """Open the rows of a saved data set, in the order of its files.

    Raises:
        ConfigError: several splits, saved with a selection of rows, or what `ParquetSource` raises.
        Corrupted: its state is none, or a file is damaged.
        StorageError: it cannot be read.
    """
    root = Path(folder)
    if (root / SPLITS).exists():
        names = _decoded(root / SPLITS, _Splits).splits
        raise ConfigError(
            f"{folder} holds the splits {', '.join(names)}: name one of them, {root / names[0]}"
            if names
            else f"{folder} holds no split"
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
            raise Corrupted(f"{root / STATE}: {file.filename!r} is no name of a file")
    return Chain([ParquetSource(root / file.filename) for file in state.files], str(folder))


def _decoded(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Corrupted(f"{path} is not of a saved data set: {error}") from error
