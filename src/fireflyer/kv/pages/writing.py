"""Writes of segments, and eviction of segments to make room.

Order of a write: select the segments to evict, read their surviving pages, write the new segment,
add it to the index, delete the evicted segments. If the process dies in between, no surviving page
is lost.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from fireflyer.errors import NoSpace, StorageError
from fireflyer.kv.pages import layout
from fireflyer.kv.pages.catalog import Catalog, Segment, entries_of, read_heads
from fireflyer.kv.pages.eviction import Resident, survivors
from fireflyer.kv.pages.layout import SEGMENTS, Head, Page
from fireflyer.kv.pages.pins import PinWatch
from fireflyer.kv.pages.reading import Outcome, PageReader, Wanted

_ABANDONED_S = 600.0
"""Seconds after which a temporary file counts as that of a killed process."""


class PendingPage(msgspec.Struct):
    """Page that is not in a segment yet."""

    page: Page
    data: bytes | bytearray


class Counters(msgspec.Struct):
    """Counters of a cache in this process."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Number of damaged pages; each was a miss."""
    written_bytes: int = 0
    rewritten_bytes: int = 0
    """Part of `written_bytes` that eviction rewrote."""
    evicted_segments: int = 0
    dropped_pages: int = 0
    """Number of pages that could not be written."""
    trouble: str = ""
    """Last error of a write or refresh."""

    def shown(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


class Plan(msgspec.Struct):
    """Segments to evict, and their surviving pages."""

    leaving: list[Segment]
    kept: list[PendingPage]


class SegmentWriter:
    """Writer of segments that enforces the capacity. Not thread-safe."""

    def __init__(
        self, catalog: Catalog, reader: PageReader, capacity: int, counters: Counters
    ) -> None:
        self.capacity = capacity
        self.most_page = capacity // 8
        self._catalog = catalog
        self._storage = catalog.storage
        self._reader = reader
        self._counters = counters
        self._identity = secrets.token_hex(8)
        self._last = 0
        self._watch = PinWatch()
        self._temporary: dict[str, float] = {}

    def write(self, pending: dict[bytes, PendingPage]) -> None:
        """Writes pages as a segment; drops pages that cannot be written."""
        try:
            self._catalog.refresh()
            self._clean_temporary()
            plan = self._plan(sum(len(page.data) for page in pending.values()))
            if plan is None:
                raise NoSpace("pinned pages fill the capacity: new pages are dropped")
            self._write(list(pending.values()), plan)
        except StorageError as error:
            self._counters.trouble = str(error)
            self._counters.dropped_pages += len(pending)

    def _write(self, pages: list[PendingPage], plan: Plan) -> None:
        try:
            self._segment([*pages, *plan.kept])
        except NoSpace:  # the disk is smaller than the capacity: evict first, without survivors
            leaving = plan.leaving or self._catalog.oldest()[:1]
            if not leaving:
                raise
            for segment in leaving:
                self._evict(segment)
            self._segment(pages)
            return
        self._counters.rewritten_bytes += sum(len(page.data) for page in plan.kept)
        for segment in plan.leaving:
            self._evict(segment)

    def _segment(self, pages: Sequence[PendingPage]) -> None:
        self._last = max(self._last + 1, self._catalog.next_sequence())
        name = layout.segment_name(self._last, self._identity)
        head, decoded = entries_of(name, [page.page for page in pages])
        self._storage.write(f"{SEGMENTS}/{name}", _chunks(head, pages))
        self._counters.written_bytes += decoded.size
        self._catalog.adopt(name, decoded.entries, decoded.salts, decoded.size)

    def _evict(self, segment: Segment) -> None:
        self._catalog.drop(segment.name)
        self._storage.delete(f"{SEGMENTS}/{segment.name}")
        self._counters.evicted_segments += 1

    def _plan(self, new: int) -> Plan | None:
        """Selects evictions that make room for `new` bytes; None: pinned pages leave no room.

        The new segment is written before old segments are deleted. So old segments may use at most
        the capacity minus twice the size of the new segment.
        """
        plan = Plan([], [])
        excess = self._catalog.total() + 2 * new - self.capacity
        if excess <= 0:
            return plan
        pinned = self._watch.pinned(self._storage, time.monotonic())
        for segment in self._catalog.oldest():
            pages = self._residents(segment, pinned)
            kept = survivors(pages, segment.size)
            if kept is None:
                continue
            rewritten = self._read_again(segment, kept)
            plan.leaving.append(segment)
            plan.kept += rewritten
            excess -= segment.size - 2 * sum(len(page.data) for page in rewritten)
            if excess <= 0:
                return plan
        return None if self._catalog.total() + new > self.capacity else plan

    def _residents(self, segment: Segment, pinned: set[bytes]) -> list[Resident]:
        """Returns the pages of a segment that no other segment has."""
        if segment.number is None:
            return []
        head = read_heads(self._storage, [segment.name])[0]
        if not isinstance(head, Head):
            return []
        pages = head.pages()
        with self._catalog.lock:
            places = self._catalog.index.find(b"".join(page.digest for page in pages), False)
        return [
            Resident(
                page.digest, page.size, page.offset, page.crc, place[4], page.position, page.salt,
                page.digest in pinned,
            )
            for page, place in zip(pages, places, strict=True)
            if place is not None and place[0] == segment.number
        ]  # fmt: skip

    def _read_again(self, segment: Segment, kept: Sequence[Resident]) -> list[PendingPage]:
        memory = [bytearray(page.size) for page in kept]
        wanted = [
            Wanted(page.digest, segment.name, page.offset, page.crc, memoryview(data))
            for page, data in zip(kept, memory, strict=True)
        ]
        return [
            PendingPage(Page(page.digest, page.size, page.crc, page.salt, page.position), data)
            for page, data, outcome in zip(kept, memory, self._reader.read(wanted), strict=True)
            if outcome is Outcome.GOOD
        ]

    def _clean_temporary(self) -> None:
        """Deletes the files of killed processes after a grace period."""
        now = time.monotonic()
        names = [name for name in self._storage.list(SEGMENTS) if name.endswith(".tmp")]
        self._temporary = {name: self._temporary.get(name, now) for name in names}
        for name, since in self._temporary.items():
            if now - since > _ABANDONED_S:
                self._storage.delete(f"{SEGMENTS}/{name}")


def _chunks(head: bytes, pages: Iterable[PendingPage]) -> Iterator[bytes | bytearray]:
    yield head
    for page in pages:
        yield page.data
        if gap := layout.padded(len(page.data)) - len(page.data):
            yield bytes(gap)
