"""The goodput ledger: the time of tasks, by cause. A pure function of the event table.

Each moment of a task between its submission and its end has exactly one cause. The weight of the
moment is the number of nodes that the task holds or waits for. Times are integer microseconds, so
the parts add up to the total exactly. The terms (goodput, effective training time ratio) follow
Meta's "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025.
docs/operate/hai-ledger.md describes the causes.
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
    "useful",
    "lost work",
    "fault",
    "restart",
    "starting",
    "suspended",
    "fragmentation",
    "queue",
    "validation",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)

IDLE = "idle"
"""Time of nodes that no task holds; a cause in the cluster's account only."""

MOMENT_US = 1_000_000
"""Minimum length, in microseconds, of a wait with enough free nodes that counts as
fragmentation."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Task data that the ledger needs besides the events."""

    task: str
    nodes: int
    ranks_per_node: int = 1
    gpus: int = 0
    """GPUs of each node that the task asks for; 0: whole nodes."""
    validation: bool = False
    """True if the task validates a node. The time in which the task holds the node then has the
    cause "validation"."""


class Gap(msgspec.Struct, frozen=True):
    """Lost ranks of a node, without which an elastic attempt continues."""

    node: str
    ranks: int


class Segment(msgspec.Struct, frozen=True):
    """Part of a task's time. Times are microseconds since 1970. `held`: names of the nodes, ()
    while the task waits."""

    begin: int
    end: int
    cause: Cause
    held: tuple[str, ...] = ()
    gaps: tuple[Gap, ...] = ()
    """Missing ranks; their share of the nodes counts as "fault"."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds times nodes (or GPUs), by cause. The parts add up to `whole` exactly."""

    whole: int
    parts: dict[str, int]
    held: int
    """Part of `whole` during which the task held its nodes."""

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time per time since the submission."""
        return self.parts.get("useful", 0) / self.whole if self.whole else 0.0

    @property
    def goodput(self) -> float:
        """Useful time per time in which nodes were held; for a cluster: per total time of its
        nodes."""
        return self.parts.get("useful", 0) / self.held if self.held else 0.0


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Weight of each node: its GPUs if all nodes report them, else 1."""

    unit: Literal["node", "GPU"]
    of: dict[str, int]
    usual: int
    """Weight of an unknown node, and of a node that a task waits for."""


def weights(gpus: Mapping[str, int]) -> Weights:
    """Derives the weights from the GPUs of the cluster's nodes; 0: not known."""
    if gpus and all(gpus.values()):
        usual = Counter(gpus.values()).most_common(1)[0][0]
        return Weights(unit="GPU", of=dict(gpus), usual=usual)
    return Weights(unit="node", of=dict.fromkeys(gpus, 1), usual=1)


# -- one task --------------------------------------------------------------------------------------


class _Attempt:
    """State of an attempt while its events are read."""

    def __init__(self, nodes: tuple[str, ...], after_fault: bool) -> None:
        self.nodes = nodes
        self.first: Cause = "restart" if after_fault else "starting"
        self.running: int | None = None
        self.leaving: int | None = None
        """Time at which the attempt began to suspend."""
        self.stopping = False
        self.broken: int | None = None
        """Time at which the attempt stopped working, if it ends by a fault."""
        self.began = 0
        """Time of the first heartbeat."""
        self.saved = 0
        self.missing: dict[int, str] = {}
        """Lost ranks, without which the attempt continues, and their nodes."""
        self.changes: list[tuple[int, tuple[Gap, ...]]] = []
        """Gaps after each change of `missing`, with the time of the change."""

    def continues(self, now: int) -> None:
        """Records the gaps from now on."""
        count = Counter(self.missing.values())
        self.changes.append((now, tuple(Gap(node, count[node]) for node in sorted(count))))


class Reader:
    """Turns the events of one task, in order, into segments without gaps."""

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
        """Adds segments up to `until`, each with the gaps of its time."""
        gaps: tuple[Gap, ...] = ()
        for at, following in attempt.changes:
            self._put(min(at, until), cause, attempt.nodes, gaps)
            gaps = following
        self._put(until, cause, attempt.nodes, gaps)

    def read(self, event: Event) -> None:
        """Reads the next event."""
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
        """Applies an event within an attempt."""
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
                attempt.continues(now)
            case "rank_exited":
                if detail["code"] != 0 and attempt.broken is None:
                    attempt.broken = now
            case "rank_joined":
                attempt.missing.pop(detail["rank"], None)
                attempt.continues(now)
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
        """Returns the segments up to `moment`, a wall clock not before the last event. Later events
        can still be read."""
        if self.over:
            return self.segments
        reader = copy(self)
        reader.segments = list(self.segments)
        reader.finish(_us(moment))
        return reader.segments

    def finish(self, until: int) -> None:
        """Ends the last segment at `until`, although the task continues. No further event can be
        read."""
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
    """Returns the segments of one task, from its submission to its end or `until`, in order and
    without gaps.

    Args:
        events: all events of the task, in order.
        until: wall clock, seconds since 1970.
    """
    reader = Reader()
    for event in events:
        reader.read(event)
    reader.finish(_us(until))
    return reader.segments


