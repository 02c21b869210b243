"""Page cache: lookups, pages in memory until they are written, and the thread that writes them."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Self

from fireflyer._native import crc32c
from fireflyer.errors import KvError, StorageError
from fireflyer.kv.pages import layout
from fireflyer.kv.pages.catalog import Catalog
from fireflyer.kv.pages.layout import MOST_PAGE, MOST_POSITION, Page, digests_of
from fireflyer.kv.pages.pins import Pin
from fireflyer.kv.pages.reading import Outcome, PageReader, Wanted
from fireflyer.kv.pages.writing import Counters, PendingPage, SegmentWriter
from fireflyer.storage import Storage

_LINGER_S = 0.5
"""Maximum seconds that pages wait in memory for more pages to fill a segment."""
_QUEUED = 2
"""If unwritten pages fill this many segments, besides the one being written, `set_from` waits."""


def writable(buffer: Any) -> memoryview:
    """Returns the bytes of a buffer; raises TypeError unless it is writable and contiguous."""
    view = memoryview(buffer)
    if view.readonly or not view.contiguous:
        raise TypeError("a page is read into a writable, contiguous buffer")
    return view.cast("B")


class PageCache:
    """Cache of pages on shared storage, from `kv.cache(url, capacity)`. Thread-safe.

    Threads: callers; a maintenance thread that writes, evicts and finds pages of other processes;
    up to four reader threads.
    """

    def __init__(self, storage: Storage, capacity: int, segment: int, poll: float) -> None:
        """Reads the heads of all segments.

        Raises:
            StorageError: the storage cannot be listed.
        """
        self._storage = storage
        self._segment = segment
        self._poll = poll
        self._catalog = Catalog(storage)
        self._reader = PageReader(storage)
        self._maintenance = threading.Lock()
        """Lock that is held during a refresh of the catalog or a write of a segment."""
        self._open: dict[bytes, PendingPage] = {}
        self._open_bytes = 0
        self._opened = 0.0
        self._writing: dict[bytes, PendingPage] = {}
        self._changed = threading.Condition(self._catalog.lock)
        """Condition that signals changes of the pending pages; it uses the catalog's lock."""
        self._flushing = 0
        self._accepted = self._settled = 0
        """Number of pages that callers have set, and number of those that the maintenance thread
        has written or dropped."""
        self._closing = False
        self.counters = Counters()
        self._writer = SegmentWriter(self._catalog, self._reader, capacity, self.counters)
        self._catalog.refresh()
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
        self._thread.start()

    def exists(self, keys: Sequence[bytes], *, salt: bytes = b"") -> int:
        """Returns the number of leading keys that have a page: the length of the usable prefix.

        Raises:
            InvalidKey: a key is empty or longer than 64 KiB.
        """
        digests = digests_of(keys, salt)
        joined = b"".join(digests)
        with self._changed:
            at = self._catalog.index.leading(joined)
            while at < len(digests) and self._pending(digests[at]):
                at = self._catalog.index.leading(joined, at + 1)
        return at

    def sizes(self, keys: Sequence[bytes], *, salt: bytes = b"") -> list[int | None]:
        """Returns the size of each key's page; None: no page. Like `exists`, this is only a hint."""
        digests = digests_of(keys, salt)
        with self._changed:
            found = self._catalog.index.find(b"".join(digests), False)
            return [
                len(pending.data) if (pending := self._pending(digest)) else place and place[2]
                for digest, place in zip(digests, found, strict=True)
            ]

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, salt: bytes = b""
    ) -> list[bool]:
        """Reads pages into buffers; returns True for each page that was read and verified.

        The result is False if a page is absent, evicted or damaged, or has another size than its
        buffer; the buffer's contents are then undefined. No error of the storage is raised.

        Raises:
            InvalidKey: a key is empty or longer than 64 KiB.
            TypeError: a buffer is not writable.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys need as many buffers, not {len(buffers)}")
        digests = digests_of(keys, salt)
        views = [writable(buffer) for buffer in buffers]
        done = [False] * len(keys)
        left = self._read(digests, views, done, list(range(len(keys))), hit=True)
        if left:  # another process may have moved them to a new segment
            self._refresh_quietly()
            self._read(digests, views, done, left, hit=False)
        self.counters.hits += sum(done)
        self.counters.misses += len(done) - sum(done)
        return done

    def _read(
        self, digests: list[bytes], views: list[memoryview], done: list[bool], which: list[int],
        *, hit: bool,
    ) -> list[int]:  # fmt: skip
        """Reads some pages; returns those whose segment vanished during the read."""
        wanted: list[Wanted] = []
        places: list[int] = []
        copies: list[tuple[int, PendingPage]] = []
        numbers: list[int] = []
        with self._changed:
            found = self._catalog.index.find(b"".join(digests[at] for at in which), hit)
            for at, place in zip(which, found, strict=True):
                if (pending := self._pending(digests[at])) is not None:
                    copies.append((at, pending))
                elif place is not None and place[2] == len(views[at]):
                    segment, offset, _, crc, _ = place
                    name = self._catalog.names[segment]
                    wanted.append(Wanted(digests[at], name, offset, crc, views[at]))
                    places.append(at)
                    numbers.append(segment)
        for at, pending in copies:
            if len(pending.data) == len(views[at]):
                views[at][:] = pending.data
                done[at] = True
        vanished: list[int] = []
        for at, number, page, outcome in zip(
            places, numbers, wanted, self._reader.read(wanted), strict=True
        ):
            done[at] = outcome is Outcome.GOOD
            if outcome is Outcome.GONE:
                vanished.append(at)
            elif outcome is Outcome.DAMAGED:
                self.counters.damaged += 1
                with self._changed:
                    self._catalog.index.remove(page.digest, number)
        return vanished

    def set_from(
        self, keys: Sequence[bytes], buffers: Sequence[Any], *, first: int = 0, salt: bytes = b""
    ) -> list[bool]:
        """Copies pages to the cache; this process can read them now, others after the write
        (`flush`).

        A page is never replaced: pages of known keys are ignored.

        Args:
            first: position of the first key in its prefix, in pages. The tail of a prefix is
                evicted before its head.

        Returns:
            True for each page that the cache has now; False: the page is empty, or larger than an
            eighth of the capacity.
        """
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys need as many buffers, not {len(buffers)}")
        digests = digests_of(keys, salt)
        done = [True] * len(keys)
        # The tail is written first, into the older segment, which is evicted first.
        for at in range(len(keys) - 1, -1, -1):
            view = memoryview(buffers[at]).cast("B")
            if not 0 < len(view) <= self._writer.most_page:
                done[at] = False
                continue
            with self._changed:
                if self._known(digests[at]):
                    continue
            position = min(first + at, MOST_POSITION)
            data = bytes(view)
            crc = crc32c(data, crc32c(digests[at]))
            page = PendingPage(Page(digests[at], len(data), crc, salt, position), data)
            self._submit(page)
        return done

    def _known(self, digest: bytes) -> bool:
        return self._pending(digest) is not None or self._catalog.index.leading(digest) == 1

    def _pending(self, digest: bytes) -> PendingPage | None:
        return self._open.get(digest) or self._writing.get(digest)

    def _submit(self, page: PendingPage) -> None:
        with self._changed:
            while self._open_bytes >= _QUEUED * self._segment and not self._closing:
                self._changed.wait()
            if self._closing:
                raise KvError("the cache is closed")
            if self._known(page.page.digest):
                return
            if not self._open:
                self._opened = time.monotonic()
            self._open[page.page.digest] = page
            self._accepted += 1
            self._open_bytes += len(page.data)
            if self._open_bytes >= self._segment or len(self._open) == 1:
                self._changed.notify_all()

    def flush(self) -> None:
        """Waits until all pages that were set before are written, or were dropped."""
        with self._changed:
            goal = self._accepted
            self._flushing += 1
            self._changed.notify_all()
            while self._settled < goal and self._thread.is_alive():
                self._changed.wait(1.0)
            self._flushing -= 1

    def pin(self, keys: Sequence[bytes], seconds: float = 60.0, *, salt: bytes = b"") -> Pin:
        """Protects pages from eviction by any process, until `release` or for `seconds`.

        If pinned pages are more than half of a segment, the whole segment stays. If such segments
        fill the capacity, new pages are dropped.
        """
        if not seconds > 0:
            raise KvError(f"invalid seconds {seconds!r}: expected more than 0")
        return Pin(self._storage, digests_of(keys, salt), seconds)

    def usage(self) -> dict[bytes, int]:
        """Returns the total bytes of the written pages of each salt."""
        return self._catalog.usage()

    def refresh(self) -> None:
        """Finds segments that other processes wrote or evicted. Raises StorageError."""
        with self._maintenance:
            self._catalog.refresh()

    def _refresh_quietly(self) -> None:
        try:
            self.refresh()
        except StorageError as error:
            self.counters.trouble = str(error)

    def stats(self) -> dict[str, Any]:
        """Returns statistics by name."""
        with self._maintenance:
            found = {
                "capacity": self._writer.capacity,
                "segments": len(self._catalog.segments),
                "bytes": self._catalog.total(),
                "pages": len(self._catalog.index),
                "index_bytes": self._catalog.index.memory,
            }
        return found | self.counters.shown()

    def _run(self) -> None:
        try:
            self._maintain()
        finally:  # also after an unexpected error, so no caller waits for an ended thread
            with self._changed:
                self._closing = True
                self._changed.notify_all()

    def _maintain(self) -> None:
        looked = time.monotonic()
        while True:
            with self._changed:
                while not self._due() and not self._closing:
                    wait = self._poll - (time.monotonic() - looked) if self._poll else _LINGER_S
                    if wait <= 0:
                        break
                    self._changed.wait(min(wait, _LINGER_S))
                if self._closing and not self._open:
                    return
                writes = self._due() or self._closing
                if writes:
                    self._take()
            with self._maintenance:
                if writes:
                    self._writer.write(self._writing)
                elif self._poll:
                    try:
                        self._catalog.refresh()
                    except StorageError as error:
                        self.counters.trouble = str(error)
            looked = time.monotonic()
            with self._changed:
                self._settled += len(self._writing)
                self._writing = {}
                self._changed.notify_all()

    def _take(self) -> None:
        """Moves the oldest pages, about one segment, to the pages being written."""
        size = 0
        for digest, page in list(self._open.items()):
            if size >= self._segment:
                break
            self._writing[digest] = self._open.pop(digest)
            size += len(page.data)
        self._open_bytes -= size
        self._changed.notify_all()

    def _due(self) -> bool:
        if not self._open:
            return False
        full = self._open_bytes >= self._segment
        return full or self._flushing > 0 or time.monotonic() - self._opened >= _LINGER_S

    def close(self) -> None:
        """Writes the pages in memory and ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def sizes_checked(capacity: int, segment: int, poll: float) -> int:
    """Returns the size of segments for a capacity; raises KvError if a size is invalid."""
    least = 64 * layout.padded(1)
    if capacity < least or not layout.padded(1) <= segment <= MOST_PAGE or poll < 0:
        raise KvError(
            f"invalid size: capacity is at least {least} bytes, segment 4 KiB to 1 GiB, poll at least 0"
        )
    return min(segment, capacity // 8)
