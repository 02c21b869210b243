"""Soaks of a cluster of real processes: `python -m tests.fs3.soak.soak kills|anything --seconds 600`.

See docs/benchmarks/fs3-soak.md. Ends with 1 if anything was lost, wrong or stuck; prints a summary and JSON.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
from tests.fs3.soak import faults
from tests.fs3.soak.cluster import LIMIT_S, Cluster, Shape, read_manifest, small_disk
from tests.fs3.soak.contents import Manifest, Sample
from tests.fs3.soak.faults import Fault
from tests.fs3.soak.verify import Verdict

from fireflyer.lab import Lab

STUCK_S = 60.0
SMALL_NODE = "n3"
SMALL_MIB = 700
ROUND_S = 100.0
TOLD = 8


class Times(msgspec.Struct):
    """Of operations: seconds."""

    count: int
    p50: float
    p99: float
    longest: float


class Summary(msgspec.Struct):
    """What a run did and found.

    Attributes:
        stalls: of operations that were under way at the moment of a fault.
        after: of those under way at any time from a fault to one failover after it.
        errors: operations that raised, by "operation class".
        whole_s: from the end of the faults until every target served.
        problems: what was lost, wrong or stuck.
    """

    run: str
    seconds: float
    seed: int
    failover_s: float
    faults: dict[str, int]
    operations: dict[str, int]
    errors: dict[str, int]
    written: int
    read: int
    all: Times
    stalls: Times
    after: Times
    slowest: list[str]
    whole_s: float
    verdict: Verdict
    problems: list[str]

    @property
    def fast(self) -> bool:
        """Whether the stalls are as short as promised."""
        return max(self.stalls.p99, self.after.p99) <= 2 * self.failover_s


def times_of(samples: list[Sample]) -> Times:
    took = np.array([s.ended - s.begun for s in samples])
    if not len(took):
        return Times(0, 0.0, 0.0, 0.0)
    p50, p99, longest = (round(float(np.percentile(took, q)), 4) for q in (50, 99, 100))
    return Times(len(took), p50, p99, longest)


def slowest(samples: list[Sample], done: list[Fault]) -> list[str]:
    """The longest operations, each with the last faults before its end."""
    told = []
    for sample in sorted(samples, key=lambda s: s.begun - s.ended)[:TOLD]:
        before = [fault for fault in done if fault.at <= sample.ended][-2:]
        faults = ", ".join(f"{f.what} at {f.at - sample.begun:+.2f} s" for f in before)
        told.append(f"{sample.kind} {sample.ended - sample.begun:.2f} s: {faults}")
    return told


def overlapping(samples: list[Sample], done: list[Fault], after_s: float) -> list[Sample]:
    """Those under way at a time between a fault and `after_s` later."""
    at = np.sort(np.array([fault.at for fault in done]))
    found = []
    for sample in samples:
        first = int(np.searchsorted(at, sample.begun - after_s))
        if first < len(at) and at[first] <= sample.ended:
            found.append(sample)
    return found


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How hard a run is.

    Attributes:
        clients, threads: processes, and threads of each.
        fault_s: between two faults of `anything`, on average.
        scrub_s: in which all chunks of a node are read once, in `anything`.
    """

    clients: int = 3
    threads: int = 2
    fault_s: float = 2.5
    scrub_s: float = 4.0


def soak(run: str, seconds: float, seed: int, folder: Path, pace: Pace) -> Summary:
    """One run, in an empty folder. Raises AssertionError where it cannot even be finished."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(5))
        if run == "anything":
            stack.enter_context(small_disk(folder / SMALL_NODE, SMALL_MIB))
            stack.callback(lab.close)  # before the disk goes
            shape = Shape(scrub_s=pace.scrub_s, recovery_wait_s=600.0)
        else:
            shape = Shape()
        cluster = Cluster(lab, folder, shape)
        stack.callback(cluster.stop_load)
        cluster.start()
        for number in range(pace.clients):
            cluster.load(number, seed, pace.threads)
        problems: list[str] = []
        if run == "anything":
            done, counts = _anything(cluster, seed, seconds, pace, problems)
        else:
            done, counts = faults.kills(cluster, seed, seconds)
        whole_s = _whole(cluster, problems)
        manifests = cluster.end_load(2 * LIMIT_S)
        verdict = cluster.verify(manifests)
    told = [read_manifest(path) for path in manifests]
    problems += verdict.problems + [text for manifest in told for text in manifest.lost]
    return _summary(run, seconds, seed, shape, told, done, counts, whole_s, verdict, problems)


def _summary(
    run: str, seconds: float, seed: int, shape: Shape, told: list[Manifest], done: list[Fault],
    counts: Counter[str], whole_s: float, verdict: Verdict, problems: list[str],
) -> Summary:  # fmt: skip
    samples = [sample for manifest in told for sample in manifest.samples]
    return Summary(
        *(run, seconds, seed, shape.failover_s, dict(counts)),
        operations=dict(Counter(s.kind for s in samples)),
        errors=dict(Counter(f"{s.kind} {s.error}" for s in samples if s.error)),
        written=sum(manifest.written for manifest in told),
        read=sum(manifest.read for manifest in told),
        all=times_of(samples),
        stalls=times_of(overlapping(samples, done, 0.0)),
        after=times_of(overlapping(samples, done, shape.failover_s)),
        slowest=slowest(samples, done),
        whole_s=round(whole_s, 2),
        verdict=verdict,
        problems=problems,
    )


def _whole(cluster: Cluster, problems: list[str]) -> float:
    begun = time.monotonic()
    try:
        cluster.wait_until_whole(STUCK_S)
    except AssertionError as error:
        problems.append(f"stuck: {error}")
    return time.monotonic() - begun


def _anything(
    cluster: Cluster, seed: int, seconds: float, pace: Pace, problems: list[str]
) -> tuple[list[Fault], Counter[str]]:
    """In rounds, with another node's bytes flipped in each; between them calm until all is whole."""
    anything = faults.Anything(cluster, seed, SMALL_NODE, pace.fault_s)
    rounds = max(1, round(seconds / ROUND_S))
    for number in range(rounds):
        victim = cluster.nodes[number % len(cluster.nodes)]
        anything.run(seconds / rounds, victim)
        anything.calm()
        _whole(cluster, problems)
    problems += anything.problems
    counts = anything.counts
    counts["flipped bytes"] = anything.flipped
    return anything.done, counts


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("run", choices=("kills", "anything"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="kept; by default a temporary one")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fs3-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        summary = soak(options.run, options.seconds, options.seed, folder, Pace())
    print(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode())
    good = not summary.problems and (options.run != "kills" or summary.fast)
    print(f"soak {options.run}: {'ok' if good else 'FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
