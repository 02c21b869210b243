"""Cluster state that `plan` reads: nodes, jobs, quotas, windows and indexes that make a plan cheap.

The caller (the server's controller, the simulator) reports each event by one call. The cost of a
call is proportional to the change. The caller passes the time as `now`, in seconds on one clock
that never goes back. Pure. Examples of each call: docs/operate/hai-scheduler.md.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from fireflyer.hai.lifecycle import Action, Launch, Preempt, Release
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.model.devices import DeviceTable
from fireflyer.hai.model.windows import LEAD_S, Window
from fireflyer.hai.scheduling import usable
from fireflyer.hai.scheduling.accounts import Accounts
from fireflyer.hai.scheduling.capacity import Capacity
from fireflyer.hai.scheduling.changes import Changes
from fireflyer.hai.scheduling.jobs import (
    ANY,
    AUTO,
    AVOID_S,
    NORMAL,
    Health,
    Job,
    Node,
    Phase,
    Quota,
    Reservation,
)
from fireflyer.hai.scheduling.lanes import Lanes, QueueKey, QuotaKey, Shape
from fireflyer.hai.scheduling.placement import Topology
from fireflyer.hai.scheduling.policies import policy_named
from fireflyer.hai.scheduling.preemption import PreemptionCache, VictimIndex
from fireflyer.hai.scheduling.quotas import counting
from fireflyer.hai.scheduling.repack import RepackIndex

__all__ = ["ANY", "AUTO", "NORMAL", "Cluster", "Health", "Job", "Node", "Phase", "Quota", "Window"]

ALL = -1
"""Set of all nodes."""

TICK_S = 60.0
"""Seconds between checks of quanta and levels. One plan handles all changes due in this time."""

Timer = tuple[float, int, str, str, float]
"""Due time, tie breaker, kind, name of the node, window, job or account, and a stamp by which a void
timer is recognised."""


class Cluster:
    """Nodes, jobs and rules, and the state derived from them. Used by one thread.

    Args:
        nodes: initial nodes; `set_node` changes them later. A node keeps its place (index) forever.
        policy: a name of `policies.POLICIES`.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(self, nodes: Iterable[Node] = (), policy: str = "fifo") -> None:
        self.policy = policy_named(policy)
        self.nodes: dict[str, Node] = {}
        self.names: list[str] = []
        """Node name by place. A set of nodes is an int with one bit per place."""
        self.places: dict[str, int] = {}
        self.on: list[dict[str, Job]] = []
        """Jobs that hold part of the node, by place."""
        self.capacity = Capacity()
        self.devices = DeviceTable()
        self.topology = Topology()
        self.ready = self.suspect = 0
        self.jobs: dict[str, Job] = {}
        self.placed: Counter[int] = Counter()
        """Number of jobs that hold nodes, by priority."""
        self.leaving: dict[str, Job] = {}
        """Suspending jobs; their nodes are about to become free."""
        self.warm: dict[str, Job] = {}
        """Queued jobs for which the engine keeps warm processes."""
        self.queue = Lanes()
        self.windows: dict[str, Window] = {}
        self.quotas: dict[QuotaKey, Quota] = {}
        self.usage: dict[QuotaKey, tuple[int, int]] = {}
        """Nodes and GPUs that running jobs hold, by quota."""
        self.changes = Changes()
        """Log of nodes whose jobs, or whose jobs' data, changed."""
        self.victim_index = VictimIndex(self)
        self.preemption_caches: dict[
            tuple[QueueKey | None, Shape, str | None], PreemptionCache
        ] = {}
        self.movers: dict[tuple[int, int, int], RepackIndex] = {}
        """Like `victim_index` and `preemption_caches`, data that plans cache per node. The caches
        never change a plan's result."""
        self.moving: dict[str, int] = {}
        """Place reserved for each moving job until it starts there."""
        self.evicting: dict[str, str] = {}
        """Nodes whose jobs the next plan preempts, with the reason."""
        self.fresh = ALL
        """Nodes that changed since the last plan. The unchanged nodes alone did not suffice then.
        Until a plan has placed its first job, a job must therefore get at least one of these
        nodes, unless the job is in `arrived`."""
        self.arrived: dict[str, Job] = {}
        """Queued jobs that are new since the last plan, or that have now waited long enough to
        preempt or move other jobs."""
        self.alike = False
        """Set by a plan: True if `fresh` and `arrived` may record single changes. If False, the
        next plan examines all nodes and jobs after any change."""
        self.again = False
        """Set by a plan: True if another plan must follow immediately."""
        self.reserved: tuple[Reservation, ...] = ()
        """Set by a plan: free capacity that later jobs in the queue may not use."""
        self.accounts = Accounts(self.policy.scale, self.policy.by, self._expect)
        self._auto: dict[str, dict[str, Job]] = {}
        self._timers: list[Timer] = []
        self._rules: list[Timer] = []
        self._ticks = 0
        for node in nodes:
            self.set_node(node)

    # -- nodes and rules ---------------------------------------------------------------------------

    def set_node(self, node: Node) -> None:
        """Adds a node, or changes the size, health, zone or leaf of a known node."""
        place = self.places.get(node.name)
        if place is None:
            place = self.places[node.name] = self.capacity.add(
                node.gpus, node.memory_mib, whole=node.whole
            )
            self.names.append(node.name)
            self.on.append({})
        else:
            self.capacity.resize(place, node.gpus, node.memory_mib, whole=node.whole)
        self.nodes[node.name] = node
        self.devices.put(place, node.gpus, node.gpu_type)
        self.topology.put(place, node.zone, node.leaf)
        bit = 1 << place
        self.ready = self.ready | bit if node.health == "ready" else self.ready & ~bit
        self.suspect = self.suspect | bit if node.health == "suspect" else self.suspect & ~bit
        if node.until is not None and node.health in ("suspect", "drained"):
            self._remind(node.until, "node", node.name, node.until)
        gangs = self.on[place].values()  # caches treat a gang's nodes as one
        self._touch({node.name, *(name for job in gangs for name in job.placement)})
        self.fresh = ALL

    def evict(self, name: str, reason: str) -> None:
        """Makes the next plan preempt the jobs on a drained node, under every policy."""
        self.evicting[name] = reason
        self.fresh = ALL

    def set_window(self, window: Window) -> None:
        """Adds a window, or replaces the window with the same id."""
        self.fresh = ALL
        self.windows[window.id] = window
        self._remind(window.begin, "window", window.id, 0.0)
        self._remind(window.begin - LEAD_S, "window", window.id, 0.0)
        self._remind(window.end, "window", window.id, window.end)
        for task in self.queue.in_order():
            self._foresee(self.jobs[task], window)

    def remove_window(self, name: str) -> None:
        """Removes the window of this id; an unknown id has no effect."""
        if self.windows.pop(name, None) is not None:
            self.fresh = ALL

    def set_quota(self, user: str, priority: int, group: str, quota: Quota | None) -> None:
        """Limits the nodes and GPUs that a user's jobs hold at a priority in a group; None removes
        the limit.

        The name ANY applies to all users or groups without a row of their own. Running jobs
        continue.
        """
        self.fresh = ALL
        if quota is None:
            self.quotas.pop((user, priority, group), None)
        else:
            self.quotas[user, priority, group] = quota
        self.usage.clear()
        for job in self.jobs.values():
            if job.placement:
                self._count(job, 1)
        for task in self.queue.in_order():
            self._move(self.jobs[task])

    def limit(self, user: str, priority: int, group: str) -> Quota | None:
        """Returns the quota that applies: the most specific row."""
        return counting(self.quotas, user, priority, group) if self.quotas else None

    # -- events ------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """Adds a new job to the queue."""
        job.submitted = now
        self._know(job, now)
        self._enqueue(job, now)

    def adopt(self, job: Job, now: float) -> None:
        """Restores a job of an earlier process, in any phase, on the nodes of its placement.

        The job's past usage is added to the job's account. The usage of jobs that ended is lost.
        """
        self.fresh = ALL
        self._know(job, now)
        self._credit(job, job.attained, now)
        if job.phase == "queued":
            self._enqueue(job, job.since)
        elif job.placement:
            if job.phase == "suspending":
                self.leaving[job.id] = job
            if job.priority != AUTO:
                job.level = job.priority
            self._settle(job, now)
            self._credit(job, job.gpus_held * (now - job.launched_at), now)

    def apply(self, action: Action, now: float) -> None:
        """Applies an action of `plan` to this state; the caller then carries it out."""
        job = self.jobs[action.task]
        match action:
            case Launch():
                self._dequeue(job)
                self.moving.pop(job.id, None)
                job.attempt = action.attempt
                job.placement, job.devices, job.previous = action.nodes, action.devices, ()
                job.launched_at = now
                self._enter(job, "starting", now)
                self._settle(job, now)
            case Preempt():
                job.preemptions += 1
                if action.to:
                    self.moving[job.id] = self.places[action.to]
                self.suspending(job.id, now)
            case Release():
                job.previous = ()
                self.warm.pop(job.id, None)

    def running(self, task: str, now: float) -> None:
        """Records that all ranks of the job have started."""
        job = self.jobs[task]
        quantum = self.policy.quantum_s(job)
        job.restart_s = now - job.launched_at
        job.started_at = now
        self._enter(job, "running", now)
        if self.policy.quantum_s(job) != quantum:
            self._ripen(job, now)
            self._touch(job.placement)
        elif self.policy.behind == "backfill":
            self._touch(job.placement)

    def suspending(self, task: str, now: float) -> None:
        """Records that the job is about to leave its nodes, because of a preemption, a suspend or a
        stop."""
        job = self.jobs[task]
        if job.phase == "suspending":
            return
        self._work_done(job, now)
        self._enter(job, "suspending", now)
        self.leaving[task] = job
        self._touch(job.placement)

    def requeue(self, task: str, now: float, estimate_s: float | None = None) -> None:
        """Returns a job to the queue after a preemption, a fault or a resume. `estimate_s`: the
        remaining work if it differs from the cluster's own estimate, for example because work was
        lost."""
        job = self.jobs[task]
        self._leave(job, now)
        job.estimate_s = job.estimate_s if estimate_s is None else estimate_s
        self._enqueue(job, now)

    def hold(self, task: str, now: float) -> None:
        """Records that the user suspended the job, which then holds no nodes and waits for
        `requeue`."""
        job = self.jobs[task]
        self._leave(job, now)
        self.moving.pop(task, None)
        self._enter(job, "held", now)

    def remove(self, task: str, now: float) -> None:
        """Removes a job that is over."""
        job = self.jobs[task]
        self._leave(job, now)
        self.moving.pop(task, None)
        del self.jobs[task]
        self.accounts.leave(job)

    def advance(self, now: float) -> None:
        """Applies all changes that are due by `now`. `plan` calls this method itself."""
        crossed: dict[str, None] = {}
        while self._timers and self._timers[0][0] <= now:
            _, _, kind, name, stamp = heapq.heappop(self._timers)
            if kind != "level":
                self._fall_due(kind, name, stamp, now)
            elif self.accounts.cross(name, int(stamp), now):
                # The account's jobs move once, even if the account crossed several levels.
                crossed[name] = None
        for name in crossed:
            self._level_changed(name)
        for job in [self.jobs[task] for task in self.moving]:
            if job.phase == "queued" and job.since + TICK_S < now:  # the job no longer fits there
                del self.moving[job.id]
        while self._rules and self._rules[0][0] <= now:
            _, _, kind, name, stamp = heapq.heappop(self._rules)
            if kind == "node":
                node = self.nodes[name]
                if node.until == stamp and node.health in ("suspect", "drained"):
                    well = msgspec.structs.replace(node, health="ready", reason="", until=None)
                    self.set_node(well)
            elif name in self.windows:
                self.fresh = ALL
                if self.windows[name].end <= now:
                    del self.windows[name]

    def next_look(self, now: float) -> float | None:
        """Returns the time at which a plan may do more without a further event; None: never. Call
        this method after a plan."""
        when = math.inf
        if self.queue.ranks:
            if self.again:
                return now
            while self._timers and self._void(self._timers[0]):
                heapq.heappop(self._timers)
            if self._timers:
                when = self._timers[0][0]
            if now < when < math.inf:
                when = math.ceil(when / TICK_S) * TICK_S
        if self._rules and (self.queue or self.windows):
            when = min(when, self._rules[0][0])
        return None if when == math.inf else max(when, now)

    # -- queries -----------------------------------------------------------------------------------

    def allowed(self, job: Job, now: float) -> int:
        """Returns the nodes that the job may use, free or not. For avoided nodes see
        `Job.avoid`."""
        return usable.allowed(self, job, now)

    def quota_size(self, job: Job) -> tuple[int, int]:
        """Returns the maximum nodes and GPUs that the job would hold."""
        return job.nodes, job.nodes * (job.gpus or self.capacity.largest or 1)

    def room_in_quota(self, job: Job, nodes: int = 0, gpus: int = 0) -> bool:
        """Returns whether the job's quota allows its start, if a plan has already given `nodes` and
        `gpus` to other jobs of the quota."""
        key = (job.user, job.level, job.group)
        limit = self.limit(*key)
        if limit is None:
            return True
        held = self.usage.get(key, (0, 0))
        size = self.quota_size(job)
        return limit.holds(held[0] + nodes + size[0], held[1] + gpus + size[1])

    def forbidden(self, job: Job) -> bool:
        """Returns whether the job alone exceeds its quota, so that it can never start. REQUIRES:
        its priority is not AUTO. The job need not be in the cluster."""
        limit = self.limit(job.user, job.priority, job.group)
        return limit is not None and not limit.holds(*self.quota_size(job))

    def jobs_on(self, node: str) -> list[Job]:
        """Returns the jobs that hold part of the node, in order of submission."""
        return sorted(self.on[self.places[node]].values(), key=lambda job: (job.order, job.id))

    def in_order(self) -> list[Job]:
        """Returns the queued jobs in queue order."""
        return [self.jobs[task] for task in self.queue.in_order()]

    # -- internal ----------------------------------------------------------------------------------

    def _know(self, job: Job, now: float) -> None:
        self.jobs[job.id] = job
        self.accounts.join(job, now)

    def _enter(self, job: Job, phase: Phase, now: float) -> None:
        job.phase, job.since = phase, now

    def _enqueue(self, job: Job, since: float) -> None:
        self._enter(job, "queued", since)
        self._arrive(job)
        if job.previous:
            self.warm[job.id] = job
            self.fresh = ALL
        if job.priority == AUTO:
            self._auto.setdefault(job.user, {})[job.id] = job
        self._file(job)
        if self.policy.preemptive and self.policy.wait_s:
            self._remind(since + self.policy.wait_s, "waited", job.id, since)
        else:
            self._remind(since + self.policy.patience_s, "overdue", job.id, since)
        self._remind(since + self.policy.repack_after_s, "repack", job.id, since)
        self._remind(since + AVOID_S if job.avoid else math.inf, "avoided", job.id, since)
        for window in self.windows.values():
            self._foresee(job, window)

    def _foresee(self, job: Job, window: Window) -> None:
        """Sets a timer for the time from which the job may not use the nodes of a window. From then
        on, a plan may reserve fewer or other nodes for the job. For a job without an estimate, the
        window's own timers suffice."""
        if job.estimate_s is not None and not window.admits(job.user, job.group):
            self._remind(window.closes(job.estimate_s), "closes", job.id, job.since)

    def _arrive(self, job: Job) -> None:
        if self.alike:
            self.arrived[job.id] = job
        else:
            self.fresh = ALL

    def _dequeue(self, job: Job) -> None:
        if job.phase == "queued":
            self.queue.take((job.order, job.id))
        job.overdue = False
        self.warm.pop(job.id, None)
        if job.priority == AUTO:
            self._auto[job.user].pop(job.id, None)

    def _file(self, job: Job) -> None:
        """Puts a queued job into its lane."""
        job.level = self._resolve(job) if job.priority == AUTO else job.priority
        rank = (-job.level, -1 if job.overdue else job.standing)
        quota = (job.user, job.level, job.group)
        shape = (job.nodes, job.gpus, job.memory_mib)
        lane = (shape, job.gpu_type, quota if self.limit(*quota) else None)
        self.queue.put((job.order, job.id), rank, lane)

    def _move(self, job: Job) -> None:
        self.queue.take((job.order, job.id))
        self._file(job)

    def _resolve(self, job: Job) -> int:
        """Returns the priority of an AUTO job: the highest priority whose quota is not used up.

        If no quota limits the priority "normal", the result is "normal" or higher. Without this
        rule, two jobs could lower each other's priority in turn, endlessly.
        """
        before = job.level
        for job.level in sorted(PRIORITIES.values(), reverse=True):
            limited = self.limit(job.user, job.level, job.group) is not None
            if (limited or job.level == NORMAL) and self.room_in_quota(job):
                found, job.level = job.level, before
                return found
        job.level = before
        return NORMAL

    def _settle(self, job: Job, now: float) -> None:
        """Marks the nodes of the job's placement as held by the job."""
        held = 0.0
        for name in job.placement:
            place = self.places[name]
            self.capacity.take(place, job.gpus, job.memory_mib)
            self.on[place][job.id] = job
            held += self.capacity.share(place, job.gpus) or 1
        for name, devices in zip(job.placement, job.devices, strict=False):
            self.devices.take(self.places[name], devices)
        job.gpus_held = held
        self.placed[job.level] += 1
        self._count(job, 1)
        self.accounts.charge(job, held, now)
        self._touch(job.placement)
        if self.policy.preemptive:
            self._ripen(job, now)

    def _leave(self, job: Job, now: float) -> None:
        """Removes the job from the queue or from its nodes."""
        if job.phase == "queued":
            self._dequeue(job)
            self.fresh = ALL
        if not job.placement:
            return
        if job.phase == "suspending":
            job.checkpoint_s = now - job.since
            del self.leaving[job.id]
        else:
            self._work_done(job, now)
        for name in job.placement:
            place = self.places[name]
            self.capacity.give(place, job.gpus, job.memory_mib)
            del self.on[place][job.id]
        for name, devices in zip(job.placement, job.devices, strict=False):
            self.devices.give(self.places[name], devices)
        job.attained += job.gpus_held * (now - job.launched_at)
        self.accounts.charge(job, -job.gpus_held, now)
        self._touch(job.placement)
        self.placed[job.level] -= 1
        self._count(job, -1)
        job.placement, job.devices, job.gpus_held = (), (), 0.0

    def _work_done(self, job: Job, now: float) -> None:
        if job.estimate_s is not None and job.phase == "running":
            job.estimate_s = max(0.0, job.estimate_s - (now - job.started_at))

    def _count(self, job: Job, sign: int) -> None:
        """Updates the usage of quotas, and the priorities of AUTO jobs, which depend on the usage."""
        if not self.quotas:
            return
        key = (job.user, job.level, job.group)
        held = self.usage.get(key, (0, 0))
        gpus = int(job.gpus_held)
        self.usage[key] = (held[0] + sign * job.nodes, held[1] + sign * gpus)
        for other in list(self._auto.get(job.user, {}).values()):
            self._move(other)

    def _credit(self, job: Job, service: float, now: float) -> None:
        """Adds the job's past usage to its account. The account's jobs move in the queue only if
        its level changes."""
        key = self.accounts.credit(job, service, now)
        if key is not None:
            self._level_changed(key)

    def _level_changed(self, key: str) -> None:
        level = self.accounts.level(key)
        for job in self.accounts.jobs(key):
            job.standing = level
            if (job.order, job.id) in self.queue:
                if not job.overdue:
                    self.queue.shift((job.order, job.id), (-job.level, level))
                self.fresh = ALL
            elif job.placement:
                self._touch(job.placement)

    def _touch(self, nodes: Iterable[str]) -> None:
        """Records that the jobs on these nodes, or their data, changed."""
        touched = 0
        for name in nodes:
            place = self.places.get(name)
            if place is not None:
                self.changes.add(place)
                touched |= 1 << place
        self.fresh = self.fresh | touched if self.alike else ALL

    # -- timers ------------------------------------------------------------------------------------

    def _ripen(self, job: Job, now: float) -> bool:
        """Sets and returns `job.ripe`: whether the job's quantum is over. If the quantum is
        not over, also sets a timer for the end of the quantum."""
        due = job.launched_at + self.policy.quantum_s(job)
        job.ripe = due <= now
        if not job.ripe:
            self._remind(due, "ripe", job.id, job.launched_at)
        return job.ripe

    def _fall_due(self, kind: str, name: str, stamp: float, now: float) -> None:
        job = self.jobs.get(name)
        if job is None:
            return
        if kind == "ripe":
            known = not job.placement or job.launched_at != stamp or job.ripe
            if not known and self._ripen(job, now):
                self._touch(job.placement)
        elif job.phase == "queued" and job.since == stamp:
            if kind in ("waited", "repack"):
                self._arrive(job)
                if kind == "waited":
                    self._remind(stamp + self.policy.patience_s, "overdue", name, stamp)
            else:
                self.fresh = ALL
                if kind == "overdue":
                    job.overdue = True
                    self._move(job)

    def _void(self, timer: Timer) -> bool:
        """Returns whether the timer is void, because its cause no longer exists."""
        _, _, kind, name, stamp = timer
        if kind == "level":
            return self.accounts.void(name, stamp)
        job = self.jobs.get(name)
        if job is None:
            return True
        if kind == "ripe":
            return not job.placement or job.launched_at != stamp or job.ripe
        void = kind == "closes" and not self.windows
        return void or job.phase != "queued" or job.since != stamp

    def _expect(self, when: float, key: str, version: int) -> None:
        """Sets the timer for an account's next level."""
        self._remind(when, "level", key, version)

    def _remind(self, when: float, kind: str, name: str, stamp: float) -> None:
        if when != math.inf:
            self._ticks += 1
            heap = self._rules if kind in ("node", "window") else self._timers
            heapq.heappush(heap, (when, self._ticks, kind, name, stamp))
