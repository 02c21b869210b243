"""Preemption: the victims that a waiting job may preempt, and the nodes where this costs least.
Pure.

A waiting job may preempt a running job of lower priority. At the same priority, the running job's
level must be higher and its quantum over. If the policy spares a user's own jobs, the running job
must also belong to another user.

`VictimIndex` sorts the nodes by the victim that would be preempted first, for any waiting job. A
`PreemptionCache` searches this index for waiting jobs of one shape and one queue rank (`QueueKey`:
priority and level). It keeps the result for a node until the node changes (`Changes`), so a
search finds the same nodes as without the cache. The end of a quantum is such a change.
"""

import math

from fireflyer.hai.scheduling.capacity import members
from fireflyer.hai.scheduling.changes import ChangeReader
from fireflyer.hai.scheduling.jobs import Job
from fireflyer.hai.scheduling.lanes import QueueKey, Shape
from fireflyer.hai.scheduling.view import ClusterView

Cost = tuple[int, float, int, int]
"""Cost of emptying a node, compared in this order: highest priority among the victims; GPUs or nodes
that the victims hold, per needed node (`_cost`); number of victims, which must all save and restart;
minus the sum of their levels."""

_Found = tuple[Cost, int, list[Job], int]
"""Cost of emptying a node, its place, the victims, and all nodes that the same victims leave at the
same cost: the node alone, or all nodes of a gang that uses complete nodes."""

NONE: Cost = (0, 0.0, 0, 0)

Class = tuple[int, int]
"""(job.level, -job.standing) of a job that holds nodes: its effective priority, and minus the level
of its account. Jobs of smaller classes are preempted first."""

LEAVING: Class = (-2, 0)
"""Class of suspending jobs, smaller than all others."""

LOOKS = 64
"""Maximum number of victim sets that a search compares, in the order of the index. A gang counts
once, however many nodes it has, so that it does not hide smaller jobs."""


def bound(rank: QueueKey) -> Class:
    """Returns the class bound of a queue rank: waiting jobs of the rank may preempt only jobs of
    smaller classes."""
    return -rank[0], -rank[1]


def victims_on(
    cluster: ClusterView, place: int, limit: Class, shape: Shape, spared: str | None
) -> list[Job] | None:
    """Returns the victims that must leave a node so that it can take one member of this shape;
    None: impossible.

    Args:
        limit: the `bound` of the waiting jobs.
        spared: a user whose jobs of the same priority are not preempted; None: no user.
    """
    _, gpus, memory = shape
    capacity = cluster.capacity
    lacks = capacity.lacks(place, gpus, memory)
    if lacks is None:
        return None
    left, left_memory = lacks
    on = cluster.on[place]
    if len(on) == 1 and not capacity.free[place]:  # the usual case in a busy cluster
        (job,) = on.values()
        if job.phase == "suspending":
            return []
        minus_level = -job.standing
        leaves = (
            (job.level, minus_level) < limit
            and (job.ripe or job.level < limit[0])
            and (spared is None or job.user != spared or job.level != limit[0])
        )
        return [job] if leaves else None
    here: list[tuple[int, int, float, int, Job]] = []
    for job in on.values():
        if job.phase == "suspending":
            left -= capacity.share(place, job.gpus)
            left_memory -= job.memory_mib
            continue
        minus_level = -job.standing
        if (
            (job.level, minus_level) < limit
            and (job.ripe or job.level < limit[0])
            and (spared is None or job.user != spared or job.level != limit[0])
        ):
            here.append((job.level, minus_level, job.gpus_held, job.order, job))
        elif not gpus:
            return None
    if not gpus:
        return [entry[4] for entry in here]
    if left <= 0 and left_memory <= 0:
        return []
    here.sort(key=lambda entry: entry[:4])
    jobs = [(entry[4], capacity.share(place, entry[4].gpus)) for entry in here]
    return first_enough(jobs, left, left_memory) or None


def first_enough(jobs: list[tuple[Job, int]], left: int, left_memory: int) -> list[Job]:
    """Returns the first jobs that together free enough, without jobs that prove unnecessary. Empty:
    all jobs together do not suffice.

    Args:
        jobs: each job with the GPUs that it holds on the node.
        left: GPUs that the node lacks; a negative number is a surplus.
        left_memory: MiB that the node lacks; a negative number is a surplus.
    """
    chosen: list[tuple[Job, int]] = []
    for job, gpus in jobs:
        if left <= 0 and left_memory <= 0:
            break
        chosen.append((job, gpus))
        left -= gpus
        left_memory -= job.memory_mib
    if left > 0 or left_memory > 0:
        return []
    for job, gpus in chosen[:]:
        if left + gpus <= 0 and left_memory + job.memory_mib <= 0:
            chosen.remove((job, gpus))
            left += gpus
            left_memory += job.memory_mib
    return [job for job, _ in chosen]


