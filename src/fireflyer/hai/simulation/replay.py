"""Event loop of a replay: arrivals, starts, ends, faults and repairs of a trace, with the
scheduler's own `plan`.

The replay takes the place of the controller and the engines of production. Simulated time is in
integer milliseconds; the scheduler gets seconds. Only measured times such as `plan_s` depend on the
wall clock.
"""

import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from fireflyer.errors import TraceError
from fireflyer.hai.lifecycle import Action, Launch, Preempt
from fireflyer.hai.model import PRIORITIES
from fireflyer.hai.model.identity import Quota
from fireflyer.hai.scheduling.capacity import members
from fireflyer.hai.scheduling.cluster import Cluster, Node, Window
from fireflyer.hai.scheduling.cluster import Job as Wanted
from fireflyer.hai.scheduling.planner import plan
from fireflyer.hai.scheduling.policies import DEFAULT, Policy
from fireflyer.hai.scheduling.quotas import limits
from fireflyer.hai.simulation import faults
from fireflyer.hai.simulation.ledger import Ledger
from fireflyer.hai.simulation.trace import Job, Trace
from fireflyer.hai.simulation.work import Costs

QUEUED, STARTING, WORKING, SUSPENDING, OVER = range(5)

NEVER = 1 << 62
REPORT_EVERY = 2048
"""Number of simulated moments between two calls of `progress`."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated cluster and its rules."""

    nodes: int
    gpus: int = 8
    """GPUs of each node."""
    types: tuple[tuple[str, int], ...] = ()
    """Types of GPUs, each with its number of nodes, in the order of the nodes; empty: all GPUs have
    one type, and the types that jobs ask for are ignored."""
    zones: int = 1
    leaf_nodes: int = 20
    """Nodes below one switch."""
    policy: str = DEFAULT
    rules: Policy | None = None
    """Parameters of the policy; None: as in production."""
    whole_nodes: bool = False
    """True if a job takes complete nodes, as on HAI; False: a job takes some GPUs of each of its
    nodes."""
    costs: Costs = Costs()
    fault_rates: dict[str, float] = {}
    """Factors on the fault rates, by kind of fault, from `faults.parse`."""
    estimates: float = 0.0
    """Ratio of the scheduler's estimate of the remaining work to the true remaining work; 0: no
    estimates."""
    quotas: tuple[Quota, ...] = ()
    """Quotas, as in `fireflyer quota set`."""
    windows: tuple[Window, ...] = ()
    """Maintenance windows and reservations. Their times are seconds since the first submission,
    with at most three decimals."""
    tick_ms: int = 0
    """Interval of plans in simulated milliseconds; 0: plan after the events of each moment, as in
    production."""
    seed: int = 0


class Run:
    """State of one job, and its measurements."""

    __slots__ = (
        "active_before", "active_mean", "active_since", "cross_zone", "ended", "epoch", "faults",
        "first", "gpus", "held_ms", "job", "left", "lost", "phase", "preemptions", "since", "wanted",
    )  # fmt: skip

    def __init__(self, job: Job, wanted: Wanted, gpus: int) -> None:
        self.job, self.wanted = job, wanted
        self.gpus = gpus
        """GPUs that the job holds while it runs: at least as many as it asked for."""
        self.left = job.run_ms
        self.phase = QUEUED
        self.since = job.submit_ms
        self.epoch = 0
        """Version of the job's scheduled events. An increment makes the events of older versions
        void."""
        self.first = self.ended = -1
        self.preemptions = self.faults = 0
        self.held_ms = 0
        """Milliseconds for which the job held nodes."""
        self.active_before = 0
        self.active_mean = 0.0
        """Mean number of tasks in the system, including the job, from its arrival to its end."""
        self.cross_zone = 0
        """Maximum, over the job's placements, of the pairs of adjacent ranks in different zones."""


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """Completed replay of a trace."""

    setup: Setup
    trace: Trace
    runs: list[Run]
    too_large: int
    """Jobs that the replay leaves out because the cluster, or two of its zones, cannot hold
    them."""
    over_quota: int
    """Further jobs that the replay leaves out because they are larger than their quota."""
    ledger: Ledger
    faults: dict[str, int]
    """Number of faults that hit a task or took a node down, by kind."""
    plans: int
    plan_s: float
    plan_max_s: float
    wall_s: float


