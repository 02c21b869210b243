"""Measurements of a replay: the figures of the report. Times are in hours unless a name has another
unit."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fireflyer.hai.scheduling.cluster import Window
from fireflyer.hai.scheduling.policies import policy_named
from fireflyer.hai.simulation.replay import Replay, Run
from fireflyer.hai.simulation.trace import HOUR_MS

Numbers = NDArray[np.float64]

SIZES = ((1, "1"), (4, "2-4"), (8, "5-8"), (32, "9-32"), (1 << 62, "over 32"))
"""Classes by requested GPUs: upper limit and name."""

BOUND_S = 10.0
"""Bound of the bounded slowdown, in seconds: a shorter job counts as a job of this length
(Feitelson and Rudolph, 1998)."""

USERS_SHOWN = 50


class Spread(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class Class(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one size or user."""

    name: str
    jobs: int
    gpu_h: float
    """Work of the jobs in GPU-hours."""
    jct_mean_h: float
    jct_p50_h: float
    wait_mean_h: float
    slowdown_p50: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one policy on one trace. Only `wall_s` and the `plan_` times depend on the
    machine."""

    policy: str
    trace: str
    jobs: int
    too_large: int
    over_quota: int
    """Jobs that the replay leaves out because they are larger than their quota."""
    left_out: dict[str, int]
    nodes: int
    gpus_per_node: int
    seed: int
    rules: dict[str, Any]
    """Parameters of the policy; the value null means no limit."""
    quotas: list[dict[str, Any]]
    windows: list[dict[str, Any]]
    """Windows in seconds since the first submission."""
    users: int

    jct_mean_h: float
    jct_p50_h: float
    jct_p95_h: float
    jct_p99_h: float
    wait_mean_h: float
    """Time from the submission to the first launch."""
    wait_p50_h: float
    wait_p95_h: float
    wait_p99_h: float
    wait_max_h: float
    queued_mean_h: float
    """Mean time of a job without nodes: the first wait, and the waits after preemptions and
    faults."""
    slowdown: Spread
    """Bounded slowdown: (time in the system) / max(time of work, 10 s), at least 1."""
    makespan_h: float

    occupancy: float
    """Held GPU-time / GPU-time of nodes that are up and in no window."""
    utilisation: float
    """(GPU-time of work, including work that was lost later) / (the denominator of `occupancy`)."""
    goodput: float
    """GPU-time of work that was not lost / all GPU-time."""
    split_gpu_ms: dict[str, int]
    """GPU-milliseconds by cause; they sum to `capacity_gpu_ms`."""
    capacity_gpu_ms: int

    preemptions: int
    preemptions_per_job: float
    preemptions_per_hour: float
    preempted_jobs: int
    most_preemptions: int
    faults: dict[str, int]
    fault_restarts: int
    lost_gpu_h: float

    rho_max: float
    """Finish-time fairness (Themis): time in the system / time on an equal share of the cluster."""
    rho_p95: float
    rho_over_1: float
    """Share of jobs that would have ended sooner on an equal share of the cluster."""
    jain: float
    """Jain's index of users' mean speeds (time of work / time in the system): 1 if all speeds are
    equal."""
    cross_zone_max: int
    cross_zone_over_1: int
    """Number of jobs that were placed with more than one pair of adjacent ranks in different
    zones."""

    by_size: list[Class]
    by_user: list[Class]
    """Users with the most work; empty if each user has one job."""
    plans: int
    plan_mean_ms: float
    plan_max_ms: float
    wall_s: float


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """Series for the plots, in addition to the figures. They are sampled, so that a page stays
    small."""

    time_h: list[float]
    held: list[float]
    """Mean share of held GPUs in each interval between samples; likewise `queued` and `down`."""
    queued: list[float]
    down: list[float]
    wait_s: list[float]
    """Waits in seconds, ascending; `wait_share` is the share of jobs that waited at most that
    long."""
    wait_share: list[float]


def measure(done: Replay) -> Result:
    """Computes the figures of a replay."""
    runs, ledger, setup = done.runs, done.ledger, done.setup
    arrays = _Arrays(runs)
    split = ledger.split()
    whole = ledger.capacity * ledger.now
    up = max(whole - ledger.down_ms - ledger.closed_ms, 1)
    waits, jct = arrays.wait_ms / HOUR_MS, arrays.jct_ms / HOUR_MS
    rho = _rho(arrays, ledger.capacity)
    preemptions = np.array([run.preemptions for run in runs])
    pairs = np.array([run.cross_zone for run in runs])
    users = [run.job.user for run in runs]
    hours = ledger.now / HOUR_MS
    p50, p95, p99 = (float(value) for value in np.percentile(jct, (50, 95, 99)))
    w50, w95, w99 = (float(value) for value in np.percentile(waits, (50, 95, 99)))
    result = Result(
        policy=setup.policy, trace=done.trace.source, jobs=len(runs), too_large=done.too_large,
        over_quota=done.over_quota, left_out=dict(done.trace.left_out), nodes=setup.nodes,
        gpus_per_node=setup.gpus, seed=setup.seed,
        rules=_plain(setup.rules or policy_named(setup.policy)), quotas=_plain(setup.quotas),
        windows=[_window(window) for window in setup.windows], users=len(set(users)),
        jct_mean_h=float(jct.mean()), jct_p50_h=p50, jct_p95_h=p95, jct_p99_h=p99,
        wait_mean_h=float(waits.mean()), wait_p50_h=w50, wait_p95_h=w95, wait_p99_h=w99,
        wait_max_h=float(waits.max()),
        queued_mean_h=float((arrays.jct_ms - arrays.held_ms).mean()) / HOUR_MS,
        slowdown=spread(arrays.slowdown), makespan_h=hours,
        occupancy=ledger.held_ms / up, utilisation=(split["useful"] + split["lost"]) / up,
        goodput=split["useful"] / max(whole, 1), split_gpu_ms=split, capacity_gpu_ms=whole,
        preemptions=int(preemptions.sum()), preemptions_per_job=float(preemptions.mean()),
        preemptions_per_hour=int(preemptions.sum()) / hours,
        preempted_jobs=int((preemptions > 0).sum()), most_preemptions=int(preemptions.max()),
        faults=done.faults, fault_restarts=sum(run.faults for run in runs),
        lost_gpu_h=split["lost"] / HOUR_MS,
        rho_max=float(rho.max()), rho_p95=float(np.percentile(rho, 95)),
        rho_over_1=float((rho > 1).mean()), jain=_jain(users, arrays.speed),
        cross_zone_max=int(pairs.max()), cross_zone_over_1=int((pairs > 1).sum()),
        by_size=_by_size(arrays), by_user=_by_user(arrays, users),
        plans=done.plans, plan_mean_ms=done.plan_s / max(done.plans, 1) * 1000,
        plan_max_ms=done.plan_max_s * 1000, wall_s=done.wall_s,
    )  # fmt: skip
    found: Result = rounded(result)
    return found


def _plain(value: Any) -> Any:
    """Returns the value without infinity, which JSON does not have."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _window(window: Window) -> dict[str, Any]:
    """Converts a window, with its nodes in order, so that the same window gives the same bytes."""
    found: dict[str, Any] = msgspec.to_builtins(window)
    del found["reason"]
    found["nodes"] = sorted(window.nodes, key=lambda name: int(name[1:]))
    return found