# -- all tasks -------------------------------------------------------------------------------------


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Ledger of a set of tasks."""

    since: int
    until: int
    unit: str
    tasks: dict[str, Account]
    total: Account
    cluster: Account
    """Account of all nodes from `since` on: the held node time by cause, and `idle`."""


class LedgerView(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the ledger that the server returns; amounts as in `Account`."""

    since: float
    until: float
    """Wall clock, seconds since 1970."""
    unit: str
    tasks: dict[str, Account]
    total: Account
    cluster: Account | None = None
    """Cluster account, if requested."""


def account(
    shapes: Sequence[Shape],
    events: Iterable[Event],
    *,
    gpus: Mapping[str, int],
    until: float,
    since: float = 0.0,
) -> Accounting:
    """Computes the ledger from events.

    Args:
        shapes: all tasks.
        events: events of all these tasks, in order for each task.
        gpus: the cluster's current nodes and their GPUs (0: not known).
        until: wall clock, seconds since 1970; later time is left out.
        since: earlier time is left out; 0: include all time.
    """
    histories: dict[str, list[Event]] = {shape.task: [] for shape in shapes}
    for event in events:
        if event.task in histories:
            histories[event.task].append(event)
    found = {task: segments(history, until) for task, history in histories.items()}
    return accounting(shapes, found, gpus=gpus, until=until, since=since)


def accounting(
    shapes: Sequence[Shape],
    found: Mapping[str, list[Segment]],
    *,
    gpus: Mapping[str, int],
    until: float,
    since: float = 0.0,
) -> Accounting:
    """Computes the ledger as `account`, from the segments of each task instead of its events."""
    scale = weights(gpus)
    load = _Load(shapes, found, scale)
    begins = [of_task[0].begin for of_task in found.values() if of_task]
    end = _us(until)
    begin = min(end, max(_us(since), min(begins, default=end)))
    cuts: list[_Cut] = []
    for shape in shapes:
        of_task = found[shape.task]
        if shape.validation:
            of_task = [_validating(segment) for segment in of_task]
        split = load.split(of_task, _wanted(shape, scale))
        cuts.append((shape, _clip(split, begin, end)))
    accounts = {shape.task: _sum(shape, cut, scale) for shape, cut in cuts}
    return Accounting(
        since=begin,
        until=end,
        unit=scale.unit,
        tasks=accounts,
        total=total(accounts.values()),
        cluster=_cluster(cuts, scale, begin, end),
    )


def _validating(segment: Segment) -> Segment:
    """Returns a segment of a validation task with the cause "validation"."""
    return msgspec.structs.replace(segment, cause="validation") if segment.held else segment


def total(accounts: Iterable[Account]) -> Account:
    """Returns the sum of some accounts, e.g. of a user's tasks."""
    accounts = list(accounts)
    parts: dict[str, int] = {c: sum(one.parts[c] for one in accounts) for c in CAUSES}
    whole, held = sum(one.whole for one in accounts), sum(one.held for one in accounts)
    return Account(whole=whole, parts=parts, held=held)


def _amounts(shape: Shape, segment: Segment, scale: Weights) -> list[tuple[Cause, int]]:
    """Splits the segment's amount by cause."""
    span = segment.end - segment.begin
    if not segment.held:
        return [(segment.cause, span * _wanted(shape, scale))]
    whole = span * _weight(segment.held, shape, scale)
    gone = sum(
        span * _weight((gap.node,), shape, scale) * gap.ranks // shape.ranks_per_node
        for gap in segment.gaps
    )
    return [(segment.cause, whole - gone), ("fault", gone)]


_Cut = tuple[Shape, list[Segment]]
"""A task and its segments, clipped to the ledger's period."""


def _sum(shape: Shape, cut: list[Segment], scale: Weights) -> Account:
    parts: dict[str, int] = dict.fromkeys(CAUSES, 0)
    whole = held = 0
    for segment in cut:
        for cause, amount in _amounts(shape, segment, scale):
            parts[cause] += amount
            whole += amount
            held += amount if segment.held else 0
    return Account(whole=whole, parts=parts, held=held)


