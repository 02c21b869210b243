"""Protocol of the one writer: take-over, append, flush, compaction.

Fencing: a writer takes over by publishing a manifest with the next epoch. Then it creates the next
log object, the fence, so the older writer's create of that number fails. A log object that was
collected could be created again by an older writer. But objects are collected only after a manifest
is published. Therefore a writer acknowledges only after it has listed the manifests and found none
of another epoch.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from fireflyer._native.kv import BlockCache, Compaction, Memtable, View
from fireflyer.errors import Corrupted, NoSpace, StorageError, Unavailable
from fireflyer.kv.core import frames, tables
from fireflyer.kv.core.manifest import (
    ROUNDS,
    Manifest,
    TableRef,
    create_own,
    current,
    decode,
    publish,
    stale,
)
from fireflyer.kv.core.operations import (
    LOG,
    MANIFESTS,
    TABLES,
    Compute,
    Pause,
    Read,
    Steps,
    Write,
    listed,
    log_name,
    manifest_name,
    table_name,
)
from fireflyer.kv.core.planning import runs_to_merge

EXPIRY_GRACE_MS = 24 * 3600 * 1000
"""Delay in ms before an expired value is dropped, so a clock that is hours off loses no value."""


class Batch(msgspec.Struct):
    """Atomic operations, and their outcome."""

    parts: list[bytes]
    """Encoded operations."""
    changes: dict[bytes, bytes | None]
    """Resulting values; None: deleted."""
    condition: tuple[bytes, bytes | None] | None = None
    """Condition: a key and the value that it must have (None: no value)."""
    applied: bool = True
    """False if the condition failed."""


class Settings(msgspec.Struct, frozen=True):
    """Limits of a writer; `memtable` and `table` are in bytes."""

    memtable: int = 32 << 20
    objects: int = 512
    """Maximum log objects per memtable, because a take-over reads each."""
    table: int = 64 << 20
    history: int = 0
    """Number of log objects kept for change feeds, in addition to those that recovery needs."""


class Writer:
    """State of a writer. Call `open` first; make no call after Stale or an unknown outcome.

    A step must not run twice concurrently; different steps may interleave at any operation.
    """

    def __init__(self, identity: bytes, settings: Settings, cache: BlockCache) -> None:
        """Prepares a writer. `identity`: 8 random bytes."""
        self.identity = identity
        self.settings = settings
        self.cache = cache
        self.handles = tables.TableSet(cache)
        self.manifest = Manifest(0, 0, b"")
        self.next_log = 0
        self.sequence = 0
        self.memtable = Memtable()
        self.frozen: list[tuple[Memtable, int, int]] = []
        """Full memtables, oldest first, with the last log object and sequence number in each."""
        self.in_flight: set[str] = set()
        self.next_table = 1
        self._publishing = False
        self.view = View([self.memtable], [], 0)

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    def open(self) -> Steps[None]:
        """Takes over the database, or creates it; replays the log and fences the older writer.

        Raises:
            Stale: a newer writer took over.
            Corrupted: a log object is missing or damaged.
        """
        yield from self._take_over()
        present = [n for n in (yield from listed(LOG)) if n > self.manifest.flushed]
        number, end = self.manifest.flushed + 1, max(present, default=self.manifest.flushed)
        self.sequence = self.manifest.sequence
        self._refresh()
        for _ in range(end - number + 1 + 100 * ROUNDS):
            if number > end:
                fence = self._frame(frames.FENCE, number, 0, [])
                if (yield from create_own(log_name(number), fence)):
                    yield from self._check_current()
                    self.next_log = number + 1
                    return
            data = yield Read(log_name(number))
            try:
                if data is None:
                    raise Corrupted(
                        f"log object {number} of {end} is missing: restore it from a replica"
                    )
                self._replay(number, data)
            except Corrupted:
                yield from self._check_current()  # raises Stale if a newer writer collected it
                raise
            number += 1
        raise Unavailable("cannot take the store over: its writer appends too fast; stop that one")

    def _take_over(self) -> Steps[None]:
        for attempt in range(ROUNDS):
            found = yield from current()
            base = found or Manifest(0, 0, b"")
            mine = msgspec.structs.replace(
                base, number=base.number + 1, epoch=base.epoch + 1, writer=self.identity,
                boundary=max(base.boundary, base.number),
            )  # fmt: skip
            if (yield from publish(mine)):
                self.manifest = mine
                return
            yield Pause(0.01 * (1 + attempt % 8))
        raise Unavailable("cannot take the store over: other writers take it over, too; try again")

    def _replay(self, number: int, data: bytes) -> None:
        frame = frames.decode(number, data)
        if frame.epoch > self.epoch:  # this writer's fence would stop the newer writer
            raise stale(self.epoch, frame.epoch)
        if frame.kind == frames.BATCH:
            self._apply(frame)

    def _apply(self, frame: frames.Frame) -> None:
        count = self.memtable.apply(frame.data, frames.HEADER_BYTES, frame.sequence)
        if count != frame.count or frame.sequence != self.sequence + 1:
            raise Corrupted(f"log object {frame.number} does not continue the one before")
        self.sequence += count
        self.view.sequence = self.sequence

    def _frame(self, kind: int, number: int, count: int, parts: Sequence[bytes]) -> bytes:
        return frames.encode(
            kind, number, self.epoch, self.identity, self.sequence + 1, count, parts
        )

    def _refresh(self) -> None:
        """Makes a view of the manifest and the memtables."""
        memtables = [self.memtable, *(memtable for memtable, _, _ in reversed(self.frozen))]
        self.view = View(memtables, self.handles.runs(self.manifest), self.sequence)

    def _check_current(self) -> Steps[None]:
        """Raises Stale if a manifest of another writer exists."""
        present = yield from listed(MANIFESTS)
        if (highest := max(present, default=0)) <= self.manifest.number:
            return
        data = yield Read(manifest_name(highest))
        found = decode(highest, data) if data is not None else None
        if found is None or found.writer != self.identity:
            raise stale(self.epoch, found.epoch if found else self.epoch + 1)

    def get(self, key: bytes, now: int) -> Steps[bytes | None]:
        """Looks up a key in the newest state."""
        for _ in range(ROUNDS):
            try:
                return (yield from tables.get(self.view, key, now))
            except tables.Gone:  # this writer has compacted and collected the table meanwhile
                yield from self._check_current()
        raise tables.collected_too_fast("read")

    def append(self, batches: Sequence[Batch], now: int) -> Steps[None]:
        """Makes batches durable, in order, and then visible; sets `applied` of each.

        Raises:
            Stale: another writer took over; the outcome of these batches is unknown.
            NoSpace: nothing was written.
            StorageError: any other failure; the outcome is unknown, and the writer must stop.
        """
        pending: dict[bytes, bytes | None] = {}
        parts: list[bytes] = []
        conditional = any(batch.condition for batch in batches)
        for batch in batches:
            if batch.condition is not None:
                key, wanted = batch.condition
                found = pending[key] if key in pending else (yield from self.get(key, now))
                batch.applied = found == wanted
            if batch.applied:
                parts += batch.parts
                if conditional:
                    pending.update(batch.changes)
        if not parts:
            yield from self._check_current()  # a condition must be checked against the newest state
            return
        number = self.next_log
        data = self._frame(frames.BATCH, number, len(parts), parts)
        if not (yield from create_own(log_name(number), data)):
            raise stale(self.epoch, self.epoch + 1)
        yield from self._check_current()
        self._apply(frames.decode(number, data))
        self.next_log = number + 1
        begin = self.frozen[-1][1] if self.frozen else self.manifest.flushed
        if self.memtable.bytes >= self.settings.memtable or number - begin >= self.settings.objects:
            self.rotate()

    def rotate(self) -> None:
        """Freezes the memtable, so that `flush` can write it."""
        if len(self.memtable):
            self.frozen.append((self.memtable, self.next_log - 1, self.sequence))
            self.memtable = Memtable()
            self._refresh()

    def flush(self) -> Steps[bool]:
        """Writes the oldest frozen memtable as a run; returns False if there is none."""
        if not self.frozen:
            return False
        memtable, log, sequence = self.frozen[0]
        view = View([memtable], [], sequence)
        bottom = not self.manifest.runs
        run = yield from self._write_run(Compaction(view, self.settings.table, bottom, 0))

        def change(base: Manifest) -> Manifest:
            runs = ((run,) if run else ()) + base.runs
            return msgspec.structs.replace(base, runs=runs, flushed=log, sequence=sequence)

        yield from self._publish(change, run, lambda: self.frozen.pop(0))
        return True

    def compact(self, now: int, count: int | None = None) -> Steps[bool]:
        """Merges the newest runs of similar size; returns False if there are none.

        Args:
            now: ms since 1970.
            count: number of runs to merge; None: `planning` chooses them.
        """
        runs = self.manifest.runs
        if count is None:
            count = runs_to_merge([sum(ref.bytes for ref in run) for run in runs])
        if count == 0:
            return False
        merged = runs[:count]
        cache = BlockCache(4 * tables.READ_AHEAD * count)
        view = View(
            [], [[tables.handle(ref, cache) for ref in run] for run in merged], self.sequence
        )
        bottom = count == len(runs)
        compaction = Compaction(view, self.settings.table, bottom, now - EXPIRY_GRACE_MS)
        run = yield from self._write_run(compaction)

        def change(base: Manifest) -> Manifest:
            at = base.runs.index(merged[0])
            kept = base.runs[:at], base.runs[at + count :]
            return msgspec.structs.replace(base, runs=kept[0] + ((run,) if run else ()) + kept[1])

        yield from self._publish(change, run, lambda: None)
        return True

    def _write_run(self, compaction: Compaction) -> Steps[tuple[TableRef, ...]]:
        refs: list[TableRef] = []
        ended = False
        try:
            while not ended:
                state = yield Compute(compaction.step)
                if isinstance(state, tuple):
                    table, block = state
                    yield from tables.supply(table, block, tables.READ_AHEAD)
                    continue
                ended = state
                whole = compaction.take()
                if whole is not None:
                    refs.append((yield from self._write_table(whole)))
        except StorageError:
            self._forget(refs)
            raise
        return tuple(refs)

    def _forget(self, refs: Iterable[TableRef]) -> None:
        """Ends the protection of tables in flight; from now on only manifests protect them from
        the collector."""
        self.in_flight.difference_update(ref.name for ref in refs)

    def _write_table(self, whole: tuple[bytes, bytes, bytes, int, int, int]) -> Steps[TableRef]:
        data, first, last, index_offset, index_bytes, records = whole
        name = table_name(self.epoch, self.next_table)
        self.next_table += 1
        self.in_flight.add(name)
        try:
            yield Write(f"{TABLES}/{name}", data)
        except StorageError:
            self.in_flight.discard(name)
            raise
        return TableRef(name, first, last, index_offset, index_bytes, len(data), records)

    def _publish(
        self,
        change: Callable[[Manifest], Manifest],
        run: Sequence[TableRef],
        done: Callable[[], object],
    ) -> Steps[None]:
        """Publishes a change of the manifest that adds the tables of `run`.

        Raises:
            Stale: another writer has published a manifest with the new number.
            NoSpace: nothing changed.
            StorageError: any other failure; the outcome is unknown.
        """
        while self._publishing:
            yield Pause(0.001)
        self._publishing = True
        try:
            base = self.manifest
            mine = change(base)
            feed = min(mine.flushed + 1, self.next_log - self.settings.history)
            mine = msgspec.structs.replace(
                mine, number=base.number + 1, boundary=base.number, feed=max(base.feed, feed)
            )
            if not (yield from publish(mine)):
                raise stale(self.epoch, self.epoch + 1)
            self.manifest = mine
            done()
            self._refresh()
            self._forget(run)
        except NoSpace:
            self._forget(run)
            raise
        finally:
            self._publishing = False
