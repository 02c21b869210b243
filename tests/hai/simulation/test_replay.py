"""The event loop around the scheduler's own plan: schedules computed by hand, exact accounts, no job lost."""

import math

import msgspec
import pytest

from fireflyer.errors import TraceError
from fireflyer.hai.scheduling.policies import POLICIES
from fireflyer.hai.simulation import faults
from fireflyer.hai.simulation.generate import generate
from fireflyer.hai.simulation.measures import Result, curves, measure
from fireflyer.hai.simulation.replay import Replay, Setup, replay, shape
from fireflyer.hai.simulation.trace import Job, Trace, with_users
from fireflyer.hai.simulation.work import Costs

FREE = Costs(checkpoint_ms=0, suspend_ms=0, restart_ms=0)
S = 1000
H = 3600 * S


def trace_of(*jobs: tuple[int, int, int]) -> Trace:
    """Jobs of users of their own, by (arrival in s, run time in s, GPUs)."""
    made = [
        Job(name=f"j{n}", user=f"u{n}", submit_ms=at * S, run_ms=run * S, gpus=gpus)
        for n, (at, run, gpus) in enumerate(jobs)
    ]
    return Trace(source="made", format="made", jobs=tuple(made))


def ends(done: Replay) -> list[float]:
    """When each job ended, in seconds."""
    return [run.ended / S for run in done.runs]


def untimed(result: Result) -> Result:
    """Without what depends on the machine."""
    return msgspec.structs.replace(result, wall_s=0.0, plan_mean_ms=0.0, plan_max_ms=0.0)


def check_accounts(done: Replay) -> None:
    """GPU-time is conserved to the millisecond, and all work was done."""
    ledger = done.ledger
    split = ledger.split()
    assert sum(split.values()) == ledger.capacity * ledger.now
    assert min(split.values()) >= 0
    assert (ledger.held, ledger.queued, ledger.active) == (0, 0, 0)
    assert split["useful"] == sum(run.job.run_ms * run.gpus for run in done.runs)
    parts = ("useful", "lost", "checkpoint", "restart", "suspend")
    assert sum(split[part] for part in parts) == ledger.held_ms
    assert sum(run.held_ms * run.gpus for run in done.runs) == ledger.held_ms
    assert all(run.ended >= run.first + run.job.run_ms for run in done.runs)


def test_first_in_first_out_by_hand() -> None:
    trace = trace_of((0, 100, 1), (10, 50, 2), (20, 30, 1))
    done = replay(trace, Setup(nodes=1, gpus=2, policy="fifo", costs=FREE))
    assert ends(done) == [100, 150, 180]
    assert [run.first / S for run in done.runs] == [0, 100, 150]
    split = done.ledger.split()
    assert split["useful"] == (100 + 100 + 30) * S
    assert split["fragmentation"] == 90 * S  # one GPU while the second job waits
    assert split["idle"] == (10 + 30) * S
    check_accounts(done)


def test_backfill_by_hand() -> None:
    trace = trace_of((0, 100, 1), (10, 50, 2), (20, 30, 1), (25, 90, 1))
    setup = Setup(nodes=1, gpus=2, policy="fifo-backfill", costs=FREE, estimates=1.0)
    assert ends(replay(trace, setup)) == [100, 150, 50, 240]


@pytest.mark.parametrize("policy", ["las", "timeshare", "timeshare-fixed"])
def test_an_interruption_by_hand(policy: str) -> None:
    """A long job of two GPUs makes room for a short one of another user, and goes on where it was."""
    trace = trace_of((0, 14_400, 2), (7_200, 3_600, 1))
    costs = Costs(checkpoint_ms=0, suspend_ms=60 * S, restart_ms=30 * S)
    done = replay(trace, Setup(nodes=1, gpus=2, policy=policy, costs=costs))
    long, short = done.runs
    waits = 1_200 if policy == "timeshare" else 0  # before it interrupts anybody
    assert short.first == (7_260 + waits) * S
    assert ends(done) == [18_150, 10_890 + waits]
    assert (long.preemptions, short.preemptions) == (1, 0)
    split = done.ledger.split()
    assert split["suspend"] == 60 * 2 * S
    assert split["restart"] == (30 * 2 + 30 + 30 * 2) * S
    assert split["lost"] == 0
    assert split["fragmentation"] == 3_630 * S
    check_accounts(done)


