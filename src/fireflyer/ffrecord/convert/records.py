"""Record files as a source, of either version."""

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from fireflyer.errors import ConfigError
from fireflyer.ffrecord.convert import rowcode
from fireflyer.ffrecord.convert.source import Column, Row
from fireflyer.ffrecord.folder import PackedFolder
from fireflyer.ffrecord.paths import PathName, record_files
from fireflyer.ffrecord.reader import FileReader

BATCH_BYTES = 8 << 20
BATCH_SAMPLES = 1024

Kind = Literal["bytes", "rows in v1", "packed folder", "columns"]

BYTES = (Column("data", "bytes"),)


class RecordSource:
    """Samples of record files as rows.

    Args:
        raw: v1 samples stay bytes whatever they hold.

    Attributes:
        kind: "columns" for v2 with a schema; of v1, and v2 without one: what the samples are.
    """

    def __init__(self, fnames: PathName | Sequence[PathName], *, raw: bool = False) -> None:
        self.files = file_names(fnames)
        self.reader = FileReader(self.files)
        self.name = self.files[0] if len(self.files) == 1 else f"{len(self.files)} record files"
        self.length: int | None = self.reader.n
        self._folder: PackedFolder | None = None
        self._names: list[str] = []
        schema = columns_of(self.reader)
        self.kind: Kind = "bytes"
        self.columns: tuple[Column, ...] = BYTES
        if schema:
            self.kind, self.columns = "columns", schema
        elif not raw:
            self._look_inside()

    def _look_inside(self) -> None:
        n = self.reader.n
        if n == 0:
            return
        first = self._head(0)
        if first == rowcode.MAGIC:
            self.kind = "rows in v1"
            self.columns = tuple(rowcode.columns_of(self._decoded(0)))
        elif len(self.files) == 1 and is_packed_folder(self.reader):
            self.kind = "packed folder"
            self._folder = PackedFolder(self.files[0])
            self._names = self._folder.list(list_dir=False, recursive=True)
            self.length = len(self._names)
            self.columns = (*BYTES, Column("name", "str"))

    def _head(self, index: int) -> bytes:
        return self.reader.read_one(index)[: len(rowcode.MAGIC)].tobytes()

    def _decoded(self, index: int) -> Row:
        return rowcode.decode(self.reader.read_one(index).tobytes(), f"{self.name}, sample {index}")

    def rows(self, jobs: int = 1) -> Iterator[Row]:
        return self.rows_at(range(self.length or 0))

    def rows_at(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> Iterator[Row]:
        """The rows at `indices`, read in batches of bounded size."""
        if self._folder is not None:
            for name in (self._names[index] for index in indices):
                yield {"data": memoryview(self._folder.read_one(name)), "name": name}  # type: ignore[arg-type]
            return
        for batch in batches(self.reader, indices):
            if self.kind == "columns":
                read_rows: Any = self.reader
                yield from read_rows.rows(batch)
                continue
            arena, offsets = self.reader.read_batch(batch)
            view = memoryview(arena)  # type: ignore[arg-type]  # numpy's stubs before Python 3.12
            for index, (start, end) in zip(batch, pairwise(offsets.tolist()), strict=True):
                sample = view[start:end]
                if self.kind == "rows in v1":
                    yield rowcode.decode(bytes(sample), f"{self.name}, sample {index}")
                else:
                    yield {"data": sample}


def file_names(fnames: PathName | Sequence[PathName]) -> list[str]:
    """Files, with each directory replaced by its record files; raises what `FileReader` does."""
    names = [fnames] if isinstance(fnames, str | os.PathLike) else fnames
    found: list[str] = []
    for name in names:
        found += record_files(name) if os.path.isdir(name) else [os.fspath(name)]
    return found


def is_packed_folder(reader: FileReader) -> bool:
    """Whether the last sample is a packed folder's tree of names, by its first bytes."""
    if reader.n == 0:
        return False
    try:
        PackedFolder(reader.fnames[-1]).close()
    except ConfigError:
        return False
    return True


def columns_of(reader: FileReader) -> tuple[Column, ...]:
    """The columns of a file's schema; none where samples are bytes."""
    found: Iterable[Any] = getattr(reader, "columns", None) or ()
    return tuple(Column(c.name, c.dtype, tuple(c.shape)) for c in found)


def lengths(reader: FileReader) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Bytes of every sample, in order."""
    parts = [np.diff(reader.get_offsets(file)) for file in range(len(reader.fnames))]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def batches(
    reader: FileReader, indices: Sequence[int] | np.ndarray[Any, Any]
) -> Iterator[list[int]]:
    """`indices` in runs of at most BATCH_BYTES (or one sample) and BATCH_SAMPLES."""
    sizes = lengths(reader)
    batch: list[int] = []
    held = 0
    for index in map(int, indices):
        size = int(sizes[index])
        if batch and (held + size > BATCH_BYTES or len(batch) == BATCH_SAMPLES):
            yield batch
            batch, held = [], 0
        batch.append(index)
        held += size
    if batch:
        yield batch
