"""Whom a waiting job may interrupt, on which node, and from when on. Pure.

A job that runs may be asked to make room for a waiting one if its priority is lower; or if the priority is
the same, its level is higher, its quantum is over, and (where the policy spares them) it is of another user.

A `Room` remembers, for one kind of waiting job, what each node could give it, and looks again only at nodes
that were touched since, or whose time has come: a blocked queue costs what changes.
"""

import heapq
import math
from typing import TYPE_CHECKING

from fireflyer.hai.scheduling.capacity import members
from fireflyer.hai.scheduling.lanes import Rank, Shape

if TYPE_CHECKING:
    from fireflyer.hai.scheduling.cluster import Cluster, Job

Cost = tuple[int, int, int]
"""Of emptying a node: highest priority among the victims, how many they are (each has to save and to start
again: one large job rather than many small ones), minus their levels."""

NONE: Cost = (0, 0, 0)


def eligible_at(cluster: "Cluster", rank: Rank | None, job: "Job") -> float:
    """From when on `job`, which holds nodes, would make room for a waiting job of `rank`; inf: not as it is.

    Rank None: nobody is interrupted; when it ends, by its estimate.
    """
    if job.phase == "suspending":
        return -math.inf
    if rank is None:
        return ends_at(job)
    if job.level < -rank[0]:
        return -math.inf
    if job.level > -rank[0] or cluster.level(job) <= rank[1]:
        return math.inf
    return job.launched_at + cluster.policy.quantum_s(job)


def ends_at(job: "Job") -> float:
    """When a job that holds nodes ends by its estimate; inf: not known."""
    if job.estimate_s is None:
        return math.inf
    begin = job.started_at if job.phase == "running" else job.launched_at + (job.restart_s or 0.0)
    return begin + job.estimate_s


def look(
    cluster: "Cluster",
    place: int,
    rank: Rank | None,
    shape: Shape,
    now: float,
    spared: str | None = None,
) -> tuple[float, Cost, list["Job"]]:
    """When a node could take one member of a job of this shape, and by which victims if that is now.

    Args:
        spared: a user whose jobs of the same priority are left alone; None: nobody's.
    """
    _, gpus, memory = shape
    capacity = cluster.capacity
    if gpus > capacity.total[place] or (memory and 0 < capacity.total_memory[place] < memory):
        return math.inf, NONE, []
    left, left_memory = gpus - capacity.free[place], 0
    if memory and capacity.total_memory[place]:
        left_memory = memory - capacity.memory[place]
    here: list[tuple[float, int, int, float, int, Job]] = []
    for job in cluster.on[place].values():
        when = eligible_at(cluster, rank, job)
        if spared is not None and job.user == spared and rank is not None and job.level == -rank[0]:
            when = -math.inf if job.phase == "suspending" else math.inf
        if job.phase == "suspending":
            left -= job.gpus or capacity.total[place]
            left_memory -= job.memory_mib
        elif when != math.inf:
            here.append((when, job.level, -cluster.level(job), job.gpus_held, job.order, job))
        elif not gpus:
            return math.inf, NONE, []
    if not gpus:
        when = max((entry[0] for entry in here), default=-math.inf)
        victims = [entry[5] for entry in here]
        return when, _cost(cluster, victims), victims
    if left <= 0 and left_memory <= 0:
        return -math.inf, NONE, []
    now_ones = sorted((entry[1:] for entry in here if entry[0] <= now), key=lambda entry: entry[:4])
    total = capacity.total[place]
    victims = _enough([entry[4] for entry in now_ones], total, left, left_memory)
    if victims:
        return -math.inf, _cost(cluster, victims), victims
    for when, *_, job in sorted(here, key=lambda entry: (entry[0], entry[4])):
        left -= job.gpus or capacity.total[place]
        left_memory -= job.memory_mib
        if left <= 0 and left_memory <= 0:
            return when, NONE, []
    return math.inf, NONE, []


def _enough(jobs: list["Job"], total: int, left: int, left_memory: int) -> list["Job"]:
    """The first jobs that free enough, less those that turn out not to be needed; empty: not even all do."""
    chosen: list[Job] = []
    for job in jobs:
        if left <= 0 and left_memory <= 0:
            break
        chosen.append(job)
        left -= job.gpus or total
        left_memory -= job.memory_mib
    if left > 0 or left_memory > 0:
        return []
    for job in chosen[:]:
        if left + (job.gpus or total) <= 0 and left_memory + job.memory_mib <= 0:
            chosen.remove(job)
            left += job.gpus or total
            left_memory += job.memory_mib
    return chosen


def _cost(cluster: "Cluster", victims: list["Job"]) -> Cost:
    if not victims:
        return NONE
    return (
        max(job.level for job in victims),
        len(victims),
        -sum(cluster.level(job) for job in victims),
    )


class Room:
    """What each node could give to waiting jobs of one rank and shape."""

    __slots__ = ("_cluster", "_due", "_rank", "_read", "_shape", "_spared", "able", "cost", "when")

    def __init__(
        self, cluster: "Cluster", rank: Rank | None, shape: Shape, spared: str | None
    ) -> None:
        self._cluster = cluster
        self._rank = rank
        self._shape = shape
        self._spared = spared
        self._read = -1
        self._due: list[tuple[float, int]] = []
        self.able = 0
        """Nodes that could take a member now or once victims have left."""
        self.when: list[float] = []
        self.cost: list[Cost] = []

    def refresh(self, now: float) -> None:
        """Looks at what has changed."""
        cluster = self._cluster
        start = self._read - cluster.forgotten
        count = len(cluster.names)
        if self._read < 0 or start < 0 or len(self.when) != count:
            self.able, self._due = 0, []
            self.when, self.cost = [math.inf] * count, [NONE] * count
            stale = set(range(count))
        else:
            stale = set(cluster.touched[start:])
        self._read = cluster.forgotten + len(cluster.touched)
        while self._due and self._due[0][0] <= now:
            stale.add(heapq.heappop(self._due)[1])
        for place in sorted(stale):
            when, cost, _ = look(cluster, place, self._rank, self._shape, now, self._spared)
            self.when[place], self.cost[place] = when, cost
            if when <= now:
                self.able |= 1 << place
            else:
                self.able &= ~(1 << place)
                if when != math.inf:
                    heapq.heappush(self._due, (when, place))

    def next_at(self, now: float) -> float:
        """When another node's quantum ends; inf: none does."""
        while self._due and (
            self._due[0][0] <= now or self.when[self._due[0][1]] != self._due[0][0]
        ):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

    def cheapest(self, nodes: int) -> list[int]:
        """Nodes by what it costs to empty them, then by when that is possible, then by place."""
        return sorted(members(nodes), key=lambda place: (self.cost[place], self.when[place], place))
