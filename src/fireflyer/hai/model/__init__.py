"""Data model of a task: the submitted spec, its state, and the append-only events.

A task is a chain of attempts. These structs cross the HTTP API as JSON; the client returns them
unchanged. Structs that exist per task are `gc=False`: they cannot be part of a reference cycle, so
the garbage collector need not visit thousands of them.
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
"""Maximum number of tasks or history lines in an answer; the request for the next page names the
last entry."""

LINES_PER_ANSWER = 5000
"""Maximum number of TaskLines in an answer."""

TERMINAL: frozenset[TaskState] = frozenset({"finished", "failed", "stopped"})
"""States that a task never leaves."""


Priority = Literal["auto", "low", "normal", "above_normal", "high", "very_high", "extreme_high"]

PRIORITIES: Mapping[str, int] = {
    "low": 8, "normal": 10, "above_normal": 20, "high": 30, "very_high": 40, "extreme_high": 50,
}  # fmt: skip
"""Priority levels of HAI Platform. "auto" is the highest level at which the user's quota is not used
up, else normal."""


PINNED = "fireflyer.validates"
"""Label of a validation task: the node that it validates. Users cannot set it."""


class TaskSpec(msgspec.Struct, gc=False, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task as the user submits it."""

    script: str
    """Absolute path of a Python script."""
    args: tuple[str, ...] = ()
    name: str = ""
    """Display name; default: the script's file name."""
    cwd: str
    env: dict[str, str] = {}
    """Environment variables added to the server's own for the ranks."""
    nodes: int = 1
    ranks_per_node: int = 1
    start: Literal["auto", "fork", "exec"] = "auto"
    """fork: ranks are forked from a process that has torch imported; exec: each rank is a fresh
    interpreter; auto: fork if the script, a module beside it, or an earlier attempt imports torch.
    """
    max_restarts: int = 3
    """Maximum number of restarts after faults; suspends and resumes are free. An elastic attempt
    may restart each of its ranks as often as there are restarts left."""
    max_node_faults: int = 10
    """Maximum number of restarts after node and network faults, which cost none of
    `max_restarts`."""
    watchdog_s: float = 0.0
    """Seconds without output or heartbeat of any rank after which the gang counts as hung; 0: no
    watchdog."""
    elastic: bool = False
    """True if an attempt continues without lost ranks and gets newcomers in their place. Only
    for scripts that train elastically (`elastic=True` of HaiScale). Until the ranks' join listeners
    are open, a lost rank ends the attempt."""
    grace_s: float = 30.0
    """Seconds in which the ranks can save and exit on suspend or stop before they are killed."""
    workspace: str = ""
    """Id of a shipped workspace; `script` and `cwd` are then relative to the workspace. Empty:
    none."""
    venv: str = ""
    """Id of a lock file on the server: the ranks run in the environment that the lock file lists.
    Empty: the server's own environment."""
    gpus: int = 0
    """GPUs on each node; 0: whole nodes."""
    gpu_type: str = ""
    """Type of these GPUs, e.g. "a100"; empty: any."""
    memory_mib: int = 0
    """Memory on each node, as a reservation and a limit; 0: all memory of the node."""
    cpus: int = 0
    """Maximum cores that the ranks of a node use together; 0: all cores of the node."""
    priority: Priority = "normal"
    """auto: the highest priority at which the user's quota is not used up."""
    group: str = ""
    """Group for quotas and reservations."""
    labels: dict[str, str] = {}
    """Labels for users and programs; the scheduler ignores them."""
    expected_s: float = 0.0
    """Expected duration of the work; 0: not known. Backfill, windows and `why` use the value; a
    longer task is not ended."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Right to continue an attempt whose ranks were separated; held by the members of one
    generation."""

    generation: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    """Number that grows with each change of membership. An attempt starts at generation 0 with all
    its ranks, without a request."""
    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Names of processes, for display."""
    token: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Token of the process that requested the lease."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of a partition of an attempt's ranks for the right to continue."""

    attempt: int
    held: int
    """Generation that the partition held when it lost contact with the other ranks."""
    lease: Lease


