"""The state that `plan` looks at: nodes, jobs, quotas, windows, with the indexes that keep a plan cheap.

The caller (the server's controller, the simulator) tells it what happens, one call an event; each call costs
what it changes. It has no clock: every time is `now` of the caller, in seconds on one clock that never goes
back. Pure.

    cluster = Cluster([Node(name="n0", gpus=8)])
    cluster.submit(Job(id="t1", order=1, gpus=2), now=0.0)
    for action in plan(cluster, 0.0):        # [Launch("t1", 1, ("n0",))]
        cluster.apply(action, 0.0)
    cluster.running("t1", 1.5)
    cluster.remove("t1", 60.0)               # it has ended
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from fireflyer.hai.capacity import Capacity, members
from fireflyer.hai.lifecycle import Action, Launch, Preempt, Release

Health = Literal["ready", "suspect", "drained", "down"]

PRIORITIES: Mapping[str, int] = {
    "low": 8, "normal": 10, "above_normal": 20, "high": 30, "very_high": 40, "extreme_high": 50,
}  # fmt: skip
"""HAI's levels. "auto" is the highest level for which the user has a quota with room left, else normal."""

AUTO = -1
NORMAL = PRIORITIES["normal"]

ANY = "*"
"""In a quota: any user, any group."""

Phase = Literal["queued", "starting", "running", "suspending", "held"]
"""held: suspended by its user; it holds nothing and waits for a resume."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine that runs jobs."""

    name: str
    gpus: int = 0
    """0: the node takes one job, whole."""
    memory_mib: int = 0
    """0: not known, not limited."""
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
    """Work that is left when it is queued, if known; without it nothing is said or planned about its end."""
    avoid: frozenset[str] = frozenset()
    """Nodes on which it met faults: taken only when others are not free."""

    phase: Phase = "queued"
    attempt: int = 0
    level: int = NORMAL
    """The priority that counts: AUTO resolved."""
    placement: tuple[str, ...] = ()
    """Nodes that it holds."""
    previous: tuple[str, ...] = ()
    """Nodes where the engine keeps something warm for it; preferred."""
    since: float = 0.0
    """When it entered its phase."""
    launched_at: float = 0.0
    """When its nodes were given to it."""
    attained: float = 0.0
    """Service of its ended attempts: GPU-seconds, or node-seconds of nodes without GPUs."""
    checkpoint_s: float | None = None
    restart_s: float | None = None
    """Last measured: from the request to suspend until the nodes were free; from the launch to running."""
    preemptions: int = 0


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


class Quota(msgspec.Struct, frozen=True):
    """The most that the running jobs of one (user, priority, group) may hold together; None: no limit."""

    nodes: int | None = None
    gpus: int | None = None


class Cluster:
    """Nodes, jobs and rules, and what follows from them. One thread uses it.

    Args:
        nodes: may change later (`set_node`); a name keeps its place for good.
    """

    def __init__(self, nodes: Iterable[Node] = (), policy: str = "fifo") -> None:
        self.nodes: dict[str, Node] = {}
        self.jobs: dict[str, Job] = {}
        self.capacity = Capacity()
        self.names: list[str] = []
        """Name by place."""
        self._places: dict[str, int] = {}
        self._on: list[dict[str, Job]] = []
        self.queue: dict[str, Job] = {}
        self.policy = policy
        for node in nodes:
            self.set_node(node)

    # -- nodes -------------------------------------------------------------------------------------

    def set_node(self, node: Node) -> None:
        """A new node, or another size, health or place of one that is known."""
        place = self._places.get(node.name)
        if place is None:
            self._places[node.name] = self.capacity.add(node.gpus, node.memory_mib)
            self.names.append(node.name)
            self._on.append({})
        else:
            self.capacity.resize(place, node.gpus, node.memory_mib)
        self.nodes[node.name] = node

    def jobs_on(self, node: str) -> list[Job]:
        """Those that hold something of it, in order of submission."""
        return sorted(self._on[self._places[node]].values(), key=lambda job: job.order)

    # -- events ------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """A new job enters the queue."""
        self.jobs[job.id] = job
        job.submitted = now
        self._enqueue(job, now)

    def apply(self, action: Action, now: float) -> None:
        """Carries out what `plan` decided; the caller then has it happen in the world."""
        job = self.jobs[action.task]
        match action:
            case Launch():
                del self.queue[job.id]
                job.attempt = action.attempt
                job.placement, job.previous = action.nodes, ()
                for place in map(self._places.__getitem__, action.nodes):
                    self.capacity.take(place, job.gpus, job.memory_mib)
                    self._on[place][job.id] = job
                job.launched_at = now
                self._enter(job, "starting", now)
            case Preempt():
                job.preemptions += 1
                self.suspending(job.id, now)
            case Release():
                job.previous = ()

    def running(self, task: str, now: float) -> None:
        """All its ranks have started."""
        job = self.jobs[task]
        job.restart_s = now - job.since
        self._enter(job, "running", now)

    def suspending(self, task: str, now: float) -> None:
        """It was asked to save and leave: by its user, or to make room."""
        self._enter(self.jobs[task], "suspending", now)

    def requeue(self, task: str, now: float) -> None:
        """Its attempt is over (made room, met a fault) and it goes back into the queue; or it was resumed."""
        job = self.jobs[task]
        self._leave(job, now)
        self._enqueue(job, now)

    def hold(self, task: str, now: float) -> None:
        """Its user suspended it; it holds nothing from now on, and waits for `requeue`."""
        job = self.jobs[task]
        self._leave(job, now)
        self._enter(job, "held", now)

    def remove(self, task: str, now: float) -> None:
        """It is over."""
        job = self.jobs.pop(task)
        self._leave(job, now)

    def next_look(self, now: float) -> float | None:
        """When a plan may say something new though nothing happens; None: never."""
        del now
        return None

    # -- inside ------------------------------------------------------------------------------------

    def _enter(self, job: Job, phase: Phase, now: float) -> None:
        job.phase, job.since = phase, now

    def _enqueue(self, job: Job, now: float) -> None:
        self.queue[job.id] = job
        self._enter(job, "queued", now)

    def _leave(self, job: Job, now: float) -> None:
        """Takes it out of the queue or off its nodes."""
        self.queue.pop(job.id, None)
        if job.phase == "suspending":
            job.checkpoint_s = now - job.since
        for place in map(self._places.__getitem__, job.placement):
            self.capacity.give(place, job.gpus, job.memory_mib)
            del self._on[place][job.id]
        job.placement = ()

    def usable(self) -> int:
        """The nodes that are ready, as a set of places."""
        return sum(
            1 << self._places[name] for name, node in self.nodes.items() if node.health == "ready"
        )


def plan(cluster: Cluster, now: float) -> list[Action]:
    """Decides what to do now: a list of launches, preemptions and releases, to be applied in order.

    Leaves the cluster as it is. The same cluster and `now` give the same list.
    """
    del now
    actions: list[Action] = []
    draft = cluster.capacity.copy()
    usable = cluster.usable()
    for job in sorted(cluster.queue.values(), key=lambda job: (-job.level, job.order)):
        fit = draft.fitting(job.gpus, job.memory_mib, usable)
        if fit.bit_count() < job.nodes:
            break
        chosen: list[int] = []
        while len(chosen) < job.nodes:
            tight = draft.tightest(job.gpus, fit)
            chosen += list(members(tight))[: job.nodes - len(chosen)]
            fit &= ~tight
        for place in chosen:
            draft.take(place, job.gpus, job.memory_mib)
        actions.append(Launch(job.id, job.attempt + 1, tuple(cluster.names[p] for p in chosen)))
    return actions
