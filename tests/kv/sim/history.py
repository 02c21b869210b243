"""One simulated history of a database: writers that replace each other, readers, collectors, and the
checks of what they were told.

Each value names its writer and its count, so a wrong or old one is recognised. After the faults a last
writer opens the database; what it holds is compared with what was acknowledged.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fs3.sim.world import Network, World
from tests.kv.sim.disk import Actor, Disk, Weather

from fireflyer._native.kv import BlockCache, Scan, View
from fireflyer.errors import Corrupted, FireflyerError, NoSpace, SnapshotGone, Stale
from fireflyer.kv.core import frames, pins, tables
from fireflyer.kv.core.collect import Collected, clean_temporary, collect
from fireflyer.kv.core.feed import Feed
from fireflyer.kv.core.manifest import Manifest, decode
from fireflyer.kv.core.operations import Steps, manifest_name
from fireflyer.kv.core.reader import Reader
from fireflyer.kv.core.writer import Batch, Settings, Writer

KEYS = 12
COUNTER = b"counter"
END_S = 3.0


@dataclass
class Attempt:
    """One put or deletion: `sequence` is set once it was acknowledged."""

    value: bytes | None
    key: bytes
    called: float
    sequence: int | None = None


@dataclass
class Facts:
    """What the history knows of all processes together."""

    attempts: dict[bytes, Attempt] = field(default_factory=dict)
    acknowledged: dict[bytes, int] = field(default_factory=dict)
    """Highest acknowledged sequence number of each key."""
    deletions: list[Attempt] = field(default_factory=list)
    increments: int = 0
    uncertain: int = 0
    newest_open: float = -1.0
    """When the newest writer's `open` returned, and its epoch."""
    newest_epoch: int = 0
    operations: int = 0


