"""`plan`: the jobs to start, to preempt and to release now. Pure. The planner walks the queue in
the policy's order. A job that fits starts. For any other job, the planner tries to reserve nodes
that are about to become free. If these are too few and the policy is preemptive, the planner
preempts or moves other jobs. If that fails, the policy decides which later jobs may start. If a job
cannot be placed, later jobs of its shape cannot either. The cost of a plan thus depends on the
number of different shapes (nodes, GPUs and memory asked for), not on the length of the queue.

A job that could not be placed cannot be placed until a node changes. Until a plan has placed a job,
the plan therefore searches only the changed nodes (`Cluster.fresh`) for jobs that the previous plan
tried. The result equals that of a plan that searches every node.
"""

import heapq
import math
from enum import Enum, auto

from fireflyer.hai.lifecycle import Action, Launch, Preempt, Release
from fireflyer.hai.model.devices import mask, pick
from fireflyer.hai.scheduling.capacity import Capacity, members
from fireflyer.hai.scheduling.cluster import ALL, Cluster, Job
from fireflyer.hai.scheduling.jobs import Reservation
from fireflyer.hai.scheduling.lanes import Lane, QueueKey, QuotaKey, Shape
from fireflyer.hai.scheduling.placement import choose
from fireflyer.hai.scheduling.preemption import PreemptionCache, bound
from fireflyer.hai.scheduling.repack import RepackIndex, destinations

BATCH = 256
"""Maximum number of actions in a plan; the next plan continues immediately. Executing a launch
takes longer than planning it, so the next plan can use the events that arrive meanwhile."""

PREEMPTION = 4
"""Number of launches that a preemption counts as in `BATCH`: finding victims costs as much."""

LOWER_ONLY = 1 << 30
"""Level above all others: a job at this level may preempt only jobs of lower priority."""

CACHES = 256
"""Maximum number of `PreemptionCache` objects, and of `RepackIndex` objects, kept between plans."""


class _Verdict(Enum):
    """Result of trying one job."""

    PLACED = auto()
    """The job starts, or other jobs are preempted or moved for it."""
    MISSED = auto()
    """The job could not be placed; another job of its lane may succeed."""
    SHORT = auto()
    """The job could not be placed; in its lane only jobs that end before the reservation begins may
    succeed."""
    STUCK = auto()
    """The job could not be placed, and no other job of its lane can succeed."""


def plan(cluster: Cluster, now: float) -> list[Action]:
    """Returns the actions that are due now, in order: launches, preemptions and releases.

    The same cluster and `now` give the same list. After `advance`, the plan changes only the
    cluster's caches for later plans.
    """
    cluster.advance(now)
    cluster.again = False
    if not cluster.queue:
        cluster.reserved = ()
    if not cluster.queue and not cluster.windows and not cluster.evicting:
        return []
    # With windows, the nodes that a job may use change with time alone; nodes reserved for moving
    # jobs change with these jobs.
    if cluster.windows or cluster.moving:
        cluster.fresh = ALL
    if not cluster.fresh and not cluster.arrived:
        return []
    return _Plan(cluster, now).make()