def _weight(nodes: tuple[str, ...], shape: Shape, scale: Weights) -> int:
    """Returns the number of GPUs (or nodes) that the task holds on these nodes."""
    share = shape.gpus if scale.unit == "GPU" else 0
    sizes = (scale.of.get(node, scale.usual) for node in nodes)
    return sum(min(share, size) if share else size for size in sizes)


def _wanted(shape: Shape, scale: Weights) -> int:
    """Returns the number of GPUs (or nodes) that a waiting task asks for."""
    share = shape.gpus if scale.unit == "GPU" else 0
    return shape.nodes * (share or scale.usual)


def _clip(of_task: Iterable[Segment], begin: int, end: int) -> list[Segment]:
    return [
        msgspec.structs.replace(s, begin=max(s.begin, begin), end=min(s.end, end))
        for s in of_task
        if s.end > begin and s.begin < end
    ]


def _cluster(cuts: list[_Cut], scale: Weights, begin: int, end: int) -> Account:
    """Returns the account of all current nodes, and of former nodes for the time in which tasks
    held them."""
    capacity = sum(scale.of.values())
    parts: dict[str, int] = dict.fromkeys((*CAUSES, IDLE), 0)
    changes: Counter[int] = Counter()
    for shape, segment in ((shape, s) for shape, cut in cuts for s in cut if s.held):
        for cause, amount in _amounts(shape, segment, scale):
            parts[cause] += amount
        weight = _weight(segment.held, shape, scale)
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
    """Nodes (or GPUs) held at each moment."""

    def __init__(
        self, shapes: Iterable[Shape], found: Mapping[str, list[Segment]], scale: Weights
    ) -> None:
        self._capacity = sum(scale.of.values())
        changes: Counter[int] = Counter()
        for shape in shapes:
            for segment in found[shape.task]:
                weight = _weight(segment.held, shape, scale)
                changes[segment.begin] += weight
                changes[segment.end] -= weight
        self._times = sorted(time for time, change in changes.items() if change)
        self._held: list[int] = []
        self._runs: dict[int, tuple[list[int], list[Cause]]] = {}
        """Cached results of `_runs_of`, by number of nodes (or GPUs): thousands of tasks wait for
        only a few different numbers."""
        held = 0
        for time in self._times:
            held += changes[time]
            self._held.append(held)

    def split(self, of_task: list[Segment], wanted: int) -> list[Segment]:
        """Gives waits for `wanted` nodes (or GPUs) the cause "fragmentation" while that many are
        free."""
        result: list[Segment] = []
        for segment in of_task:
            if segment.cause == "queue":
                result += self._split(segment.begin, segment.end, wanted)
            else:
                result.append(segment)
        return result

    def _split(self, begin: int, end: int, wanted: int) -> list[Segment]:
        """Splits one wait. A piece is the time between two consecutive changes of the held number.
        The first and the last result may cover only part of a piece; the results between them are
        runs of pieces."""
        times = self._times
        low, high = bisect_right(times, begin), bisect_left(times, end)
        if low >= high:
            return [Segment(begin, end, self._cause(low - 1, end - begin, wanted))]
        first, last = times[low], times[high - 1]
        found = [Segment(begin, first, self._cause(low - 1, first - begin, wanted))]
        starts, causes = self._runs_of(wanted)
        at, moment = bisect_right(starts, first) - 1, first
        while moment < last:
            until = min(starts[at + 1], last) if at + 1 < len(starts) else last
            found.append(Segment(moment, until, causes[at]))
            at, moment = at + 1, until
        return [*found, Segment(last, end, self._cause(high - 1, end - last, wanted))]

    def _cause(self, piece: int, length: int, wanted: int) -> Cause:
        """Returns the cause of a wait within a piece; `piece` is the index of the change at its
        begin."""
        held = self._held[piece] if piece >= 0 else 0
        hindered = self._capacity - held >= wanted and length >= MOMENT_US
        return "fragmentation" if hindered else "queue"

    def _runs_of(self, wanted: int) -> tuple[list[int], list[Cause]]:
        """Returns runs of adjacent pieces with the same cause: the begins of the runs, and their
        causes."""
        found = self._runs.get(wanted)
        if found is None:
            found = self._runs[wanted] = ([], [])
            for piece, (begin, end) in enumerate(pairwise(self._times)):
                cause = self._cause(piece, end - begin, wanted)
                if not found[1] or found[1][-1] != cause:
                    found[0].append(begin)
                    found[1].append(cause)
        return found


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