class WriterActor(Actor):
    """A writer process: batches, increments, flushes, compactions, collections, until it fails."""

    def __init__(self, history: "History", name: str) -> None:
        super().__init__(history.world, history.network, name, history.disk, history.weather)
        self.history = history
        self.facts = history.facts
        rng = self.world.rng
        settings = Settings(
            memtable=rng.choice((600, 2000)),
            table=rng.choice((300, 3000)),
            history=rng.choice((0, 5)),
        )
        self.writer = Writer(rng.randbytes(8), settings, BlockCache(1 << 30))
        self.watch = pins.PinWatch()
        self.count = 0
        self.ready = False
        self.over = False
        self.go(self._open(), self._opened, self._failed)

    def _open(self) -> Steps[None]:
        yield from self.writer.open()
        yield from clean_temporary()

    def _opened(self, _: None) -> None:
        self.ready = True
        if self.writer.epoch > self.facts.newest_epoch:
            self.facts.newest_epoch, self.facts.newest_open = self.writer.epoch, self.world.now
        for loop in (self._write, self._flush, self._compact, self._collect):
            self.later(0.0, loop)

    def _failed(self, error: FireflyerError) -> None:
        if isinstance(error, Corrupted):
            raise AssertionError(f"{self.name}: {error}") from error
        if isinstance(error, Stale):
            assert self.history.highest_epoch() > self.writer.epoch, (
                f"{self.name}: replaced by no writer: {error}"
            )
        self.over = True
        self.alive = False

    def _again(self, loop: Callable[[], None], pause: float) -> None:
        if not self.over:
            self.later(pause * self.world.rng.random(), loop)

    def _retry(self, loop: Callable[[], None]) -> Callable[[FireflyerError], None]:
        def failed(error: FireflyerError) -> None:
            if isinstance(error, NoSpace | tables.Gone):
                self._again(loop, 0.5)
            else:
                self._failed(error)

        return failed

    def _batch(self) -> Batch:
        rng = self.world.rng
        changes: dict[bytes, bytes | None] = {}
        for _ in range(rng.choice((1, 1, 2, 4))):
            self.count += 1
            key = f"key{rng.randrange(KEYS)}".encode()
            value = f"{self.name}.{self.count}.".encode() + b"x" * rng.randrange(60)
            if rng.random() < 0.1:
                changes[key] = None
                continue
            changes[key] = value
            self.facts.attempts[value] = Attempt(value, key, self.world.now)
        for key, kept in changes.items():
            if kept is None:
                self.facts.deletions.append(Attempt(None, key, self.world.now))
        parts = [frames.operation(key, value) for key, value in changes.items()]
        return Batch(parts, changes)

    def _write(self) -> None:
        called = self.world.now
        batches = [self._batch() for _ in range(self.world.rng.choice((1, 2)))]
        increment: list[Batch] = []
        if self.world.rng.random() < 0.4:
            self.go(
                self.writer.get(COUNTER, 0),
                lambda found: self._append(called, batches, increment, found),
                self._retry(self._write),
            )
        else:
            self._append(called, batches, increment, None, plain=True)

    def _append(
        self,
        called: float,
        batches: list[Batch],
        increment: list[Batch],
        found: bytes | None,
        plain: bool = False,
    ) -> None:
        if not plain:
            for more in (1, 1000):  # the second one must not be applied
                value = b"%d" % (int(found or b"0") + more)
                batch = Batch(
                    [frames.operation(COUNTER, value)], {COUNTER: value}, (COUNTER, found)
                )
                increment.append(batch)
            self.facts.uncertain += 1

        def failed(error: FireflyerError) -> None:
            if isinstance(error, NoSpace):
                self.facts.uncertain -= bool(increment)
                self._again(self._write, 0.5)
            elif isinstance(error, tables.Gone):
                self._again(self._write, 0.5)
            else:
                self._failed(error)

        before = self.writer.sequence
        self.go(
            self.writer.append([*batches, *increment], 0),
            lambda _: self._acknowledged(called, batches, increment, before),
            failed,
        )

    def _acknowledged(
        self, called: float, batches: list[Batch], increment: list[Batch], before: int
    ) -> None:
        facts = self.facts
        facts.operations += len(batches)
        zombie = facts.newest_epoch > self.writer.epoch and called > facts.newest_open
        assert not zombie, (
            f"{self.name}: epoch {self.writer.epoch} was acknowledged after {facts.newest_epoch} opened"
        )
        sequence = before
        for batch in batches:
            assert batch.applied
            for key, value in batch.changes.items():
                sequence += 1
                facts.acknowledged[key] = max(facts.acknowledged.get(key, 0), sequence)
                if value is not None:
                    facts.attempts[value].sequence = sequence
                else:
                    deleted = (
                        a
                        for a in facts.deletions
                        if a.key == key and a.sequence is None and a.called == called
                    )
                    next(deleted).sequence = sequence
        if increment:
            facts.uncertain -= 1
            facts.increments += sum(batch.applied for batch in increment)
            assert not (increment[0].applied and increment[1].applied), "two equal conditions held"
        self._again(self._write, self.history.pause)

    def _flush(self) -> None:
        if self.world.rng.random() < 0.2:
            self.writer.rotate()
        self.go(
            self.writer.flush(), lambda _: self._again(self._flush, 0.3), self._retry(self._flush)
        )

    def _compact(self) -> None:
        runs = len(self.writer.manifest.runs)
        count = (
            self.world.rng.randint(2, runs) if runs > 1 and self.world.rng.random() < 0.5 else None
        )
        self.go(
            self.writer.compact(0, count),
            lambda _: self._again(self._compact, 1.0),
            self._retry(self._compact),
        )

    def _collect(self) -> None:
        called = self.world.now

        def done(_: Collected) -> None:
            replaced = self.facts.newest_epoch > self.writer.epoch
            assert not (replaced and called > self.facts.newest_open), (
                f"{self.name}: epoch {self.writer.epoch} collected after {self.facts.newest_epoch} opened"
            )
            self._again(self._collect, self.history.collect_pause)

        steps = collect(self.writer, self.watch, self.clock())
        self.go(steps, done, self._retry(self._collect))


