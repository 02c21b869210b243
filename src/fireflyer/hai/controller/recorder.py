"""Records the use of the hardware by tasks, nodes, users and the cluster once a minute, for charts
and metrics.

The figures come from the queue (held nodes and GPUs), from the supervisors' files
(`sampling/usage.py`) and from the heartbeats of ranks. No decision depends on the figures, so a
missing figure is left out.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from fireflyer import heartbeat
from fireflyer.errors import StorageError
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.lifecycle import ACTIVE, Task
from fireflyer.hai.sampling.series import LEVELS, METRICS, Point, point
from fireflyer.hai.sampling.usage import RankUsage, Usage, read_usage, usage_path
from fireflyer.hai.scheduling.cluster import Cluster
from fireflyer.log import get_logger

RANKS = 64
"""Maximum number of a task's ranks that have a series of their own."""

SUMS = ("cpu", "memory", "read", "written", "gpu_memory")
"""Metrics that are summed: over a task's nodes, over a user's tasks and over the cluster's
tasks."""

_log = get_logger("hai")

Values = dict[str, float]


class Seen(msgspec.Struct, frozen=True):
    """Content of the files of one attempt at one moment."""

    usage: dict[str, Usage]
    """Totals by node."""
    beats: dict[int, heartbeat.Heartbeat]


class Recorder:
    """Recorder of one controller.

    Args:
        cluster: queue and nodes.
        tasks: live tasks; the controller keeps them current.
        directory: returns the folder of an attempt of a task.
        samples: the database's series.
    """

    def __init__(
        self,
        cluster: Cluster,
        tasks: Mapping[str, Task],
        directory: Callable[[str, int], Path],
        samples: Samples,
    ) -> None:
        self._cluster = cluster
        self._tasks = tasks
        self._directory = directory
        self._samples = samples
        self._before: dict[tuple[str, int], tuple[float, Seen]] = {}
        """Last reads of running attempts, and their times."""
        self.latest: dict[str, Values] = {}
        """Values of the last minute, by scope."""

    async def watch(self) -> None:
        """Records at each full minute until cancelled."""
        while True:
            now = time.time()
            await asyncio.sleep(LEVELS[0] - now % LEVELS[0])
            try:
                await self.record(time.time())
            except StorageError as error:
                _log.warning("could not record what tasks use: %s", error)

    async def record(self, now: float) -> None:
        """Records the minute that ends at `now`."""
        active = [task for task in self._tasks.values() if task.state in ACTIVE]
        read = {
            (task.id, task.attempt): await asyncio.to_thread(
                read_attempt, self._directory(task.id, task.attempt), task
            )
            for task in active
        }
        found = self._held()
        for key, seen in read.items():
            then, before = self._before.get(key, (now, None))
            self._add_task(found, key[0], seen, before, now - then)
        self._before = {key: (now, seen) for key, seen in read.items()}
        self.latest = found
        # At exactly a full minute the point is that of the minute that has just ended.
        points: dict[str, Point] = {scope: point(**values) for scope, values in found.items()}
        self._samples.add(math.ceil(now / LEVELS[0]) * LEVELS[0] - LEVELS[0], points)

    def _held(self) -> dict[str, Values]:
        """Returns the values that the queue gives, by scope: capacity, held capacity, and numbers of
        tasks."""
        cluster = self._cluster
        found: dict[str, Values] = defaultdict(dict)
        whole = found["cluster"]
        whole.update(held=0.0, capacity=0.0, queued=0.0, running=0.0)
        for name, node in cluster.nodes.items():
            place = cluster.places[name]
            jobs = cluster.on[place]
            size = node.gpus or 1
            held = size - cluster.capacity.free[place] if node.gpus else bool(jobs)
            found[f"node:{name}"] = {
                "held": float(held), "capacity": float(size), "running": float(len(jobs))
            }  # fmt: skip
            usable = node.health in ("ready", "suspect")
            whole["held"] += held
            whole["capacity"] += size if usable else held
        working: dict[str, float] = defaultdict(float)
        for job in cluster.jobs.values():
            user = found[f"user:{job.user}"]
            for values in (whole, user):
                values["queued"] = values.get("queued", 0.0) + (job.phase == "queued")
                values["running"] = values.get("running", 0.0) + bool(job.placement)
            user["held"] = user.get("held", 0.0) + job.gpus_held
            if job.placement:
                found[f"task:{job.id}"] = {"held": job.gpus_held}
            if job.phase == "running":
                working["cluster"] += job.gpus_held
                working[f"user:{job.user}"] += job.gpus_held
        for scope, values in found.items():
            if values.get("held") and (scope == "cluster" or scope.startswith("user:")):
                values["useful"] = working[scope] / values["held"]
        return found

    def _add_task(
        self, found: dict[str, Values], task: str, seen: Seen, before: Seen | None, passed: float
    ) -> None:
        """Adds the use of the hardware by an attempt since its last read."""
        job = self._cluster.jobs.get(task)
        if job is None or f"task:{task}" not in found:
            return
        mine = found[f"task:{task}"]
        loads: list[tuple[float, int]] = []
        for node, usage in seen.usage.items():
            earlier = None if before is None else before.usage.get(node)
            used, ranks, load = between(usage, earlier)
            for rank, values in ranks.items():
                if rank < RANKS:
                    found[f"rank:{task}/{rank}"] = values
            scopes = (f"node:{node}", f"task:{task}", f"user:{job.user}", "cluster")
            for scope in scopes:
                add(found[scope], used)
            found[f"node:{node}"].update(network(usage, earlier))
            if load is not None:
                loads.append((load, usage.gpus))
                for scope in scopes:
                    average(found[scope], "gpu", load, usage.gpus)
        for rank, beat in seen.beats.items():
            earlier_beat = None if before is None else before.beats.get(rank)
            reported = progress(beat, earlier_beat, passed)
            if rank == 0:
                mine.update(reported)
            if rank < RANKS and f"rank:{task}/{rank}" in found:
                found[f"rank:{task}/{rank}"].update(reported)


