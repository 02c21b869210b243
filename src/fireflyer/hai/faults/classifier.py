"""Fault classifier: records observations, applies the rules, and determines the cause of an
attempt's end.

The classifier runs beside the controller, which alone writes the history and calls the engine. When
a server starts, past observations and actions are restored from the history.
"""

import os
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from fireflyer import heartbeat
from fireflyer.hai.faults.hang_detection import HangDetector, StragglerDetector, behind
from fireflyer.hai.faults.rules import Decision, Rule, decide, gravest
from fireflyer.hai.lifecycle import ACTIVE, Note, Task, Verdict
from fireflyer.hai.model import Event, TaskSpec
from fireflyer.hai.model.engine import GangEnded, RankExited
from fireflyer.hai.model.observations import (
    Exit,
    Hang,
    Loss,
    Observation,
    Seen,
    Straggler,
    SupervisorLost,
)

EXPLAINS_S = 300.0
"""Seconds for which an observation that did not end its attempt still explains the attempt's end."""

REMEMBERED = 5000
"""Maximum number of past observations that rules can count."""

LOOK_S = 2.0
"""Interval between two reads of logs and heartbeats."""

TAIL_BYTES = 8192
"""Bytes at the end of a log that are searched for the reason of the rank's end."""


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """Decision about an observation of an attempt."""

    task: str
    attempt: int
    wall: float
    node: str
    decision: Decision


class AttemptReading(msgspec.Struct, frozen=True):
    """Data read from a running attempt."""

    sizes: tuple[int, ...]
    """Sizes of the logs, by rank; empty without a watchdog."""
    heartbeats: dict[int, heartbeat.Heartbeat]


class _Watch:
    """Detectors of one attempt."""

    def __init__(self, now: float) -> None:
        self.hang = HangDetector(now)
        self.stragglers = StragglerDetector()
        self.heartbeats: dict[int, heartbeat.Heartbeat] = {}