class ReaderActor(Actor):
    """A reader process: two threads that refresh, reads, snapshots that it scans later, a feed."""

    def __init__(self, history: "History", name: str) -> None:
        super().__init__(history.world, history.network, name, history.disk, history.weather)
        self.history = history
        self.facts = history.facts
        self.reader = Reader(BlockCache(self.world.rng.choice((1 << 12, 1 << 20))), memtable=2000)
        self.feed = Feed(0)
        self.counter = 0
        self.seen: dict[bytes, int] = {}
        self.opened = False
        self.later(self.world.rng.random(), self._open)

    def _open(self) -> None:
        self.go(self.reader.open(), self._opened, lambda error: self._failed(error, self._open))

    def _opened(self, _: None) -> None:
        self.opened = True
        for loop in (self._refresh, self._refresh, self._read, self._snapshot, self._follow):
            self.later(self.world.rng.random() * 0.2, loop)

    def _failed(self, error: FireflyerError, loop: Callable[[], None]) -> None:
        assert not isinstance(error, Corrupted), f"{self.name}: {error}"
        self.later(0.3 * self.world.rng.random(), loop)

    def _refresh(self) -> None:
        look = self.world.rng.random() < 0.3
        before = self.reader.sequence

        def done(_: int) -> None:
            assert self.reader.sequence >= before, f"{self.name} went back from {before}"
            self.later(0.2 * self.world.rng.random(), self._refresh)

        self.go(
            self.reader.refresh(look=look), done, lambda error: self._failed(error, self._refresh)
        )

    def _read(self) -> None:
        key = (
            f"key{self.world.rng.randrange(KEYS)}".encode()
            if self.world.rng.random() < 0.8
            else COUNTER
        )

        def done(value: bytes | None) -> None:
            self.history.check_value(self.name, key, value)
            attempt = self.facts.attempts.get(value) if value is not None else None
            if attempt is not None and attempt.sequence is not None:
                assert attempt.sequence >= self.seen.get(key, 0), f"{self.name}: {key!r} went back"
                self.seen[key] = attempt.sequence
            if key == COUNTER and value is not None:
                assert int(value) >= self.counter, f"{self.name}: the counter went back"
                self.counter = int(value)
            self.later(0.1 * self.world.rng.random(), self._read)

        self.go(self.reader.get(key, 0), done, lambda error: self._failed(error, self._read))

    def _snapshot(self) -> None:
        """Pins the manifest of the view, and scans the view twice with a pause."""
        view, manifest = self.reader.view.copy(), self.reader.manifest
        identity = f"{self.name}-{self.world.rng.randrange(1 << 30)}"
        self.go(
            pins.pinned(identity, manifest, 1e9),
            lambda held: self._pinned(held, identity, view, manifest),
            lambda error: self._failed(error, self._snapshot),
        )

    def _pinned(self, held: bool, identity: str, view: View, manifest: Manifest) -> None:
        if not held:
            self.later(0.3 * self.world.rng.random(), self._snapshot)
            return
        found: list[list[tables.Item]] = []

        def scanned(items: list[tables.Item]) -> None:
            found.append(items)
            if len(found) < 2:
                self.later(self.world.rng.random(), scan)
                return
            assert found[0] == found[1], f"{self.name}: two scans of a snapshot differ"
            for key, value in items:
                self.history.check_value(self.name, key, value)
            self.later(0.3, self._snapshot)

        def broken(error: FireflyerError) -> None:
            raise AssertionError(f"{self.name}: snapshot of {manifest.number}: {error}") from error

        def scan() -> None:
            self.go(whole(view), scanned, broken)

        scan()

    def _follow(self) -> None:
        before = self.feed.after

        def done(changes: list[tuple[int, bytes, bytes | None]]) -> None:
            expected = list(range(before + 1, before + 1 + len(changes)))
            assert [sequence for sequence, _, _ in changes] == expected, (
                f"{self.name}: a gap in the feed"
            )
            for _, key, value in changes:
                self.history.check_value(self.name, key, value)
            if self.world.rng.random() < 0.1:
                self.feed = Feed(max(0, self.feed.after - self.world.rng.randrange(4)))
            self.later(0.1 * self.world.rng.random(), self._follow)

        def failed(error: FireflyerError) -> None:
            if isinstance(error, SnapshotGone):
                self.feed = Feed(self.reader.sequence)
                self.later(0.1 * self.world.rng.random(), self._follow)
            else:
                self._failed(error, self._follow)

        self.go(self.feed.poll(), done, failed)


def whole(view: View) -> Steps[list[tables.Item]]:
    """Scans a whole view, a few pairs at a time."""
    items: list[tables.Item] = []
    walk = Scan(view, b"", None)
    while found := (yield from tables.scan(walk, 0, 5, 0)):
        items += found
    return items


def caught_up(reader: Reader, items: dict[bytes, bytes]) -> Steps[None]:
    """Lets a reader that was away read on; it must come to the present state."""
    for _ in range(200):
        if not (yield from reader.refresh()):
            break
    for key in {*items, *(f"key{number}".encode() for number in range(KEYS))}:
        found = yield from reader.get(key, 0)
        assert found == items.get(key), f"a reader did not catch up: {key!r} is {found!r}"


def fed(feed: Feed, sequence: int) -> Steps[None]:
    """Lets a feed read on; it must come to the newest operation, or learn that some were collected."""
    try:
        while (yield from feed.poll()):
            pass
    except SnapshotGone:
        return
    assert feed.after == sequence, f"a feed stays at {feed.after}, the store is at {sequence}"


