"""Explains why a queued job waits, and when it can start. Pure.

The expected time follows from the running jobs' estimates, from quanta under a preemptive policy,
and from windows. Jobs ahead in the queue are counted but not planned, so the expected time is a
lower bound.
"""

import math
from typing import Literal

import msgspec

from fireflyer.hai.lifecycle import count
from fireflyer.hai.model.devices import in_words
from fireflyer.hai.scheduling.cluster import Cluster, Job
from fireflyer.hai.scheduling.jobs import AVOID_S, Reservation
from fireflyer.hai.scheduling.preemption import ready_at
from fireflyer.hai.scheduling.usable import large_enough
from fireflyer.units import format_mib

Rule = Literal["size", "health", "window", "quota", "avoided", "reserved", "busy", "start"]


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a job waits."""

    rule: Rule
    """Rule that delays the job; docs/operate/hai-scheduler.md lists the rules. "start": no rule
    delays the job."""
    text: str
    """For example "waits for 2 nodes; 1 free"."""
    ahead: int
    """Number of jobs ahead of the job."""
    earliest: float | None
    """Lower bound of the job's start, in the cluster's time; None: not known."""


class _Hold(msgspec.Struct, frozen=True):
    """Reason of a wait, shared by equal jobs at different positions in the queue."""

    rule: Rule
    text: str
    earliest: float | None = None
    counts: bool = False
    """True if the text for a job counts the jobs ahead of it."""

    def text_behind(self, ahead: int) -> str:
        if not ahead or not self.counts:
            return self.text
        tasks = count(ahead, "task")
        return (
            f"waits for {tasks} ahead of it"
            if self.rule == "start"
            else f"{self.text}; {tasks} ahead"
        )


def explain(cluster: Cluster, job: Job, now: float, *, expect: bool = True) -> Why:
    """Returns why a queued job does not run yet. With `expect`, also computes the earliest start,
    which examines each node."""
    ahead = cluster.queue.ahead((job.order, job.id))
    held = _hold(cluster, job, now, expect=expect)
    return Why(rule=held.rule, text=held.text_behind(ahead), ahead=ahead, earliest=held.earliest)


class Texts:
    """Explanations of many queued jobs while the cluster does not change. Equal requests of a user
    share one explanation."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self._cluster = cluster
        self._now = now
        self._apart = {kept.task for kept in cluster.reserved}
        """Jobs for which the plan reserves capacity. A reservation does not delay its own job, so
        these jobs share no explanation."""
        self._found: dict[object, _Hold] = {}

    def text(self, job: Job) -> str:
        """Returns the text of `explain`."""
        ahead = self._cluster.queue.ahead((job.order, job.id))
        if job.avoid or job.id in self._apart:
            return _hold(self._cluster, job, self._now, expect=False).text_behind(ahead)
        key = (
            job.nodes, job.gpus, job.gpu_type, job.memory_mib, job.user, job.group, job.level,
            job.estimate_s,
        )  # fmt: skip
        held = self._found.get(key)
        if held is None:
            held = self._found[key] = _hold(self._cluster, job, self._now, expect=False)
        return held.text_behind(ahead)


def _hold(cluster: Cluster, job: Job, now: float, *, expect: bool) -> _Hold:
    allowed = cluster.allowed(job, now)
    large = large_enough(cluster, job)
    topology = cluster.topology
    if not topology.enough(job.nodes, large):
        found = count(large.bit_count(), "such node")
        zones = ", but no two zones together have enough" if large.bit_count() >= job.nodes else ""
        text = f"asks for {_demand(job)}; the server has {found}{zones}"
        return _Hold("size", text)
    if not topology.enough(job.nodes, large & (cluster.ready | cluster.suspect)):
        text = f"asks for {_demand(job)}; {_unusable(cluster, large)}"
        return _Hold("health", text, _until(cluster, large))
    if not topology.enough(job.nodes, large & allowed):
        return _behind_window(cluster, job, now)
    if not cluster.room_in_quota(job):
        return _Hold("quota", behind_quota(cluster, job))
    kept_for = _quota_kept_for(cluster, job)
    if kept_for is not None:
        text = f"the room in its quota is kept for {kept_for.task}, {kept_for.reason}"
        return _Hold("quota", text)
    return _for_room(cluster, job, now, allowed, expect=expect)


def _quota_kept_for(cluster: Cluster, job: Job) -> Reservation | None:
    """Returns the first reservation that uses up the job's quota; None: no reservation does."""
    if cluster.limit(job.user, job.level, job.group) is None:
        return None
    nodes = gpus = 0
    for kept in cluster.reserved:
        other = cluster.jobs.get(kept.task)
        if kept.whole or other is None or other is job or other.phase != "queued":
            continue
        if (other.user, other.level, other.group) == (job.user, job.level, job.group):
            size = cluster.quota_size(other)
            nodes, gpus = nodes + size[0], gpus + size[1]
            if not cluster.room_in_quota(job, nodes, gpus):
                return kept
    return None


