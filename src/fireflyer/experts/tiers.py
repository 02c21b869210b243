"""Tiers of a store, a state machine: events in, actions out; no I/O, no clock, no thread.

        Wanted, Hinted          Loaded               Wanted, Hinted       Heated
    COLD --------> LOADING -------------> WARM -----------------> HEATING -----> HOT
     ^                | Failed             ^ EvictionFailed  |                    |
     |                v                    |                 v  room for another  v
     |             DAMAGED             EVICTING <------------+--------------------+
     +-------------------------------------+ Evicted

Invariants, after each event:

- The sum of two amounts exceeds `warm_bytes` only if other processes added bytes: the bytes of all
  experts in LOADING, WARM, HEATING, HOT and EVICTING, and the bytes of other processes.
- The bytes of all experts in HEATING and HOT never exceed `hot_bytes`.
- An expert that a caller uses is HOT. An expert that a caller uses or waits for is not evicted.
- At most one expert without a waiting caller is being loaded or copied, so a caller waits for at
most one such expert.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from fireflyer.experts.events import (
    Action,
    Cool,
    Delete,
    Dropped,
    Event,
    Evict,
    Evicted,
    EvictionFailed,
    Failed,
    FileChanged,
    Heat,
    Heated,
    Hinted,
    Known,
    Load,
    Loaded,
    Lost,
    Place,
    Reason,
    Refuse,
    Released,
    Seen,
    Serve,
    Wanted,
    Withdrawn,
)

IN_WARM = frozenset((Place.LOADING, Place.WARM, Place.HEATING, Place.HOT, Place.EVICTING))
IN_HOT = frozenset((Place.HEATING, Place.HOT))
IN_PROGRESS = frozenset((Place.LOADING, Place.HEATING))


@dataclass(slots=True)
class Entry:
    """State of one expert in the tiers."""

    bytes: int
    place: Place = Place.COLD
    used: int = 0
    """Time of the last use."""
    holders: int = 0
    """Number of callers that use the expert."""
    waiting: int = 0
    """Number of callers that wait for the expert."""
    stuck: bool = False
    """True if the last eviction failed; the expert can be evicted again after the next `Seen`."""
    dropped: bool = False
    """True if the expert must be deleted once it is no longer in warm memory."""


@dataclass
class Counts:
    """Counters since the store was opened."""

    hot_hits: int = 0
    """Number of requests for an expert that was hot."""
    warm_hits: int = 0
    """Number of requests for an expert that was in warm memory."""
    late: int = 0
    """Number of requests for an expert that was being loaded."""
    misses: int = 0
    """Number of requests for an expert that was cold."""
    loads: int = 0
    prefetches: int = 0
    """Number of loads that began without a waiting caller."""
    evictions: int = 0


@dataclass
class Tiers:
    """State of all experts in one process. `step` changes it and returns the actions to execute."""

    warm_bytes: int
    hot_bytes: int
    ahead: int = 8
    """Number of experts at the start of the hint that may be loaded before a caller wants them.
    Later experts of the hint are not loaded ahead. Like all hinted experts, they are evicted only
    after the experts without a hint."""
    entries: dict[str, Entry] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    foreign_bytes: int = 0
    """Bytes of warm memory that only other processes use; see `Seen`."""
    expected: list[str] = field(default_factory=list)
    """Rest of the hint. When an expert is served, its first occurrence is removed."""
    hints: dict[str, int] = field(default_factory=dict)
    """Position of each expert in `expected`, from 0, after removal of repetitions."""
    queue: dict[str, None] = field(default_factory=dict)
    """Experts that callers wait for, in the order of arrival."""

    def step(self, event: Event) -> list[Action]:
        actions: list[Action] = []
        getattr(self, f"_{type(event).__name__.lower()}")(event, actions)
        self._plan(actions)
        return actions

    def blocking(self) -> list[str]:
        """Returns the experts that callers use, which cannot be evicted."""
        return [name for name, entry in self.entries.items() if entry.holders]

    # Events --------------------------------------------------------------------------------------

    def _known(self, event: Known, actions: list[Action]) -> None:
        entry = self.entries.setdefault(event.name, Entry(event.bytes))
        if entry.place in (Place.COLD, Place.DAMAGED):
            entry.place, entry.bytes = Place.COLD, event.bytes

    def _wanted(self, event: Wanted, actions: list[Action]) -> None:
        entry = self.entries.get(event.name)
        if entry is None:
            actions.append(Refuse(event.name, Reason.UNKNOWN))
            return
        self._count(entry)
        entry.used = event.now
        entry.waiting += 1
        self.queue.setdefault(event.name)

    def _count(self, entry: Entry) -> None:
        if entry.place is Place.HOT:
            self.counts.hot_hits += 1
        elif entry.place in (Place.WARM, Place.HEATING):
            self.counts.warm_hits += 1
        elif entry.place is Place.LOADING:
            self.counts.late += 1
        else:
            self.counts.misses += 1

    def _withdrawn(self, event: Withdrawn, actions: list[Action]) -> None:
        entry = self.entries.get(event.name)
        if entry is not None and entry.waiting:
            entry.waiting -= 1
            if not entry.waiting:
                del self.queue[event.name]

    def _released(self, event: Released, actions: list[Action]) -> None:
        self.entries[event.name].holders -= 1

    def _hinted(self, event: Hinted, actions: list[Action]) -> None:
        self.expected = list(event.names)
        self._number_hints()

    def _number_hints(self) -> None:
        self.hints = {}
        for name in self.expected:
            self.hints.setdefault(name, len(self.hints))

    def _drop_hint(self, name: str) -> None:
        if name in self.hints:
            self.expected = [other for other in self.expected if other != name]
            self._number_hints()

    def _seen(self, event: Seen, actions: list[Action]) -> None:
        self.foreign_bytes = event.foreign_bytes
        for name, entry in self.entries.items():
            entry.stuck = False
            there = event.images.get(name)
            if there is None and entry.place is Place.WARM:
                entry.place = Place.COLD
            elif there is not None and entry.place is Place.COLD:
                entry.place = Place.WARM
            entry.used = max(entry.used, there or 0)

    def _loaded(self, event: Loaded, actions: list[Action]) -> None:
        self.entries[event.name].place = Place.WARM

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        entry = self.entries[event.name]
        entry.place = Place.DAMAGED if event.damaged else Place.COLD
        self._drop_hint(event.name)  # prevents an immediate retry
        if not event.damaged:
            self._refuse(event.name, Reason.FAILED, actions)

    def _filechanged(self, event: FileChanged, actions: list[Action]) -> None:
        entry = self.entries[event.name]
        entry.place, entry.bytes = Place.COLD, event.bytes

    def _heated(self, event: Heated, actions: list[Action]) -> None:
        self.entries[event.name].place = Place.HOT

    def _lost(self, event: Lost, actions: list[Action]) -> None:
        self.entries[event.name].place = Place.COLD

    def _evicted(self, event: Evicted, actions: list[Action]) -> None:
        entry = self.entries[event.name]
        entry.place = Place.COLD
        self.counts.evictions += 1
        if entry.dropped:
            self._delete(event.name, actions)

    def _evictionfailed(self, event: EvictionFailed, actions: list[Action]) -> None:
        entry = self.entries[event.name]
        entry.place, entry.stuck = Place.WARM, True
        if entry.dropped:
            entry.dropped = False
            actions.append(Refuse(event.name, Reason.IN_USE))

    def _dropped(self, event: Dropped, actions: list[Action]) -> None:
        entry = self.entries.get(event.name)
        if entry is None:
            actions.append(Refuse(event.name, Reason.UNKNOWN))
            return
        busy = entry.place in IN_PROGRESS or entry.place is Place.EVICTING
        if busy or entry.holders or entry.waiting:
            actions.append(Refuse(event.name, Reason.IN_USE))
        elif entry.place in (Place.COLD, Place.DAMAGED):
            self._delete(event.name, actions)
        else:
            entry.dropped = True
            self._evict(event.name, actions)

    def _delete(self, name: str, actions: list[Action]) -> None:
        del self.entries[name]
        self._drop_hint(name)
        actions.append(Delete(name))

    # Plan ----------------------------------------------------------------------------------------

    def _plan(self, actions: list[Action]) -> None:
        for name in list(self.queue):
            self._advance(name, actions)
        if not self.queue and self.hints:
            self._prefetch(actions)

    def _advance(self, name: str, actions: list[Action]) -> None:
        entry = self.entries[name]
        if entry.place is Place.DAMAGED:
            self._refuse(name, Reason.DAMAGED, actions)
        elif entry.bytes > min(self.warm_bytes, self.hot_bytes):
            self._refuse(name, Reason.TOO_LARGE, actions)
        elif entry.place is Place.HOT:
            entry.holders += entry.waiting
            actions.append(Serve(name, entry.waiting))
            entry.waiting = 0
            del self.queue[name]
            if name in self.hints:
                self.expected.remove(name)
                self._number_hints()
        elif entry.place is Place.WARM:
            self._heat(name, self._victims(name), actions)
        elif entry.place is Place.COLD:
            self._load(name, self._victims(name), actions)

    def _prefetch(self, actions: list[Action]) -> None:
        """Begins one load or copy for the hint, if none is in progress.

        If the hint's first expert is warm, it is copied to the hot tier. Otherwise the first cold
        expert of the hint is loaded.
        """
        if any(entry.place in IN_PROGRESS for entry in self.entries.values()):
            return
        for name, turn in self.hints.items():
            if turn >= self.ahead:
                return
            entry = self.entries.get(name)
            if entry is None or entry.bytes > min(self.warm_bytes, self.hot_bytes):
                continue
            first = turn == 0 and entry.place is Place.WARM and not entry.dropped
            if first and self._heat(name, self._victims(name, last=0), actions):
                return
            if entry.place is Place.EVICTING:
                return
            if entry.place is Place.COLD:
                self._load(name, self._victims(name, last=turn), actions)
                return

    def _victims(self, name: str, last: int | None = None) -> list[str]:
        """Returns the experts that may be evicted for an expert, in the order of eviction.

        Experts without a hint come first, the least recently used first. Then come hinted experts,
        from the last position in the hint to the first.

        Args:
            last: position in the hint; experts up to this position are not evicted. None: a caller
                waits for the expert.
        """
        found = []
        for other, entry in self.entries.items():
            turn = self.hints.get(other)
            if other == name or entry.holders or entry.waiting or entry.stuck or entry.dropped:
                continue
            if entry.place not in (Place.WARM, Place.HOT):
                continue
            if last is not None and turn is not None and turn <= last:
                continue
            found.append(((turn is not None, -(turn or 0), entry.used), other))
        return [other for _, other in sorted(found)]

    def _heat(self, name: str, victims: list[str], actions: list[Action]) -> bool:
        """Begins the copy of an expert to the hot tier; returns False if there is no room."""
        entry = self.entries[name]
        needed = self._bytes(IN_HOT) + entry.bytes - self.hot_bytes
        hot = [other for other in victims if self.entries[other].place is Place.HOT]
        chosen = list(self._enough(hot, needed))
        if needed > sum(self.entries[other].bytes for other in chosen):
            return False
        for other in chosen:
            self._cool(other, actions)
        entry.place = Place.HEATING
        actions.append(Heat(name))
        return True

    def _load(self, name: str, victims: list[str], actions: list[Action]) -> None:
        entry = self.entries[name]
        leaving = self._bytes(frozenset((Place.EVICTING,)))
        needed = self._bytes(IN_WARM) + self.foreign_bytes + entry.bytes - self.warm_bytes
        if needed <= 0:
            entry.place = Place.LOADING
            self.counts.loads += 1
            self.counts.prefetches += not entry.waiting
            actions.append(Load(name, entry.bytes))
            return
        chosen = list(self._enough(victims, needed - leaving))
        if needed - leaving > sum(self.entries[other].bytes for other in chosen):
            return
        for other in chosen:
            self._evict(other, actions)

    def _enough(self, victims: list[str], needed: int) -> Iterator[str]:
        for name in victims:
            if needed <= 0:
                return
            needed -= self.entries[name].bytes
            yield name

    def _cool(self, name: str, actions: list[Action]) -> None:
        self.entries[name].place = Place.WARM
        actions.append(Cool(name))

    def _evict(self, name: str, actions: list[Action]) -> None:
        if self.entries[name].place is Place.HOT:
            self._cool(name, actions)
        self.entries[name].place = Place.EVICTING
        actions.append(Evict(name))

    def _refuse(self, name: str, reason: Reason, actions: list[Action]) -> None:
        entry = self.entries[name]
        entry.waiting = 0
        if name in self.queue:
            del self.queue[name]
            actions.append(Refuse(name, reason))

    def _bytes(self, places: frozenset[Place]) -> int:
        return sum(entry.bytes for entry in self.entries.values() if entry.place in places)
