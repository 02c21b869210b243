"""Traces generated from a seed, calibrated to published figures of four clusters: for tests, and
for use without a trace file.

Run times are log-normal with the published mean and median. Sizes of gangs are powers of two. The
share of each size is the share of the previous size times a constant factor, which is fitted to the
published mean. Arrivals are a Poisson process with a daily wave. All draws use `random.Random`,
whose methods used here give the same numbers on every machine.
"""

import bisect
import itertools
import math
import random

import msgspec

from fireflyer.errors import TraceError
from fireflyer.hai.simulation.trace import HOUR_MS, LONGEST_MS, Job, Trace

DAY_MS = 24 * HOUR_MS
WAVE = 0.6
"""Amplitude of the daily wave: the rate of arrivals is 1.6 times its mean at the peak, and 0.4
times its mean at the trough."""


class Calibration(msgspec.Struct, frozen=True):
    """Calibration to a cluster's GPU jobs: `data/cluster_summary.csv` of AcmeTrace (CC BY 4.0)."""

    mean_run_s: float
    median_run_s: float
    longest_s: float
    mean_gpus: float
    most_gpus: int


CLUSTERS = {
    "seren": Calibration(1414.335, 122.0, 1_209_604, 5.68, 1024),
    "kalos": Calibration(1259.689, 124.0, 625_740, 26.77, 1024),
    "philly": Calibration(18006.055, 874.0, 4_240_676, 1.928, 128),
    "helios": Calibration(6651.681, 206.0, 4_320_009, 3.716, 2048),
}
"""Calibrations by cluster. The fifth cluster of the table, PAI, shares single GPUs between jobs,
which is not modelled."""


def generate(
    cluster: str, jobs: int, *, capacity: int, load: float = 0.8, users: int = 20, seed: int = 0
) -> Trace:
    """Generates a trace that asks for `load` times `capacity` GPUs on average.

    Args:
        cluster: a key of CLUSTERS.
        jobs: number of jobs.
        capacity: GPUs of the simulated cluster; no gang is larger.
        load: requested GPU time of all jobs / GPU time of the cluster over the span of the
            arrivals.
        users: number of users; the share of the jobs of user number k is proportional to 1/k
            (Zipf).
        seed: the same seed gives the same trace.

    Raises:
        TraceError: no such calibration, or a number is out of range.
    """
    if cluster not in CLUSTERS:
        raise TraceError(f"invalid cluster {cluster!r}: expected one of {', '.join(CLUSTERS)}")
    if jobs < 1 or capacity < 1 or users < 1 or not 0 < load <= 100:
        raise TraceError(
            "a generated trace needs at least one job, GPU and user, and a load above 0"
        )
    table = CLUSTERS[cluster]
    draw = random.Random(f"{cluster}/{seed}")
    sizes, weights = gang_sizes(table.mean_gpus, min(table.most_gpus, capacity))
    heaviness = math.sqrt(2 * math.log(table.mean_run_s / table.median_run_s))
    names = [f"user{rank}" for rank in range(1, users + 1)]
    shares = list(itertools.accumulate(1 / rank for rank in range(1, users + 1)))
    wanted = [
        (
            max(round(min(draw.lognormvariate(math.log(table.median_run_s), heaviness),
                          table.longest_s) * 1000), 1000),
            sizes[bisect.bisect(weights, draw.random() * weights[-1])],
            names[bisect.bisect(shares, draw.random() * shares[-1])],
        )
        for _ in range(jobs)
    ]  # fmt: skip
    demand = sum(run_ms * gpus for run_ms, gpus, _ in wanted)
    arrivals = _arrivals(draw, jobs, span_ms=demand / (load * capacity))
    return Trace(
        source=f"{cluster} x {jobs}, seed {seed}",
        format="generated",
        jobs=tuple(
            Job(name=f"j{number}", user=user, submit_ms=when, run_ms=run_ms, gpus=gpus)
            for number, (when, (run_ms, gpus, user)) in enumerate(
                zip(arrivals, wanted, strict=True), start=1
            )
        ),
    )


def gang_sizes(mean: float, most: int) -> tuple[list[int], list[float]]:
    """Returns powers of two up to `most` and their cumulative weights, with a mean size as close to
    `mean` as possible."""
    sizes = [1 << power for power in range(most.bit_length())]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = [middle**power for power in range(len(sizes))]
        found = sum(map(float.__mul__, weights, map(float, sizes))) / sum(weights)
        low, high = (middle, high) if found < mean else (low, middle)
    return sizes, list(itertools.accumulate(low**power for power in range(len(sizes))))


def _arrivals(draw: random.Random, jobs: int, span_ms: float) -> list[int]:
    """Draws the times of a Poisson process over the span, thinned to a daily wave, relative to the
    first arrival."""
    found: list[float] = []
    while len(found) < jobs:
        when = draw.random() * min(span_ms, LONGEST_MS)
        if draw.random() * (1 + WAVE) < 1 + WAVE * math.sin(2 * math.pi * when / DAY_MS):
            found.append(when)
    found.sort()
    return [round(when - found[0]) for when in found]