def _cost(victims: list[Job], priority: int, count: int) -> Cost:
    """Returns the cost of one of `count` nodes for a job of this priority.

    A preempted gang leaves all its nodes, of which at most `count` are needed, so each of these
    nodes bears its share of the gang's cost. For victims of lower priority the cost counts GPUs. At
    the same priority, where jobs take turns, the cost counts nodes. Counting GPUs would preempt the
    smallest jobs most often, even if they have had little service.
    """
    if not victims:
        return NONE
    if len(victims) == 1:
        (job,) = victims
        size = job.gpus_held if job.level < priority else job.nodes
        return job.level, size / min(job.nodes, count), 1, -job.standing
    highest = max(job.level for job in victims)
    lower = highest < priority
    return (
        highest,
        sum((job.gpus_held if lower else job.nodes) / min(job.nodes, count) for job in victims),
        len(victims),
        -sum(job.standing for job in victims),
    )


def ready_at(
    cluster: ClusterView, place: int, rank: QueueKey | None, shape: Shape, spared: str | None = None
) -> float:
    """Returns the time at which a node could take a member of this shape if no job ends early; inf:
    not known. Rank None: no job is preempted, and jobs end by their estimates.
    """
    _, gpus, memory = shape
    capacity = cluster.capacity
    lacks = capacity.lacks(place, gpus, memory)
    if lacks is None:
        return math.inf
    left, left_memory = lacks
    times: list[tuple[float, int, Job]] = []
    for job in cluster.on[place].values():
        when = -math.inf if job.phase == "suspending" else _leaves_at(cluster, rank, job, spared)
        if when != math.inf:
            times.append((when, job.order, job))
        elif not gpus:
            return math.inf
    if not gpus:
        return max((when for when, _, _ in times), default=-math.inf)
    found = -math.inf
    for when, _, job in sorted(times, key=lambda entry: entry[:2]):
        if left <= 0 and left_memory <= 0:
            break
        found = when
        left -= capacity.share(place, job.gpus)
        left_memory -= job.memory_mib
    return found if left <= 0 and left_memory <= 0 else math.inf


def _leaves_at(cluster: ClusterView, rank: QueueKey | None, job: Job, spared: str | None) -> float:
    """Returns the time from which a running job may be preempted; inf: never under these rules.
    Rank None: returns the estimated end of the job."""
    if rank is None:
        if job.estimate_s is None:
            return math.inf
        started = job.phase == "running"
        begin = job.started_at if started else job.launched_at + (job.restart_s or 0.0)
        return begin + job.estimate_s
    limit = bound(rank)
    if job.level < limit[0]:
        return -math.inf
    if (job.level, -job.standing) >= limit or job.user == spared:
        return math.inf
    return job.launched_at + cluster.policy.quantum_s(job)


class VictimIndex:
    """Index of nodes by the smallest class of their jobs, and of nodes with a job whose quantum is
    over."""

    __slots__ = ("_changes", "_cluster", "_of", "_reach", "_ripe", "_steps")

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._changes = ChangeReader(cluster.changes)
        self._of: list[Class | None] = []
        """Smallest class of the jobs on each node, by place; None: the node holds no job."""
        self._steps: dict[Class, int] = {}
        """Nodes by the smallest class of their jobs."""
        self._reach: dict[Class, int] = {}
        """Cached results of `reach`."""
        self._ripe = 0
        """Nodes that hold a job whose quantum is over."""

    def refresh(self) -> None:
        """Examines the nodes that have changed."""
        cluster, stale = self._cluster, self._changes.read()
        self._of.extend([None] * (len(cluster.names) - len(self._of)))
        for place in range(len(cluster.names)) if stale is None else stale:
            before, found, ripe = self._of[place], None, False
            for job in cluster.on[place].values():
                ripe |= job.ripe
                of = LEAVING if job.phase == "suspending" else (job.level, -job.standing)
                if found is None or of < found:
                    found = of
            bit = 1 << place
            if ripe != bool(self._ripe & bit):
                self._reach.clear()
                self._ripe ^= bit
            if found != before:
                self._reach.clear()
                self._of[place] = found
                if before is not None:
                    self._steps[before] ^= bit
                    if not self._steps[before]:
                        del self._steps[before]
                if found is not None:
                    self._steps[found] = self._steps.get(found, 0) | bit

    def reach(self, limit: Class) -> int:
        """Returns all nodes on which waiting jobs with this `bound` may preempt a job."""
        self.refresh()
        found = self._reach.get(limit)
        if found is None:
            found = 0
            for nodes in self.below(limit):
                found |= nodes
            self._reach[limit] = found
        return found

    def below(self, limit: Class) -> list[int]:
        """Returns disjoint sets of the nodes on which jobs with this `bound` may preempt a job,
        smallest class first. Such a node has a job that is already leaving, a job of lower
        priority, or both a job of a class below the bound and a job whose quantum is over (possibly
        the same job). Other nodes have no victim."""
        found = []
        for of in sorted(self._steps):
            if of >= limit:
                break
            nodes = self._steps[of] if of[0] < limit[0] else self._steps[of] & self._ripe
            if nodes:
                found.append(nodes)
        return found