def read_attempt(directory: Path, task: Task) -> Seen:
    """Reads the supervisors' totals and the heartbeats of an attempt."""
    usage = {node: read_usage(usage_path(directory, node)) for node in task.placement}
    beats = {
        rank: heartbeat.read(directory / f"{rank}.pulse") for rank in range(min(task.world, RANKS))
    }
    return Seen(
        {node: found for node, found in usage.items() if found is not None},
        {rank: beat for rank, beat in beats.items() if beat is not None},
    )


def between(usage: Usage, before: Usage | None) -> tuple[Values, dict[int, Values], float | None]:
    """Returns the use of a node by an attempt between two reads: the totals, the use by rank, and
    the load of the GPUs (None: not sampled)."""
    if before is not None and (before.samples > usage.samples or before.seconds > usage.seconds):
        before = None  # a new supervisor counts from zero
    seconds = usage.seconds - (before.seconds if before is not None else 0.0)
    samples = usage.samples - (before.samples if before is not None else 0)
    known = {} if before is None else {rank.rank: rank for rank in before.ranks}
    ranks: dict[int, Values] = {}
    if seconds <= 0 or not samples:
        return {}, {}, None
    for rank in usage.ranks:
        earlier = known.get(rank.rank)
        if earlier is None or earlier.pid != rank.pid:
            earlier = RankUsage(rank=rank.rank, pid=rank.pid)
        if rank.samples > earlier.samples:
            ranks[rank.rank] = {
                "cpu": (rank.cpu_s - earlier.cpu_s) / seconds,
                "memory": (rank.memory_sum - earlier.memory_sum) / (rank.samples - earlier.samples),
                "read": (rank.read - earlier.read) / seconds,
                "written": (rank.written - earlier.written) / seconds,
            }
    used: Values = {}
    for values in ranks.values():
        add(used, values)
    load = None
    if usage.gpus:
        sums = (0.0, 0.0) if before is None else (before.gpu_sum, before.gpu_memory_sum)
        load = (usage.gpu_sum - sums[0]) / samples / usage.gpus
        used["gpu_memory"] = (usage.gpu_memory_sum - sums[1]) / samples
    return used, ranks, load


def network(usage: Usage, before: Usage | None) -> Values:
    """Returns the bytes a second that a node received and sent between two reads."""
    if before is None or usage.seconds <= before.seconds:
        return {}
    seconds = usage.seconds - before.seconds
    return {
        "received": max(0, usage.received - before.received) / seconds,
        "sent": max(0, usage.sent - before.sent) / seconds,
    }


def progress(
    beat: heartbeat.Heartbeat, before: heartbeat.Heartbeat | None, passed: float
) -> Values:
    """Returns the step, the loss and the speed that a rank reports."""
    if beat.step < 0:
        return {}
    found: Values = {"step": float(beat.step)}
    if not math.isnan(beat.loss):
        found["loss"] = beat.loss
    if before is not None and passed > 0 and 0 <= before.step <= beat.step:
        found["speed"] = (beat.step - before.step) / passed
    return found


def add(values: Values, more: Values) -> None:
    """Adds the metrics of SUMS in `more` to `values`."""
    for name in SUMS:
        if name in more:
            values[name] = values.get(name, 0.0) + more[name]


def average(values: Values, name: str, value: float, weight: int) -> None:
    """Adds a value to a weighted mean; `values[name + "/"]` keeps the sum of the weights so far."""
    before = values.get(f"{name}/", 0.0)
    values[name] = (values.get(name, 0.0) * before + value * weight) / (before + weight)
    values[f"{name}/"] = before + weight


assert set(SUMS) <= set(METRICS)
