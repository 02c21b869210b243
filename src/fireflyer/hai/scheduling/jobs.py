"""Planner's data on nodes, tasks and rules. Values; `cluster.py` keeps them."""

from typing import Literal

import msgspec

from fireflyer.hai.model import PRIORITIES

Health = Literal["ready", "suspect", "drained", "down"]

AUTO = -1
NORMAL = PRIORITIES["normal"]

ANY = "*"
"""Any user or any group, in a quota."""

AVOID_S = 300.0
"""Wait after which a job takes nodes that it avoids rather than leave them idle: what failed there
may be over, as when only the supervisor was killed."""

Phase = Literal["queued", "starting", "running", "suspending", "held"]
"""held: suspended by its user; it holds nothing and waits for a resume."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs jobs."""

    name: str
    gpus: int = 0
    """0: the node takes one job, whole."""
    gpu_type: str = ""
    """Type of its GPUs; empty: not known."""
    indexed: bool = True
    """False if another scheduler chooses the devices of a job, so that jobs get no indexes."""
    memory_mib: int = 0
    """0: not known, not limited."""
    whole: bool = False
    """True if a job that gets a part of the node gets all of it."""
    zone: str = ""
    leaf: str = ""
    """Names of the zone and of the switch in it; empty: not known."""
    health: Health = "ready"
    """suspect: used only if nothing else is free; drained: running jobs continue; down: nothing
    runs there."""
    reason: str = ""
    until: float | None = None
    """Time at which a drained or suspect node becomes ready again by itself."""


class Job(msgspec.Struct, gc=False, kw_only=True, eq=False):
    """The planner's view of a task. The caller sets the first part; the cluster maintains the
    second."""

    id: str
    order: int
    """Position in the order of submission."""
    nodes: int = 1
    gpus: int = 0
    """GPUs on each node; 0: whole nodes."""
    gpu_type: str = ""
    """Type of these GPUs; empty: any."""
    memory_mib: int = 0
    """Memory on each node; 0: all that it has."""
    user: str = ""
    group: str = ""
    priority: int = NORMAL
    """A value of PRIORITIES, or AUTO."""
    submitted: float = 0.0
    estimate_s: float | None = None
    """Seconds of work left, if known; the cluster subtracts running time."""
    avoid: frozenset[str] = frozenset()
    """Nodes where the job met faults; used if the others are too few, or after a wait of AVOID_S."""

    phase: Phase = "queued"
    attempt: int = 0
    level: int = NORMAL
    """Priority in force: AUTO resolved."""
    standing: int = 0
    """Level of its account, by the policy; 0 if there are no accounts."""
    placement: tuple[str, ...] = ()
    """Nodes that the job holds."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the GPUs that the job holds on each of these nodes."""
    previous: tuple[str, ...] = ()
    """Nodes where the engine keeps something warm for the job; preferred."""
    since: float = 0.0
    """Time at which the job entered its phase."""
    launched_at: float = 0.0
    """Time at which the job got its nodes."""
    started_at: float = 0.0
    """Time at which all its ranks had started."""
    gpus_held: float = 0.0
    """GPUs that the whole gang holds; a node without GPUs counts 1."""
    attained: float = 0.0
    """Service of its ended attempts, in seconds x gpus_held."""
    overdue: bool = False
    """True if the job has waited longer than the policy's patience."""
    checkpoint_s: float | None = None
    restart_s: float | None = None
    """Last measured time from the suspend request until the nodes were free; from the launch to
    running."""
    preemptions: int = 0
    ripe: bool = False
    """True if the job holds nodes and its quantum is over."""


class Reservation(msgspec.Struct, frozen=True):
    """Capacity that a plan keeps for a job which cannot start yet."""

    task: str
    places: tuple[int, ...]
    whole: bool
    """True if nothing may start there behind the job; False: it holds a member's share of each
    node."""
    reason: str
    """Reason, as text that follows the task's id."""
    until: float | None = None
    """Jobs that end by this time may use the nodes all the same; None: no job may."""


class Quota(msgspec.Struct, frozen=True):
    """Maximum that the running jobs of one (user, priority, group) may hold together; None: no
    limit. A node without GPUs counts as one GPU."""

    nodes: int | None = None
    gpus: int | None = None

    def holds(self, nodes: int, gpus: int) -> bool:
        """Returns whether this many nodes and GPUs are within the quota."""
        return (self.nodes is None or nodes <= self.nodes) and (
            self.gpus is None or gpus <= self.gpus
        )
