"""The goodput ledger: where the time of tasks went, by cause. A pure function of the event table.

Each moment of a task between its submission and its end, times the nodes that it holds or waits for, is in
exactly one cause. Times are whole microseconds, so the parts add up to the whole exactly. The vocabulary
(goodput, effective training time ratio) is that of Meta's "Revisiting Reliability in Large-Scale Machine
Learning Research Clusters", HPCA 2025. docs/hai-ledger.md has the causes in words.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Literal, get_args

import msgspec

from fireflyer.hai.model import TERMINAL, Event

Cause = Literal[
    "useful", "lost work", "fault", "restart", "starting", "suspended", "fragmentation", "queue"
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

IDLE = "idle"
"""Of nodes that nothing holds; a cluster has it, a task has not."""

MOMENT_US = 1_000_000
"""A task that waits less beside nodes that are free is not said to be hindered."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger has to know of a task besides its events."""

    task: str
    nodes: int
    ranks_per_node: int = 1


class Gap(msgspec.Struct, frozen=True):
    """Ranks of a node that an elastic attempt goes on without."""

    node: str
    ranks: int


class Segment(msgspec.Struct, frozen=True):
    """A stretch of a task's time. Microseconds since 1970; `held`: names of the nodes, () while it waits."""

    begin: int
    end: int
    cause: Cause
    held: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()
    """Their share of the nodes is a fault's."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds times nodes (or GPUs), by cause. The parts add up to the whole exactly."""

    whole: int
    parts: dict[str, int]
    held: int
    """That part of the whole in which it had its nodes."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time of all time since the submission."""
        return self.parts.get("useful", 0) / self.whole if self.whole else 0.0

    @property
    def goodput(self) -> float:
        """Useful time of the time in which nodes were held; of a cluster: of all time of its nodes."""
        return self.parts.get("useful", 0) / self.held if self.held else 0.0


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """What a node counts: its GPUs, where all nodes say how many they have, else 1."""

    unit: Literal["node", "GPU"]
    of: dict[str, int]
    usual: int
    """Of a node that is not known, and of one that is waited for."""


def weights(gpus: Mapping[str, int]) -> Weights:
    """From the GPUs of the cluster's nodes; 0: not known."""
    if gpus and all(gpus.values()):
        usual = Counter(gpus.values()).most_common(1)[0][0]
        return Weights(unit="GPU", of=dict(gpus), usual=usual)
    return Weights(unit="node", of=dict.fromkeys(gpus, 1), usual=1)


# -- one task --------------------------------------------------------------------------------------


class _Attempt:
    """What is known of an attempt while its events are read."""

    def __init__(self, nodes: tuple[str, ...], after_fault: bool) -> None:
        self.nodes = nodes
        self.first: Cause = "restart" if after_fault else "starting"
        self.running: int | None = None
        self.leaving: int | None = None
        """Since when it suspends."""
        self.stopping = False
        self.broken: int | None = None
        """Since when it did not work any more, should it end by a fault."""
        self.began = 0
        """First heartbeat."""
        self.saved = 0
        self.missing: dict[int, str] = {}
        """Ranks that it goes on without, and where they were."""
        self.changes: list[tuple[int, tuple[Gap, ...]]] = []
        """Whenever these have changed: since then, these gaps."""

    def goes_on(self, now: int) -> None:
        """With those that are not missing."""
        count = Counter(self.missing.values())
        self.changes.append((now, tuple(Gap(node, count[node]) for node in sorted(count))))


