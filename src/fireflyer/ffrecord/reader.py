"""Reader of record files: a thin wrapper of the native reader, which runs without the GIL."""

import os
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from fireflyer._native.ffrecord import Reader
from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord.columns import Row, RowCodec, common_columns, decode_rows, stack
from fireflyer.ffrecord.integers import checked_integer
from fireflyer.ffrecord.paths import PathName, is_url, record_files, record_path
from fireflyer.ffrecord.spans import HEADER, MAGIC_V2
from fireflyer.ffrecord.zstd import ENTRY, PLAIN, expand

TAIL = 64 << 10
"""Number of bytes at the end of a v2 file that identify its content; the first bytes do not depend
on the samples."""
_MAX_THREADS = 1 << 12

Sample = npt.NDArray[np.uint8]
Indices = Sequence[int] | npt.NDArray[np.integer]
Strategy = Literal["auto", "cached", "direct", "threads", "mmap"]


class FileReader:
    """Random batch reads of one or several record files, with samples numbered as one sequence.

    Any number of threads may use one reader, also after a fork. Unpickling reopens the files by
    path and rejects files that have changed. Arrays that were read stay valid after `close`.

    Args:
        fnames: a file, a list of files, or a directory (all its `*.ffr` files sorted by name).
        check_data: compare the CRC32 of every sample that is read; costs little.
        strategy: method of reading.
            `auto`: cached pages from the page cache, all others with direct I/O (io_uring with
                O_DIRECT, or threads if the system forbids io_uring).
            `cached`: all bytes through the page cache, with few threads that copy.
            `threads`: all bytes through the page cache, with many threads that wait for the disk.
            `direct`: all bytes with direct I/O.
            `mmap`: from the mapped files; each sample is checked once.
        threads: maximum number of threads per batch. None: one per core, at most 4, for copying
            from the page cache; 16 for waiting for the disk.

    Attributes:
        n: number of samples in all files.
        fnames: the files, in the order of their samples.
        columns: name -> (dtype, shape) if the samples are rows, otherwise None.

    Raises:
        ConfigError: a name without the suffix `.ffr`, no file at all, files with different columns,
            or an invalid number of threads.
        StorageError: a file cannot be opened or read.
        Corrupted: an index does not match its checksum or the size of its file.
        ValueError: an unknown strategy.
    """

    def __init__(
        self,
        fnames: PathName | Iterable[PathName],
        check_data: bool = True,
        strategy: Strategy = "auto",
        threads: int | None = None,
    ) -> None:
        if isinstance(fnames, str | os.PathLike):
            self.fnames = record_files(fnames) if os.path.isdir(fnames) else [record_path(fnames)]
        else:
            self.fnames = [record_path(name) for name in fnames]
        if not self.fnames:
            raise ConfigError("no record file given: pass a file, a list of files or a directory")
        if urls := [name for name in self.fnames if is_url(name)]:
            raise ConfigError(f"{urls[0]!r} is a URL: read it with open_records or RemoteFiles")
        self.check_data = bool(check_data)
        self._paths = [os.path.abspath(name) for name in self.fnames]
        if not isinstance(strategy, str):
            raise TypeError(f"strategy must be one of {get_args(Strategy)}, not {strategy!r:.100}")
        threads = None if threads is None else checked_integer("threads", threads)
        if threads is not None and not 1 <= threads <= _MAX_THREADS:
            raise ConfigError(f"invalid threads {threads}: expected 1 to {_MAX_THREADS}")
        self.strategy: Strategy = strategy
        self.threads = threads
        self._native: Reader | None = Reader(self.fnames, self.check_data, strategy, threads or 0)
        self.n: int = self._native.n
        self._may_be_packed = 2 in self._native.versions()
        self.columns = common_columns(
            (name, self._native.schema(number)) for number, name in enumerate(self.fnames)
        )
        self._rows = None if self.columns is None else RowCodec(self.columns)
        for path in self._native.unchecked():
            warnings.warn(
                f"record file '{path}' has no checksum of its metadata (an old file): "
                "only its structure was checked",
                stacklevel=2,
            )

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Indices) -> list[Sample]:
        """Returns the samples at `indices`, in that order, as writable views on one new arena.

        An index may repeat; each occurrence has its own copy.

        Raises:
            IndexError: an index is negative or not below `n`.
            TypeError: an index is not an integer, or is a bool.
            NoSpace: the batch is larger than the memory of the machine.
            Corrupted: a sample does not match its checksum, or its file was truncated.
            StorageError: the file cannot be read, or `strategy` cannot be used.
        """
        native = self._open()
        wanted = _index_array(indices)
        if self._packed(native, wanted) is None:
            return native.read_list(wanted)
        arena, offsets = self.read_batch(wanted)
        return [arena[start:end] for start, end in pairwise(offsets.tolist())]

    def read_batch(self, indices: Indices) -> tuple[Sample, npt.NDArray[np.int64]]:
        """Returns the k samples at `indices` as one array and k + 1 offsets; raises as `read`.

        Sample j is `arena[offsets[j]:offsets[j + 1]]`. Compressed samples are returned
        decompressed. For small samples `read_batch` is faster than `read`, because a view costs as
        much as reading 256 bytes.
        """
        native = self._open()
        wanted = _index_array(indices)
        entries = self._packed(native, wanted)
        arena, offsets = native.read(wanted)
        if entries is None:
            return arena, offsets
        return expand(arena, offsets, entries, lambda j: _named(native, int(wanted[j])))

    def rows(self, indices: Indices) -> list[Row]:
        """Returns the rows at `indices`: column -> array, a writable view on one new arena.

        Values of str and bytes columns are str and bytes.

        Raises:
            ConfigError: the files have no columns.
            Corrupted: also if the sizes in a row do not match its bytes.
            IndexError, StorageError: as `read`.
        """
        if self._rows is None:
            return decode_rows(None, (), str)
        native = self._open()
        return decode_rows(
            self._rows, self.read(indices), lambda j: _named(native, int(indices[j]))
        )

    def read_columns(self, indices: Indices) -> dict[str, Any]:
        """Returns the rows at `indices` by column: k values of each; raises what `rows` does.

        A column of fixed shape is one array of shape (k, *shape), any other column a list.
        """
        return stack(self.columns or {}, self.rows(indices))

    def read_views(self, indices: Indices) -> list[Sample]:
        """Returns the samples at `indices` as read-only views on the mapped files, without a copy.

        A sample is checked the first time it is requested. Views keep the mapping alive, but not
        the reader. If the file was truncated meanwhile, touching a view ends the process with
        SIGBUS, as with any mapped file.

        Raises:
            ConfigError: a sample is compressed.
            IndexError, Corrupted, StorageError: as `read`.
        """
        native = self._open()
        wanted = _index_array(indices)
        entries = self._packed(native, wanted)
        if entries is not None:
            first = int(np.flatnonzero(entries["codec"] != PLAIN)[0])
            raise ConfigError(
                f"{_named(native, int(wanted[first]))} is compressed and has no view: "
                "use read, or write the file without compression"
            )
        return native.read_views(wanted)

    def read_one(self, index: int) -> Sample:
        """Returns the sample at `index`; raises what `read` does."""
        return self.read_batch([checked_integer("an index", index)])[0]

    def entries(self, indices: Indices) -> npt.NDArray[np.void]:
        """Returns the index entries of the samples: place, bytes, raw, crc, codec (`zstd.ENTRY`).

        Raises:
            IndexError, TypeError: as `read`.
            Corrupted: a page of the index does not match its checksum.
        """
        return self._open().extents(_index_array(indices)).view(ENTRY)

    def versions(self) -> list[int]:
        """Returns the format version of each file."""
        return self._open().versions()

    def sizes(self) -> list[int]:
        """Returns the current size in bytes of each file on disk.

        Raises:
            StorageError: a file is gone.
        """
        try:
            return [os.stat(path).st_size for path in self._paths]
        except OSError as error:
            raise StorageError(f"cannot stat {error.filename!r}: {error.strerror}") from error

    def validate(self, data: bool = True) -> None:
        """Checks the current content of all files on disk; with `data=False` only the metadata.

        Raises:
            Corrupted: a file does not match its checksums.
            StorageError: a file cannot be read.
        """
        self._open()
        fresh = Reader(self._paths, True)
        if data:
            fresh.check_all()

    def get_offsets(self, file: int) -> npt.NDArray[np.int64]:
        """Returns the position of each sample of file number `file`, then the end of its last
        commit, in bytes."""
        return self._open().offsets(file)

    def get_checksums(self, file: int) -> npt.NDArray[np.uint32]:
        """Returns the stored CRC32 of each sample of file number `file`."""
        return self._open().checksums(file)

    def fingerprint(self) -> Iterator[bytes]:
        """Yields bytes for each file that identify its content at the time it was opened.

        The bytes are the position at which the last commit ends, and the first 12 bytes of the
        file. In v1 these contain the checksum of all metadata. In v2 the last 64 KiB before the end
        of the last commit follow.
        """
        native = self._open()
        return (_identity(native, number) for number in range(len(self._paths)))

    def close(self) -> None:
        """Closes the files after the reads in progress end; may be called again."""
        self._native = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        digests = [sha256(part).digest() for part in self.fingerprint()]
        options = (self._paths, self.check_data, self.strategy, self.threads)
        return _reopen, (type(self), *options, digests)

    def __repr__(self) -> str:
        return f"FileReader({len(self.fnames)} files, {self.n} samples)"

    def _packed(self, native: Reader, wanted: npt.NDArray[np.int64]) -> npt.NDArray[np.void] | None:
        """Returns the index entries of `wanted`; None if none of these samples is compressed."""
        if not self._may_be_packed:
            return None
        entries = native.extents(wanted).view(ENTRY)
        return entries if np.any(entries["codec"] != PLAIN) else None

    def _open(self) -> Reader:
        if self._native is None:
            raise ValueError("the FileReader is closed")
        return self._native