def replay(
    trace: Trace, setup: Setup, progress: Callable[[int], None] = lambda ended: None
) -> Replay:
    """Runs the trace to the end of its last job.

    Args:
        trace: jobs with users (`with_users`).
        setup: cluster, policy, costs, faults.
        progress: called regularly with the number of jobs that ended since the last call.

    Raises:
        TraceError: no job fits the cluster, or the policy leaves jobs waiting forever.
    """
    return _World(trace, setup).run(progress)


def shape(job: Job, setup: Setup) -> tuple[int, int]:
    """Returns the number of nodes of a job and the GPUs on each: as few nodes as possible, with
    equal shares."""
    gpus = job.gpus or job.nodes * setup.gpus
    nodes = -(-gpus // setup.gpus)
    return nodes, setup.gpus if setup.whole_nodes else -(-gpus // nodes)


class _World:
    """State of one replay. Event handlers get the simulated time in milliseconds."""

    def __init__(self, trace: Trace, setup: Setup) -> None:
        self.trace, self.setup, self.costs = trace, setup, setup.costs
        per_zone = -(-setup.nodes // setup.zones)
        kinds = [kind for kind, count in setup.types for _ in range(count)] or [""] * setup.nodes
        self.nodes = [
            Node(
                name=f"n{n}", gpus=setup.gpus, gpu_type=kinds[n],
                zone=f"z{n // per_zone}", leaf=f"z{n // per_zone}l{n % per_zone // setup.leaf_nodes}",
            )
            for n in range(setup.nodes)
        ]  # fmt: skip
        self.zone = {node.name: node.zone for node in self.nodes}
        self.cluster = Cluster(self.nodes, policy=setup.policy)
        if setup.rules is not None:
            self.cluster.policy = setup.rules  # before the cluster has any job
        for key, limit in limits(setup.quotas).items():
            self.cluster.set_quota(*key, limit)
        for window in setup.windows:
            self.cluster.set_window(window)
        self.ledger = Ledger(setup.nodes * setup.gpus)
        self.runs: dict[str, Run] = {}
        self.too_large = self.over_quota = 0
        for job in trace.jobs:
            self._admit(job)
        if not self.runs:
            quota = " and its quota" if self.over_quota else ""
            raise TraceError(
                f"no job of {trace.source} fits {setup.nodes} nodes of {setup.gpus} GPUs{quota}"
            )
        self.events: list[tuple[int, int, Callable[..., None], object, int]] = []
        self.made = 0
        self.closed = 0
        """Nodes that are in a window now."""
        for window in setup.windows:
            for edge in (window.begin, window.end):
                self._at(round(edge * 1000), self._turn, window)
        self.down_until = [0] * setup.nodes
        self.faults: Iterator[faults.Fault] = iter(())
        if setup.fault_rates:
            self.faults = faults.stream(setup.fault_rates, setup.nodes, setup.seed)
        self.hit: Counter[str] = Counter()
        self.ended = 0
        self.plans, self.plan_s, self.plan_max_s = 0, 0.0, 0.0

    def _admit(self, job: Job) -> None:
        setup = self.setup
        nodes, each = shape(job, setup)
        kind = job.gpu_type if setup.types else ""
        places = self.cluster.devices.typed(kind)
        if not self.cluster.topology.enough(nodes, places):
            self.too_large += 1
            return
        number = len(self.runs) + 1
        wanted = Wanted(
            id=f"t{number}", order=number, nodes=nodes,
            gpus=0 if self.setup.whole_nodes else each, gpu_type=kind,
            user=job.user, group=job.group,
            priority=PRIORITIES.get(job.priority, PRIORITIES["normal"]),
        )  # fmt: skip
        if self.cluster.forbidden(wanted):
            self.over_quota += 1
            return
        self.runs[wanted.id] = Run(job, wanted, nodes * each)

    # -- time ------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int], None]) -> Replay:
        began = time.perf_counter()
        runs = list(self.runs.values())
        events, ledger, waiting = self.events, self.ledger, self.cluster.queue.ranks
        windows = self.cluster.windows
        arrived, total, reported = 0, len(runs), 0
        tick = self.setup.tick_ms
        look = due = NEVER
        self._next_fault(0)
        next_arrival = runs[0].job.submit_ms
        moments = 0
        while self.ended < total:
            now = min(next_arrival, events[0][0] if events else NEVER, look, due)
            if now == NEVER:
                raise self._stuck(total)
            ledger.advance(now)
            while next_arrival == now:
                self._arrive(runs[arrived], now)
                arrived += 1
                next_arrival = runs[arrived].job.submit_ms if arrived < total else NEVER
            while events and events[0][0] == now:
                _, _, handle, subject, epoch = heapq.heappop(events)
                handle(now, subject, epoch)
            if tick and now % tick:
                due, look = now - now % tick + tick, NEVER
            else:
                due = NEVER
                acted = bool(waiting or windows) and self._plan(now)
                look = self._look(now) if waiting or windows else NEVER
                if not acted and look == next_arrival == NEVER and self._idle():
                    raise self._stuck(total)
            if self.closed or ledger.closed:
                ledger.closed = self._idle_in_windows()
            moments += 1
            if not moments % REPORT_EVERY:
                progress(self.ended - reported)
                reported = self.ended
        progress(total - reported)
        return Replay(
            setup=self.setup, trace=self.trace, runs=runs, too_large=self.too_large,
            over_quota=self.over_quota, ledger=ledger, faults=dict(sorted(self.hit.items())),
            plans=self.plans,
            plan_s=self.plan_s, plan_max_s=self.plan_max_s, wall_s=time.perf_counter() - began,
        )  # fmt: skip

    def _at(self, when: int, handle: Callable[..., None], subject: object, epoch: int = 0) -> None:
        self.made += 1
        heapq.heappush(self.events, (when, self.made, handle, subject, epoch))

    def _plan(self, now: int) -> bool:
        """Plans and executes the plan; returns whether the plan had actions."""
        begun = time.perf_counter()
        actions = plan(self.cluster, now / 1000)
        took = time.perf_counter() - begun
        self.plans += 1
        self.plan_s += took
        self.plan_max_s = max(self.plan_max_s, took)
        for action in actions:
            self._act(action, now)
        return bool(actions)

    def _look(self, now: int) -> int:
        look = self.cluster.next_look(now / 1000)
        return NEVER if look is None else max(math.ceil(look * 1000), now + 1)

    def _idle(self) -> bool:
        """Returns whether jobs wait although no job runs and no node is down: these jobs would wait
        forever."""
        return not self.ledger.held and not self.ledger.down and bool(self.cluster.queue)

    def _stuck(self, total: int) -> TraceError:
        return TraceError(
            f"policy {self.setup.policy} leaves {total - self.ended} of {total} jobs waiting forever "
            "on an idle cluster; check their size and the quotas"
        )

    # -- a job's life ----------------------------------------------------------------------------------

    def _arrive(self, run: Run, now: int) -> None:
        ledger = self.ledger
        run.active_before = ledger.active_ms
        ledger.active += 1
        ledger.queued += run.gpus
        run.wanted.estimate_s = self._estimate(run)
        self.cluster.submit(run.wanted, now / 1000)

    def _estimate(self, run: Run) -> float | None:
        """Returns the estimate of the remaining work that the scheduler gets."""
        return run.left / 1000 * self.setup.estimates if self.setup.estimates else None

    def _act(self, action: Action, now: int) -> None:
        self.cluster.apply(action, now / 1000)
        match action:
            case Launch():
                self._launch(self.runs[action.task], action, now)
            case Preempt():
                self._preempt(self.runs[action.task], now)

    def _launch(self, run: Run, action: Launch, now: int) -> None:
        self.ledger.queued -= run.gpus
        self.ledger.held += run.gpus
        if run.first < 0:
            run.first = now
        if self.setup.zones > 1 and len(action.nodes) > 1:
            zones = [self.zone[node] for node in action.nodes]
            pairs = sum(a != b for a, b in itertools.pairwise(zones))
            run.cross_zone = max(run.cross_zone, pairs)
        run.phase, run.since = STARTING, now
        self._at(now + self.costs.restart_ms, self._started, run, run.epoch)

    def _started(self, now: int, run: Run, epoch: int) -> None:
        if epoch != run.epoch:
            return
        passed = now - run.since
        run.held_ms += passed
        self.ledger.restart += passed * run.gpus
        run.phase, run.since = WORKING, now
        self.cluster.running(run.wanted.id, now / 1000)
        self._at(now + self.costs.time_for(run.left), self._end, run, epoch)

    def _end(self, now: int, run: Run, epoch: int) -> None:
        if epoch != run.epoch:
            return
        ledger, passed = self.ledger, now - run.since
        run.held_ms += passed
        ledger.useful += run.left * run.gpus
        ledger.checkpoint += (passed - run.left) * run.gpus
        ledger.held -= run.gpus
        ledger.active -= 1
        run.phase, run.left, run.ended = OVER, 0, now
        stayed = now - run.job.submit_ms
        run.active_mean = (ledger.active_ms - run.active_before) / stayed
        self.ended += 1
        self.cluster.remove(run.wanted.id, now / 1000)

    def _preempt(self, run: Run, now: int) -> None:
        run.preemptions += 1
        self._break_off(run, now, saves=True)
        run.phase, run.since = SUSPENDING, now
        self._at(now + self.costs.suspend_ms, self._suspended, run, run.epoch)

    def _suspended(self, now: int, run: Run, epoch: int) -> None:
        if epoch == run.epoch:
            run.held_ms += now - run.since
            self.ledger.suspend += (now - run.since) * run.gpus
            self._requeue(run, now)

    def _break_off(self, run: Run, now: int, *, saves: bool) -> None:
        """Ends the attempt's current phase early. `saves`: True if the work of the phase is
        kept."""
        ledger, passed = self.ledger, now - run.since
        run.epoch += 1
        run.held_ms += passed
        if run.phase == STARTING:
            ledger.restart += passed * run.gpus
        elif run.phase == SUSPENDING:
            ledger.suspend += passed * run.gpus
        else:
            done, kept = self.costs.done_after(passed)
            kept = done if saves else kept
            ledger.useful += kept * run.gpus
            ledger.lost += (done - kept) * run.gpus
            ledger.checkpoint += (passed - done) * run.gpus
            run.left -= kept

    def _requeue(self, run: Run, now: int) -> None:
        self.ledger.held -= run.gpus
        self.ledger.queued += run.gpus
        run.phase, run.since = QUEUED, now
        self.cluster.requeue(run.wanted.id, now / 1000, self._estimate(run))

    # -- windows ---------------------------------------------------------------------------------------

    def _turn(self, now: int, _window: Window, _epoch: int) -> None:
        """Begins or ends a window. The next plan preempts the jobs on the window's nodes."""
        self.closed = 0
        for window in self.setup.windows:
            if window.begin * 1000 <= now < window.end * 1000:
                for name in window.nodes:
                    self.closed |= 1 << self.cluster.places[name]

    def _idle_in_windows(self) -> int:
        """Returns the number of free GPUs on nodes that are up and in a window. A job that is still
        saving holds its GPUs, and so does a job for which the window is a reservation."""
        cluster = self.cluster
        nodes = self.closed & (cluster.ready | cluster.suspect)
        return sum(cluster.capacity.free[place] for place in members(nodes))

    # -- faults ----------------------------------------------------------------------------------------

    def _next_fault(self, _now: int) -> None:
        fault = next(self.faults, None)
        if fault is not None:
            self._at(fault.at_ms, self._fault, fault)

    def _fault(self, now: int, fault: faults.Fault, _epoch: int) -> None:
        self._next_fault(now)
        if now < self.down_until[fault.node]:
            return  # the node is down already
        name = self.nodes[fault.node].name
        victims = [self.runs[job.id] for job in self.cluster.jobs_on(name)]
        match fault.effect:
            case "node":
                self._take_down(fault, now)
            case "link":
                victims = [run for run in victims if run.wanted.nodes > 1]
            case "task":
                victims = self._at_gpu(victims, fault)
        if victims or fault.effect == "node":
            self.hit[fault.kind] += 1
        for run in victims:
            run.faults += 1
            self._break_off(run, now, saves=False)
            self._requeue(run, now)

    def _at_gpu(self, victims: list[Run], fault: faults.Fault) -> list[Run]:
        """Returns the task on the faulty GPU. The model gives a node's GPUs to its tasks from the
        first GPU on, in order of submission."""
        gpu = int(fault.gpu * self.setup.gpus)
        for run in victims:
            gpu -= run.gpus // run.wanted.nodes
            if gpu < 0:
                return [run]
        return []

    def _take_down(self, fault: faults.Fault, now: int) -> None:
        until = now + fault.repair_ms
        self.down_until[fault.node] = until
        self.ledger.down += self.setup.gpus
        node = self.nodes[fault.node]
        self.cluster.set_node(msgspec.structs.replace(node, health="down", reason=fault.kind))
        self._at(until, self._repaired, fault)

    def _repaired(self, now: int, fault: faults.Fault, _epoch: int) -> None:
        self.ledger.down -= self.setup.gpus
        if now >= self.down_until[fault.node]:  # else the node failed again at this moment
            self.cluster.set_node(self.nodes[fault.node])