def test_a_fault_undoes_work_since_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = faults.Fault(
        at_ms=250 * S, kind="gpu", effect="node", node=0, gpu=0.0, repair_ms=100 * S
    )
    monkeypatch.setattr(faults, "stream", lambda *_: iter([broken]))
    costs = Costs(checkpoint_every_ms=90 * S, checkpoint_ms=10 * S, suspend_ms=0, restart_ms=0)
    setup = Setup(nodes=1, gpus=4, policy="fifo", costs=costs, fault_rates={"gpu": 1.0})
    done = replay(trace_of((0, 300, 3)), setup)
    # 250 s are two rounds of 90 s of work and 10 s of saving, and 50 s that are lost; 120 s are left.
    assert ends(done) == [350 + 120 + 10]
    assert done.ledger.split() == {
        "useful": 900 * S, "lost": 150 * S, "checkpoint": 90 * S, "restart": 0, "suspend": 0,
        "fragmentation": 0, "idle": (250 + 130) * S, "faulty": 400 * S, "window": 0,
    }  # fmt: skip
    assert (done.faults, done.runs[0].faults) == ({"gpu": 1}, 1)
    check_accounts(done)


@pytest.mark.parametrize(
    ("effect", "where", "hit"),
    [
        ("node", 0.0, {"gang", "one"}),
        ("link", 0.0, {"gang"}),
        ("task", 0.5, {"gang"}),
        ("task", 0.7, {"one"}),
        ("task", 0.99, set()),
    ],
)
def test_whom_a_fault_hits(
    monkeypatch: pytest.MonkeyPatch, effect: faults.Effect, where: float, hit: set[str]
) -> None:
    """On the first node: three GPUs of a gang of two nodes, one of a second job, one idle."""
    fault = faults.Fault(at_ms=10, kind="x", effect=effect, node=0, gpu=where, repair_ms=1)
    monkeypatch.setattr(faults, "stream", lambda *_: iter([fault]))
    jobs = [
        Job(name=name, user=name, submit_ms=0, run_ms=99, gpus=gpus)
        for name, gpus in (("gang", 6), ("one", 1))
    ]
    setup = Setup(nodes=2, gpus=5, policy="fifo", costs=FREE, fault_rates={"x": 1.0})
    done = replay(Trace(source="t", format="t", jobs=tuple(jobs)), setup)
    assert {run.job.name for run in done.runs if run.faults} == hit
    assert done.faults == ({"x": 1} if hit else {})
    check_accounts(done)


def test_a_node_that_breaks_again_while_away_is_no_second_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(at_s: int) -> faults.Fault:
        return faults.Fault(
            at_ms=at_s * S, kind="gpu", effect="node", node=0, gpu=0.0, repair_ms=100 * S
        )

    monkeypatch.setattr(faults, "stream", lambda *_: iter([broken(10), broken(50), broken(110)]))
    setup = Setup(nodes=1, gpus=1, policy="fifo", costs=FREE, fault_rates={"gpu": 1.0})
    done = replay(trace_of((0, 20, 1)), setup)
    assert done.faults == {"gpu": 2}
    assert done.ledger.split()["faulty"] == 200 * S
    assert ends(done) == [230]
    check_accounts(done)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_no_job_is_lost_and_no_gpu_second(policy: str, seed: int) -> None:
    nodes = 4 + 3 * seed
    trace = with_users(generate("seren", 250, capacity=nodes * 8, load=1.1, seed=seed), None)
    setup = Setup(
        nodes=nodes, zones=1 + seed % 2, policy=policy, seed=seed, estimates=seed % 3 * 0.5,
        whole_nodes=seed == 3, fault_rates={} if seed == 0 else faults.parse("paper:300"),
        costs=Costs(suspend_ms=7 * S, restart_ms=11 * S), tick_ms=0 if seed < 2 else S,
    )  # fmt: skip
    done = replay(trace, setup)
    assert len(done.runs) + done.too_large == 250
    assert (seed == 0) == (not done.faults)
    check_accounts(done)


@pytest.mark.parametrize("policy", ["fifo", "timeshare"])
def test_a_seed_gives_the_same_figures(policy: str) -> None:
    trace = with_users(generate("philly", 400, capacity=64, seed=9), None)

    def once(seed: int) -> tuple[Result, object]:
        setup = Setup(nodes=8, policy=policy, fault_rates=faults.parse("paper:100"), seed=seed)
        done = replay(trace, setup)
        return untimed(measure(done)), curves(done)

    assert once(1) == once(1)
    assert once(1) != once(2)


def test_planning_by_ticks_is_later_by_less_than_one() -> None:
    trace = trace_of((0, 25, 1), (3, 10, 1), (4, 10, 1))
    setup = Setup(nodes=1, gpus=1, policy="fifo", costs=FREE, tick_ms=10 * S)
    assert [run.first / S for run in replay(trace, setup).runs] == [0, 30, 40]


