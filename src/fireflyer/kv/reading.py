"""Reads that stores and snapshots share, and pinned snapshots."""

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from fireflyer._native.kv import MOST_KEY, Scan, View
from fireflyer.errors import FireflyerError, KvError, SnapshotGone
from fireflyer.kv.batch import now_ms
from fireflyer.kv.core import pins, tables
from fireflyer.kv.core.feed import Feed
from fireflyer.kv.core.frames import checked_key
from fireflyer.kv.core.manifest import Manifest
from fireflyer.kv.core.reader import Reader
from fireflyer.kv.core.writer import Writer
from fireflyer.kv.shell import run
from fireflyer.storage import Storage

_ITEMS = 512
_FEED_POLL_S = 0.01


class Change(NamedTuple):
    """Operation of a change feed; `value` is None for a deletion."""

    sequence: int
    key: bytes
    value: bytes | None


def bounds(start: bytes, end: bytes | None, prefix: bytes) -> tuple[bytes, bytes | None]:
    """Returns the range of keys with start <= key < end that begin with `prefix`."""
    if not prefix:
        return start, end
    start = max(start, prefix)
    stem = prefix.rstrip(b"\xff")
    if stem:
        after = stem[:-1] + bytes([stem[-1] + 1])
        end = after if end is None else min(end, after)
    return start, end


class Readable:
    """Lookups and scans in the state of a core, that is, a `Writer` or `Reader`. Thread-safe."""

    def __init__(self, storage: Storage, core: Writer | Reader) -> None:
        self._storage = storage
        self._core = core
        self._lock = threading.Lock()
        """Lock that is held while the core runs, but not while it waits for the storage."""
        self._failure: FireflyerError | None = None
        self._closed = False

    @property
    def sequence(self) -> int:
        """Sequence number of the newest visible operation; the first operation has number 1."""
        return self._core.sequence

    def get(self, key: bytes) -> bytes | None:
        """Returns the value of a key, or None.

        Raises:
            InvalidKey: the key is empty or longer than 64 KiB.
            Corrupted: stored bytes are damaged.
        """
        if not 0 < len(key) <= MOST_KEY:
            checked_key(key)
        if self._failure is not None or self._closed:
            self._refuse()
        found = self._core.view.get(key, now_ms())
        if found.__class__ is tuple:
            return run(self._storage, self._core.get(key, now_ms()), self._lock)
        return found  # type: ignore[return-value]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the value or None for each key, like `get`."""
        return [self.get(key) for key in keys]

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def scan(
        self,
        start: bytes = b"",
        end: bytes | None = None,
        *,
        prefix: bytes = b"",
        limit: int | None = None,
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yields (key, value) with start <= key < end, sorted by key, from one state of the store.

        Raises:
            SnapshotGone: tables of this state were collected meanwhile; `snapshot` prevents that.
        """
        if self._failure is not None or self._closed:
            self._refuse()
        return self._scan(*bounds(start, end, prefix), limit)

    def _scan(
        self, start: bytes, end: bytes | None, limit: int | None
    ) -> Iterator[tuple[bytes, bytes]]:
        left = limit if limit is not None else 1 << 62
        with self._held() as view:
            walk = Scan(view, start, end)
            ahead = tables.READ_AHEAD if left > _ITEMS else 0
            while left > 0:
                try:
                    steps = tables.scan(walk, now_ms(), min(left, _ITEMS), ahead)
                    items = run(self._storage, steps)
                except tables.Gone as error:
                    raise SnapshotGone("the scan outlived its tables: use snapshot()") from error
                if not items:
                    return
                yield from items
                left -= len(items)

    @contextlib.contextmanager
    def _held(self) -> Iterator[View]:
        """Yields a view of the current state.

        `Store` overrides this method: during the `with` block, it keeps the view's tables.
        """
        yield self._core.view.copy()

    def changes(self, after: int = 0, *, wait: float | None = 0.0) -> Iterator[Change]:
        """Yields the operations that follow number `after`, in order.

        Args:
            wait: seconds without an operation after which the iterator ends; None: it never ends.

        Raises:
            SnapshotGone: operations that follow `after` were collected. The writer's `history`
                keeps more of them.
        """
        feed, idle = Feed(after), time.monotonic()
        while not self._closed:
            if found := run(self._storage, feed.poll()):
                yield from (Change(*change) for change in found)
                idle = time.monotonic()
            elif wait is not None and time.monotonic() - idle >= wait:
                return
            else:
                time.sleep(_FEED_POLL_S)

    def _refuse(self) -> None:
        if self._closed:
            raise KvError("the store is closed")
        if self._failure is not None:
            raise self._failure


class Snapshot(Readable):
    """State of a store that is protected from collection.

    A background thread renews its pin until `close`, or the end of a `with` block.

    Attributes:
        id: id for `kv.open(url, snapshot=id)`; None for a snapshot of a reader.
    """

    def __init__(
        self, storage: Storage, core: Reader, identity: str, shared: bool, seconds: float
    ) -> None:
        super().__init__(storage, core)
        self.id = identity if shared else None
        self._identity = identity
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if seconds:
            self._thread = threading.Thread(target=self._renew, name="kv-pin", daemon=True)
            self._thread.start()

    def _renew(self) -> None:
        count = 0
        while not self._ended.wait(self._seconds / 3):
            count += 1
            pin = pins.Pin(self._core.manifest.number, self._seconds, count)
            with contextlib.suppress(
                FireflyerError
            ):  # a later renewal may succeed before the pin expires
                run(self._storage, pins.write(self._identity, pin))

    def close(self) -> None:
        """Releases the snapshot: from now on its tables may be collected."""
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._storage.delete(pins.pin_name(self._identity))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reader_at(manifest: Manifest, view: View, sequence: int, core: Reader) -> Reader:
    """Returns a core that always reads one state."""
    core.manifest, core.view, core.sequence = manifest, view, sequence
    return core


def new_identity() -> str:
    return secrets.token_hex(12)
