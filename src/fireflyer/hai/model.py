"""What the platform knows of a task: the submitted spec, its state, and the append-only events.

A task is a chain of attempts. These structs cross the HTTP API as JSON; the client returns them as
they are.
"""

from typing import Annotated, Any, Literal

import msgspec

TaskState = Literal[
    "queued", "starting", "running", "suspending", "suspended", "finished", "failed", "stopped"
]

TERMINAL: frozenset[TaskState] = frozenset({"finished", "failed", "stopped"})
"""States that a task never leaves."""


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
    start: Literal["fork", "exec"] = "fork"
    """fork: ranks come from a server that has torch imported; exec: a fresh interpreter each."""
    max_restarts: int = 3
    """Attempts that may be spent on faults; suspends and resumes are free. An elastic attempt may start each
    of its ranks again as often as there are restarts left."""
    elastic: bool = False
    """An attempt goes on without the ranks that it loses, and gets newcomers in their place. For scripts
    that train elastically (`elastic=True` of HaiScale); until their doors are open, a lost rank ends the
    attempt."""
    grace_s: float = 30.0
    """Time the ranks get to save and leave on suspend or stop before they are killed."""


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
    ranks: tuple[RankView, ...]
    directory: str
    """`<home>/tasks/<id>`: one folder an attempt, and `output/`, which outlives attempts."""
    created: float
    """Wall clock, seconds since 1970."""
    user: str = ""
    """Who submitted it."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a task's history; never changed, never deleted."""

    seq: int
    """Grows over all tasks of a server; continue reading with `after=seq`."""
    task: str
    attempt: int
    kind: str
    """submitted, queued, starting, rank_started, running, leased, rank_joined, rank_exited, gang_ended,
    restarting, suspending, suspended, resumed, stopping, finished, failed, stopped."""
    detail: dict[str, Any]
    """rank_started: rank, node, pid; leased: generation, members, token; rank_joined: rank, node;
    rank_exited: rank, node, code, signal, suspended; gang_ended: outcome, reason. The rank_ kinds of
    newcomers: incarnation, too."""
    monotonic_ns: int
    """CLOCK_MONOTONIC of the observation, by the supervisor for the rank_ and gang_ kinds."""
    wall: float
