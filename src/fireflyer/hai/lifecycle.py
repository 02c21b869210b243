"""State machine of one task: the effect of each request and event. Pure: no I/O, no clock.

`request`, `grant`, `observe` and `decide` take one task and one input. They return the task's new
value, the history lines to write and the engine calls to make. `planner.py` decides which gang
starts on which nodes, and which tasks are preempted. The server writes each `Step` in one
transaction before it makes any of the calls.
"""

from typing import Any, Literal

import msgspec

from fireflyer.errors import TaskError
from fireflyer.hai.model import TERMINAL, Lease, LeaseRequest, TaskState
from fireflyer.hai.model.engine import (
    EngineEvent,
    GangEnded,
    NodeObserved,
    RankExited,
    RankJoined,
    RankStarted,
)

Request = Literal["stop", "suspend", "resume"]

ACTIVE: frozenset[TaskState] = frozenset({"starting", "running", "suspending"})
"""States in which an attempt holds nodes."""


class Task(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """The scheduler's view of a task."""

    id: str
    order: int
    """Position in the order of submission."""
    user: str = ""
    nodes: int
    world: int
    """Number of ranks."""
    max_restarts: int
    state: TaskState = "queued"
    reason: str = ""
    attempt: int = 0
    restarts: int = 0
    placement: tuple[str, ...] = ()
    """Nodes that the active attempt holds; empty outside ACTIVE."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the task's GPUs on each node of `placement`; empty: whole nodes without GPUs, or
    the engine chooses."""
    previous: tuple[str, ...] = ()
    """Nodes of the last attempt while the engine keeps warm processes there; a restart prefers
    these nodes."""
    preempted: bool = False
    """True while the task suspends because of a preemption; the task then returns to the
    queue by itself."""
    stopping: bool = False
    """True if a stop was requested and the attempt has not ended yet."""
    unsure: bool = False
    """True if the server died before it recorded that the launch succeeded. A lost attempt is then
    not charged to the task."""
    started: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    newcomers: frozenset[tuple[str, int, int]] = frozenset()
    """Events seen from newcomers in the active attempt: kind, rank, incarnation."""
    max_node_faults: int = 10
    node_faults: int = 0
    avoid: frozenset[str] = frozenset()
    """Nodes on which the task is not placed while enough other nodes exist."""
    lease: Lease | None = None
    """Lease of the active attempt; None: no lease was granted, so all ranks are at generation 0."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Decision of the fault rules on an attempt that ended by a fault; `hai.faults` creates it."""

    cause: Literal["script", "node", "network"] = "script"
    """Cause of the fault. A restart after "script" counts against `max_restarts`, after another
    cause against `max_node_faults`."""
    avoid: frozenset[str] = frozenset()
    """Nodes that the next attempt avoids."""
    stop: str = ""
    """Reason why no further attempt may start; empty: a further attempt may start."""


class Launch(msgspec.Struct, frozen=True, tag="Launch"):
    """Start attempt `attempt` of a task on these nodes."""

    task: str
    attempt: int
    nodes: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the GPUs on each of these nodes."""


class SuspendGang(msgspec.Struct, frozen=True, tag="SuspendGang"):
    task: str
    attempt: int


class StopGang(msgspec.Struct, frozen=True, tag="StopGang"):
    task: str
    attempt: int


class Preempt(msgspec.Struct, frozen=True, tag="Preempt"):
    """Preempt a running task: its ranks save and exit, and the task returns to the queue by
    itself."""

    task: str
    attempt: int
    why: str
    """Reason, as text for users."""
    to: str = ""
    """Node on which the plan restarts the task at once; empty: none."""


class Release(msgspec.Struct, frozen=True, tag="Release"):
    """Release the warm processes that the engine keeps after this attempt."""

    task: str
    attempt: int


Action = Launch | Preempt | SuspendGang | StopGang | Release


class Note(msgspec.Struct, frozen=True):
    """One history line, written with the step."""

    kind: str
    detail: dict[str, Any] = {}


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of one input on one task. No notes and no actions: nothing changed."""

    task: Task
    notes: tuple[Note, ...] = ()
    actions: tuple[Action, ...] = ()


def admit(task: Task, about: dict[str, Any] | None = None) -> Step:
    """Puts a new task into the queue. The history keeps `about`, for replays."""
    return Step(task=task, notes=(Note("submitted", about or {}), Note("queued")))


def request(task: Task, what: Request) -> Step:
    """Applies a user's stop, suspend or resume. A repeated request has no effect.

    Raises:
        TaskError: the task's state does not allow the request.
    """
    match what:
        case "stop":
            return _stop(task)
        case "suspend":
            return _suspend(task)
        case "resume":
            return _resume(task)


def _stop(task: Task) -> Step:
    if task.state == "stopped" or task.stopping:
        return Step(task=task)
    if task.state in TERMINAL:
        raise TaskError(f"task {task.id} has already {_ended(task)}")
    if task.state in ACTIVE:
        changed = _replace(task, stopping=True, reason="stop requested")
        return Step(
            task=changed,
            notes=(Note("stopping"),),
            actions=(StopGang(task.id, task.attempt),),
        )
    return _enter(task, "stopped", f"stopped while {task.state}", Note("stopping"))


def _suspend(task: Task) -> Step:
    if task.state in ("suspending", "suspended") and not task.stopping:
        if not task.preempted:
            return Step(task=task)
        note = Note("suspending", {"reason": "suspend requested"})
        return Step(task=_replace(task, preempted=False, reason=""), notes=(note,))
    if task.state in TERMINAL:
        raise TaskError(f"task {task.id} has already {_ended(task)}")
    if task.stopping:
        raise TaskError(f"task {task.id} is being stopped")
    if task.state in ACTIVE:
        step = _enter(task, "suspending", "")
        return msgspec.structs.replace(step, actions=(SuspendGang(task.id, task.attempt),))
    return _enter(task, "suspended", "suspended while queued")


def preempt(task: Task, why: str) -> Step:
    """Makes an active task give up its nodes. A task that is already leaving does not change."""
    if task.state not in ("starting", "running") or task.stopping:
        return Step(task=task)
    return Step(
        task=_replace(task, state="suspending", preempted=True, reason=why),
        notes=(Note("suspending", {"reason": why, "preempted": True}),),
        actions=(SuspendGang(task.id, task.attempt),),
    )


def _resume(task: Task) -> Step:
    if task.preempted:
        return Step(task=task)
    if task.state == "suspending":
        raise TaskError(f"task {task.id} is still suspending; resume it once it is suspended")
    if task.state in TERMINAL:
        raise TaskError(f"task {task.id} has already {_ended(task)}")
    if task.state != "suspended":
        raise TaskError(f"task {task.id} is {task.state}, not suspended")
    return _enter(task, "queued", "", Note("resumed"))


def grant(task: Task, asked: LeaseRequest) -> Step | None:
    """Grants the lease of a later generation to the first partition that requests it; None:
    refused.

    At most one partition of a generation continues. A request states the generation that its
    partition holds, which must be the current one. A partition that was granted the current
    generation but missed the answer is recognised by its token.
    """
    if task.state not in ACTIVE or asked.attempt != task.attempt:
        return None
    wanted, held = asked.lease, task.lease
    if wanted == held:
        return Step(task=task)
    in_force = held.generation if held is not None else 0
    follows = asked.held == in_force or (held is not None and wanted.token == held.token)
    if wanted.generation <= in_force or not follows:
        return None
    note = Note("leased", msgspec.structs.asdict(wanted))
    return Step(task=_replace(task, lease=wanted), notes=(note,))


def observe(task: Task, event: EngineEvent, verdict: Verdict = Verdict()) -> Step:  # noqa: B008
    """Applies an engine event and the fault rules' verdict on the event. Events of older attempts
    and repeated events have no effect."""
    if task.state not in ACTIVE or event.attempt != task.attempt:
        return Step(task=task)
    match event:
        case RankJoined():
            return _newcomer(task, event, Note("rank_joined"))
        case RankStarted():
            return _rank_started(task, event)
        case RankExited():
            return _rank_exited(task, event)
        case GangEnded():
            return _gang_ended(task, event, verdict)
        case NodeObserved():
            return Step(task=task)


def _rank_started(task: Task, event: RankStarted) -> Step:
    note = Note("rank_started", {"rank": event.rank, "node": event.node, "pid": event.pid})
    if event.incarnation:
        return _newcomer(task, event, note)
    if event.rank in task.started:
        return Step(task=task)
    task = _replace(task, started=task.started | {event.rank}, unsure=False)
    if task.state == "starting" and len(task.started) == task.world and not task.stopping:
        return _enter(task, "running", "", note)
    return Step(task=task, notes=(note,))


def _rank_exited(task: Task, event: RankExited) -> Step:
    detail: dict[str, Any] = {
        "rank": event.rank,
        "node": event.node,
        "code": event.code,
        "signal": event.signal,
        "suspended": event.suspended,
    }
    if event.lost:
        detail["lost"] = True
    if event.incarnation:
        return _newcomer(task, event, Note("rank_exited", detail))
    if event.rank in task.exited:
        return Step(task=task)
    task = _replace(task, exited=task.exited | {event.rank}, unsure=False)
    return Step(task=task, notes=(Note("rank_exited", detail),))


def _newcomer(task: Task, event: RankStarted | RankJoined | RankExited, note: Note) -> Step:
    """Records an event of a newcomer in an elastic attempt; the attempt continues."""
    seen = (note.kind, event.rank, event.incarnation)
    if seen in task.newcomers:
        return Step(task=task)
    about = {"rank": event.rank, "node": event.node, "incarnation": event.incarnation}
    note = Note(note.kind, about | note.detail)
    return Step(task=_replace(task, newcomers=task.newcomers | {seen}), notes=(note,))


def _gang_ended(task: Task, event: GangEnded, verdict: Verdict) -> Step:
    note = Note("gang_ended", {"outcome": event.outcome, "reason": event.reason})
    fault = event.outcome in ("failed", "lost")
    free = task.unsure and event.outcome == "lost"
    wants_stop = task.stopping
    wants_suspend = task.state == "suspending" and not task.preempted
    preempted = task.reason if task.preempted else ""
    task = _replace(
        task, placement=(), devices=(), previous=task.placement, stopping=False,
        preempted=False, unsure=False,
        started=frozenset(), exited=frozenset(), newcomers=frozenset(), lease=None,
    )  # fmt: skip
    if event.outcome == "finished":
        return _enter(task, "finished", event.reason, note)
    if wants_stop or event.outcome == "stopped":
        return _enter(task, "stopped", event.reason, note)
    if not fault:
        if preempted:
            return _enter(task, "queued", preempted, note, Note("preempted", {"reason": preempted}))
        return _enter(task, "suspended", event.reason, note)
    if not free:
        charged = _charge(task, verdict)
        if isinstance(charged, str):
            return _enter(task, "failed", event.reason + charged, note)
        task = charged
    if wants_suspend:
        return _enter(task, "suspended", event.reason, note)
    restarting = Note(
        "restarting",
        {
            "reason": event.reason,
            "restarts": task.restarts,
            "max_restarts": task.max_restarts,
            "node_faults": task.node_faults,
            "avoid": sorted(task.avoid),
        },
    )
    return _enter(task, "queued", f"restarting: {event.reason}", note, restarting)


def _charge(task: Task, verdict: Verdict) -> Task | str:
    """Returns the task with one more restart charged to the budget of the fault's cause. If the
    task must not restart, returns text to append to the reason."""
    if verdict.stop:
        return f"; {verdict.stop}"
    task = _replace(task, avoid=task.avoid | verdict.avoid)
    if verdict.cause == "script":
        if task.restarts >= task.max_restarts:
            return ""
        return _replace(task, restarts=task.restarts + 1)
    if task.node_faults >= task.max_node_faults:
        return f"; the limit of {count(task.max_node_faults, 'node fault')} is reached"
    return _replace(task, node_faults=task.node_faults + 1)


def decide(task: Task, action: Action) -> Step:
    """Turns one action of `plan` into the step that records it."""
    match action:
        case Launch():
            task = _replace(
                task, attempt=action.attempt, placement=action.nodes, devices=action.devices,
                previous=(),
            )  # fmt: skip
            step = _enter(task, "starting", "")
            detail: dict[str, Any] = {"nodes": list(action.nodes)}
            if action.devices:
                detail["devices"] = [list(each) for each in action.devices]
            noted = (Note("starting", detail),)
            return msgspec.structs.replace(step, notes=noted, actions=(action,))
        case Release():
            return Step(task=_replace(task, previous=()), actions=(action,))
        case Preempt():
            return preempt(task, action.why)
        case SuspendGang() | StopGang():
            raise ValueError(f"not an action of plan: {action}")


def count(number: int, noun: str) -> str:
    """Returns the number with the noun in singular or plural, for example "1 node" or "3 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _enter(task: Task, state: TaskState, reason: str, *before: Note) -> Step:
    """Changes the state and writes its note last. Releases warm processes if no attempt can follow
    soon."""
    actions: tuple[Action, ...] = ()
    if task.previous and (state in TERMINAL or state == "suspended"):
        actions = (Release(task.id, task.attempt),)
        task = _replace(task, previous=())
    detail = {"reason": reason} if reason else {}
    return Step(
        task=_replace(task, state=state, reason=reason),
        notes=(*before, Note(state, detail)),
        actions=actions,
    )


def _replace(task: Task, **changes: Any) -> Task:
    return msgspec.structs.replace(task, **changes)


def _ended(task: Task) -> str:
    return {"finished": "finished", "failed": "failed"}.get(task.state, "been stopped")