class Reader:
    """Turns the events of one task, one by one in order, into segments without gaps."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.over = False
        self._at: int | None = None
        self._waits: Cause = "queue"
        self._attempt: _Attempt | None = None
        self._after_fault = False

    def _put(
        self, until: int, cause: Cause, held: tuple[str, ...] = (), gaps: tuple[Gap, ...] = ()
    ) -> None:
        assert self._at is not None
        if until > self._at:
            self.segments.append(Segment(self._at, until, cause, held, gaps))
            self._at = until

    def _work(self, attempt: _Attempt, until: int, cause: Cause) -> None:
        """Of the ranks that were there."""
        gaps: tuple[Gap, ...] = ()
        for at, following in attempt.changes:
            self._put(min(at, until), cause, attempt.nodes, gaps)
            gaps = following
        self._put(until, cause, attempt.nodes, gaps)

    def read(self, event: Event) -> None:
        """The next event."""
        if self.over:
            return
        if self._at is None:
            self._at = _us(event.wall)
        now = max(_us(event.wall), self._at)
        attempt = self._attempt
        match event.kind:
            case "starting":
                self._put(now, self._waits)
                nodes = tuple(event.detail.get("nodes", ()))
                self._attempt = _Attempt(nodes, self._after_fault)
            case "gang_ended" if attempt is not None:
                self._close(attempt, str(event.detail["outcome"]), now)
            case "suspended" | "queued" if attempt is None:
                self._put(now, self._waits)
                self._waits = "suspended" if event.kind == "suspended" else "queue"
            case kind if kind in TERMINAL:
                if attempt is None:
                    self._put(now, self._waits)
                self.over = True
            case _ if attempt is not None:
                self._learn(attempt, event, now)

    def _learn(self, attempt: _Attempt, event: Event, now: int) -> None:
        """What happens within an attempt."""
        detail = event.detail
        match event.kind:
            case "running":
                attempt.running = now
            case "suspending":
                attempt.leaving = now
            case "stopping":
                attempt.stopping = True
            case "rank_exited" if detail.get("lost"):
                attempt.missing[detail["rank"]] = detail["node"]
                attempt.goes_on(now)
            case "rank_exited":
                if detail["code"] != 0 and attempt.broken is None:
                    attempt.broken = now
            case "rank_joined":
                attempt.missing.pop(detail["rank"], None)
                attempt.goes_on(now)
            case "observed" if detail.get("what") == "hang":
                attempt.broken = now - _us(detail["quiet_s"])
            case "progress":
                attempt.began = _us(detail["first"])
                attempt.saved = _us(detail["saved"])

    def _close(self, attempt: _Attempt, outcome: str, end: int) -> None:
        fault = outcome in ("failed", "lost") and not attempt.stopping
        nodes = attempt.nodes
        broken = end
        if fault and attempt.broken is not None:
            broken = min(attempt.broken, end)
        elif attempt.leaving is not None:
            broken = min(attempt.leaving, end)
        if attempt.running is None:
            self._put(broken, attempt.first, nodes)
        else:
            self._put(min(max(attempt.running, attempt.began), broken), attempt.first, nodes)
            if fault:
                self._work(attempt, min(attempt.saved, broken), "useful")
                self._work(attempt, broken, "lost work")
            self._work(attempt, broken, "useful")
        self._put(end, "fault" if fault else "suspended", nodes)
        self._attempt, self._after_fault = None, fault
        self._waits = "queue"

    def until(self, moment: float) -> list[Segment]:
        """The segments up to now or to a later moment (wall clock); it can be read on."""
        if self.over:
            return self.segments
        reader = copy(self)
        reader.segments = list(self.segments)
        reader.finish(_us(moment))
        return reader.segments

    def finish(self, until: int) -> None:
        """The time has come to `until`, and the task goes on. Nothing can be read any more."""
        if self.over or self._at is None:
            return
        attempt = self._attempt
        if attempt is None:
            self._put(until, self._waits)
            return
        begun = until if attempt.running is None else attempt.running
        self._put(min(begun, until), attempt.first, attempt.nodes)
        if attempt.leaving is not None:
            self._work(attempt, min(attempt.leaving, until), "useful")
            self._put(until, "suspended", attempt.nodes)
        self._work(attempt, until, "useful")


def segments(events: Iterable[Event], until: float) -> list[Segment]:
    """The time of one task, from its submission to its end or `until`, in order and without gaps.

    Args:
        events: all of the task, in order.
        until: wall clock, seconds since 1970.
    """
    reader = Reader()
    for event in events:
        reader.read(event)
    reader.finish(_us(until))
    return reader.segments


# -- all tasks -------------------------------------------------------------------------------------


class Books(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger of some tasks."""

    since: int
    until: int
    unit: str
    tasks: dict[str, Account]
    total: Account
    cluster: Account
    """Of all nodes from `since` on; its parts are what tasks did with nodes that they held, and `idle`."""


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the ledger, as the server tells it; amounts as in `Account`."""

    since: float
    until: float
    """Wall clock, seconds since 1970."""
    unit: str
    tasks: dict[str, Account]
    total: Account
    cluster: Account | None = None
    """Where it was asked for."""


def account(
    shapes: Sequence[Shape],
    events: Iterable[Event],
    *,
    gpus: Mapping[str, int],
    until: float,
    since: float = 0.0,
) -> Books:
    """The ledger.

    Args:
        shapes: all tasks.
        events: of all of them, in order for each task.
        gpus: the cluster's nodes as of now, and their GPUs (0: not known).
        until: wall clock, seconds since 1970; what lies behind it is left out.
        since: what lies before it is left out; 0: nothing.
    """
    histories: dict[str, list[Event]] = {shape.task: [] for shape in shapes}
    for event in events:
        if event.task in histories:
            histories[event.task].append(event)
    found = {task: segments(history, until) for task, history in histories.items()}
    return books(shapes, found, gpus=gpus, until=until, since=since)


def books(
    shapes: Sequence[Shape],
    found: Mapping[str, list[Segment]],
    *,
    gpus: Mapping[str, int],
    until: float,
    since: float = 0.0,
) -> Books:
    """As `account`, of the segments of each task instead of its events."""
    load = _Load(found.values())
    scale = weights(gpus)
    begins = [of_task[0].begin for of_task in found.values() if of_task]
    end = _us(until)
    begin = min(end, max(_us(since), min(begins, default=end)))
    cuts: list[_Cut] = []
    for shape in shapes:
        split = load.split(found[shape.task], shape.nodes, len(gpus))
        cuts.append((shape, _clip(split, begin, end)))
    accounts = {shape.task: _sum(shape, cut, scale) for shape, cut in cuts}
    return Books(
        since=begin,
        until=end,
        unit=scale.unit,
        tasks=accounts,
        total=total(accounts.values()),
        cluster=_cluster(cuts, scale, begin, end),
    )


def total(accounts: Iterable[Account]) -> Account:
    """The sum of some accounts, e.g. of a user's tasks."""
    accounts = list(accounts)
    parts: dict[str, int] = {c: sum(one.parts[c] for one in accounts) for c in CAUSES}
    whole, held = sum(one.whole for one in accounts), sum(one.held for one in accounts)
    return Account(whole=whole, parts=parts, held=held)


