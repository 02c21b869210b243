"""Index of a remote record file: completely in memory for v1, page by page for v2."""

import struct
import warnings
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer._native.ffrecord import V2Index
from fireflyer.errors import Corrupted, StorageError
from fireflyer.ffrecord.chunk_cache import Bytes, ChunkCache
from fireflyer.ffrecord.ranges import Retry, read_ranges
from fireflyer.ffrecord.spans import HEADER, Numbers, RemoteFile, SpanReader, Spans
from fireflyer.ffrecord.zstd import ENTRY
from fireflyer.storage import Storage

Entries = npt.NDArray[np.void]
"""Index entries: place, bytes, raw, crc, codec (ENTRY)."""

PAGE = 4096
_HEAD = 16 << 10
"""Number of first bytes that opening reads. They hold everything before the samples of a v2 file if
its schema fits into a page."""


class V1Index:
    """Complete index of a v1 file, validated like in the native reader.

    Raises:
        Corrupted: the index does not match its checksum or the size of its file.
    """

    schema = b""

    def __init__(self, file: RemoteFile, index: bytes) -> None:
        checksum, count = struct.unpack("<Iq", file.header)
        if checksum == 0:
            warnings.warn(
                f"record file '{file.shown}' has no checksum of its metadata (an old file): "
                "only its structure was checked",
                stacklevel=5,
            )
        elif crc32(index, crc32(file.header[4:])) != checksum:
            raise Corrupted(f"record file '{file.shown}': its index does not match its CRC32")
        self.count = int(count)
        self.end = file.size
        self.crcs = np.frombuffer(index, "<u4", count).astype(np.uint32)
        self.places = np.empty(count + 1, np.int64)
        self.places[:-1] = np.frombuffer(index, "<i8", count, 4 * count)
        self.places[-1] = file.size
        if int(self.places[0]) != HEADER + 12 * count or np.any(np.diff(self.places) < 0):
            raise Corrupted(f"record file '{file.shown}': its samples overlap or are out of order")

    def entries(self, samples: Numbers) -> Entries:
        found = np.zeros(len(samples), ENTRY)
        found["place"] = self.places[samples]
        found["bytes"] = found["raw"] = self.places[samples + 1] - self.places[samples]
        found["crc"] = self.crcs[samples]
        return found


def open_remote(
    place: tuple[Storage, str, str], cache: ChunkCache | None, retry: Retry
) -> tuple[RemoteFile, V1Index | V2Index]:
    """Opens the file `place` (storage, name in it, display name); fetches damaged metadata once
    more.

    Opening takes two round trips: one for the size, one for the first 16 KiB and the last page. It
    takes more for a longer v1 index or schema, and for a v2 file that ends in a torn commit. With a
    cache, it takes one more for the stamp of a v2 file.

    Raises:
        StorageError: the file does not exist, cannot be read, or has a later version.
        Corrupted: the metadata does not match its checksums or the size of the file.
    """
    try:
        return _open(place, cache, retry, fresh=False)
    except Corrupted:
        return _open(place, cache, retry, fresh=True)


def _open(
    place: tuple[Storage, str, str], cache: ChunkCache | None, retry: Retry, fresh: bool
) -> tuple[RemoteFile, V1Index | V2Index]:
    storage, name, shown = place
    size = _size(place, retry)
    if size < HEADER:
        raise Corrupted(f"record file '{shown}' has {size} bytes: too few for a record file")
    last = (size - 1) // PAGE * PAGE
    head, tail = read_ranges(storage, [(name, 0, min(size, _HEAD)), (name, last, size)], retry)
    digest = sha256(bytes(head) + bytes(tail)).digest()
    file = RemoteFile(storage, name, shown, size, bytes(head[:HEADER]), digest=digest)
    if not file.is_v2:
        return file, V1Index(file, _v1_index(file, head, cache, retry, fresh))

    def read(start: int, end: int) -> bytes:
        if end <= len(head):
            return bytes(head[start:end])
        if start >= last and end <= last + len(tail):
            return bytes(tail[start - last : end - last])
        return bytes(read_ranges(storage, [(name, start, end)], retry)[0])

    def size_now() -> int:
        nonlocal size
        size = _size(place, retry)
        return size

    index = V2Index(shown, size, read, size_now)
    stamp = retry.run(lambda: storage.stamp(name)) if cache else ""
    return RemoteFile(storage, name, shown, size, file.header, stamp, digest), index


def _size(place: tuple[Storage, str, str], retry: Retry) -> int:
    storage, name, shown = place
    size = retry.run(lambda: storage.size(name))
    if size is None:
        raise StorageError(f"cannot open record file '{shown}': it does not exist")
    return size