def _identity(native: Reader, number: int) -> bytes:
    end = native.size(number)
    head = native.part(number, 0, HEADER)
    tail = native.part(number, max(0, end - TAIL), end) if head.startswith(MAGIC_V2) else b""
    return struct.pack("<Q", end) + head + tail


def _reopen(
    kind: type[FileReader],
    paths: list[str],
    check_data: bool,
    strategy: Strategy,
    threads: int | None,
    digests: list[bytes],
) -> FileReader:
    reader = kind(paths, check_data, strategy, threads)
    for path, before, now in zip(paths, digests, reader.fingerprint(), strict=True):
        if sha256(now).digest() != before:
            raise file_changed(path)
    return reader


def file_changed(name: str) -> StorageError:
    return StorageError(
        f"record file '{name}' has changed since the reader was pickled: it was replaced or extended; "
        "open it again"
    )


def _named(native: Reader, index: int) -> str:
    path, number = native.locate(index)
    return f"record file '{path}', sample {number}"


_BOOLS = frozenset((bool, np.bool_))


def _index_array(indices: Indices) -> npt.NDArray[np.int64]:
    """Returns `indices` as the contiguous int64 array that the native reader takes."""
    array = np.asarray(indices)
    if isinstance(indices, list | tuple) and not _BOOLS.isdisjoint(map(type, indices)):
        # numpy would turn a bool between integers into an integer.
        raise TypeError("indices must be integers, not bool")
    if array.ndim != 1:
        raise TypeError(f"indices must be a list of integers, not of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.int64)
    kind = array.dtype.kind
    if kind not in "iu":
        # numpy turns integers that are too large into objects or floats.
        if all(isinstance(index, int) for index in indices) and any(
            not -(1 << 63) <= index < 1 << 63 for index in indices
        ):
            raise IndexError("a sample index does not fit into 64 bits")
        raise TypeError(f"indices must be integers, not {array.dtype}")
    if kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise IndexError(f"sample index {array.max()} does not fit into 64 bits")
    return np.ascontiguousarray(array, dtype=np.int64)