def _for_room(cluster: Cluster, job: Job, now: float, allowed: int, *, expect: bool) -> _Hold:
    fitting = cluster.capacity.fitting(job.gpus, job.memory_mib, allowed)
    free = fitting.bit_count()
    if cluster.topology.enough(job.nodes, fitting):
        kept_for = _reserved_for(cluster, job, now, allowed)
        if kept_for is None:
            return _Hold("start", "starts at once", now, counts=True)
        text = f"waits for {_demand(job)}; {free} free, reserved for {kept_for.task}, {kept_for.reason}"
        return _Hold("reserved", text, now)
    text = f"waits for {_demand(job)}; {free} free"
    most = cluster.capacity.most_free(allowed)
    if not free and 0 < most < job.gpus:
        text += f" (at most {count(most, 'GPU')} on one)"
    fits = cluster.capacity.fitting(
        job.gpus, job.memory_mib, large_enough(cluster, job) & (cluster.ready | cluster.suspect)
    )
    others = fits & ~allowed
    known = job.avoid & cluster.places.keys()
    avoided = sum(others >> cluster.places[name] & 1 for name in known)
    if avoided:
        text += f", {avoided} more that it avoids for {AVOID_S / 60:g} min after a fault"
    if any(other.phase == "suspending" for other in cluster.leaving.values()):
        text += f", {count(len(cluster.leaving), 'task')} making room"
    earliest = None
    if expect:
        earliest = _when(cluster, job, now, allowed)
        if avoided:
            earliest = _sooner(earliest, _when_it_avoids_none(cluster, job, now))
    closed = others.bit_count() > avoided and cluster.topology.enough(job.nodes, fits)
    rule: Rule = "window" if closed else "avoided" if avoided else "busy"
    return _Hold(rule, text, earliest, counts=True)


def _reserved_for(cluster: Cluster, job: Job, now: float, allowed: int) -> Reservation | None:
    """Returns the first reservation that prevents the job's start; None: no reservation does."""
    free, left = cluster.capacity, allowed
    for kept in cluster.reserved:
        other = cluster.jobs.get(kept.task)
        if other is None or other is job or other.phase not in ("queued", "suspending"):
            continue
        short = kept.until is not None and job.estimate_s is not None
        if kept.whole and short and now + (job.estimate_s or 0.0) <= (kept.until or 0.0):
            continue
        if free is cluster.capacity:
            free = free.copy()
        for place in kept.places:
            if kept.whole:
                left &= ~(1 << place)
            else:
                free.take(place, other.gpus, other.memory_mib)
        fitting = free.fitting(job.gpus, job.memory_mib, left)
        if not cluster.topology.enough(job.nodes, fitting):
            return kept
    return None


def _when(cluster: Cluster, job: Job, now: float, allowed: int) -> float | None:
    """Returns the earliest time at which the job could have enough of the `allowed` nodes; None:
    not known."""
    shape = (job.nodes, job.gpus, job.memory_mib)
    rank = (-job.level, -1 if job.overdue else job.standing)
    spared = job.user if cluster.policy.spares_own else None
    times: list[float] = []
    for place in range(len(cluster.names)):
        if allowed >> place & 1:
            ends = ready_at(cluster, place, None, shape)
            room = math.inf
            if cluster.policy.preemptive:
                room = ready_at(cluster, place, rank, shape, spared)
            times.append(max(now, min(ends, room)))
    times.sort()
    when = times[job.nodes - 1] if len(times) >= job.nodes else math.inf
    return None if when == math.inf else when


def _when_it_avoids_none(cluster: Cluster, job: Job, now: float) -> float | None:
    """Returns the earliest start, as `_when`, after the job stops avoiding nodes."""
    then = max(now, job.since + AVOID_S)
    return _when(cluster, job, then, cluster.allowed(job, then))


def _sooner(one: float | None, other: float | None) -> float | None:
    return min((when for when in (one, other) if when is not None), default=None)


def _behind_window(cluster: Cluster, job: Job, now: float) -> _Hold:
    closing = [
        window
        for window in cluster.windows.values()
        if not window.admits(job.user, job.group) and window.end > now
    ]
    window = min(closing, key=lambda window: (window.begin, window.id))
    about = f" ({window.reason})" if window.reason else ""
    state = "closes" if window.begin <= now else "will close before it could end"
    text = f"window {window.id}{about} {state} {count(len(window.nodes), 'node')}"
    earliest = min(each.end for each in closing)
    return _Hold("window", text, earliest)


def behind_quota(cluster: Cluster, job: Job) -> str:
    """Describes the quota that delays a job at its priority. REQUIRES: a quota applies to the job."""
    key = (job.user, job.level, job.group)
    limit = cluster.limit(*key)
    assert limit is not None
    held, size = cluster.usage.get(key, (0, 0)), cluster.quota_size(job)
    known = [
        (most, held[at], size[at], what)
        for at, (most, what) in enumerate(((limit.nodes, "node"), (limit.gpus, "GPU")))
        if most is not None
    ]
    quota = " and ".join(count(most, what) for most, _, _, what in known)
    if limit.holds(*size):
        taken = " and ".join(count(has, what) for _, has, _, what in known)
        return f"the quota at this priority, {quota}, is used up: {taken} held"
    asked = " and ".join(count(asks, what) for _, _, asks, what in known)
    return f"the quota at this priority, {quota}, is too small for {asked}"


def _unusable(cluster: Cluster, large: int) -> str:
    """Describes unusable nodes, for example "of 3 such nodes 1 is drained, 1 is down"."""
    counts: dict[str, int] = {}
    for place, name in enumerate(cluster.names):
        health = cluster.nodes[name].health
        if large >> place & 1 and health in ("drained", "down"):
            counts[health] = counts.get(health, 0) + 1
    parts = [
        f"{number} {'is' if number == 1 else 'are'} {health}" for health, number in counts.items()
    ]
    return f"of {count(large.bit_count(), 'such node')} {', '.join(parts)}"


def _until(cluster: Cluster, large: int) -> float | None:
    times = [
        node.until
        for place, node in enumerate(map(cluster.nodes.__getitem__, cluster.names))
        if large >> place & 1 and node.health == "drained" and node.until is not None
    ]
    return min(times, default=None)


def _demand(job: Job) -> str:
    each = []
    if job.gpus:
        each.append(in_words(job.gpus, job.gpu_type))
    if job.memory_mib:
        each.append(f"{format_mib(job.memory_mib)} of memory")
    return count(job.nodes, "node") + (f" with {' and '.join(each)}" if each else "")
