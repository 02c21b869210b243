"""Repacking: jobs move so that scattered free GPUs come together for a waiting job. Pure.

A job may move if it has one node, its quantum is over and its priority is not higher than that of
the waiting job. Free GPUs on another node must also suffice for the job, so that it saves and
restarts at once. A move costs the user a save and a restart, but no share of the cluster. Levels
and users therefore do not matter; `MOST` limits the moved GPUs per gained GPU.
"""

from fireflyer.hai.scheduling.capacity import members
from fireflyer.hai.scheduling.changes import ChangeReader
from fireflyer.hai.scheduling.jobs import Job
from fireflyer.hai.scheduling.placement import choose
from fireflyer.hai.scheduling.preemption import first_enough
from fireflyer.hai.scheduling.view import ClusterView

MOST = 0.5
"""Maximum number of GPUs moved per GPU that the waiting job gets on the vacated nodes."""


class RepackIndex:
    """Index of the jobs that must move from each node, for waiting jobs of one priority and size.

    A changed node (`Changes`) is examined again, so results do not depend on the cache.
    """

    __slots__ = ("_changes", "_cluster", "_found", "_gpus", "_level", "_memory_mib")

    def __init__(self, cluster: ClusterView, level: int, gpus: int, memory_mib: int) -> None:
        self._cluster = cluster
        self._level, self._gpus, self._memory_mib = level, gpus, memory_mib
        self._changes = ChangeReader(cluster.changes)
        self._found: dict[int, tuple[int, list[Job]]] = {}
        """GPUs to move, and the jobs that hold them, by place. Has only nodes that need moves and
        can be emptied."""

    def search(self, count: int, among: int) -> dict[int, list[Job]]:
        """Returns the nodes of `among` that could take `count` members with the fewest GPUs moved.

        Returns:
            The jobs that must move, by place, cheapest first; a node with enough free capacity has
            no such jobs. Empty: there are too few nodes, too many GPUs would move, or no move is
            needed.
        """
        self._refresh()
        cluster = self._cluster
        enough = cluster.topology.enough
        nodes = cluster.capacity.fitting(self._gpus, self._memory_mib, among)
        able = [place for place in self._found if among >> place & 1]
        if nodes.bit_count() + len(able) < count or enough(count, nodes):
            return {}
        chosen: dict[int, list[Job]] = {place: [] for place in members(nodes)}
        moved, gained = 0, 0
        for place in sorted(able, key=lambda place: (self._found[place][0], place)):
            gpus, chosen[place] = self._found[place]
            moved += gpus
            gained += cluster.capacity.share(place, self._gpus)
            nodes |= 1 << place
            if moved > MOST * gained:
                return {}
            if enough(count, nodes):
                return chosen
        return {}

    def _refresh(self) -> None:
        stale = self._changes.read()
        for place in range(len(self._cluster.names)) if stale is None else stale:
            jobs = self._leave(place)
            if jobs:
                self._found[place] = (sum(job.gpus for job in jobs), jobs)
            else:
                self._found.pop(place, None)

    def _leave(self, place: int) -> list[Job]:
        """Returns the jobs that must move from a node, small jobs first; empty: no job must move,
        or moves do not suffice."""
        cluster = self._cluster
        capacity = cluster.capacity
        lacks = capacity.lacks(place, capacity.share(place, self._gpus), self._memory_mib)
        if lacks is None or capacity.whole >> place & 1:
            return []
        able = [
            job
            for job in cluster.on[place].values()
            if job.nodes == 1
            and job.gpus
            and job.ripe
            and job.phase != "suspending"
            and job.level <= self._level
        ]
        able.sort(key=lambda job: (job.gpus, job.order))
        return first_enough([(job, job.gpus) for job in able], *lacks)


def destinations(
    cluster: ClusterView, jobs: list[Job], among: int, now: float
) -> list[tuple[Job, int]]:
    """Chooses for each of these jobs a node to which the job can move immediately, by best fit,
    large jobs first.

    Args:
        among: nodes that the jobs may move to; windows and faults may exclude some nodes for a job.

    Returns:
        Each job and its new place; empty: the free capacity does not suffice for all of them.
    """
    draft = cluster.capacity.copy()
    found: list[tuple[Job, int]] = []
    for job in sorted(jobs, key=lambda job: (-job.gpus, job.order)):
        allowed = among & cluster.allowed(job, now)
        fitting = draft.fitting(job.gpus, job.memory_mib, allowed)
        if not fitting:
            return []
        (place,) = choose(job, fitting, [], draft, cluster.topology)
        draft.take(place, job.gpus, job.memory_mib)
        found.append((job, place))
    return found
