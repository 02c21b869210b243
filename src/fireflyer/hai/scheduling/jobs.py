"""Data of the planner about nodes, tasks and rules, which `cluster.py` stores."""

from typing import Literal

import msgspec

from fireflyer.hai.model import PRIORITIES

Health = Literal["ready", "suspect", "drained", "down"]

AUTO = -1
NORMAL = PRIORITIES["normal"]

ANY = "*"
"""Any user or any group, in a quota."""

AVOID_S = 300.0
"""Seconds of waiting after which a job may also use the nodes that it avoids. The cause of the fault
may be gone, for example if only the supervisor was killed."""

Phase = Literal["queued", "starting", "running", "suspending", "held"]
"""held: suspended by its user; the job holds no nodes and waits for a resume."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs jobs."""

    name: str
    gpus: int = 0
    """Number of GPUs; 0: a job always takes the complete node."""
    gpu_type: str = ""
    """Type of its GPUs; empty: not known."""
    indexed: bool = True
    """False if another scheduler chooses the devices of a job, so that jobs get no indexes."""
    memory_mib: int = 0
    """Memory in MiB; 0: not known and not limited."""
    whole: bool = False
    """True if a job that asks for part of the node gets the complete node."""
    zone: str = ""
    leaf: str = ""
    """Names of the zone and of the switch in it; empty: not known."""
    health: Health = "ready"
    """suspect: used only if no other node is free; drained: running jobs continue; down: no job
    runs there."""
    reason: str = ""
    until: float | None = None
    """Time at which a drained or suspect node becomes ready again by itself."""


class Job(msgspec.Struct, gc=False, kw_only=True, eq=False):
    """The planner's view of a task. The caller sets the fields up to `avoid`; the cluster maintains
    the fields from `phase` on."""

    id: str
    order: int
    """Position in the order of submission."""
    nodes: int = 1
    gpus: int = 0
    """GPUs on each node; 0: whole nodes."""
    gpu_type: str = ""
    """Type of these GPUs; empty: any."""
    memory_mib: int = 0
    """Memory on each node; 0: all memory of the node."""
    user: str = ""
    group: str = ""
    priority: int = NORMAL
    """A value of PRIORITIES, or AUTO."""
    submitted: float = 0.0
    estimate_s: float | None = None
    """Seconds of work left, if known; the cluster subtracts running time."""
    avoid: frozenset[str] = frozenset()
    """Nodes on which the job had faults. The job uses them only if the other nodes are too few, or
    after a wait of AVOID_S."""

    phase: Phase = "queued"
    attempt: int = 0
    level: int = NORMAL
    """Effective priority, with AUTO resolved."""
    standing: int = 0
    """Level of the job's account under the policy; 0 if the policy has no accounts."""
    placement: tuple[str, ...] = ()
    """Nodes that the job holds."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Indexes of the GPUs that the job holds on each of these nodes."""
    previous: tuple[str, ...] = ()
    """Nodes where the engine keeps warm processes for the job; the planner prefers them."""
    since: float = 0.0
    """Time at which the job entered its phase."""
    launched_at: float = 0.0
    """Time at which the job got its nodes."""
    started_at: float = 0.0
    """Time at which all its ranks had started."""
    gpus_held: float = 0.0
    """GPUs that all members of the gang hold together; a node without GPUs counts 1."""
    attained: float = 0.0
    """Service of its ended attempts, in seconds x gpus_held."""
    overdue: bool = False
    """True if the job has waited longer than the policy's patience."""
    checkpoint_s: float | None = None
    restart_s: float | None = None
    """Last measured times: `checkpoint_s` from the suspend request until the nodes were free,
    `restart_s` from the launch until all ranks ran."""
    preemptions: int = 0
    ripe: bool = False
    """True if the job holds nodes and its quantum is over."""


class Reservation(msgspec.Struct, frozen=True):
    """Capacity that a plan reserves for a job that cannot start yet."""

    task: str
    places: tuple[int, ...]
    whole: bool
    """True if no later job may start on these nodes; False: only a member's share of each node is
    reserved."""
    reason: str
    """Reason, as text that follows the task's id."""
    until: float | None = None
    """Jobs that end by this time may use the nodes nevertheless; None: no job may."""


class Quota(msgspec.Struct, frozen=True):
    """Maximum nodes and GPUs that the running jobs of one (user, priority, group) hold together;
    None: no limit. A node without GPUs counts as one GPU."""

    nodes: int | None = None
    gpus: int | None = None

    def holds(self, nodes: int, gpus: int) -> bool:
        """Returns whether this many nodes and GPUs are within the quota."""
        return (self.nodes is None or nodes <= self.nodes) and (
            self.gpus is None or gpus <= self.gpus
        )