class PreemptionCache:
    """Capacity that each node could give to waiting jobs of one queue rank and shape."""

    __slots__ = (
        "_changes",
        "_cluster",
        "_found",
        "_limit",
        "_rank",
        "_shape",
        "_spared",
        "_unable",
        "_victim_index",
        "_when",
    )

    def __init__(
        self,
        cluster: ClusterView,
        victim_index: VictimIndex,
        rank: QueueKey | None,
        shape: Shape,
        spared: str | None,
    ) -> None:
        self._cluster, self._victim_index = cluster, victim_index
        self._rank = rank
        self._limit = (0, 0) if rank is None else bound(rank)
        self._shape = shape
        self._spared = spared
        self._changes = ChangeReader(cluster.changes)
        self._found: dict[int, _Found] = {}
        self._unable = 0
        """Nodes that were examined and cannot be emptied."""
        self._when: dict[int, float] = {}

    def refresh(self) -> None:
        """Drops the cache entries of nodes that have changed."""
        stale = self._changes.read()
        if stale is None:
            self._unable = 0
            self._found.clear()
            self._when.clear()
            return
        for place in stale:
            self._unable &= ~(1 << place)
            self._found.pop(place, None)
            self._when.pop(place, None)

    def when(self, place: int) -> float:
        """Returns the time at which a node could take a member."""
        found = self._when.get(place)
        if found is None:
            found = ready_at(self._cluster, place, self._rank, self._shape, self._spared)
            self._when[place] = found
        return found

    def search(self, among: int, count: int) -> dict[int, list[Job]]:
        """Returns the cheapest nodes that can take `count` members, now or after their victims have
        left.

        Returns:
            The victims that must leave each node, by place, cheapest first; empty: there are too few nodes.
        """
        cluster = self._cluster
        enough = cluster.topology.enough
        left = among & ~self._unable
        if not enough(count, left):
            return {}
        victim_index = self._victim_index
        victim_index.refresh()
        free = cluster.capacity.fitting(self._shape[1], self._shape[2], left)
        seen = self._examine((free, *victim_index.below(self._limit)), left, count)
        chosen: dict[int, list[Job]] = {}
        nodes = 0
        for _, _, victims, alike in sorted(seen) if count > 1 else [min(seen)] if seen else []:
            for place in members(alike):
                chosen[place] = victims
                nodes |= 1 << place
                if len(chosen) >= count and enough(count, nodes):
                    return chosen
        return {}

    def _examine(self, steps: tuple[int, ...], left: int, count: int) -> list[_Found]:
        """Returns the nodes of `left` that can be emptied, in the order of `steps`. Stops after
        `LOOKS` sets of victims if they suffice for the gang. The nodes of a gang that uses complete
        nodes form one entry."""
        found, enough = self._found, self._cluster.topology.enough
        seen: list[_Found] = []
        known: set[Job] = set()
        sets = able = 0
        for step in steps:
            nodes = step & left
            left &= ~nodes
            while nodes:
                place = (nodes & -nodes).bit_length() - 1
                entry = found.get(place) or self._look(place)
                if entry is None:
                    nodes &= nodes - 1
                    continue
                cost, _, victims, alike = entry
                alike &= nodes
                nodes ^= alike
                able |= alike
                seen.append((cost, place, victims, alike))
                if not victims or not known.issuperset(victims):
                    sets += 1
                    known.update(victims)
                if sets >= LOOKS and enough(count, able):
                    return seen
        return seen

    def _look(self, place: int) -> _Found | None:
        """Returns the cost and the victims of emptying a node, and caches the result; None: the
        node cannot be emptied."""
        victims = victims_on(self._cluster, place, self._limit, self._shape, self._spared)
        if victims is None:
            self._unable |= 1 << place
            return None
        alike = 1 << place
        if len(victims) == 1 and victims[0].nodes > 1 and not victims[0].gpus:
            alike |= self._alike(victims[0])
        entry = (_cost(victims, self._limit[0], self._shape[0]), place, victims, alike)
        for each in members(alike):
            self._found[each] = entry
        return entry

    def _alike(self, gang: Job) -> int:
        """Returns the nodes of a gang that are large enough for a member. REQUIRES: the gang uses
        complete nodes, so all of them change together."""
        capacity, places = self._cluster.capacity, self._cluster.places
        nodes = 0
        for name in gang.placement:
            if not capacity.free[places[name]]:  # otherwise the node's size has changed meanwhile
                nodes |= 1 << places[name]
        return capacity.sized(self._shape[1], self._shape[2], nodes)
