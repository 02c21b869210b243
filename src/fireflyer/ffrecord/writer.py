"""Writer of record files: a file appears under its name complete and durable, or not at all.

Samples go to a temporary file in the directory of the target. `close` writes the metadata, syncs
the file, renames it into place and syncs the directory. A v2 file (writer_v2.py) can be committed
earlier and extended later.
"""

import os
import struct
import sys
import threading
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from fireflyer._native import crc32
from fireflyer.errors import ConfigError
from fireflyer.ffrecord.columns import Columns, ColumnsLike, RowCodec, columns_of, without_objects
from fireflyer.ffrecord.integers import checked_integer
from fireflyer.ffrecord.output import Output, Tail, bytes_of, translated
from fireflyer.ffrecord.paths import PathName, record_path
from fireflyer.ffrecord.writer_v2 import DEFAULT_ALIGN, Version2

if TYPE_CHECKING:
    from fireflyer.ffrecord.output import SampleBuffer

_HEADER = 12
_PER_SAMPLE = 12
_MAX_SAMPLES = ((1 << 63) - 1 - _HEADER) // _PER_SAMPLE


class _Body(Protocol):
    """Content of a file that is being written; OSError propagates unchanged."""

    @property
    def count(self) -> int:
        """Number of samples so far, including those that the file had before `append`."""

    def add(self, parts: list[memoryview]) -> None:
        """Appends one sample, which is the concatenation of the parts."""

    def close(self) -> None:
        """Completes the file, so that `discard` has no further effect."""

    def discard(self) -> None:
        """Drops everything that is not complete; closes the file."""


class _Version1:
    """Content of a v1 file.

    If the number of samples is unknown, the samples are spooled first. The kernel then copies them
    behind a header of the right size.
    """

    def __init__(self, target: str, n: int | None) -> None:
        self._announced = n
        self._base = 0 if n is None else _HEADER + _PER_SAMPLE * n
        self._checksums = array("I")
        self._offsets = array("q")
        self._file = Output.temporary(target)
        self._tail = Tail(self._file, self._base)

    @property
    def count(self) -> int:
        return len(self._checksums)

    def add(self, parts: list[memoryview]) -> None:
        checksum = 0
        for part in parts:
            checksum = crc32(part, checksum)
        start = self._tail.end
        self._tail.add(parts)
        self._offsets.append(start)
        self._checksums.append(checksum)

    def close(self) -> None:
        file = self._file
        self._tail.flush()
        first = _HEADER + _PER_SAMPLE * self.count
        offsets = np.frombuffer(self._offsets, "<i8") + (first - self._base)
        metadata = struct.pack("<q", self.count) + self._checksums.tobytes() + offsets.tobytes()
        header = [struct.pack("<I", crc32(metadata)), metadata]
        if self._announced is not None:
            file.write(header, 0)
            file.publish()
            return
        whole = Output.temporary(file.target)
        try:
            whole.write(header, 0)
            whole.copy_from(file, self._tail.end, first)
            whole.publish()
        finally:
            whole.discard()

    def discard(self) -> None:
        self._file.discard()