class FaultClassifier:
    """Observations and decisions of all attempts. Used only from the controller's loop."""

    def __init__(self, rules: tuple[Rule, ...], past: Iterable[Event] = ()) -> None:
        """`past`: the last events `observed` and `acted`, oldest first."""
        self.rules = rules
        self._seen: deque[Seen] = deque(maxlen=REMEMBERED)
        self._acts: deque[Act] = deque(maxlen=REMEMBERED)
        self._watches: dict[tuple[str, int], _Watch] = {}
        for event in past:
            if event.kind == "observed":
                found = msgspec.convert(event.detail, Observation)
                self._remember(event.task, event.attempt, found)
            else:
                decision = msgspec.convert(event.detail, Decision)
                self._act(event.task, event.attempt, event.wall, event.detail["node"], decision)

    def _remember(self, task: str, attempt: int, found: Observation) -> None:
        self._seen.append(Seen(task=task, attempt=attempt, observation=found))

    def _act(self, task: str, attempt: int, wall: float, node: str, decision: Decision) -> None:
        act = Act(task=task, attempt=attempt, wall=wall, node=node, decision=decision)
        self._acts.append(act)

    def knows(self, task: str, attempt: int, found: Observation) -> bool:
        """Returns whether an equal observation was made before."""
        return Seen(task=task, attempt=attempt, observation=found) in self._seen

    # -- one observation ---------------------------------------------------------------------------

    def observed(self, task: str, attempt: int, found: Observation) -> Decision:
        """Returns the rules' decision about an observation, and remembers both."""
        decision = decide(self.rules, found, self._seen, task)
        self._remember(task, attempt, found)
        self._act(task, attempt, found.wall, found.node, decision)
        return decision

    # -- the end of an attempt ---------------------------------------------------------------------

    def ended(
        self, task: Task, event: GangEnded, history: list[Event], directory: Path
    ) -> tuple[Verdict, tuple[Note, ...]]:
        """Returns the cause of an attempt's end, and the history lines that record it.

        Args:
            task: state of the task before the end.
            event: the end.
            history: events of the attempt's ranks.
            directory: folder of the attempt.
        """
        if task.state not in ACTIVE or event.attempt != task.attempt:
            return Verdict(), ()
        self._watches.pop((task.id, task.attempt), None)
        notes = _progress(directory)
        free = task.unsure and event.outcome == "lost"
        if event.outcome not in ("failed", "lost") or task.stopping or free:
            return Verdict(), notes
        before = [
            act for act in self._acts
            if (act.task, act.attempt) == (task.id, task.attempt)
            and act.decision.action != "note"
            and act.wall >= event.wall - EXPLAINS_S
        ]  # fmt: skip
        for found in _causes(event, history, directory, ended=any(a.decision.end for a in before)):
            notes += (observed(found),)
            if before:
                self._remember(task.id, task.attempt, found)
            else:
                self.observed(task.id, task.attempt, found)
        acts = before or [
            act for act in self._acts
            if (act.task, act.attempt) == (task.id, task.attempt) and act.wall >= event.wall
        ]  # fmt: skip
        if not acts:
            return Verdict(), notes
        return _verdict(acts, notes)

    # -- running attempts --------------------------------------------------------------------------

    def look(
        self, task: Task, spec: TaskSpec, reading: AttemptReading, monotonic: float, wall: float
    ) -> list[Observation]:
        """Returns the observations that follow from the data just read from a running attempt."""
        watch = self._watches.get((task.id, task.attempt))
        if watch is None:
            for key in [key for key in self._watches if key[0] == task.id]:
                del self._watches[key]
            watch = self._watches[task.id, task.attempt] = _Watch(monotonic)
        watch.heartbeats = watch.heartbeats | reading.heartbeats
        found: list[Observation] = []
        for rank, factor in watch.stragglers.feed(
            {r: dict(p.steps) for r, p in watch.heartbeats.items()}
        ):
            node = task.placement[rank // spec.ranks_per_node]
            found.append(
                Straggler(
                    node=node, wall=wall, rank=rank, factor=factor, steps=watch.stragglers.in_a_row
                )
            )
        if spec.watchdog_s > 0:
            activity = (reading.sizes, {r: (p.last, p.step) for r, p in reading.heartbeats.items()})
            hang = watch.hang.feed(activity, monotonic, spec.watchdog_s)
            if hang is not None:
                last = behind(reading.heartbeats, task.world)
                node = "" if last is None else task.placement[last // spec.ranks_per_node]
                found.append(Hang(node=node, wall=wall, quiet_s=round(hang, 1), rank=last))
        return found

    def step_of(self, task: str, attempt: int, rank: int) -> tuple[int | None, float]:
        """Returns the last step that a running rank reported, and its slowness factor as a
        straggler, or 0."""
        watch = self._watches.get((task, attempt))
        if watch is None:
            return None, 0.0
        told = watch.heartbeats.get(rank)
        step = None if told is None or told.step < 0 else told.step
        return step, round(watch.stragglers.now.get(rank, 0.0), 2)


def period_s(specs: Iterable[TaskSpec]) -> float:
    """Returns the time until the next read: a quarter of the shortest watchdog timeout, at most
    LOOK_S."""
    watchdogs = [spec.watchdog_s / 4 for spec in specs if spec.watchdog_s > 0]
    return max(0.1, min([LOOK_S, *watchdogs]))


def read_attempt(directory: Path, world: int, *, logs: bool) -> AttemptReading:
    """Reads the heartbeats and, with `logs`, the sizes of the logs of an attempt."""
    sizes = tuple(_size(directory / f"{rank}.log") for rank in range(world)) if logs else ()
    return AttemptReading(sizes, _heartbeats(directory))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _heartbeats(directory: Path) -> dict[int, heartbeat.Heartbeat]:
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.name.endswith(".pulse")]
    except OSError:
        return {}
    ranks = [int(name[:-6]) for name in names if name[:-6].isdecimal()]
    read = {rank: heartbeat.read(directory / f"{rank}.pulse") for rank in ranks}
    return {rank: found for rank, found in read.items() if found is not None}


# -- lines of history ------------------------------------------------------------------------------


def observed(found: Observation) -> Note:
    """Returns the history line of an observation."""
    return Note("observed", msgspec.to_builtins(found) | {"text": found.text()})


def acted(decision: Decision, node: str, **more: Any) -> Note:
    """Returns the history line of the action taken."""
    return Note("acted", msgspec.to_builtins(decision) | {"node": node} | more)


def _verdict(acts: list[Act], notes: tuple[Note, ...]) -> tuple[Verdict, tuple[Note, ...]]:
    grave = gravest(act.decision for act in acts)
    elsewhere = ("restart elsewhere", "drain node")
    avoid = {act.node for act in acts if act.decision.action in elsewhere and act.node}
    node = next((act.node for act in acts if act.decision == grave), "")
    stop = ""
    if grave.action == "stop task":
        stop = f"no further attempt (rule {grave.rule}): {grave.why}"
    verdict = Verdict(cause=grave.cause, avoid=frozenset(avoid), stop=stop)
    return verdict, (*notes, acted(grave, node, ended=True, avoid=sorted(avoid)))


def _progress(directory: Path) -> tuple[Note, ...]:
    """Returns a history line with the progress that the ranks report."""
    heartbeats = _heartbeats(directory).values()
    if not heartbeats:
        return ()
    newest = max(heartbeats, key=lambda found: found.saved)
    detail = {
        "first": max(found.first for found in heartbeats),
        "last": max(found.last for found in heartbeats),
        "step": max(found.step for found in heartbeats),
        "saved": newest.saved,
        "saved_step": newest.saved_step,
    }
    return (Note("progress", detail),)


def _causes(
    event: GangEnded, history: list[Event], directory: Path, *, ended: bool
) -> list[Observation]:
    """Returns the observations that follow from the end itself. `ended`: the platform ended the
    attempt, so the exits of its ranks carry no information."""
    if event.outcome == "lost":
        nodes = event.lost or ("",)
        return [SupervisorLost(node=node, wall=event.wall, reason=event.reason) for node in nodes]
    if ended:
        return []
    failed = [
        e for e in history
        if e.kind == "rank_exited" and e.detail["code"] != 0 and not e.detail["suspended"]
    ]  # fmt: skip
    if not failed:
        return []
    # An elastic attempt survived the exits that have `lost`. If all have it, the last exit ended
    # the attempt.
    first = next((e for e in failed if not e.detail.get("lost")), failed[-1])
    rank = first.detail["rank"]
    begun = [e.wall for e in history if e.kind == "rank_started" and e.detail["rank"] == rank]
    return [
        Exit(
            node=first.detail["node"],
            wall=event.wall,
            rank=rank,
            code=first.detail["code"],
            signal=first.detail["signal"],
            place=last_place(_tail(directory / f"{rank}.log")),
            ran_s=round(max(first.wall - max(begun, default=first.wall), 0.0), 3),
        )
    ]


def loss(event: RankExited, directory: Path) -> Loss:
    """Builds the observation of a lost rank. REQUIRES: `directory` is the folder of an elastic
    attempt that continues without the rank."""
    return Loss(
        node=event.node,
        wall=event.wall,
        rank=event.rank,
        code=event.code,
        signal=event.signal,
        place=last_place(_tail(directory / f"{event.rank}.log")),
    )


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


_FRAME = re.compile(r'^\s*File "([^"\n]{1,500})", line (\d+)', re.MULTILINE)
_ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Lost|\w))(?::|$)")


def last_place(log: str) -> str:
    """Returns the place where a rank ended, from the end of its log: the last frame of its last
    traceback and the class of the error. Without a traceback returns the last line, with its
    numbers masked."""
    lines = [line for line in log.splitlines() if line.strip()]
    if not lines:
        return ""
    frames = list(_FRAME.finditer(log))
    if "Traceback (most recent call last)" in log and frames:
        path, line = frames[-1].groups()
        error = _ERROR.match(lines[-1].split("(")[0].strip())
        name = f" {error[1]}" if error else ""
        return f"{os.path.basename(path)}:{line}{name}"
    return re.sub(r"\d+", "#", lines[-1].strip())[:200]
