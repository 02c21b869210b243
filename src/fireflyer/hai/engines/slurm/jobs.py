"""Slurm jobs of an engine's tasks, one per task, and the nodes of the partition. Finds, submits,
watches and ends jobs.

If Slurm does not answer, no state changes. Used on one asyncio loop; the commands run in threads.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from fireflyer.errors import PeerLost, TaskError
from fireflyer.hai.engines.slurm.cli import JobLine, PartitionNode, Share, Slurm, final
from fireflyer.log import get_logger

GONE = "GONE"
"""State of a job that Slurm has forgotten."""

_log = get_logger("hai")


class Job:
    """Job of a task, in the state that the last query reported."""

    def __init__(self, id: int, nodes: frozenset[str], state: str) -> None:
        self.id = id
        self.nodes = nodes
        self.state = state
        self.left = set(nodes)
        """Nodes on which a supervisor of the job may live."""

    @property
    def alive(self) -> bool:
        """True if the job is pending or running, and no supervisor is known to be dead."""
        ending = self.state in ("COMPLETING", GONE) or final(self.state)
        return not ending and self.left == self.nodes

    @property
    def over(self) -> bool:
        """True if no process of the job is left on any node."""
        # Slurm may keep the state COMPLETING while it waits for a dead node, so `left` decides.
        if self.state == "COMPLETING":
            return not self.left
        return self.state == GONE or final(self.state)

    def __str__(self) -> str:
        return f"Slurm job {self.id} ({self.state})"


class PartitionNodes:
    """Nodes of the partition, as the last query reported them."""

    def __init__(self, slurm: Slurm) -> None:
        """Reads the nodes.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: slurmctld rejects the request.
        """
        self._slurm = slurm
        self._looking = asyncio.Lock()
        self._take(slurm.places())

    def _take(self, places: list[PartitionNode]) -> None:
        self.nodes = [place.node for place in places]
        self.unfit = [p.node for p in places if p.node.state != "up" and not p.unresponsive]
        """Nodes that no pending job will get."""
        self._addresses = {place.node.name: place.address for place in places}

    def address(self, node: str) -> str:
        """Returns the node's address, or its name if the partition has no such node."""
        return self._addresses.get(node, node)

    async def look(self) -> bool:
        """Reads the nodes again; returns whether any node has changed, False if Slurm does not
        answer."""
        async with self._looking:  # an older answer must not replace a newer one
            try:
                places = await asyncio.to_thread(self._slurm.places)
            except (PeerLost, TaskError) as error:
                _log.debug("could not query nodes: %s", error)
                return False
            before = self.nodes
            self._take(places)
            return self.nodes != before


class Jobs:
    def __init__(self, slurm: Slurm, prefix: str) -> None:
        """`prefix`: start of the names of all jobs of this engine, and of no other jobs."""
        self._slurm = slurm
        self._prefix = prefix
        self._jobs: dict[str, Job] = {}
        self._unreachable = False
        self._looking = asyncio.Lock()

    def of(self, task: str) -> Job | None:
        """Returns the task's job if this engine knows the job, else None."""
        return self._jobs.get(task)

    def any(self) -> bool:
        return bool(self._jobs)

    def forget(self, task: str) -> None:
        """Forgets the task's job. REQUIRES: the job is over."""
        self._jobs.pop(task, None)

    async def find(self, task: str) -> Job | None:
        """Returns the task's job, also if an earlier engine submitted the job; None if the job is
        over.

        Raises:
            PeerLost: slurmctld does not answer.
            TaskError: slurmctld rejects the request.
        """
        known = self._jobs.get(task)
        if known is not None:
            return known
        lines = await self._list()
        found = [line for line in lines if line.name == self._prefix + task and not line.over]
        if not found:
            return None
        newest = max(found, key=lambda line: line.id)
        self._jobs[task] = Job(newest.id, newest.nodes, newest.state)
        return self._jobs[task]

    async def submit(self, task: str, nodes: tuple[str, ...], share: Share, attempt: Path) -> Job:
        """Submits a new job. REQUIRES: the task has no job.

        Raises:
            PeerLost: slurmctld does not answer; `find` tells whether slurmctld accepted the job.
            TaskError: slurmctld rejects the job.
        """
        name = self._prefix + task
        number = await asyncio.to_thread(self._slurm.submit, name, nodes, share, attempt)
        job = self._jobs[task] = Job(number, frozenset(nodes), "PENDING")
        return job

    async def refresh(self) -> None:
        """Reads the states of all known jobs."""
        async with self._looking:  # an older answer must not replace a newer one
            # Copied first: the query may miss a job that is submitted meanwhile.
            known = list(self._jobs.values())
            try:
                lines = await self._list()
            except (PeerLost, TaskError) as error:
                if not self._unreachable:
                    _log.warning("could not query jobs: %s", error)
                self._unreachable = True
                return
            self._unreachable = False
            states = {line.id: line.state for line in lines}
            for job in known:
                job.state = states.get(job.id, GONE)

    async def until(self, ready: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Refreshes with growing pauses until `ready` returns true; returns False after
        `limit_s`."""
        end = None if limit_s is None else time.monotonic() + limit_s
        pause = 0.02
        while True:
            await self.refresh()
            if ready():
                return True
            if end is not None and time.monotonic() >= end:
                return False
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 1.0)

    async def end(self, job: Job) -> None:
        """Cancels the job; returns once no process of the job is left."""
        while True:
            try:
                await asyncio.to_thread(self._slurm.cancel, job.id)
            except (PeerLost, TaskError) as error:
                _log.warning("cannot cancel job %d yet: %s", job.id, error)
            if await self.until(lambda: job.over, 30.0):
                return

    async def _list(self) -> list[JobLine]:
        return await asyncio.to_thread(self._slurm.jobs, self._prefix)
