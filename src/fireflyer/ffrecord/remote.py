"""Record files at URLs: the reader's interface over range requests and a local cache of chunks."""

import operator
import struct
import warnings
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer.errors import ConfigError, Corrupted
from fireflyer.ffrecord.chunks import ChunkCache
from fireflyer.ffrecord.paths import SUFFIX, record_path
from fireflyer.ffrecord.ranges import Retry
from fireflyer.ffrecord.reader import Indices, Sample, _index_array
from fireflyer.ffrecord.spans import HEADER, RemoteFile, Span, SpanReader, open_remote, side_by_side
from fireflyer.storage import FsspecStorage, Storage

_MAGIC_V2 = b"\x89FFREC2\n"
_PIECE = 8 << 20

_Index = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""N + 1 offsets in the file, the last one its size; N checksums."""


class RemoteFiles:
    """Random batch reads of v1 record files that are reached by range requests; else as `FileReader`.

    Any number of threads may use one; it works on after a fork, and pickling opens the files again.

    Args:
        fnames: a URL, a list of URLs, or the URL of a directory (all its `*.ffr` sorted by name); names
            inside `storage` if that is given.
        check_data: compare the CRC32 of every sample that is read.
        storage: where the names are; by default fsspec's file system for each URL.
        cache: keeps chunks of the files on a local disk.
        attempts: how often a range is asked for.
        backoff_s: pause before the second attempt in seconds; later ones double.

    Attributes:
        n: number of samples in all files.
        fnames: the files, in the order of their samples.

    Raises:
        ConfigError: no file, a wrong suffix, an unknown scheme, or a file of format v2.
        StorageError, Unavailable: a file cannot be opened.
        Corrupted: an index does not match its checksum or the size of its file.
    """

    def __init__(
        self,
        fnames: str | Iterable[str],
        check_data: bool = True,
        *,
        storage: Storage | None = None,
        cache: ChunkCache | None = None,
        attempts: int = 5,
        backoff_s: float = 0.1,
    ) -> None:
        self.check_data = bool(check_data)
        self._storage, self._cache = storage, cache
        self._retry = Retry(attempts=attempts, backoff_s=backoff_s)
        places = _places(fnames, storage)
        files = side_by_side(lambda place: open_remote(*place, self._retry), places)
        self.fnames = [file.shown for file in files]
        self._spans: SpanReader | None = SpanReader(files, cache, self._retry)
        self._indices = side_by_side(self._load_index, range(len(files)))
        self._starts = np.cumsum([0, *(len(checksums) for _, checksums in self._indices)])
        self.n = int(self._starts[-1])

    def __len__(self) -> int:
        return self.n

    def read(self, indices: Indices) -> list[Sample]:
        """The samples at `indices`, in that order, as writable views on one new arena.

        Raises:
            IndexError: an index is negative or not below `n`.
            Corrupted: a sample does not match its checksum, or its file was truncated.
            Unavailable: the place answered with transient errors until the attempts ran out.
            StorageError: a file is gone or may not be read.
        """
        arena, offsets = self.read_batch(indices)
        return [arena[start:end] for start, end in pairwise(offsets.tolist())]

    def read_one(self, index: int) -> Sample:
        """The sample at `index`; raises what `read` does."""
        return self.read_batch([operator.index(index)])[0]

    def read_batch(self, indices: Indices) -> tuple[Sample, npt.NDArray[np.int64]]:
        """The k samples at `indices` as one array and its k + 1 offsets; raises what `read` does."""
        reader = self._opened()
        wanted = _index_array(indices)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.n):
            bad = wanted[(wanted < 0) | (wanted >= self.n)][0]
            raise IndexError(f"sample index {bad} is outside [0, {self.n})")
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        locals_ = (wanted - self._starts[numbers]).tolist()
        spans: list[Span] = []
        for number, local in zip(numbers.tolist(), locals_, strict=True):
            offsets, _ = self._indices[number]
            spans.append((number, int(offsets[local]), int(offsets[local + 1])))
        ends = np.cumsum([0, *(end - start for _, start, end in spans)], dtype=np.int64)
        arena = np.empty(int(ends[-1]), np.uint8)
        at = 0
        for pieces in reader.read(spans):
            for piece in pieces:
                arena[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
                at += len(piece)
        if self.check_data:
            for place, (span, local) in enumerate(zip(spans, locals_, strict=True)):
                self._check(arena[ends[place] : ends[place + 1]], span, local)
        return arena, ends

    def get_offsets(self, file: int) -> npt.NDArray[np.int64]:
        """Start of each sample of file number `file` in bytes, then the size of that file."""
        return self._indices[file][0].copy()

    def get_checksums(self, file: int) -> npt.NDArray[np.uint32]:
        """CRC32 of each sample of file number `file`."""
        return self._indices[file][1].copy()

    def fingerprint(self) -> bytes:
        """Tells these files from others: sizes and headers, which hold the checksums of the metadata."""
        files = self._opened().files
        return b"".join(struct.pack("<Q", file.size) + file.header for file in files)

    def close(self) -> None:
        """Reading ends; may be called again."""
        self._spans = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        names = [file.name for file in self._opened().files] if self._storage else self.fnames
        options = (names, self.check_data, self._storage, self._cache)
        return _reopen, (type(self), *options, self._retry.attempts, self._retry.backoff_s)

    def __repr__(self) -> str:
        return f"RemoteFiles({len(self.fnames)} files, {self.n} samples)"

    def _opened(self) -> SpanReader:
        if self._spans is None:
            raise ValueError("the RemoteFiles are closed")
        return self._spans

    def _load_index(self, number: int) -> _Index:
        reader = self._opened()
        file = reader.files[number]
        end = _index_end(file)
        steps = range(HEADER, end, _PIECE)
        spans = [(number, start, min(start + _PIECE, end)) for start in steps]
        index = b"".join(piece for span in spans for piece in reader.read([span])[0])
        try:
            return _parse_index(file, index)
        except Corrupted:
            # Perhaps damaged on its way here: what was kept of it must go.
            for span in spans:
                reader.forget(span)
            return _parse_index(file, b"".join(reader.read_uncached(spans)))

    def _check(self, sample: Sample, span: Span, local: int) -> None:
        """Compares a sample with its CRC32; one that does not match is fetched once more, uncached."""
        right = int(self._indices[span[0]][1][local])
        if crc32(sample.data) == right:
            return
        reader = self._opened()
        sample[:] = np.frombuffer(reader.read_uncached([span])[0], np.uint8)
        reader.forget(span)
        if crc32(sample.data) != right:
            raise Corrupted(
                f"record file '{self.fnames[span[0]]}': sample {local} does not match its CRC32, "
                "also when fetched again; do not trust this file"
            )


def _reopen(
    kind: type[RemoteFiles],
    names: list[str],
    check_data: bool,
    storage: Storage | None,
    cache: ChunkCache | None,
    attempts: int,
    backoff_s: float,
) -> RemoteFiles:
    options: dict[str, Any] = {"attempts": attempts, "backoff_s": backoff_s}
    return kind(names, check_data, storage=storage, cache=cache, **options)


def _places(fnames: str | Iterable[str], storage: Storage | None) -> list[tuple[Storage, str, str]]:
    """(storage, name in it, name to show) of each file."""
    names = [fnames] if isinstance(fnames, str) else list(fnames)
    if storage is not None:
        found = [(storage, record_path(name), f"{storage}/{name}") for name in names]
    elif isinstance(fnames, str) and not fnames.endswith(SUFFIX):
        directory: Storage = FsspecStorage(_url(fnames))
        listed = [n for n in directory.list() if n.endswith(SUFFIX) and n[0] != "."]
        found = [(directory, name, f"{fnames.rstrip('/')}/{name}") for name in listed]
    else:
        parents: dict[str, Storage] = {}
        found = []
        for url in names:
            parent, _, name = _url(record_path(url)).rpartition("/")
            if parent not in parents:
                parents[parent] = FsspecStorage(parent)
            found.append((parents[parent], name, url))
    if not found:
        raise ConfigError(f"no '*{SUFFIX}' file in {fnames!r}")
    return found


def _url(text: str) -> str:
    if "://" not in text:
        raise ConfigError(f"{text!r} is not a URL: read local record files with FileReader")
    return text


def _index_end(file: RemoteFile) -> int:
    if file.header.startswith(_MAGIC_V2):
        raise ConfigError(
            f"record file '{file.shown}' has format v2, which is not read by ranges: "
            "copy it to a local directory"
        )
    if file.header == bytes(HEADER):
        raise Corrupted(f"record file '{file.shown}': its header is all zero, its writer died")
    count = int(struct.unpack_from("<q", file.header, 4)[0])
    if count < 0 or count > (file.size - HEADER) // 12:
        raise Corrupted(
            f"record file '{file.shown}': {count} samples do not fit into {file.size} bytes"
        )
    return HEADER + 12 * count


def _parse_index(file: RemoteFile, index: bytes) -> _Index:
    """Offsets and checksums, under the same demands as the native reader's."""
    checksum, count = struct.unpack("<Iq", file.header)
    if checksum == 0:
        warnings.warn(
            f"record file '{file.shown}' has no checksum of its metadata (an old file): "
            "only its structure was checked",
            stacklevel=4,
        )
    elif crc32(index, crc32(file.header[4:])) != checksum:
        raise Corrupted(f"record file '{file.shown}': its index does not match its CRC32")
    checksums = np.frombuffer(index, "<u4", count).astype(np.uint32)
    offsets = np.empty(count + 1, np.int64)
    offsets[:-1] = np.frombuffer(index, "<i8", count, 4 * count)
    offsets[-1] = file.size
    if int(offsets[0]) != HEADER + 12 * count or (offsets[1:] < offsets[:-1]).any():
        raise Corrupted(f"record file '{file.shown}': its samples do not lie behind one another")
    return offsets, checksums
