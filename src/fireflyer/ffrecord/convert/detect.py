"""Which format a path is of."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.arrays import ArraySource
from fireflyer.ffrecord.convert.decompress import COMPRESSIONS
from fireflyer.ffrecord.convert.folder import FolderSource
from fireflyer.ffrecord.convert.huggingface import INFO, SPLITS, STATE, open_saved
from fireflyer.ffrecord.convert.mds import MdsSource
from fireflyer.ffrecord.convert.parquet import ParquetSource
from fireflyer.ffrecord.convert.records import RecordSource
from fireflyer.ffrecord.convert.source import Chain, Source
from fireflyer.ffrecord.convert.tar import TarSource
from fireflyer.ffrecord.convert.text import JsonLinesSource, TextSource
from fireflyer.ffrecord.convert.torchset import DatasetSource
from fireflyer.ffrecord.paths import is_url

KINDS: dict[str, Callable[[str], Source]] = {
    "folder": FolderSource,
    "tar": TarSource,
    "parquet": ParquetSource,
    "huggingface": open_saved,
    "mds": MdsSource,
    "text": TextSource,
    "jsonl": JsonLinesSource,
    "numpy": ArraySource,
    "torch": DatasetSource,
    "records": RecordSource,
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


def open_source(paths: Sequence[str], kind: str | None = None) -> Source:
    """What `paths` hold, as one source; without `kind` by suffix and content of folders.

    Raises:
        ConfigError: an unknown kind, nothing there or neither file nor folder, or columns that differ.
        Corrupted, StorageError: as the format's source says.
    """
    if not paths:
        raise ConfigError("nothing to read: name files, a folder, or MODULE:NAME of a data set")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--from {kind!r} is none of {', '.join(KINDS)}")
    for path in paths:
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise ConfigError(f"{path}: it is neither a file nor a folder: save it as a file first")
    kinds = [kind or kind_of_path(path) for path in paths]
    for path, each in zip(paths, kinds, strict=True):
        if is_url(path) and each != "records":
            raise ConfigError(f"{path}: only record files are read by URL: copy it here first")
    if set(kinds) == {"records"}:
        return RecordSource(paths)
    sources = [KINDS[each](path) for each, path in zip(kinds, paths, strict=True)]
    return sources[0] if len(sources) == 1 else Chain(sources)


def kind_of_path(path: str) -> str:
    """
    Raises:
        ConfigError: nothing tells.
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
        return "records"  # a folder of them
    raise ConfigError(f"{path}: the suffix tells no format; name it: --from {'|'.join(KINDS)}")


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
