"""What the platform knows of a task: the submitted spec, its state, and the append-only events.

A task is a chain of attempts. These structs cross the HTTP API as JSON; the client returns them as
they are.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

TaskState = Literal[
    "queued", "starting", "running", "suspending", "suspended", "finished", "failed", "stopped"
]

Wall = Annotated[float, msgspec.Meta(ge=0, le=253_370_764_800)]
"""Wall clock, seconds since 1970, until the year 9999."""

PER_ANSWER = 1000
"""So many tasks or lines of history are in an answer at most; who asks for the rest names the last one."""

TERMINAL: frozenset[TaskState] = frozenset({"finished", "failed", "stopped"})
"""States that a task never leaves."""


Priority = Literal["auto", "low", "normal", "above_normal", "high", "very_high", "extreme_high"]

PRIORITIES: Mapping[str, int] = {
    "low": 8, "normal": 10, "above_normal": 20, "high": 30, "very_high": 40, "extreme_high": 50,
}  # fmt: skip
"""HAI's levels. "auto" is the highest level for which the user has a quota with room left, else normal."""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user submits."""

    script: str
    """Absolute path of a Python script."""
    args: tuple[str, ...] = ()
    name: str = ""
    """For people; the script's file name when empty."""
    cwd: str
    env: dict[str, str] = {}
    """Added to the server's own environment for the ranks."""
    nodes: int = 1
    ranks_per_node: int = 1
    start: Literal["auto", "fork", "exec"] = "auto"
    """fork: ranks come from a process that has torch imported; exec: a fresh interpreter each; auto: fork
    where the script, a module beside it, or an earlier attempt imports torch."""
    max_restarts: int = 3
    """Attempts that may be spent on faults; suspends and resumes are free. An elastic attempt may start each
    of its ranks again as often as there are restarts left."""
    max_node_faults: int = 10
    """Attempts that may be spent on faults of nodes and network, which cost none of `max_restarts`."""
    watchdog_s: float = 0.0
    """A gang of which no rank wrote a line or had a heartbeat for so long hangs; 0: nobody watches."""
    elastic: bool = False
    """An attempt goes on without the ranks that it loses, and gets newcomers in their place. For scripts
    that train elastically (`elastic=True` of HaiScale); until their doors are open, a lost rank ends the
    attempt."""
    grace_s: float = 30.0
    """Time the ranks get to save and leave on suspend or stop before they are killed."""
    workspace: str = ""
    """Id of a workspace that was shipped; `script` and `cwd` are then relative to it. Empty: none."""
    venv: str = ""
    """Id of a lock file that the server has: the ranks run in its environment. Empty: in the server's own."""
    gpus: int = 0
    """Of each node; 0: whole nodes."""
    memory_mib: int = 0
    """Of each node; 0: whatever there is."""
    priority: Priority = "normal"
    """auto: the highest one for which the user has a quota with room left."""
    group: str = ""
    """For quotas and reservations."""
    labels: dict[str, str] = {}
    """For people and programs; the scheduler does not look at them."""
    expected_s: float = 0.0
    """How long it works, if known; 0: not known. Backfill, windows and `why` use it; nothing ends by it."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Who may go on with an attempt whose ranks were parted: the members of one generation."""

    generation: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    """Grows with each change of membership. An attempt starts with all its ranks at 0, never asked for."""
    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Names of processes, for people."""
    token: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Of the process that asked."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of an attempt asks to be the one that goes on."""

    attempt: int
    held: int
    """The generation that its members were of when they lost sight of others."""
    lease: Lease


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of the current or last attempt."""

    rank: int
    node: str
    pid: int | None
    """None before the start."""
    ended: str | None
    """None while it runs, else e.g. "exit 0" or "SIGKILL"."""
    log: str
    """Path of the log file."""
    incarnation: int = 0
    """0: of the attempt's first ranks; n: the n-th newcomer in this place."""
    step: int | None = None
    """The last one that it told by `fireflyer.hai.heartbeat(step)`; known while it runs."""
    slower: float = 0.0
    """A straggler: how many times as slow as the median of its gang; else 0."""
    member: bool = True
    """False for a newcomer that the others have not let in yet."""


class TaskView(msgspec.Struct, frozen=True, kw_only=True):
    """A task as of now."""

    id: str
    """"t1", "t2", ... in order of submission."""
    spec: TaskSpec
    state: TaskState
    reason: str
    """Why it is in this state, in words; empty when there is nothing to say."""
    attempt: int
    """0 before the first start."""
    generation: int
    """How often the members of this attempt have changed."""
    members: tuple[str, ...]
    """The processes that hold the attempt's lease; empty at generation 0: all ranks."""
    restarts: int
    """Attempts spent on faults so far."""
    node_faults: int = 0
    """Attempts spent on faults of nodes and network."""
    avoid: tuple[str, ...] = ()
    """Nodes that it is not placed on again, as long as there are others."""
    ranks: tuple[RankView, ...]
    directory: str
    """`<home>/tasks/<id>`: one folder an attempt, and `output/`, which outlives attempts."""
    created: float
    """Wall clock, seconds since 1970."""
    user: str = ""
    """Who submitted it."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as of now."""

    name: str
    task: str | None = None
    """The first task that holds something of it."""
    tasks: tuple[str, ...] = ()
    state: Literal["ready", "suspect", "drained", "down"] = "ready"
    """suspect: used where nothing else is free; drained: what runs there goes on, nothing new starts; down:
    nothing runs there."""
    reason: str = ""
    until: float | None = None
    """When it is ready again by itself; wall clock."""
    gpus: int = 0
    free: int = 0
    """GPUs; of a node without GPUs 1 if it is idle."""
    leaf: str = ""
    zone: str = ""


class WindowView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes that are taken out for some time: a maintenance, or a reservation for a user or group."""

    id: str = ""
    nodes: tuple[str, ...]
    begin: Wall
    end: Wall
    reason: str = ""
    user: str = ""
    group: str = ""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Takes a node out of use."""

    reason: str
    until: Wall | None = None
    """None: until `undrain`."""


class WhyView(msgspec.Struct, frozen=True, kw_only=True):
    """What a task waits for."""

    task: str
    state: TaskState
    text: str
    ahead: int = 0
    """Queued tasks that come before it."""
    earliest: float | None = None
    """The moment before which it does not start, wall clock; None: not known."""
    policy: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a task's history; never changed, never deleted."""

    seq: int
    """Grows over all tasks of a server; continue reading with `after=seq`."""
    task: str
    attempt: int
    kind: str
    """submitted, queued, starting, rank_started, running, leased, rank_joined, rank_exited, gang_ended,
    restarting, suspending, preempted, suspended, resumed, stopping, finished, failed, stopped;
    observed, acted and progress: docs/hai-faults.md."""
    detail: dict[str, Any]
    """rank_started: rank, node, pid; leased: generation, members, token; rank_joined: rank, node;
    rank_exited: rank, node, code, signal, suspended, and lost where an elastic attempt goes on without it;
    gang_ended: outcome, reason. The rank_ kinds of newcomers: incarnation, too."""
    monotonic_ns: int
    """CLOCK_MONOTONIC of the observation, by the supervisor for the rank_ and gang_ kinds."""
    wall: float
