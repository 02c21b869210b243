"""Record files of either version as a source."""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert.source import Column, Row
from fireflyer.ffrecord.folder import PackedFolder
from fireflyer.ffrecord.paths import SUFFIX, PathName, is_url, record_files
from fireflyer.ffrecord.remote import Reader, RemoteFiles, open_records

BATCH_BYTES = 8 << 20
BATCH_SAMPLES = 1024

_AT_ONCE = 1 << 16  # number of index entries read together

Kind = Literal["bytes", "packed folder", "rows"]

BYTES = (Column("data", "bytes"),)


class RecordSource:
    """Samples of record files as rows.

    Args:
        raw: treat the tree of names of a packed folder as an ordinary sample.

    Attributes:
        kind: rows, bytes, or the files of a packed folder, {data, name}.
        version: format version; 2 if the files differ.
    """

    def __init__(self, fnames: PathName | Sequence[PathName], *, raw: bool = False) -> None:
        self.files = file_names(fnames)
        self.paths: tuple[str, ...] = tuple(self.files)
        self.reader = open_records(self.files)
        self.name = self.files[0] if len(self.files) == 1 else f"{len(self.files)} record files"
        self.length: int | None = self.reader.n
        self.version = max(self.reader.versions())
        self.kind: Kind = "bytes"
        self.columns: tuple[Column, ...] = columns_of(self.reader) or BYTES
        self._folder: PackedFolder | None = None
        self._names: list[str] = []
        if self.reader.columns is not None:
            self.kind = "rows"
        elif not raw and len(self.files) == 1 and is_packed_folder(self.reader):
            self.kind = "packed folder"
            self._folder = PackedFolder(self.files[0])
            self._names = self._folder.list(list_dir=False, recursive=True)
            self.length = len(self._names)
            self.columns = (*BYTES, Column("name", "str"))

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        return self.rows_at(range(self.length or 0))

    def rows_at(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> Iterator[Row]:
        """Yields the rows at `indices`, read in batches of bounded size."""
        if self._folder is not None:
            for name in (self._names[index] for index in indices):
                yield {"data": memoryview(self._folder.read_one(name)), "name": name}  # type: ignore[arg-type]
            return
        for batch in batches(self.reader, indices):
            if self.kind == "rows":
                yield from self.reader.rows(batch)
                continue
            arena, offsets = self.reader.read_batch(batch)
            view = memoryview(arena)  # type: ignore[arg-type]  # numpy's stubs before Python 3.12
            for start, end in pairwise(offsets.tolist()):
                yield {"data": view[start:end]}


def file_names(fnames: PathName | Sequence[PathName]) -> list[str]:
    """Returns files, with directories replaced by their record files; raises as `open_records`."""
    names = [fnames] if isinstance(fnames, str | os.PathLike) else fnames
    found: list[str] = []
    for name in names:
        text = os.fspath(name)
        if is_url(text) and not text.endswith(SUFFIX):
            with RemoteFiles(text) as listed:
                found += listed.fnames
        else:
            found += record_files(text) if os.path.isdir(text) else [text]
    return found


def is_packed_folder(reader: Reader) -> bool:
    """Returns whether the last sample starts like the tree of names of a packed folder."""
    if reader.n == 0:
        return False
    try:
        PackedFolder(reader.fnames[-1]).close()
    except ConfigError:
        return False
    return True


def columns_of(reader: Reader) -> tuple[Column, ...]:
    """Returns the columns of the files' schema; empty if samples are bytes."""
    return tuple(Column(name, *c) for name, c in (reader.columns or {}).items())


def is_compressed(reader: Reader) -> bool:
    """Returns whether any of the first samples is stored compressed."""
    first = np.arange(min(reader.n, _AT_ONCE))
    return bool(reader.entries(first)["codec"].any())


def lengths(
    reader: Reader, indices: Sequence[int] | np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the uncompressed bytes of the samples at `indices`, or of all samples.

    Raises:
        Corrupted: a page of the index does not match its checksum.
    """
    wanted = np.asarray(range(reader.n) if indices is None else indices, np.int64)
    found = np.empty(len(wanted), np.int64)
    for at in range(0, len(wanted), _AT_ONCE):
        found[at : at + _AT_ONCE] = reader.entries(wanted[at : at + _AT_ONCE])["raw"]
    return found


def batches(reader: Reader, indices: Sequence[int] | np.ndarray[Any, Any]) -> Iterator[list[int]]:
    """Splits `indices` into runs of at most BATCH_SAMPLES samples and BATCH_BYTES bytes; a larger
    sample is a separate run."""
    for at in range(0, len(indices), _AT_ONCE):
        part = np.asarray(indices[at : at + _AT_ONCE], np.int64)
        first = held = 0
        for number, size in enumerate(lengths(reader, part).tolist()):
            full = held + size > BATCH_BYTES or number - first == BATCH_SAMPLES
            if number > first and full:
                yield part[first:number].tolist()
                first, held = number, 0
            held += size
        yield part[first:].tolist()
