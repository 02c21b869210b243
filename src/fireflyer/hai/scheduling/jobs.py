"""What the planner knows of nodes, tasks and rules. Values; `cluster.py` keeps them."""

from typing import Literal

import msgspec

from fireflyer.hai.model import PRIORITIES

Health = Literal["ready", "suspect", "drained", "down"]

AUTO = -1
NORMAL = PRIORITIES["normal"]

ANY = "*"
"""In a quota: any user, any group."""

LEAD_S = 600.0
"""So long before a window nothing of unknown length is started on its nodes."""

Phase = Literal["queued", "starting", "running", "suspending", "held"]
"""held: suspended by its user; it holds nothing and waits for a resume."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs jobs."""

    name: str
    gpus: int = 0
    """0: the node takes one job, whole."""
    memory_mib: int = 0
    """0: not known, not limited."""
    whole: bool = False
    """Whoever gets a part of it gets all."""
    zone: str = ""
    leaf: str = ""
    """Names of the zone and of the switch in it; empty: not known."""
    health: Health = "ready"
    """suspect: used when nothing else is free; drained: what runs there goes on; down: nothing runs there."""
    reason: str = ""
    until: float | None = None
    """When a drained or suspect node is ready again by itself."""


class Job(msgspec.Struct, kw_only=True, eq=False):
    """What the planner knows of a task. The caller sets the first part; the cluster keeps the second."""

    id: str
    order: int
    """Place in the order of submission."""
    nodes: int = 1
    gpus: int = 0
    """Of each node; 0: whole nodes."""
    memory_mib: int = 0
    """Of each node; 0: whatever there is."""
    user: str = ""
    group: str = ""
    priority: int = NORMAL
    """A value of PRIORITIES, or AUTO."""
    submitted: float = 0.0
    estimate_s: float | None = None
    """Seconds of work that are left, if known. What it works is taken off."""
    avoid: frozenset[str] = frozenset()
    """Nodes on which it met faults: taken only when others are not free."""

    phase: Phase = "queued"
    attempt: int = 0
    level: int = NORMAL
    """The priority that counts: AUTO resolved."""
    standing: int = 0
    """The level of its account, by the policy; 0 where there are no accounts."""
    placement: tuple[str, ...] = ()
    """Nodes that it holds."""
    previous: tuple[str, ...] = ()
    """Nodes where the engine keeps something warm for it; preferred."""
    since: float = 0.0
    """When it entered its phase."""
    launched_at: float = 0.0
    """When its nodes were given to it."""
    started_at: float = 0.0
    """When all its ranks had started."""
    gpus_held: float = 0.0
    """By the whole gang; a node without GPUs counts 1."""
    attained: float = 0.0
    """Service of its ended attempts, in seconds x gpus_held."""
    overdue: bool = False
    """It has waited longer than the policy's patience."""
    checkpoint_s: float | None = None
    restart_s: float | None = None
    """Last measured: from the request to suspend until the nodes were free; from the launch to running."""
    preemptions: int = 0
    ripe: bool = False
    """It holds nodes, and has had its quantum."""


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are taken out from `begin` to `end`: a maintenance, or a reservation for somebody."""

    id: str
    nodes: frozenset[str]
    begin: float
    end: float
    reason: str = ""
    user: str = ""
    group: str = ""
    """Who may use the nodes meanwhile; both empty: nobody."""

    def lets_in(self, job: "Job") -> bool:
        """Whether it is a reservation for this job's user or group."""
        if not self.user and not self.group:
            return False
        return self.user in ("", job.user) and self.group in ("", job.group)

    def closes(self, job: "Job") -> float:
        """From when on it is not started on the nodes: it would not be over before the window begins."""
        return self.begin - (LEAD_S if job.estimate_s is None else job.estimate_s)


class Quota(msgspec.Struct, frozen=True):
    """The most that the running jobs of one (user, priority, group) may hold together; None: no limit.
    A node without GPUs counts as one GPU."""

    nodes: int | None = None
    gpus: int | None = None

    def holds(self, nodes: int, gpus: int) -> bool:
        """Whether so much is within it."""
        return (self.nodes is None or nodes <= self.nodes) and (
            self.gpus is None or gpus <= self.gpus
        )