class _Arrays:
    """Columns over the jobs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        submit = np.array([run.job.submit_ms for run in runs], dtype=np.float64)
        self.jct_ms: Numbers = np.array([run.ended for run in runs], dtype=np.float64) - submit
        self.wait_ms: Numbers = np.array([run.first for run in runs], dtype=np.float64) - submit
        self.run_ms: Numbers = np.array([run.job.run_ms for run in runs], dtype=np.float64)
        self.held_ms: Numbers = np.array([run.held_ms for run in runs], dtype=np.float64)
        self.gpus: Numbers = np.array([run.gpus for run in runs], dtype=np.float64)
        self.contending: Numbers = np.array([run.active_mean for run in runs])
        self.speed: Numbers = self.run_ms / self.jct_ms
        bound = np.maximum(self.run_ms, BOUND_S * 1000)
        self.slowdown: Numbers = np.maximum(self.jct_ms / bound, 1.0)


def spread(values: Numbers) -> Spread:
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Spread(float(values.mean()), p50, p95, p99, float(values.max()))


def _rho(arrays: _Arrays, capacity: int) -> Numbers:
    """Returns the finish-time fairness of each job: its time in the system / its time on an equal
    share of the capacity. The share is the capacity / the mean number of tasks in the system while
    the job is there. A gang larger than the share would run slower in proportion."""
    share = capacity / np.maximum(arrays.contending, 1.0)
    ideal = arrays.run_ms * np.maximum(arrays.gpus / share, 1.0)
    found: Numbers = arrays.jct_ms / ideal
    return found


def _jain(users: Sequence[str], speed: Numbers) -> float:
    """Returns Jain's index of the mean speeds of users' jobs."""
    _, place = np.unique(np.array(users), return_inverse=True)
    mean = np.bincount(place, weights=speed) / np.bincount(place)
    return float(mean.sum() ** 2 / (len(mean) * (mean**2).sum()))


def _class(name: str, arrays: _Arrays, chosen: NDArray[np.bool_]) -> Class:
    jct, waits = arrays.jct_ms[chosen] / HOUR_MS, arrays.wait_ms[chosen] / HOUR_MS
    work = (arrays.run_ms * arrays.gpus)[chosen].sum() / HOUR_MS
    return Class(
        name=name, jobs=int(chosen.sum()), gpu_h=float(work),
        jct_mean_h=float(jct.mean()), jct_p50_h=float(np.median(jct)),
        wait_mean_h=float(waits.mean()), slowdown_p50=float(np.median(arrays.slowdown[chosen])),
    )  # fmt: skip


def _by_size(arrays: _Arrays) -> list[Class]:
    found, least = [], 0
    for most, name in SIZES:
        chosen = (arrays.gpus > least) & (arrays.gpus <= most)
        least = most
        if chosen.any():
            found.append(_class(name, arrays, chosen))
    return found


def _by_user(arrays: _Arrays, users: Sequence[str]) -> list[Class]:
    names, place = np.unique(np.array(users), return_inverse=True)
    if len(names) == len(users):
        return []
    work = np.bincount(place, weights=arrays.run_ms * arrays.gpus)
    heaviest = np.lexsort((np.arange(len(names)), -work))[:USERS_SHOWN]
    return [_class(str(names[n]), arrays, place == n) for n in heaviest]


def rounded(value: Any) -> Any:
    """Rounds floats to 6 decimals, in structs, lists and dicts, so that the output does not depend
    on the last bit of a sum."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, msgspec.Struct):
        changes = {name: rounded(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **changes)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return value


def curves(done: Replay, samples: int = 240) -> Curves:
    """Returns the series for the plots, each of at most `samples` points."""
    ledger = done.ledger
    times = np.array([*ledger.series_time, ledger.now], dtype=np.float64)
    edges = np.linspace(0, ledger.now, samples + 1)

    def shares(series: Sequence[int]) -> list[float]:
        """Returns the mean share of the capacity in each interval between samples, computed from
        the integral at the edges."""
        steps = np.array(series, dtype=np.float64) * np.diff(times)
        whole = np.concatenate(([0.0], np.cumsum(steps)))
        means = np.diff(np.interp(edges, times, whole)) / np.diff(edges) / ledger.capacity
        return [round(float(mean), 5) for mean in means]

    waits = np.sort([(run.first - run.job.submit_ms) / 1000 for run in done.runs])
    at = np.unique(np.linspace(0, len(waits) - 1, samples).astype(int))
    return Curves(
        time_h=[round(float(edge) / HOUR_MS, 4) for edge in edges],
        held=shares(ledger.series_held), queued=shares(ledger.series_queued),
        down=shares(ledger.series_down),
        wait_s=[round(float(waits[n]), 3) for n in at],
        wait_share=[round((int(n) + 1) / len(waits), 5) for n in at],
    )  # fmt: skip