class _Plan:
    """State of one plan under construction."""

    def __init__(self, cluster: Cluster, now: float) -> None:
        self.cluster = cluster
        self.now = now
        self.policy = cluster.policy
        self.actions: list[Action] = []
        self.fresh = cluster.fresh
        """Nodes to search for jobs that the previous plan could not place."""
        self.usable = cluster.ready | cluster.suspect
        self.free = cluster.capacity
        """Free capacity. It becomes a copy once this plan launches a job or reserves capacity."""
        self.soon: Capacity | None = None
        """Free capacity plus the capacity of leaving jobs; created at the first use."""
        self.victims: set[str] = set()
        self.moved: set[str] = set()
        """Moved jobs that this plan starts on their new node."""
        self.used = 0
        """Nodes on which this plan has given capacity to a job or preempted a job."""
        self.kept = 0
        """Nodes on which no further job may start."""
        self.kept_until: float | None = None
        """Backfill only: jobs that end by this time may use the nodes of `kept`."""
        self.failed: list[tuple[Shape, int]] = []
        """Shapes, each with nodes among which no job of the shape can be placed."""
        self.own: set[tuple[str, Shape, str]] = set()
        """User, shape and GPU type of jobs whose only victims are running jobs of the same user."""
        self.devices: dict[int, int] = {}
        """Devices that this plan leaves free, on the nodes where it launches jobs."""
        self.reserved: list[Reservation] = []
        self.quota: dict[QuotaKey, list[tuple[int, int]]] = {}
        """Nodes and GPUs of the jobs to which this plan has given capacity, by quota."""
        self.waits = self.missed = self.cut = self.again = False
        """`waits`: a job waits for nodes that other jobs leave. `missed`: some jobs of a lane were
        skipped. `cut`: the plan ended before the end of the queue. `again`: a job may be placed once
        the plan's actions are applied."""

    def make(self) -> list[Action]:
        if self.cluster.windows or self.cluster.evicting:
            self._vacate()
        if self.cluster.moving:
            self._keep_for_moving()
        if self._only_arrivals():
            self._try_arrivals()
        else:
            for rank in tuple(self.cluster.queue.ranks):
                if self._walk(rank):
                    break
            if self.cluster.warm and not self.cut:
                self._release()
        return self._finish()

    def _only_arrivals(self) -> bool:
        """Returns whether it suffices to try the new jobs: no node has changed, and no new job may
        preempt more than the jobs before it."""
        cluster, policy = self.cluster, self.policy
        if self.fresh or policy.behind != "anything":
            return False
        wait_s = min(policy.wait_s or math.inf, policy.repack_after_s)
        return all(self.now < job.since + wait_s for job in cluster.arrived.values())

    def _try_arrivals(self) -> None:
        """Tries only the new jobs, because all other jobs still cannot be placed."""
        jobs = list(self.cluster.arrived.values())
        if len(jobs) > 1:
            jobs.sort(key=lambda job: (-job.level, job.standing, job.order))
        for job in jobs:
            self._try(job, (-job.level, job.standing), (job.nodes, job.gpus, job.memory_mib), None)
            if self._is_long():
                break

    def _release(self) -> None:
        """Releases the warm processes of jobs that do not start now."""
        launched = {action.task for action in self.actions if isinstance(action, Launch)}
        for job in self.cluster.warm.values():
            if job.id not in launched:
                self.actions.append(Release(job.id, job.attempt))

    def _finish(self) -> list[Action]:
        """Records in the cluster how much the next plan must examine; returns the actions."""
        cluster = self.cluster
        # A waiting job may choose other nodes once more jobs leave; another job can then start on
        # the nodes that the waiting job had reserved.
        cluster.again = self.again or self.cut or bool(self.victims)
        cluster.alike = not (
            self.waits or self.missed or self.victims or cluster.again
            or cluster.windows or cluster.warm or cluster.quotas or cluster.moving
            or self.policy.behind == "backfill"
            or (self.kept and self.policy.behind == "anything")
        )  # fmt: skip
        cluster.fresh = 0 if cluster.alike or not self.actions else ALL
        cluster.arrived.clear()
        cluster.evicting.clear()
        cluster.reserved = tuple(self.reserved)
        return self.actions

    def _is_long(self) -> bool:
        """Returns whether the plan has reached `BATCH` actions."""
        self.cut = len(self.actions) + (PREEMPTION - 1) * len(self.victims) >= BATCH
        return self.cut

    def _vacate(self) -> None:
        """Preempts the jobs on evicted nodes, and on the nodes of a window that has begun."""
        cluster = self.cluster
        for name, reason in cluster.evicting.items():
            for job in cluster.jobs_on(name):
                self._preempt(job, reason)
        for window in cluster.windows.values():
            if window.begin <= self.now < window.end:
                for name in sorted(window.nodes & cluster.places.keys()):
                    for job in cluster.jobs_on(name):
                        if not window.admits(job.user, job.group):
                            self._preempt(job, window.reason or "its node is reserved")

    def _keep_for_moving(self) -> None:
        """Handles moving jobs. A job that has left its old node starts on the node reserved for it.
        For a job that is still leaving, the reservation continues."""
        cluster = self.cluster
        for task, place in cluster.moving.items():
            job = cluster.jobs[task]
            allowed = cluster.allowed(job, self.now) & 1 << place
            if not self.free.fitting(job.gpus, job.memory_mib, allowed):
                continue
            if job.phase != "queued":
                self._hold(job, place)
                self._reserve(job, [place], "which moves there")
            elif self._within((job.user, job.level, job.group), job):
                self._launch(job, [place])
                self.moved.add(task)

    # -- the walk ----------------------------------------------------------------------------------

    def _walk(self, rank: QueueKey) -> bool:
        """Walks the queued jobs of one queue rank in order of submission, over all lanes. Returns
        True if no further job can start."""
        lanes = list(self.cluster.queue.lanes[rank].items())
        if self.failed and self.kept_until is None:
            open_ = self.usable & ~self.kept
            lanes = [each for each in lanes if not self._hopeless_lane(each[0], open_)]
            if not lanes:
                return False
        jobs = self.cluster.jobs
        heads = [(line[0], number, 0) for number, (_, line) in enumerate(lanes)]
        heapq.heapify(heads)
        while heads:
            (_, task), number, at = heads[0]
            (shape, _, quota), line = lanes[number]
            verdict = self._try(jobs[task], rank, shape, quota)
            at += 1
            if verdict is _Verdict.PLACED:
                self.fresh = ALL
                if self._is_long():
                    return True
            elif self.kept and self._full():
                return True
            elif verdict is _Verdict.SHORT:
                at = self._next_short(line, at)
            if verdict is _Verdict.STUCK or at == len(line):
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (line[at], number, at))
        return False

    def _full(self) -> bool:
        """Returns whether no further job can start."""
        return not self.usable & ~self.kept and self.kept_until is None

    def _next_short(self, line: list[tuple[int, str]], at: int) -> int:
        """Returns the index of the next job of a lane that ends before the reservation begins."""
        jobs = self.cluster.jobs
        for place in range(at, len(line)):
            if self._short(jobs[line[place][1]]):
                return place
        return len(line)

    def _short(self, job: Job) -> bool:
        """Returns whether the job ends, by its estimate, before the reservation begins."""
        return (
            self.kept_until is not None
            and job.estimate_s is not None
            and self.now + job.estimate_s <= self.kept_until
        )

    def _try(self, job: Job, rank: QueueKey, shape: Shape, quota: QuotaKey | None) -> _Verdict:
        if job.id in self.moved:
            return _Verdict.PLACED
        if quota is not None and not self._within(quota, job):
            return _Verdict.STUCK
        allowed = self.usable
        particular = bool(self.cluster.windows or job.avoid)
        if particular:
            allowed = self.cluster.allowed(job, self.now)
        elif job.gpu_type:
            allowed &= self.cluster.devices.typed(job.gpu_type)
        open_ = allowed
        if self.kept and not self._short(job):
            open_ &= ~self.kept
        if not self._hopeless(shape, open_):
            fresh = ALL if job.id in self.cluster.arrived else self.fresh
            if self._start(job, shape, open_, fresh) or self._wait(job, shape, open_, fresh):
                return _Verdict.PLACED
            own = (job.user, shape, job.gpu_type) in self.own
            if self.policy.preemptive and not own:
                placed, own = self._interrupt(job, rank, shape, open_, fresh)
                if placed:
                    return _Verdict.PLACED
            if fresh and self._repack(job, shape, open_):
                return _Verdict.PLACED
            if own:
                self.own.add((job.user, shape, job.gpu_type))
                return self._miss()
            self.failed.append((shape, open_))
            self._hold_back(job, rank, shape, allowed)
        if particular:  # other jobs of the shape may use other nodes
            return self._miss()
        if self.kept_until is not None and self._fits(self.free, shape, allowed, ALL):
            return _Verdict.SHORT
        return _Verdict.STUCK

    def _miss(self) -> _Verdict:
        self.missed = True
        return _Verdict.MISSED

    def _hopeless_lane(self, lane: Lane, open_: int) -> bool:
        shape, kind, _ = lane
        return self._hopeless(shape, open_ & self.cluster.devices.typed(kind) if kind else open_)

    def _hopeless(self, shape: Shape, among: int) -> bool:
        """Returns whether a smaller or equal request already failed among these nodes. Requests
        with and without GPUs are not compared."""
        nodes, gpus, memory_mib = shape
        for other, looked_at in self.failed:  # called often, so without calls and generators
            if (
                not among & ~looked_at
                and nodes >= other[0]
                and gpus >= other[1]
                and memory_mib >= other[2]
                and (not gpus) == (not other[1])
            ):
                return True
        return False

    # -- a job -------------------------------------------------------------------------------------

    def _start(self, job: Job, shape: Shape, among: int, fresh: int) -> bool:
        """Launches the job if enough nodes are free now and one of them is fresh."""
        fitting = self._fits(self.free, shape, among, fresh)
        if not fitting:
            return False
        self._launch(job, self._choose(job, fitting, self.free))
        return True

    def _launch(self, job: Job, chosen: list[int]) -> None:
        """Launches the job on these nodes, in the order of its ranks."""
        names = tuple([self.cluster.names[place] for place in chosen])
        devices = self._devices(job, chosen) if self.cluster.capacity.largest else ()
        self.actions.append(Launch(job.id, job.attempt + 1, names, devices))
        self._take(job, chosen)

    def _devices(self, job: Job, chosen: list[int]) -> tuple[tuple[int, ...], ...]:
        """Chooses the job's devices on each of its nodes; none on nodes where another scheduler
        chooses them."""
        cluster, found = self.cluster, []
        for place in chosen:
            devices: tuple[int, ...] = ()
            if cluster.nodes[cluster.names[place]].indexed:
                free = self.devices.get(place, cluster.devices.free(place))
                devices = pick(free, cluster.capacity.share(place, job.gpus))
                self.devices[place] = free & ~mask(devices)
            found.append(devices)
        return tuple(found) if any(found) else ()

    def _wait(self, job: Job, shape: Shape, among: int, fresh: int) -> bool:
        """Reserves nodes that are free now or after the leaving jobs have left. Returns False if
        there are too few."""
        if not self.cluster.leaving and not self.victims:
            return False
        fitting = self._fits(self._later(), shape, among, fresh)
        if not fitting:
            return False
        chosen = self._choose(job, fitting, self._later())
        self._take(job, chosen)
        self._reserve(job, chosen, "which waits for other tasks to leave")
        self.waits = True
        return True

    def _later(self) -> Capacity:
        """Returns the capacity that is free after the leaving jobs have left."""
        if self.soon is None:
            self.soon = self.free.copy()
            for other in self.cluster.leaving.values():
                self._give(self.soon, other)
        return self.soon

    def _interrupt(
        self, job: Job, rank: QueueKey, shape: Shape, among: int, fresh: int
    ) -> tuple[bool, bool]:
        """Preempts other jobs for this job, and reserves the nodes that they leave.

        Returns:
            Two flags. The first is True if victims were found. The second is True if the only
            possible victims belong to the job's own user, so that no job is preempted.
        """
        cluster = self.cluster
        if self.now < job.since + self.policy.wait_s and not job.overdue:
            if not _holds_below(cluster, job.level):
                return False, False
            rank = (rank[0], LOWER_ONLY)
        if fresh != ALL:
            some = among & fresh & cluster.victim_index.reach(bound(rank))
            if not some and not cluster.capacity.fitting(shape[1], shape[2], among & fresh):
                return False, False
        room = self._room(rank, shape)
        if fresh != ALL and not room.search(among & fresh, 1):
            return False, False
        found = room.search(among & ~self.used, job.nodes)
        if not found:
            if self.actions and room.search(among, job.nodes):
                self.again = True
            return False, False
        if self._spares(rank):
            found = self._room(rank, shape, job.user).search(among & ~self.used, job.nodes)
            if not found:
                return False, True
        chosen = cluster.topology.within(job.nodes, list(found))
        for place in chosen:
            for victim in found[place]:
                self._preempt(victim, f"makes room for {job.id}")
        self._take(job, chosen)
        self._reserve(job, chosen, "for which other tasks make room")
        return True, False

    def _repack(self, job: Job, shape: Shape, among: int) -> bool:
        """Moves other jobs to free GPUs on other nodes; reserves these GPUs and the nodes that the
        moved jobs leave.

        A change of any node may help, because moved jobs need nodes, too. So all nodes are searched.
        """
        if self.now < job.since + self.policy.repack_after_s:
            return False
        movers = self._movers((job.level, shape[1], shape[2]))
        found = self._moves(movers, job.nodes, among, self.used)
        if not found:
            if self.actions and self._moves(movers, job.nodes, among, 0):
                self.again = True
            return False
        chosen, moves = found
        for mover, place in moves:
            name = self.cluster.names[place]
            self._preempt(mover, f"moves to {name}, which makes room for {job.id}", name)
            self._hold(mover, place)
            self._reserve(mover, [place], "which moves there")
        self._take(job, chosen)
        self._reserve(job, chosen, "for which other tasks move")
        return True

    def _movers(self, key: tuple[int, int, int]) -> RepackIndex:
        known = self.cluster.movers
        if key not in known:
            if len(known) >= CACHES:
                del known[next(iter(known))]
            known[key] = RepackIndex(self.cluster, *key)
        return known[key]

    def _moves(
        self, movers: RepackIndex, count: int, among: int, used: int
    ) -> tuple[list[int], list[tuple[Job, int]]] | None:
        """Returns nodes for a gang, and the moves that must come first: each job and its new place.
        Leaves out the nodes of `used`."""
        leaving = movers.search(count, among & ~used)
        if not leaving:
            return None
        chosen = self.cluster.topology.within(count, list(leaving))
        jobs = [job for place in chosen for job in leaving[place]]
        others = self.cluster.ready & ~used & ~self.kept
        for place in chosen:
            others &= ~(1 << place)
        moves = destinations(self.cluster, jobs, others, self.now)
        return (chosen, moves) if moves else None

    def _spares(self, rank: QueueKey) -> bool:
        """Returns whether jobs of this rank could preempt jobs of the same user and priority, which
        the policy forbids. If levels belong to users, all jobs of a user share one level, so only
        an overdue job could."""
        return self.policy.spares_own and (rank[1] < 0 or self.policy.by == "job")

    def _hold_back(self, job: Job, rank: QueueKey, shape: Shape, allowed: int) -> None:
        """Reserves nodes for a job that could not be placed, so that later jobs cannot use them."""
        behind = self.policy.behind
        if behind == "anything" and not job.overdue:
            return
        large = self.free.sized(job.gpus, job.memory_mib, allowed)
        if not self.cluster.topology.enough(job.nodes, large):
            return  # the job can never start on these nodes
        why = "which comes first"
        if behind == "nothing":
            nodes = large
        elif behind == "anything":
            nodes = self._soonest(self._room(rank, shape), job.nodes, large & ~self.kept)[1]
            why = "which is overdue"
        elif self.kept_until is None and not self.kept:
            when, nodes = self._soonest(self._room(None, shape), job.nodes, large)
            nodes = large if when == math.inf else nodes
            self.kept_until = None if when == math.inf else max(when, self.now)
        else:
            return
        if nodes & ~self.kept:
            self._reserve(job, [*members(nodes & ~self.kept)], why, whole=True)
        self.kept |= nodes

    def _soonest(self, room: PreemptionCache, count: int, among: int) -> tuple[float, int]:
        """Returns the time at which `count` nodes could be free, and those nodes."""
        first = heapq.nsmallest(count, [(room.when(place), place) for place in members(among)])
        return first[-1][0] if first else math.inf, sum(1 << place for _, place in first)

    def _room(
        self, rank: QueueKey | None, shape: Shape, spared: str | None = None
    ) -> PreemptionCache:
        """Returns the cluster's `PreemptionCache` of this rank and shape, refreshed."""
        preemption_caches = self.cluster.preemption_caches
        room = preemption_caches.pop((rank, shape, spared), None)
        if room is None:
            if len(preemption_caches) >= CACHES:
                del preemption_caches[next(iter(preemption_caches))]
            room = PreemptionCache(self.cluster, self.cluster.victim_index, rank, shape, spared)
        preemption_caches[rank, shape, spared] = room
        room.refresh()
        return room

    def _reserve(self, job: Job, chosen: list[int], why: str, *, whole: bool = False) -> None:
        """Records, for explanations of waits, that the job reserves free capacity."""
        until = self.kept_until if whole else None
        self.reserved.append(Reservation(job.id, tuple(chosen), whole, why, until))

    # -- capacity within the plan ------------------------------------------------------------------

    def _fits(self, capacity: Capacity, shape: Shape, among: int, fresh: int) -> int:
        """Returns the nodes that can take a member, if they are enough for the gang and one of them
        is fresh; else 0."""
        nodes, gpus, memory = shape
        if fresh != ALL and not capacity.fitting(gpus, memory, among & fresh):
            return 0
        found = capacity.fitting(gpus, memory, among)
        if nodes == 1:
            return found
        return found if self.cluster.topology.enough(nodes, found) else 0

    def _choose(self, job: Job, fitting: int, capacity: Capacity) -> list[int]:
        """Chooses among the nodes that the job may use; avoids suspect nodes if enough other
        nodes exist."""
        cluster = self.cluster
        sound = fitting & cluster.ready
        if sound != fitting and cluster.topology.enough(job.nodes, sound):
            fitting = sound
        places = cluster.places
        kept = [places[name] for name in job.previous if name in places]
        kept = [place for place in kept if fitting >> place & 1]
        return choose(job, fitting, kept, capacity, cluster.topology)

    def _take(self, job: Job, chosen: list[int]) -> None:
        for place in chosen:
            self._hold(job, place)
        if self.cluster.quotas:
            key = (job.user, job.level, job.group)
            self.quota.setdefault(key, []).append(self.cluster.quota_size(job))

    def _hold(self, job: Job, place: int) -> None:
        """Reserves the job's share of one node."""
        if self.free is self.cluster.capacity:
            self.free = self.free.copy()
        self.free.take(place, job.gpus, job.memory_mib)
        if self.soon is not None:
            self.soon.take(place, job.gpus, job.memory_mib)
        self.used |= 1 << place

    def _give(self, capacity: Capacity, job: Job) -> None:
        for name in job.placement:
            capacity.give(self.cluster.places[name], job.gpus, job.memory_mib)

    def _preempt(self, job: Job, why: str, to: str = "") -> None:
        if job.id in self.victims or job.phase == "suspending":
            return
        self.actions.append(Preempt(job.id, job.attempt, why, to))
        self.victims.add(job.id)
        self._give(self._later(), job)
        for name in job.placement:
            self.used |= 1 << self.cluster.places[name]

    def _within(self, key: QuotaKey, job: Job) -> bool:
        """Returns whether the job's quota allows its start, including the capacity that this plan
        has given to other jobs."""
        taken = self.quota.get(key, ())
        nodes, gpus = sum(each[0] for each in taken), sum(each[1] for each in taken)
        return self.cluster.room_in_quota(job, nodes, gpus)


def _holds_below(cluster: Cluster, priority: int) -> bool:
    """Returns whether a job of lower priority holds nodes."""
    for level, count in cluster.placed.items():  # noqa: SIM110  # called often; a generator takes twice as long
        if count and level < priority:
            return True
    return False
