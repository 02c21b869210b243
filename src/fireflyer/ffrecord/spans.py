"""Spans of remote files, read in one batch of ranges a storage, through a cache of chunks if there is one."""

import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from fireflyer.errors import Corrupted, StorageError
from fireflyer.ffrecord.chunks import ChunkCache
from fireflyer.ffrecord.ranges import Retry, read_ranges, stored_size
from fireflyer.storage import Storage

HEADER = 12
"""Bytes of a v1 file ahead of its index."""

A = TypeVar("A")
B = TypeVar("B")

Span = tuple[int, int, int]
"""Number of the file, first byte, byte behind the last."""

Pieces = list[memoryview]
"""The bytes of a span, in order."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Where a record file is, and what it began with when it was opened."""

    storage: Storage
    name: str
    shown: str
    size: int
    header: bytes

    @property
    def key(self) -> str | None:
        """Names its chunks. It changes with place, size and, by the header's CRC of the metadata, every
        sample; None for an old file without that CRC, which must not be cached."""
        if self.header[:4] == bytes(4):
            return None
        place = self.shown.encode()
        return sha256(struct.pack("<Q", self.size) + self.header + place).hexdigest()[:40]


_OPENING = 16


def side_by_side(work: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """`work` of each item, in order, by up to 16 threads: opening many files costs few round trips.

    The first exception is raised once all have ended.
    """
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(_OPENING, len(items))) as pool:
        return list(pool.map(work, items))


def open_remote(storage: Storage, name: str, shown: str, retry: Retry) -> RemoteFile:
    """
    Raises:
        StorageError: there is no such file, or it cannot be read.
        Corrupted: it is shorter than a header.
    """
    size = stored_size(storage, name, retry)
    if size is None:
        raise StorageError(f"cannot open record file '{shown}': there is no such file")
    if size < HEADER:
        raise Corrupted(f"record file '{shown}' has {size} bytes: too few for a record file")
    header = bytes(read_ranges(storage, [(name, 0, HEADER)], retry)[0])
    return RemoteFile(storage, name, shown, size, header)


class SpanReader:
    """Reads spans of `files`, by their numbers. Without mutable state of its own: any thread may use it."""

    def __init__(self, files: Sequence[RemoteFile], cache: ChunkCache | None, retry: Retry) -> None:
        self.files = list(files)
        self._cache = cache
        self._retry = retry
        self._keys = [file.key if cache else None for file in files]

    def read(self, spans: Sequence[Span]) -> list[Pieces]:
        """The bytes of each span; raises what `read_ranges` does."""
        results: list[Pieces] = [[] for _ in spans]
        plain = [place for place, span in enumerate(spans) if self._keys[span[0]] is None]
        for place, piece in zip(plain, self.read_uncached([spans[p] for p in plain]), strict=True):
            results[place] = [piece]
        if self._cache is not None and len(plain) < len(spans):
            cached = [place for place, span in enumerate(spans) if self._keys[span[0]] is not None]
            pieces = self._read_cached(self._cache, [spans[place] for place in cached])
            for place, found in zip(cached, pieces, strict=True):
                results[place] = found
        return results

    def read_uncached(self, spans: Sequence[Span]) -> Pieces:
        """The bytes of each span as the storages have them now."""
        pieces = [memoryview(b"")] * len(spans)
        groups: dict[int, list[int]] = {}
        for place, (number, _, _) in enumerate(spans):
            groups.setdefault(id(self.files[number].storage), []).append(place)
        for places in groups.values():
            mine = [spans[place] for place in places]
            ranges = [(self.files[number].name, start, end) for number, start, end in mine]
            storage = self.files[mine[0][0]].storage
            for place, data in zip(places, read_ranges(storage, ranges, self._retry), strict=True):
                pieces[place] = data
        return pieces

    def forget(self, span: Span) -> None:
        """Drops the span's chunks from the cache."""
        number, start, end = span
        key = self._keys[number]
        if self._cache is not None and key is not None:
            for chunk in _chunks(start, end, self._cache.chunk_bytes):
                self._cache.discard(key, chunk)

    def _read_cached(self, cache: ChunkCache, spans: Sequence[Span]) -> list[Pieces]:
        step = cache.chunk_bytes
        needed = {(n, chunk) for n, start, end in spans for chunk in _chunks(start, end, step)}
        chunks: dict[tuple[int, int], memoryview] = {}
        missing: list[tuple[int, int]] = []
        for number, chunk in sorted(needed):
            data = cache.get(self._keys[number] or "", chunk)
            if data is None:
                missing.append((number, chunk))
            else:
                chunks[number, chunk] = memoryview(data)
        bounds = [(n, c * step, min((c + 1) * step, self.files[n].size)) for n, c in missing]
        chunks.update(zip(missing, self.read_uncached(bounds), strict=True))
        if missing:
            cache.put((self._keys[n] or "", c, bytes(chunks[n, c])) for n, c in missing)
        results = []
        for number, start, end in spans:
            pieces = []
            for chunk in _chunks(start, end, step):
                first, last = max(start - chunk * step, 0), min(end - chunk * step, step)
                pieces.append(chunks[number, chunk][first:last])
            results.append(pieces)
        return results


def _chunks(start: int, end: int, step: int) -> range:
    """Numbers of the chunks that hold bytes [start, end)."""
    return range(start // step, (end - 1) // step + 1) if end > start else range(0)