def _v1_index(
    file: RemoteFile, head: memoryview, cache: ChunkCache | None, retry: Retry, fresh: bool
) -> bytes:
    """Returns the bytes of the index; `fresh` bypasses the cached bytes."""
    if file.header == bytes(HEADER):
        raise Corrupted(
            f"record file '{file.shown}': its header is all zeros because its writer died"
        )
    count = int(struct.unpack_from("<q", file.header, 4)[0])
    if count < 0 or count > (file.size - HEADER) // 12:
        raise Corrupted(
            f"record file '{file.shown}': {count} samples do not fit into {file.size} bytes"
        )
    end = HEADER + 12 * count
    if end <= len(head):
        return bytes(head[HEADER:end])
    reader = SpanReader([file], cache, retry)
    index = np.empty(end - HEADER, np.uint8)
    steps = np.arange(0, len(index), 8 << 20, dtype=np.int64)
    for first in steps.tolist():
        part = index[first : first + (8 << 20)]
        zero, ends = np.zeros(1, np.int64), np.array([0, len(part)], np.int64)
        span = Spans(zero, zero + HEADER + first, ends)
        if fresh:
            reader.read_again(span, zero, part)
        else:
            reader.read(span, part)
    return index.tobytes()


class PageCache:
    """Recently used index pages of v2 files, at most `limit` of them.

    Thread-safe: every step is one operation on a dict; concurrent calls may do the same work twice.
    """

    def __init__(self, limit: int = 1 << 14) -> None:
        self._half = limit // 2
        self._new: dict[tuple[int, int], bytes] = {}
        self._old: dict[tuple[int, int], bytes] = {}

    def get(self, number: int, place: int) -> bytes | None:
        page = self._new.get((number, place))
        if page is None and (page := self._old.get((number, place))) is not None:
            self.put(number, place, page)
        return page

    def put(self, number: int, place: int, page: bytes) -> None:
        if len(self._new) >= self._half:
            self._old, self._new = self._new, {}
        self._new[number, place] = page


class Indexes:
    """Indexes of all files of a reader."""

    def __init__(self, indexes: Sequence[V1Index | V2Index], reader: SpanReader) -> None:
        self.each = list(indexes)
        self.starts = np.cumsum([0, *(index.count for index in indexes)], dtype=np.int64)
        self._reader = reader
        self._memory = PageCache()

    def locate(self, wanted: Numbers) -> tuple[Numbers, Numbers]:
        """Returns the file of each sample of the sequence, and the sample's number in that file."""
        numbers = np.searchsorted(self.starts, wanted, side="right") - 1
        return numbers, wanted - self.starts[numbers]

    def entries(self, numbers: Numbers, samples: Numbers) -> Entries:
        """Returns the index entry of each sample; fetches missing pages of all files in one batch.

        Raises:
            Corrupted: a page is damaged, also after a second fetch.
            StorageError: the errors of `read_ranges`.
        """
        found = np.empty(len(numbers), ENTRY)
        if not len(numbers):
            return found
        order = np.argsort(numbers, kind="stable")
        names, firsts = np.unique(numbers[order], return_index=True)
        paged: list[tuple[int, V2Index, Numbers, Numbers]] = []
        for number, rows in zip(names.tolist(), np.split(order, firsts[1:]), strict=True):
            index = self.each[number]
            if isinstance(index, V1Index):
                found[rows] = index.entries(samples[rows])
            else:
                paged.append((number, index, rows, np.unique(index.pages(samples[rows]))))
        pages = self._pages([(number, places) for number, _, _, places in paged])
        for (number, index, rows, places), content in zip(paged, pages, strict=True):
            mine = np.ascontiguousarray(samples[rows])
            try:
                entries = index.extents(mine, places, content)
            except Corrupted:
                content = content.copy()
                spans = _page_spans([(number, places)])
                self._reader.read_again(spans, np.arange(len(places)), content)
                entries = index.extents(mine, places, content)
            found[rows] = entries.view(ENTRY)
            for place, at in zip(places.tolist(), range(0, content.size, PAGE), strict=True):
                if self._memory.get(number, place) is None:
                    self._memory.put(number, place, content[at : at + PAGE].tobytes())
        return found

    def _pages(self, wanted: Sequence[tuple[int, Numbers]]) -> list[Bytes]:
        """Returns the pages at ascending places of each file, concatenated and unchecked."""
        flat = [(number, place) for number, places in wanted for place in places.tolist()]
        have = [self._memory.get(number, place) for number, place in flat]
        gone = [at for at, page in enumerate(have) if page is None]
        if gone:
            spans = _page_spans([(flat[at][0], np.array([flat[at][1]])) for at in gone])
            arena = np.empty(len(gone) * PAGE, np.uint8)
            self._reader.read(spans, arena)
            for turn, at in enumerate(gone):
                have[at] = arena[turn * PAGE : (turn + 1) * PAGE].tobytes()
        content = np.frombuffer(b"".join(page for page in have if page is not None), np.uint8)
        cuts = np.cumsum([len(places) * PAGE for _, places in wanted])
        return np.split(content, cuts[:-1]) if wanted else []


def _page_spans(wanted: Sequence[tuple[int, Numbers]]) -> Spans:
    counts = [len(places) for _, places in wanted]
    numbers = np.repeat(np.array([number for number, _ in wanted], np.int64), counts)
    starts = np.concatenate([places for _, places in wanted])
    return Spans(numbers, starts, np.arange(len(starts) + 1, dtype=np.int64) * PAGE)
