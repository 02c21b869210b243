"""Reads of spans (byte ranges) of remote files, one batch per storage, with an optional cache."""

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from fireflyer.ffrecord.chunk_cache import Bytes, ChunkCache, Pieces
from fireflyer.ffrecord.ranges import Retry, read_ranges
from fireflyer.storage import Storage

HEADER = 12
"""Number of bytes of a v1 file before its index."""
MAGIC_V2 = b"\x89FFREC2\n"

A = TypeVar("A")
B = TypeVar("B")

Numbers = npt.NDArray[np.int64]
Span = tuple[int, int, int]
"""Number of the file, first byte, end byte (exclusive)."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Location of a record file, and its identity when it was opened."""

    storage: Storage
    name: str
    shown: str
    size: int
    header: bytes
    """First 12 bytes of the file."""
    stamp: str = ""
    """Backend version tag (for example an ETag); detects replaced files. Fetched only if needed."""
    digest: bytes = b""
    """Digest of the parts that opening read: the first 16 KiB and the last page."""

    @property
    def is_v2(self) -> bool:
        return self.header.startswith(MAGIC_V2)

    @property
    def key(self) -> str | None:
        """Cache key of the file's chunks, or None if nothing of the file may be cached.

        The key differs if the file's URL, its size or any sample differs. A v1 header contains a
        CRC of all metadata. A v2 file has no checksum of the whole file, so the key contains the
        stamp. Without the CRC or the stamp the key is None.
        """
        if not (self.stamp if self.is_v2 else any(self.header[:4])):
            return None
        identity = struct.pack("<Q", self.size) + self.header + self.shown.encode()
        if self.is_v2:
            identity += b"\0" + self.stamp.encode()
        return sha256(identity).hexdigest()[:40]


_OPENING = 16


def map_in_threads(work: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """Applies `work` to each item, in order, in up to 16 threads, to open many files fast.

    Raises the first exception after all calls have ended.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_OPENING, len(items))) as pool:
        return list(pool.map(work, items))


class Spans(NamedTuple):
    """Arrays of k spans of files, and their consecutive places in an arena."""

    numbers: Numbers
    """File number of each span."""
    starts: Numbers
    """First byte of each span in its file."""
    offsets: Numbers
    """Places in the arena, k + 1 values, which also give the length of each span."""


class SpanReader:
    """Reader of spans of `files`, by file number. Thread-safe, because the attributes are constant.

    This class does not validate the bytes: the caller checks them and passes wrong spans to
    `read_again`. All methods raise what `read_ranges` does.
    """

    def __init__(self, files: Sequence[RemoteFile], cache: ChunkCache | None, retry: Retry) -> None:
        self.files = list(files)
        self.cache = cache
        self._retry = retry
        keys = [file.key if cache else None for file in files]
        self._keys = [key or "" for key in keys]
        self._cached = np.array([key is not None for key in keys], np.bool_)

    def read(self, spans: Spans, arena: Bytes) -> None:
        """Fills `arena` from the cache; missing bytes are fetched and cached."""
        cached = self._cached[spans.numbers]
        if self.cache is not None and cached.any():
            self._read_cached(self.cache, spans, np.flatnonzero(cached), arena)
        self._fetch(spans, np.flatnonzero(~cached), arena)

    def read_again(self, spans: Spans, rows: Numbers, arena: Bytes) -> None:
        """Fetches the spans `rows` again from the storages and drops their cached chunks."""
        if self.cache is not None:
            kept = rows[self._cached[spans.numbers[rows]]]
            for number, chunk in _chunks(_pieces(spans, kept, self.cache.chunk_bytes)):
                self.cache.discard(self._keys[number], chunk)
        self._fetch(spans, rows, arena)

    def fetch(self, wanted: Sequence[Span]) -> list[memoryview]:
        """Fetches the current bytes of each span, in one batch of ranges per storage."""
        found = [memoryview(b"")] * len(wanted)
        groups: dict[int, list[int]] = {}
        for place, (number, _, _) in enumerate(wanted):
            groups.setdefault(id(self.files[number].storage), []).append(place)
        for places in groups.values():
            mine = [wanted[place] for place in places]
            ranges = [(self.files[number].name, start, end) for number, start, end in mine]
            storage = self.files[mine[0][0]].storage
            for place, data in zip(places, read_ranges(storage, ranges, self._retry), strict=True):
                found[place] = data
        return found

    def _fetch(self, spans: Spans, rows: Numbers, arena: Bytes) -> None:
        starts, places = spans.starts[rows], spans.offsets[rows]
        ends = starts + spans.offsets[rows + 1] - places
        columns = (spans.numbers[rows].tolist(), starts.tolist(), ends.tolist())
        wanted = list(zip(*columns, strict=True))
        for place, data in zip(places.tolist(), self.fetch(wanted), strict=True):
            arena[place : place + len(data)] = np.frombuffer(data, np.uint8)

    def _read_cached(self, cache: ChunkCache, spans: Spans, rows: Numbers, arena: Bytes) -> None:
        step = cache.chunk_bytes
        pieces = _pieces(spans, rows, step)
        numbers, keys = np.unique(pieces[:, 0], return_inverse=True)
        by_key = np.column_stack((keys.reshape(-1), pieces[:, 1:])).astype(np.int64)
        found = cache.read([self._keys[number] for number in numbers.tolist()], by_key, arena)
        if found.all():
            return
        pieces = pieces[~found]
        missing = _chunks(pieces)
        bounds = [(n, c * step, min((c + 1) * step, self.files[n].size)) for n, c in missing]
        chunks = dict(zip(missing, self.fetch(bounds), strict=True))
        cache.put((self._keys[n], c, data) for (n, c), data in chunks.items())
        for number, chunk, first, size, place in pieces.tolist():
            data = chunks[number, chunk][first : first + size]
            arena[place : place + size] = np.frombuffer(data, np.uint8)


def _pieces(spans: Spans, rows: Numbers, step: int) -> Pieces:
    """Splits the spans `rows` at the borders of chunks.

    Returns:
        int64 rows: file number, chunk number, first byte in the chunk, number of bytes, first byte
        in the arena.
    """
    starts, places = spans.starts[rows], spans.offsets[rows]
    ends = starts + spans.offsets[rows + 1] - places
    firsts = starts // step
    counts = np.where(ends > starts, (ends - 1) // step + 1 - firsts, 0)
    of = np.repeat(np.arange(len(rows)), counts)
    chunks = firsts[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(starts[of], chunks * step)
    high = np.minimum(ends[of], (chunks + 1) * step)
    targets = places[of] + low - starts[of]
    columns = (spans.numbers[rows][of], chunks, low - chunks * step, high - low, targets)
    return np.column_stack(columns).astype(np.int64, copy=False)


def _chunks(pieces: Pieces) -> list[tuple[int, int]]:
    """Returns (file, chunk) of all pieces, each once, in order."""
    return sorted({(number, chunk) for number, chunk in pieces[:, :2].tolist()})
