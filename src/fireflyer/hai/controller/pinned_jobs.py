"""Validation tasks: each waits for one node, outside the queue.

Such a task starts when its node is idle: a drained node at once, any other node only while no job
is queued, so that it never takes a place for which another task waits. It neither reserves a node
nor makes other tasks leave. While it runs it counts as any other task of low priority, and makes
room like one.
"""

from fireflyer.hai.lifecycle import Launch
from fireflyer.hai.scheduling.cluster import Cluster, Job


class PinnedJobs:
    """Waiting validation tasks of one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.nodes: dict[str, str] = {}
        """Node of each validation task that is not over."""
        self._waiting: dict[str, Job] = {}

    def add(self, job: Job, node: str, now: float) -> None:
        """Adds a job that waits for a node, or, as recovered, already holds it."""
        self.nodes[job.id] = node
        job.level = job.priority
        if job.phase == "queued":
            job.phase = "held"
            self._waiting[job.id] = job
        self._cluster.adopt(job, now)

    def wait(self, task: str) -> None:
        """Makes a job wait again: its attempt ended without an end of the task."""
        self._waiting[task] = self._cluster.jobs[task]

    def pause(self, task: str) -> None:
        """Makes a job wait no more: it was suspended."""
        self._waiting.pop(task, None)

    def forget(self, task: str) -> None:
        """Forgets a job that is over."""
        self.nodes.pop(task, None)
        self._waiting.pop(task, None)

    def launches(self) -> list[Launch]:
        """Returns the launches due now; the caller applies each to the cluster."""
        found, cluster = [], self._cluster
        for task, job in list(self._waiting.items()):
            name = self.nodes[task]
            node = cluster.nodes.get(name)
            if node is None or node.health == "down":
                continue
            if not cluster.capacity.idle >> cluster.places[name] & 1:
                continue
            if node.health == "drained" or not cluster.queue:
                del self._waiting[task]
                found.append(Launch(task, job.attempt + 1, (name,)))
        return found