class History:
    """A world, a disk, and the processes on it."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.world = World(seed, traced=traced)
        rng = self.world.rng
        self.network = Network(self.world)
        self.disk = Disk()
        self.facts = Facts()
        harsh = rng.choice((0.0, 0.02, 0.1))
        self.weather = Weather(
            lost=harsh, failed=harsh / 2, late=harsh / 2, fills=0.2, slow=rng.choice((0.0, 0.05)),
            stall=rng.choice((0.0, 0.003, 0.02)), stall_s=rng.choice((0.2, 1.5)),
        )  # fmt: skip
        self.pause = rng.choice((0.03, 0.2))
        self.collect_pause = rng.choice((0.1, 1.0))
        self.writers: list[WriterActor] = []
        self.readers = [ReaderActor(self, f"read{i}") for i in range(rng.choice((1, 2)))]

    def check_value(self, who: str, key: bytes, value: bytes | None) -> None:
        if value is None or key == COUNTER:
            return
        attempt = self.facts.attempts.get(value)
        own = attempt is not None and attempt.key == key
        assert own, f"{who}: {key!r} has the wrong value {value!r}"

    def highest_epoch(self) -> int:
        number = max(map(int, self.disk.folders["manifest"]))
        return decode(number, self.disk.objects[manifest_name(number)]).epoch

    def run(self) -> None:
        """Runs the history. Raises AssertionError."""
        rng = self.world.rng
        self._start()
        while self.world.now < END_S:
            self.world.run(self.world.now + rng.expovariate(3.0))
            self._disturb()
        for actor in (*self.writers, *self.readers):
            actor.crash()
        self.world.run(self.world.now + 4.0)  # what is in flight arrives
        self._finish()

    def _start(self) -> None:
        self.writers.append(WriterActor(self, f"w{len(self.writers)}"))

    def _disturb(self) -> None:
        rng = self.world.rng
        living = [writer for writer in self.writers if writer.alive]
        chance = rng.random()
        if chance < 0.25 and living:
            rng.choice(living).crash()
        elif chance < 0.5 and living:
            rng.choice(living).frozen_until = self.world.now + rng.choice((0.2, 1.0, 3.0))
        elif chance < 0.6:
            self.disk.full = True
        else:
            self.disk.full = False
        if (
            not any(
                writer.alive and writer.frozen_until <= self.world.now for writer in self.writers
            )
            or rng.random() < 0.2
        ):
            self._start()

    def _finish(self) -> None:
        self.disk.full = False
        self.weather.lost = self.weather.failed = self.weather.late = self.weather.stall = 0.0
        last = Actor(self.world, self.network, "last", self.disk, self.weather)
        writer = Writer(b"lastlast", Settings(), BlockCache(1 << 20))
        ended: list[bool] = []

        def audit() -> Steps[None]:
            yield from writer.open()
            items = dict((yield from whole(writer.view)))
            self._compare(items)
            writer.rotate()
            while (yield from writer.flush()):
                pass
            watch = pins.PinWatch()
            yield from collect(writer, watch, 0.0)
            yield from writer.compact(0, len(writer.manifest.runs))
            yield from collect(writer, watch, 2e9)
            yield from collect(writer, watch, 4e9)
            assert dict((yield from whole(writer.view))) == items, "compaction changed the store"
            self._swept(writer)
            for reader in self.readers:
                if reader.opened:
                    yield from caught_up(reader.reader, items)
                yield from fed(reader.feed, writer.sequence)

        def failed(error: FireflyerError) -> None:
            raise AssertionError(f"the last writer: {type(error).__name__}: {error}") from error

        last.go(audit(), lambda _: ended.append(True), failed)
        self.world.run(self.world.now + 300.0)
        assert ended, "the last writer did not end"

    def _compare(self, items: dict[bytes, bytes]) -> None:
        facts = self.facts
        for key, sequence in facts.acknowledged.items():
            value = items.get(key)
            if value is None:
                may = (
                    a.sequence is None or a.sequence >= sequence
                    for a in facts.deletions
                    if a.key == key
                )
                assert any(may), f"{key!r} is lost, which was acknowledged as {sequence}"
                continue
            attempt = facts.attempts[value]
            assert attempt.key == key, f"{key!r} has the value of {attempt.key!r}"
            if attempt.sequence is not None:
                assert attempt.sequence >= sequence, (
                    f"{key!r}: {value!r} is older than the acknowledged {sequence}"
                )
        counter = int(items.get(COUNTER, b"0"))
        assert facts.increments <= counter <= facts.increments + facts.uncertain, (
            f"the counter is {counter}, {facts.increments} increments were acknowledged, "
            f"{facts.uncertain} are uncertain"
        )

    def _swept(self, writer: Writer) -> None:
        """After a collection without pins only what the newest two manifests name is left."""
        numbers = sorted(int(name) for name in self.disk.folders["manifest"])
        newest = writer.manifest.number
        assert numbers == [number for number in (newest - 1, newest) if number], (
            f"manifests {numbers}"
        )
        named: set[str] = set()
        for number in numbers:
            named |= decode(number, self.disk.objects[manifest_name(number)]).tables()
        left = self.disk.folders.get("table", set())
        assert named == left, f"tables missing or left: {sorted(named ^ left)[:3]}"


def history(seed: int, *, traced: bool = False) -> tuple[str, list[str], int]:
    """Runs the history of a seed; returns the error or "", the transcript and the number of operations."""
    run = History(seed, traced=traced)
    error = ""
    gc.disable()  # a cache notices tables that are gone, so their end must not depend on other histories
    try:
        run.run()
    except AssertionError as failure:
        error = str(failure) or repr(failure)
    finally:
        gc.enable()
    return error, run.world.transcript, run.facts.operations
