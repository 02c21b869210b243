"""Detection of the format of a path."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.formats.arrays import ArraySource
from fireflyer.ffrecord.convert.formats.decompress import COMPRESSIONS
from fireflyer.ffrecord.convert.formats.folder import FolderSource
from fireflyer.ffrecord.convert.formats.huggingface import INFO, SPLITS, STATE, open_saved
from fireflyer.ffrecord.convert.formats.mds import MdsSource
from fireflyer.ffrecord.convert.formats.parquet import ParquetSource
from fireflyer.ffrecord.convert.formats.records import RecordSource
from fireflyer.ffrecord.convert.formats.tar import TarSource
from fireflyer.ffrecord.convert.formats.text import JsonLinesSource, TextSource
from fireflyer.ffrecord.convert.formats.torch_dataset import DatasetSource
from fireflyer.ffrecord.convert.source import Chain, Selected, Source
from fireflyer.ffrecord.paths import is_url

_Opener = Callable[[str, Sequence[str] | None], Source]
"""Function that opens a path; some formats read only the requested columns."""

KINDS: dict[str, _Opener] = {
    "folder": lambda path, _: FolderSource(path),
    "tar": TarSource,
    "parquet": ParquetSource,
    "huggingface": open_saved,
    "mds": MdsSource,
    "text": lambda path, _: TextSource(path),
    "jsonl": lambda path, _: JsonLinesSource(path),
    "numpy": ArraySource,
    "torch": DatasetSource,
    "records": lambda path, _: RecordSource(path),
}

_SUFFIXES = {
    ".tar": "tar",
    ".tar.gz": "tar",
    ".tgz": "tar",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "parquet",
    ".feather": "parquet",
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "numpy",
    ".npz": "numpy",
    ".ffr": "records",
}

_SHARDS = (".mds", *(f".mds.{kind}" for kind in COMPRESSIONS))


def open_source(
    paths: Sequence[str], kind: str | None = None, columns: Sequence[str] | None = None
) -> Source:
    """Opens `paths` as one source; without `kind`, detects the format by suffix and folder content.

    With `columns` the source has only these, in this order; the other columns are not read.

    Raises:
        ConfigError: an unknown kind, a path that is missing or neither file nor folder, or
            different columns.
        Corrupted, StorageError: the errors of the format's source.
    """
    if not paths:
        raise ConfigError("nothing to read: name files, a folder, or MODULE:NAME of a data set")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"invalid --from {kind!r}: expected one of {', '.join(KINDS)}")
    for path in paths:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise ConfigError(f"{path}: not a file or folder: save it as a file first")
    kinds = [kind or kind_of_path(path) for path in paths]
    for path, each in zip(paths, kinds, strict=True):
        if is_url(path) and each != "records":
            raise ConfigError(
                f"{path}: only record files can be read by URL: copy it to this machine first"
            )
    if set(kinds) == {"records"}:
        return _selected(RecordSource(paths), columns)
    sources = [
        _selected(KINDS[each](path, columns), columns)
        for each, path in zip(kinds, paths, strict=True)
    ]
    return sources[0] if len(sources) == 1 else Chain(sources)


def _selected(source: Source, columns: Sequence[str] | None) -> Source:
    return source if columns is None else Selected(source, columns)


def kind_of_path(path: str) -> str:
    """Returns the detected kind of a path.

    Raises:
        ConfigError: the format cannot be detected.
    """
    where = Path(path)
    if not is_url(path) and not where.exists():
        if ":" in path:
            return "torch"
        raise ConfigError(f"{path}: no such file or folder")
    if where.is_dir():
        return _kind_of_folder(where)
    for suffix, kind in _SUFFIXES.items():
        if path.lower().endswith(suffix):
            return kind
    if is_url(path):
        return "records"  # a folder of record files
    raise ConfigError(
        f"{path}: cannot detect the format from the suffix; use --from {'|'.join(KINDS)}"
    )


def _kind_of_folder(folder: Path) -> str:
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    if "index.json" in names and any(name.endswith(_SHARDS) for name in names):
        return "mds"
    if SPLITS in names or {STATE, INFO} <= set(names):
        return "huggingface"
    for suffix, kind in ((".ffr", "records"), (".npy", "numpy")):
        if names and all(name.endswith(suffix) for name in names):
            return kind
    return "folder"