class RankView(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One rank of the current or last attempt."""

    rank: int
    node: str
    pid: int | None
    """Process id; None before the start."""
    ended: str | None
    """None while the rank runs, else for example "exit 0" or "SIGKILL"."""
    log: str
    """Path of the log file."""
    incarnation: int = 0
    """0: one of the attempt's first ranks; n: the n-th newcomer in this place."""
    step: int | None = None
    """Last step reported by `fireflyer.hai.heartbeat(step)`; known while the rank runs."""
    slower: float = 0.0
    """Slowness of a straggler relative to the median of its gang; 0 for other ranks."""
    member: bool = True
    """False for a newcomer that the other members have not admitted yet."""


class TaskView(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """Current state of a task."""

    id: str
    """"t1", "t2", ... in order of submission."""
    spec: TaskSpec
    state: TaskState
    reason: str
    """Reason for the state, as text; may be empty."""
    attempt: int
    """0 before the first start."""
    generation: int
    """Generation of the attempt's lease: grows with each change of membership; 0: no change yet."""
    members: tuple[str, ...]
    """Processes that hold the attempt's lease; empty at generation 0: all ranks."""
    restarts: int
    """Restarts after faults so far."""
    node_faults: int = 0
    """Restarts after node and network faults so far."""
    avoid: tuple[str, ...] = ()
    """Nodes on which the task is not placed again while enough other nodes exist."""
    ranks: tuple[RankView, ...]
    directory: str
    """`<home>/tasks/<id>`: one folder per attempt, and `output/`, which outlives attempts."""
    created: float
    """Wall clock, seconds since 1970."""
    user: str = ""
    """User that submitted the task."""
    nodes: tuple[str, ...] = ()
    """Nodes of the current or last attempt, in the order of its ranks."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the task's GPUs on each of `nodes`; empty: the engine does not tell them."""
    limits: str = ""
    """Limits of memory and cores as text, and which are not enforced; empty: no limits."""


class TaskLine(msgspec.Struct, gc=False, frozen=True, kw_only=True, omit_defaults=True):
    """A task in a list of thousands: the fields of its TaskView and TaskSpec that fit one line."""

    id: str
    name: str
    """Display name; default: the script's file name."""
    state: TaskState
    created: float
    user: str = ""
    reason: str = ""
    nodes: int = 1
    ranks_per_node: int = 1
    gpus: int = 0
    gpu_type: str = ""
    attempt: int = 0
    restarts: int = 0
    placement: tuple[str, ...] = ()
    """Nodes of the active attempt, in the order of its ranks."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the task's GPUs on each node of `placement`; empty: the engine does not tell
    them."""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of a node."""

    name: str
    task: str | None = None
    """First task that holds part of the node."""
    tasks: tuple[str, ...] = ()
    state: Literal["ready", "suspect", "drained", "down"] = "ready"
    """suspect: used only if no other node is free; drained: running tasks continue, no new task
    starts; down: no task runs there."""
    reason: str = ""
    until: float | None = None
    """Time at which the node becomes ready again by itself; wall clock."""
    gpus: int = 0
    free: int = 0
    """Free GPUs; for a node without GPUs 1 if it is idle."""
    memory_bytes: int = 0
    """Memory of the node; 0: not known."""
    free_memory_bytes: int = 0
    """Memory that no task has reserved with `--memory`."""
    gpu_type: str = ""
    """Type of its GPUs; empty: not known."""
    devices: tuple[str | None, ...] = ()
    """Task that holds each GPU, by index; empty: the engine does not tell."""
    leaf: str = ""
    zone: str = ""
    unheld: str = ""
    """Limits of tasks that this node does not enforce, and why, as text; empty: the node enforces
    all."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of tasks in a list."""

    live: bool = False
    """True: only tasks that are not over."""
    user: str | None = None
    """Only this user's tasks."""
    states: tuple[TaskState, ...] = ()
    """Only tasks in one of these states; empty: in any."""
    labels: dict[str, str] = {}
    """Only tasks with these labels; an empty value matches any value of the label."""

    def accepts(self, labels: Mapping[str, str]) -> bool:
        """Returns whether the labels of a task match the labels of this listing."""
        return all(
            name in labels and value in ("", labels[name]) for name, value in self.labels.items()
        )


class WindowView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes that are out of use for maintenance, or reserved for a user or group, for some time."""

    id: str = ""
    nodes: tuple[str, ...]
    begin: Wall
    end: Wall
    reason: str = ""
    user: str = ""
    group: str = ""


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to take a node out of use."""

    reason: str
    until: Wall | None = None
    """None: until `undrain`."""
    evict: bool = False
    """True: the tasks on the node save, exit and continue on other nodes."""


class WhyView(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a task waits."""

    task: str
    state: TaskState
    text: str
    rule: str = ""
    """Rule that delays a queued task: size, health, window, quota, avoided, reserved or busy;
    "start": no rule delays the task. Empty for other states."""
    ahead: int = 0
    """Number of queued tasks ahead of the task."""
    earliest: float | None = None
    """Lower bound of the task's start, wall clock; None: not known."""
    policy: str


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a task's history; never changed, never deleted."""

    seq: int
    """Sequence number; grows over all tasks of a server. Continue reading with `after=seq`."""
    task: str
    attempt: int
    kind: str
    """submitted, queued, starting, rank_started, running, leased, rank_joined, rank_exited,
    gang_ended, restarting, suspending, preempted, suspended, resumed, stopping, finished, failed,
    stopped; observed, acted and progress: docs/operate/hai-faults.md."""
    detail: dict[str, Any]
    """submitted: user, group, gpus, gpu_type, priority, if they are set; rank_started: rank, node,
    pid; leased: generation, members, token; rank_joined: rank, node; rank_exited: rank, node, code,
    signal, suspended, and lost if an elastic attempt continues without the rank; gang_ended:
    outcome, reason. The rank_ kinds of newcomers also have incarnation."""
    monotonic_ns: int
    """CLOCK_MONOTONIC at the observation; for the rank_ and gang_ kinds, the supervisor's."""
    wall: float


class SeriesView(msgspec.Struct, frozen=True, kw_only=True):
    """Use of the hardware over time, of one scope."""

    scope: str
    """ "cluster", "node:n0", "user:ada", "task:t7" or "rank:t7/0"."""
    begin: float
    """Time of the first point; wall clock."""
    step_s: float
    """Seconds between two points; each is the mean of its interval."""
    metrics: dict[str, list[float | None]]
    """Values of the metrics that the scope has (`sampling/series.py`), by name; None: not known."""
