"""Stores: one writer and any number of readers, which communicate only by objects in the storage.

Threads of a writer: callers, the committer (committing.py), a flush thread, and a thread that
merges tables and collects. Threads of a reader: callers, and a thread that follows the log. A lock
makes the core's steps interleave only at storage operations. Lookups that need no storage take no
lock.
"""

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Self

from fireflyer._native.kv import BlockCache, View
from fireflyer.errors import FireflyerError, KvError, NoSpace, Stale, StorageError, Unavailable
from fireflyer.kv.batch import WriteBatch, now_ms
from fireflyer.kv.committing import Committer
from fireflyer.kv.core import pins, tables
from fireflyer.kv.core.collect import Collected, clean_temporary, collect
from fireflyer.kv.core.reader import Reader
from fireflyer.kv.core.writer import Batch, Settings, Writer
from fireflyer.kv.reading import Readable, Snapshot, new_identity, reader_at
from fireflyer.kv.shell import run
from fireflyer.storage import Storage

_RETRY_S = 1.0
_COLLECT_S = 5.0
_MOST_FROZEN = 4
"""Maximum full memtables that wait for a flush; further batches wait."""


class Store(Readable):
    """Writer of a database, from `kv.open(url, write=True)`. Thread-safe."""

    _core: Writer

    def __init__(self, storage: Storage, settings: Settings, cache: int) -> None:
        """Takes over the database, or creates it.

        Raises:
            Stale: another process took over at the same time.
            Corrupted: the log is damaged.
        """
        super().__init__(storage, Writer(secrets.token_bytes(8), settings, BlockCache(cache)))
        self._watch = pins.PinWatch()
        self._views: Counter[int] = Counter()
        """Number of uses of each manifest by scans and snapshots of this process."""
        run(storage, self._core.open())
        run(storage, clean_temporary())
        self._room = threading.Condition()
        """Condition that signals frozen or flushed memtables, or the end of the store."""
        self._ending = False
        self._maintenance = threading.Lock()
        """Lock that a merge or a collection holds."""
        self.trouble: StorageError | None = None
        """Last error of a flush, merge or collection; its thread retries that work."""
        self._committer = Committer(self._append, self._end)
        self._threads = [
            threading.Thread(
                target=self._loop, args=(self._flush_all, None), name="kv-flush", daemon=True
            ),
            threading.Thread(
                target=self._loop,
                args=(self._compact_and_collect, _COLLECT_S),
                name="kv-merge",
                daemon=True,
            ),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def epoch(self) -> int:
        """Fencing token of this writer; each take-over increments it."""
        return self._core.epoch

    def put(self, key: bytes, value: bytes, *, ttl: float | None = None, wait: bool = True) -> None:
        """Sets a value durably.

        Args:
            ttl: seconds until the value expires.
            wait: False: return before the value is visible and durable; `sync` waits for that.

        Raises:
            InvalidKey: the key is empty or longer than 64 KiB.
            NoSpace: nothing was written.
            Stale: another writer took over.
            StorageError: any other failure; the outcome is unknown.
        """
        batch = WriteBatch()
        batch.put(key, value, ttl=ttl)
        self._commit(batch.encoded(), wait)

    def delete(self, key: bytes, *, wait: bool = True) -> None:
        """Deletes a key, like `put`; a missing key is no error."""
        batch = WriteBatch()
        batch.delete(key)
        self._commit(batch.encoded(), wait)

    def write(self, batch: WriteBatch, *, wait: bool = True) -> None:
        """Writes a batch atomically; see `put`."""
        if len(batch):
            self._commit(batch.encoded(), wait)

    @contextlib.contextmanager
    def batch(self) -> Iterator[WriteBatch]:
        """Yields a batch and writes it at the end of the `with` block, unless the block raises."""
        batch = WriteBatch()
        yield batch
        self.write(batch)

    def compare_and_set(
        self, key: bytes, expected: bytes | None, value: bytes | None, *, ttl: float | None = None
    ) -> bool:
        """Sets or deletes a value if the current value is `expected`.

        Args:
            expected: expected value; None: the key has no value.
            value: new value; None: delete the key.

        Returns:
            True if the change was made and is durable.
        """
        changes = WriteBatch()
        if value is None:
            changes.delete(key)
        else:
            changes.put(key, value, ttl=ttl)
        batch = changes.encoded()
        batch.condition = (key, expected)
        with contextlib.suppress(StorageError):
            self.get(key)  # reads the blocks that the committer will need
        self._commit(batch, wait=True)
        return batch.applied

    def sync(self) -> None:
        """Waits until all earlier writes are durable. Raises the errors of `put`."""
        self._committer.drain()

    def _commit(self, batch: Batch, wait: bool) -> None:
        if self._failure is not None or self._closed:
            self._refuse()
        ticket = self._committer.submit(batch)
        if wait:
            ticket.wait()

    def _append(self, batches: list[Batch]) -> None:
        with self._room:
            while len(self._core.frozen) >= _MOST_FROZEN and not self._ending:
                if isinstance(self.trouble, NoSpace):
                    raise NoSpace(str(self.trouble))
                self._room.wait(_RETRY_S)
        frozen = len(self._core.frozen)
        run(self._storage, self._core.append(batches, now_ms()), self._lock)
        if len(self._core.frozen) > frozen:
            with self._room:
                self._room.notify_all()

    def _end(self, failure: FireflyerError) -> None:
        """Stops writes and reads, because this process no longer knows the newest state."""
        self._failure = failure
        self._committer.fail(failure)
        with self._room:
            self._ending = True
            self._room.notify_all()

    def _loop(self, work: Callable[[], None], period: float | None) -> None:
        """Runs `work` after each change of memtables and every `period` seconds, until the store ends."""
        while not self._ending:
            try:
                work()
                failed = False
            except Stale as error:
                self._end(error)
                return
            except StorageError as error:
                self.trouble, failed = error, True
            with self._room:
                pending = period is None and self._core.frozen
                if not self._ending and (failed or not pending):
                    self._room.wait(_RETRY_S if failed else period)

    def _flush_all(self) -> None:
        while run(self._storage, self._core.flush(), self._lock):
            self.trouble = None
            with self._room:
                self._room.notify_all()

    def _compact_and_collect(self) -> None:
        try:
            while not self._ending and self.compact():
                self.collect()
        finally:
            self.collect()

    def compact(self, *, everything: bool = False) -> bool:
        """Merges runs of similar size, or all runs; returns False if there was nothing to merge.

        A merge needs as much free space as the tables that it merges.
        """
        with self._maintenance:
            count = len(self._core.manifest.runs) if everything else None
            return run(self._storage, self._core.compact(now_ms(), count), self._lock)

    def flush(self) -> None:
        """Writes all memtables as tables, so that the next open replays no log."""
        self.sync()
        with self._lock:
            self._core.rotate()
        with self._room:
            self._room.notify_all()
            while self._core.frozen and not self._ending:
                if self.trouble is not None:
                    raise self.trouble
                self._room.wait(_RETRY_S)
        if self._failure is not None:
            raise self._failure

    def collect(self) -> Collected:
        """Deletes objects that no manifest, pin or view needs; works even on a full disk.

        Returns:
            Numbers of deleted objects.
        """
        with self._maintenance:
            local = [number for number, count in self._views.items() if count]
            return run(
                self._storage, collect(self._core, self._watch, time.monotonic(), local), self._lock
            )

    def snapshot(self, *, seconds: float = 60.0) -> Snapshot:
        """Flushes, then takes a snapshot that other processes can open by its `id`.

        Args:
            seconds: time after which the snapshot expires if this process dies.
        """
        self.flush()
        with self._lock:
            manifest = self._core.manifest
            view = View([], self._core.handles.runs(manifest), manifest.sequence)
            self._views[manifest.number] += 1
        try:
            identity = new_identity()
            if not run(self._storage, pins.pinned(identity, manifest, seconds)):
                raise Unavailable("the snapshot was overtaken by a collection: try again")
        finally:
            self._views[manifest.number] -= 1
        core = reader_at(manifest, view, manifest.sequence, Reader(BlockCache(0)))
        return Snapshot(self._storage, core, identity, True, seconds)

    @contextlib.contextmanager
    def _held(self) -> Iterator[View]:
        with self._lock:
            number, view = self._core.manifest.number, self._core.view.copy()
            self._views[number] += 1
        try:
            yield view
        finally:
            self._views[number] -= 1

    def close(self, *, flush: bool = True) -> None:
        """Writes the queued batches and ends the threads.

        Args:
            flush: True to write tables, too, so that the next open is fast.
        """
        if self._closed:
            return
        if flush and self._failure is None:
            with contextlib.suppress(StorageError, Stale):  # the log has all data
                self.flush()
        self._closed = True
        self._committer.close()
        with self._room:
            self._ending = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ReadOnlyStore(Readable):
    """Reader of a database that follows its writer, from `kv.open(url)`. Thread-safe."""

    _core: Reader

    def __init__(self, storage: Storage, cache: int, poll: float) -> None:
        """Reads the manifest and the log.

        Args:
            cache: maximum bytes of cached table blocks.
            poll: seconds between reads of the log; 0: only `refresh` reads it.

        Raises:
            KvError: there is no database.
        """
        super().__init__(storage, Reader(BlockCache(cache), where=str(storage)))
        run(storage, self._core.open())
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if poll:
            self._thread = threading.Thread(
                target=self._follow, args=(poll,), name="kv-follow", daemon=True
            )
            self._thread.start()

    def refresh(self) -> int:
        """Reads new operations; returns the newest sequence number.

        Afterwards all writes that were acknowledged before this call are visible.
        """
        while run(self._storage, self._core.refresh(), self._lock):
            pass
        return self._core.sequence

    def _follow(self, poll: float) -> None:
        patience, since = 10.0, time.monotonic()
        looked = 0.0
        while not self._ended.wait(poll):
            look = time.monotonic() - looked > 1.0
            try:
                while run(self._storage, self._core.refresh(look=look), self._lock):
                    pass
                since = time.monotonic()
                looked = since if look else looked
            except Unavailable as error:
                if time.monotonic() - since > patience:
                    self._failure = error
            except FireflyerError as error:
                self._failure = error
                return
            else:
                self._failure = None

    def snapshot(self, *, seconds: float = 60.0) -> Snapshot:
        """Takes a snapshot of the visible state. The storage must be writable.

        Args:
            seconds: time after which the snapshot expires if this process dies.
        """
        if self._failure is not None or self._closed:
            self._refuse()
        for _ in range(16):
            with self._lock:
                manifest, sequence = self._core.manifest, self._core.sequence
                view = self._core.view.copy()
            identity = new_identity()
            if run(self._storage, pins.pinned(identity, manifest, seconds)):
                core = reader_at(manifest, view, sequence, Reader(BlockCache(0)))
                return Snapshot(self._storage, core, identity, False, seconds)
            self.refresh()
        raise tables.collected_too_fast("take a snapshot")

    def put(self, key: bytes, value: bytes) -> None:
        """Raises KvError, because the store is read-only."""
        raise KvError("the store is open for reading: open it with write=True")

    def close(self) -> None:
        """Ends the thread that follows the writer."""
        self._closed = True
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