class FileWriter:
    """Writer of one record file, which appears under its name in `close`, complete and synced.

    Until then, the name refers to the previous file, if there was one, or to the last commit of a
    v2 file. This stays so if the writer fails, dies or is discarded. Threads may share a writer; a
    forked child must not use it.

    Args:
        fname: the file, ending in `.ffr`; an existing file is replaced.
        n: number of samples that will be written. Without `n`, the samples of a v1 file are written
            twice.
        version: format version; `columns`, `compression` and `align` each imply 2.
        columns: name -> dtype or (dtype, shape): each sample is a row, for `write_row`.
        compression: "zstd": samples that become smaller are stored compressed.
        level: compression level.
        align: samples start at multiples of this number of bytes, a power of 2 from 8 (the default)
            to 1 MiB.

    Attributes:
        n: number of samples as given to the constructor.
        count: number of samples in the file so far.
        columns: columns of the file, or None.

    Raises:
        ConfigError: wrong suffix, an `n` that no file can hold, or invalid options.
        TypeError: `n` is not an integer.
        NoSpace, StorageError: the file cannot be created.
    """

    def __init__(
        self,
        fname: PathName,
        n: int | None = None,
        *,
        version: int = 1,
        columns: ColumnsLike | None = None,
        compression: str | None = None,
        level: int = 3,
        align: int | None = None,
    ) -> None:
        self._body: _Body | None = None
        name = record_path(fname)
        n = None if n is None else checked_integer("n", n)
        if n is not None and not 0 <= n <= _MAX_SAMPLES:
            raise ConfigError(f"a record file cannot hold {n} samples")
        if version not in (1, 2):
            raise ConfigError(f"invalid version {version} of record files: expected 1 or 2")
        checked = None if columns is None else columns_of(columns)
        target = os.path.abspath(name)
        if version == 1 and columns is None and compression is None and align is None:
            self._begin(name, n, None, lambda: _Version1(target, n))
            return
        alignment = DEFAULT_ALIGN if align is None else align
        self._begin(
            name,
            n,
            checked,
            lambda: Version2.create(target, checked, alignment, compression, level),
        )

    @classmethod
    def append(cls, fname: PathName, *, compression: str | None = None, level: int = 3) -> Self:
        """Returns a writer that appends to the v2 file `fname` after its last commit.

        Uncommitted bytes of a dead writer are cut off. Options: as for a new file.

        Raises:
            ConfigError: a v1 file, which cannot grow.
            Corrupted: the file is damaged.
            StorageError: another writer appends to the file, or the file cannot be opened.
        """
        name = record_path(fname)
        writer = cls.__new__(cls)
        writer._body = None
        opened: list[Version2] = []

        def reopen() -> Version2:
            opened.append(Version2.reopen(os.path.abspath(name), compression, level))
            return opened[0]

        writer._begin(name, None, None, reopen)
        writer._take_columns(opened[0].columns)
        return writer

    def _begin(
        self, name: str, n: int | None, columns: Columns | None, make: Callable[[], _Body]
    ) -> None:
        self.fname = name
        self.n = n
        self._take_columns(columns)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._count = 0
        try:
            self._body = make()
        except OSError as error:
            raise translated(error, name) from error

    def _take_columns(self, columns: Columns | None) -> None:
        self.columns = columns
        self._rows = None if columns is None else RowCodec(columns)

    @property
    def count(self) -> int:
        body = self._body
        return self._count if body is None else body.count

    def write_one(self, data: "SampleBuffer") -> None:
        """Appends one sample: all bytes of a C-contiguous buffer of any type and shape.

        A failure ends the writer and drops everything that was not committed.

        Raises:
            ConfigError: more samples than `n`, or the file has columns.
            ValueError: the buffer is not C-contiguous, or the writer is closed.
            TypeError: not a buffer, or a buffer of Python objects, which holds addresses instead of
                data.
            NoSpace, StorageError: the bytes cannot be written.
        """
        if self._rows is not None:
            raise ConfigError(f"record file '{self.fname}' has columns: use write_row")
        self._add([bytes_of(without_objects(data))])

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Appends one row: for each column an array-like value, or str or bytes.

        Raises:
            ConfigError: the file has no columns.
            ValueError, TypeError: a value that the column cannot hold; the writer stays usable.
            NoSpace, StorageError: the bytes cannot be written; this ends the writer.
        """
        if self._rows is None:
            raise ConfigError(f"record file '{self.fname}' has no columns: use write_one")
        self._add([bytes_of(part) for part in self._rows.encode(row)])

    def _add(self, parts: list[memoryview]) -> None:
        self._own()
        with self._lock:
            body = self._open()
            if body.count == self.n:
                self._drop()
                raise ConfigError(
                    f"record file '{self.fname}': more than the announced {self.n} samples; "
                    "nothing more was written: pass the correct n, or none"
                )
            self._or_drop(body.add, parts)

    def commit(self) -> None:
        """Makes all samples so far visible and durable. Without new samples, its only effect is
        that a new file gets its name.

        A failure ends the writer: the file stays at the previous commit.

        Raises:
            ConfigError: a v1 file, which only `close` commits.
            NoSpace, StorageError: the bytes cannot be written or synced.
        """
        self._own()
        with self._lock:
            body = self._open()
            if not isinstance(body, Version2):
                raise ConfigError(
                    f"record file '{self.fname}' is v1, which cannot be committed before it is "
                    "closed: pass version=2"
                )
            self._or_drop(body.commit)

    def _or_drop(self, action: Callable[..., object], *arguments: object) -> None:
        """Does an action; its failure ends the writer."""
        try:
            action(*arguments)
        except OSError as error:
            self._drop()
            raise translated(error, self.fname) from error
        except BaseException:
            self._drop()
            raise

    def close(self) -> None:
        """Completes the file and makes it visible and durable; may be called again.

        Raises:
            ConfigError: fewer samples than `n`; no file is created.
            NoSpace, StorageError: the bytes cannot be written or synced. If only the last step
                failed, the sync of the directory, the file is complete. Otherwise a new file is not
                created, and an existing v2 file stays at its last commit.
        """
        self._own()
        with self._lock:
            body = self._body
            if body is None:
                return
            if self.n is not None and body.count != self.n:
                self._drop()
                raise ConfigError(
                    f"record file '{self.fname}': only {self._count} of {self.n} announced samples were "
                    "added; nothing more was written: pass the correct n, or none"
                )
            try:
                body.close()
            except OSError as error:
                raise translated(error, self.fname) from error
            finally:
                self._drop()

    def discard(self) -> None:
        """Ends the writer and drops uncommitted samples; may be called again or after `close`."""
        self._own()
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            return
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if self._body is not None and os.getpid() == self._process:
            self._drop()
            warnings.warn(
                f"FileWriter of '{self.fname}' was not closed: the file does not exist, "
                "or it ends at the last commit",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _own(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"FileWriter of '{self.fname}' belongs to the process that created it: "
                "create one writer and one file for each process"
            )

    def _open(self) -> _Body:
        if self._body is None:
            raise ValueError(f"the FileWriter of '{self.fname}' is closed")
        return self._body

    def _drop(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            self._count = body.count
            body.discard()


def dump(
    samples: Sequence[Any], fname: PathName, nfiles: int = 1, verbose: bool = False
) -> list[str]:
    """Writes the buffers `samples[0] ... samples[len - 1]` to record files; returns the file names.

    With `nfiles` > 1, `fname` is a directory (created if missing) for the files `PART_00000.ffr
    ...` of ceil(len / nfiles) samples each. These may be fewer than `nfiles` files, which causes a
    warning. Each file is complete or absent; raises what `FileWriter` does. With `verbose`, prints
    one line per file to stderr.
    """
    if nfiles < 1:
        raise ConfigError(f"invalid nfiles {nfiles}: expected at least 1")
    total = len(samples)
    if nfiles == 1:
        parts = [(record_path(fname), range(total))]
    else:
        try:
            os.makedirs(fname, exist_ok=True)
        except OSError as error:
            raise translated(error, os.fspath(fname)) from error
        size = max(1, -(-total // nfiles))
        parts = [
            (os.path.join(fname, f"PART_{number:05d}.ffr"), range(at, min(at + size, total)))
            for number, at in enumerate(range(0, max(1, total), size))
        ]
        if len(parts) != nfiles:
            warnings.warn(
                f"{total} samples fill {len(parts)} files instead of {nfiles}", stacklevel=2
            )
    for path, indices in parts:
        with FileWriter(path, len(indices)) as writer:
            for index in indices:
                writer.write_one(samples[index])
        if verbose:
            sys.stderr.write(f"{indices.stop}/{total} {path}\n")
    return [path for path, _ in parts]
