"""Generated traces, faults and the arithmetic of work: seeded, calibrated, and exact."""

import collections
import itertools

import pytest

from fireflyer.errors import ConfigError, TraceError
from fireflyer.hai.simulation import faults
from fireflyer.hai.simulation.generate import CLUSTERS, gang_sizes, generate
from fireflyer.hai.simulation.work import Costs


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_generated_jobs_are_like_those_of_the_table(cluster: str) -> None:
    table = CLUSTERS[cluster]
    trace = generate(cluster, 30_000, capacity=4096, load=0.5, seed=3)
    runs = sorted(job.run_ms / 1000 for job in trace.jobs)
    gpus = [job.gpus for job in trace.jobs]
    assert runs[len(runs) // 2] == pytest.approx(table.median_run_s, rel=0.05)
    assert sum(runs) / len(runs) == pytest.approx(table.mean_run_s, rel=0.25)
    assert sum(gpus) / len(gpus) == pytest.approx(table.mean_gpus, rel=0.1)
    demand = sum(job.run_ms * job.gpus for job in trace.jobs)
    assert demand / trace.jobs[-1].submit_ms / 4096 == pytest.approx(0.5, rel=0.02)


def test_a_seed_is_a_trace() -> None:
    assert generate("seren", 500, capacity=640, seed=1) == generate(
        "seren", 500, capacity=640, seed=1
    )
    assert generate("seren", 500, capacity=640, seed=1) != generate(
        "seren", 500, capacity=640, seed=2
    )


def test_arrivals_are_in_order_and_gangs_fit() -> None:
    jobs = generate("kalos", 3000, capacity=64, seed=1).jobs
    assert all(a.submit_ms <= b.submit_ms for a, b in itertools.pairwise(jobs))
    assert max(job.gpus for job in jobs) == 64
    assert jobs[0].submit_ms == 0


def test_gangs_have_the_mean_asked_for() -> None:
    sizes, weights = gang_sizes(4.0, 64)
    assert sizes == [1, 2, 4, 8, 16, 32, 64]
    parts = [b - a for a, b in itertools.pairwise([0.0, *weights])]
    assert sum(map(float.__mul__, parts, map(float, sizes))) / sum(parts) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("cluster", "jobs", "load"), [("pai", 5, 0.5), ("seren", 0, 0.5), ("seren", 5, 0.0)]
)
def test_what_cannot_be_generated_is_refused(cluster: str, jobs: int, load: float) -> None:
    with pytest.raises(TraceError):
        generate(cluster, jobs, capacity=8, load=load)


def test_the_tables_are_the_papers() -> None:
    assert sum(sum(codes.values()) for codes in faults.XID_YEAR.values()) == 12_970
    assert sum(faults.FLASH_CUT_DAYS.values()) == 348
    assert sum(cuts * days for cuts, days in faults.FLASH_CUT_DAYS.items()) == 213


def test_faults_come_at_the_tables_rates() -> None:
    year = 10 * faults.YEAR_MS
    stream = faults.stream(faults.parse("paper"), faults.FLEET_NODES // 10, seed=5)
    seen = list(itertools.takewhile(lambda fault: fault.at_ms < year, stream))
    assert all(a.at_ms <= b.at_ms for a, b in itertools.pairwise(seen))
    count = collections.Counter(fault.kind for fault in seen)
    assert count["software"] == pytest.approx(7114, rel=0.05)
    assert count["nvlink"] == pytest.approx(5521, rel=0.05)
    assert count["ecc"] == pytest.approx(277, rel=0.2)
    assert count["memory"] == pytest.approx(54 * 365 / 183, rel=0.3)
    assert count["network"] == pytest.approx(213 * 365 / 348, rel=0.3)
    assert {fault.node for fault in seen} == set(range(125))


def test_one_more_kind_changes_no_other() -> None:
    alone = faults.stream(faults.parse("ecc"), 1000, seed=1)
    among = (f for f in faults.stream(faults.parse("paper"), 1000, seed=1) if f.kind == "ecc")
    assert list(itertools.islice(alone, 20)) == list(itertools.islice(among, 20))


def test_the_words_for_faults() -> None:
    assert faults.parse("none") == faults.parse("") == {}
    assert faults.parse("hardware:2,software:0.5")["software"] == 0.5
    assert faults.parse("hardware:2,memory:0") == dict.fromkeys(
        ("nvlink", "ecc", "gpu", "network"), 2.0
    )
    for bad in ("papers", "paper:x", "paper:-1", "paper:nan"):
        with pytest.raises(ConfigError, match="invalid faults"):
            faults.parse(bad)


def test_saves_stall_and_keep_work() -> None:
    costs = Costs(checkpoint_every_ms=100, checkpoint_ms=10)
    assert [costs.time_for(work) for work in (1, 100, 101, 200, 201, 350)] == [
        1,
        100,
        111,
        210,
        221,
        380,
    ]
    assert [costs.done_after(t) for t in (0, 99, 100, 105, 110, 150, 220)] == [
        (0, 0), (99, 0), (100, 0), (100, 0), (100, 100), (140, 100), (200, 200),
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 7, 100])
@pytest.mark.parametrize("stall", [0, 3])
def test_an_attempt_has_done_its_work_at_its_end_and_not_before(every: int, stall: int) -> None:
    costs = Costs(checkpoint_every_ms=every, checkpoint_ms=stall)
    for work in range(1, 300):
        end = costs.time_for(work)
        assert costs.done_after(end)[0] == work
        assert costs.done_after(end - 1)[0] == work - 1