def _amounts(shape: Shape, segment: Segment, scale: Weights) -> list[tuple[Cause, int]]:
    """What the segment is of which cause."""
    span = segment.end - segment.begin
    if not segment.held:
        return [(segment.cause, span * shape.nodes * scale.usual)]
    whole = span * _weight(segment.held, scale)
    gone = sum(
        span * _weight((gap.node,), scale) * gap.ranks // shape.ranks_per_node
        for gap in segment.gaps
    )
    return [(segment.cause, whole - gone), ("fault", gone)]


_Cut = tuple[Shape, list[Segment]]
"""A task's segments from the begin to the end of the ledger."""


def _sum(shape: Shape, cut: list[Segment], scale: Weights) -> Account:
    parts: dict[str, int] = dict.fromkeys(CAUSES, 0)
    whole = held = 0
    for segment in cut:
        for cause, amount in _amounts(shape, segment, scale):
            parts[cause] += amount
            whole += amount
            held += amount if segment.held else 0
    return Account(whole=whole, parts=parts, held=held)


def _weight(nodes: tuple[str, ...], scale: Weights) -> int:
    return sum(scale.of.get(node, scale.usual) for node in nodes)


def _clip(of_task: Iterable[Segment], begin: int, end: int) -> list[Segment]:
    return [
        msgspec.structs.replace(s, begin=max(s.begin, begin), end=min(s.end, end))
        for s in of_task
        if s.end > begin and s.begin < end
    ]


def _cluster(cuts: list[_Cut], scale: Weights, begin: int, end: int) -> Account:
    """All nodes that are there, and those that tasks held while there were more."""
    capacity = sum(scale.of.values())
    parts: dict[str, int] = dict.fromkeys((*CAUSES, IDLE), 0)
    changes: Counter[int] = Counter()
    for shape, segment in ((shape, s) for shape, cut in cuts for s in cut if s.held):
        for cause, amount in _amounts(shape, segment, scale):
            parts[cause] += amount
        weight = _weight(segment.held, scale)
        changes[segment.begin] += weight
        changes[segment.end] -= weight
    whole = busy = 0
    times = sorted({begin, end, *changes})
    for at, following in pairwise(times):
        busy += changes[at]
        parts[IDLE] += (following - at) * max(0, capacity - busy)
        whole += (following - at) * max(capacity, busy)
    return Account(whole=whole, parts=parts, held=whole)


class _Load:
    """How many nodes were held at each moment."""

    def __init__(self, of_tasks: Iterable[list[Segment]]) -> None:
        changes: Counter[int] = Counter()
        for segment in (s for of_task in of_tasks for s in of_task):
            changes[segment.begin] += len(segment.held)
            changes[segment.end] -= len(segment.held)
        self._times = sorted(time for time, change in changes.items() if change)
        self._held: list[int] = []
        held = 0
        for time in self._times:
            held += changes[time]
            self._held.append(held)

    def split(self, of_task: list[Segment], nodes: int, there: int) -> list[Segment]:
        """With the waits beside enough free nodes marked as fragmentation. `there`: nodes of the cluster."""
        result: list[Segment] = []
        for segment in of_task:
            if segment.cause != "queue":
                result.append(segment)
                continue
            low, high = (
                bisect_right(self._times, segment.begin),
                bisect_left(self._times, segment.end),
            )
            cuts = [segment.begin, *self._times[low:high], segment.end]
            for begin, end in pairwise(cuts):
                index = bisect_right(self._times, begin) - 1
                held = self._held[index] if index >= 0 else 0
                hindered = there - held >= nodes and end - begin >= MOMENT_US
                cause: Cause = "fragmentation" if hindered else "queue"
                result.append(Segment(begin, end, cause))
        return result


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