@pytest.mark.parametrize(
    ("gpus", "nodes", "whole", "found"),
    [(1, 0, False, (1, 1)), (8, 0, False, (1, 8)), (12, 0, False, (2, 6)), (9, 0, False, (2, 5)),
     (64, 16, False, (8, 8)), (0, 3, False, (3, 8)), (1, 0, True, (1, 8)), (12, 0, True, (2, 8))],
)  # fmt: skip
def test_shapes(gpus: int, nodes: int, whole: bool, found: tuple[int, int]) -> None:
    job = Job(name="j", submit_ms=0, run_ms=1, gpus=gpus, nodes=nodes)
    assert shape(job, Setup(nodes=99, whole_nodes=whole)) == found


def test_jobs_larger_than_the_cluster_are_left_out() -> None:
    done = replay(trace_of((0, 5, 64), (0, 5, 8)), Setup(nodes=2))
    assert (done.too_large, len(done.runs)) == (1, 1)
    with pytest.raises(TraceError, match="no job of made fits 2 nodes of 8 GPUs"):
        replay(trace_of((0, 5, 64)), Setup(nodes=2))


def test_jobs_get_the_type_of_gpus_that_they_ask_for() -> None:
    trace = trace_of((0, 100, 2), (1, 50, 2), (2, 30, 2), (3, 10, 2))
    kinds = ("a100", "a100", "", "h100")
    jobs = tuple(
        msgspec.structs.replace(job, gpu_type=kind)
        for job, kind in zip(trace.jobs, kinds, strict=True)
    )
    trace = msgspec.structs.replace(trace, jobs=jobs)
    setup = Setup(
        nodes=2, gpus=2, policy="fifo-backfill", costs=FREE, types=(("a100", 1), ("v100", 1))
    )
    done = replay(trace, setup)
    assert done.too_large == 1, "no node has the last one's type"
    assert ends(done) == [100, 150, 32]
    check_accounts(done)
    untyped = replay(trace, msgspec.structs.replace(setup, types=()))
    assert ends(untyped) == [100, 51, 81, 91], "without types each job gets any node"


def test_a_policy_that_never_starts_a_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fireflyer.hai.simulation.replay.plan", lambda cluster, now: [])
    with pytest.raises(TraceError, match="policy fifo leaves 1 of 1 jobs waiting forever"):
        replay(trace_of((0, 5, 1)), Setup(nodes=2, policy="fifo"))


def test_figures_by_hand() -> None:
    done = replay(
        trace_of((0, 100, 1), (0, 100, 1)), Setup(nodes=1, gpus=1, policy="fifo", costs=FREE)
    )
    result = measure(done)
    assert result.jct_mean_h * 3600 == pytest.approx(150, abs=0.01)
    assert result.wait_mean_h * 3600 == pytest.approx(50, abs=0.01)
    assert result.wait_max_h * 3600 == pytest.approx(100, abs=0.01)
    assert result.slowdown.mean == 1.5
    assert result.makespan_h * 3600 == pytest.approx(200, abs=0.01)
    assert (result.occupancy, result.utilisation, result.goodput) == (1.0, 1.0, 1.0)
    # Both contend for the first's time; the second for half of its time alone: on average 1.5.
    assert result.rho_max == pytest.approx(200 / 150, abs=1e-6)
    assert result.rho_over_1 == 0.5
    assert result.jain == pytest.approx(1.5**2 / (2 * 1.25), abs=1e-6)
    [size] = result.by_size
    assert (size.name, size.jobs) == ("1", 2)
    assert result.by_user == []


def test_figures_by_user_and_size() -> None:
    trace = with_users(generate("seren", 300, capacity=128, users=5, seed=1), None)
    result = measure(replay(trace, Setup(nodes=16, policy="fifo-backfill")))
    assert sum(each.jobs for each in result.by_size) == result.jobs == 300
    assert sum(each.jobs for each in result.by_user) == 300
    assert [each.gpu_h for each in result.by_user] == sorted(
        (e.gpu_h for e in result.by_user), reverse=True
    )
    assert result.users == len(result.by_user) == 5
    assert sum(result.split_gpu_ms.values()) == result.capacity_gpu_ms


def test_curves_have_the_means_of_the_figures() -> None:
    trace = with_users(generate("philly", 300, capacity=64, seed=4), None)
    done = replay(trace, Setup(nodes=8, policy="fifo"))
    found, result = curves(done, samples=50), measure(done)
    assert sum(found.held) / 50 == pytest.approx(result.occupancy, abs=1e-4)
    assert len(found.time_h) == 51
    assert found.wait_s == sorted(found.wait_s)
    assert found.wait_share[-1] == 1.0
    assert math.isclose(found.wait_s[-1] / 3600, result.wait_max_h, rel_tol=1e-4, abs_tol=1e-6)
