"""Validation tasks: each waits for one node, outside the queue.

A validation task starts when its node is idle. If the node is not drained, the validation task also
waits until no job is queued, so that it takes no node from a queued task. A validation task neither
reserves a node nor preempts other tasks. A running validation task can be preempted like any other
task of low priority.
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
        """Adds a job that waits for a node, or a recovered job that already holds the node."""
        self.nodes[job.id] = node
        job.level = job.priority
        if job.phase == "queued":
            job.phase = "held"
            self._waiting[job.id] = job
        self._cluster.adopt(job, now)

    def wait(self, task: str) -> None:
        """Makes a job wait again after an attempt that did not end its task."""
        self._waiting[task] = self._cluster.jobs[task]

    def pause(self, task: str) -> None:
        """Removes a suspended job from the waiting jobs."""
        self._waiting.pop(task, None)

    def forget(self, task: str) -> None:
        """Removes a job that is over."""
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
