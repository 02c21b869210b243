"""Quotas and windows of a replay: schedules computed by hand, exact accounts, limits that hold."""

from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.hai.simulation.test_replay import FREE, S, check_accounts, ends, trace_of, untimed

from fireflyer.errors import TraceError
from fireflyer.hai.lifecycle import Action
from fireflyer.hai.model.identity import Quota
from fireflyer.hai.scheduling.cluster import Cluster, Window
from fireflyer.hai.scheduling.planner import plan
from fireflyer.hai.scheduling.policies import POLICIES
from fireflyer.hai.simulation import faults
from fireflyer.hai.simulation.generate import generate
from fireflyer.hai.simulation.measures import measure
from fireflyer.hai.simulation.replay import Replay, Setup, replay
from fireflyer.hai.simulation.trace import with_users
from fireflyer.hai.simulation.work import Costs


def window(begin: float, end: float, *nodes: str, **fields: Any) -> Window:
    return Window(id=f"w{begin}", nodes=frozenset(nodes or ("n0",)), begin=begin, end=end, **fields)


def idle_parts(done: Replay) -> dict[str, float]:
    """GPU-seconds of what is not work."""
    split = done.ledger.split()
    return {name: split[name] / S for name in ("suspend", "fragmentation", "idle", "window")}


def test_a_window_by_hand() -> None:
    """The job leaves within 10 s of its begin, though nobody waits, and goes on at its end."""
    costs = Costs(checkpoint_ms=0, suspend_ms=10 * S, restart_ms=0)
    setup = Setup(nodes=1, gpus=4, policy="fifo", costs=costs, windows=(window(1_000, 1_030),))
    done = replay(trace_of((0, 1_060, 3)), setup)
    assert ends(done) == [1_090]
    assert done.runs[0].preemptions == 1
    # Of the window 10 s with one GPU idle, 20 s with all four; nobody could have had them.
    assert idle_parts(done) == {"suspend": 30, "fragmentation": 0, "idle": 1_060, "window": 90}
    check_accounts(done)
    result = measure(done)
    assert result.occupancy == pytest.approx((3_180 + 30) / (4_360 - 90), abs=1e-6)
    assert result.goodput == pytest.approx(3_180 / 4_360, abs=1e-6)


@pytest.mark.parametrize("estimates", [0.0, 1.0])
def test_a_job_that_would_not_be_over_starts_after_the_window(estimates: float) -> None:
    trace = trace_of((0, 50, 1), (0, 30, 1))
    setup = Setup(
        nodes=1, gpus=1, policy="fifo", costs=FREE, estimates=estimates, windows=(window(40, 70),)
    )  # fmt: skip
    done = replay(trace, setup)
    # Of unknown length: nothing starts less than 10 min before.
    assert ends(done) == ([120, 30] if estimates else [120, 150])
    assert sum(run.preemptions for run in done.runs) == 0
    assert done.ledger.split()["window"] == 30 * S
    check_accounts(done)


def test_a_gang_lets_go_what_it_kept_when_a_window_draws_near() -> None:
    """The gang of both nodes cannot be over by then after 100 min; the short job behind it then starts."""
    trace = trace_of((0, 20_000, 1), (0, 6_000, 2), (0, 3_000, 1))
    setup = Setup(
        nodes=2, gpus=1, policy="fifo", costs=FREE, estimates=1.0,
        windows=(window(12_000, 30_000, "n1"),),
    )  # fmt: skip
    done = replay(trace, setup)
    assert [run.first / S for run in done.runs] == [0, 30_000, 6_000]
    check_accounts(done)


def test_a_reservation_is_for_its_user() -> None:
    trace = trace_of((0, 50, 1), (0, 50, 1))
    setup = Setup(nodes=1, gpus=1, policy="fifo", costs=FREE, windows=(window(0, 60, user="u1"),))
    done = replay(trace, setup)
    assert ends(done) == [110, 50]
    assert done.ledger.split()["window"] == 10 * S
    check_accounts(done)


def test_a_node_that_is_down_in_a_window_is_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = faults.Fault(
        at_ms=1_010 * S, kind="gpu", effect="node", node=0, gpu=0.0, repair_ms=30 * S
    )
    monkeypatch.setattr(faults, "stream", lambda *_: iter([broken]))
    setup = Setup(
        nodes=1, gpus=2, policy="fifo", costs=FREE, fault_rates={"gpu": 1.0},
        windows=(window(1_000, 1_060), window(1_050, 1_080)),
    )  # fmt: skip
    done = replay(trace_of((0, 10, 2), (1_005, 5, 2)), setup)
    assert ends(done) == [10, 1_085]
    assert done.ledger.split()["faulty"] == 30 * 2 * S
    assert done.ledger.split()["window"] == (80 - 30) * 2 * S
    check_accounts(done)


def test_what_a_quota_never_allows_is_left_out() -> None:
    quotas = (Quota(user="u0", gpus=4), Quota(nodes=1))
    jobs = trace_of((0, 5, 8), (0, 5, 4), (0, 5, 16))
    done = replay(jobs, Setup(nodes=2, quotas=quotas))
    assert [run.job.name for run in done.runs] == ["j1"]
    assert (done.over_quota, done.too_large) == (2, 0)
    assert measure(done).over_quota == 2
    with pytest.raises(TraceError, match="fits 2 nodes of 8 GPUs and its quota"):
        replay(trace_of((0, 5, 8)), Setup(nodes=2, quotas=(Quota(gpus=7),)))


def test_a_quota_is_waited_for_by_hand() -> None:
    trace = with_users(trace_of((0, 100, 2), (10, 50, 2), (20, 30, 2)), None)
    jobs = tuple(msgspec.structs.replace(job, user="u0") for job in trace.jobs[:2])
    trace = msgspec.structs.replace(trace, jobs=(*jobs, trace.jobs[2]))
    setup = Setup(nodes=1, gpus=8, policy="fifo", costs=FREE, quotas=(Quota(user="u0", gpus=3),))
    assert ends(replay(trace, setup)) == [100, 150, 50]


@pytest.mark.sample(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_above_a_quota_and_no_gpu_second_is_lost(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    most: Counter[str] = Counter()

    def watched(cluster: Cluster, now: float) -> list[Action]:
        held: Counter[str] = Counter()
        for job in cluster.jobs.values():
            held[job.user] += len(job.placement) * (job.gpus or 8)
        for user, gpus in held.items():
            most[user] = max(most[user], gpus)
        actions = plan(cluster, now)
        for window in cluster.windows.values():  # no launch where a window is open
            if window.begin <= now < window.end:
                closed = [set(getattr(each, "nodes", ())) & window.nodes for each in actions]
                assert not any(closed)
        return actions

    monkeypatch.setattr("fireflyer.hai.simulation.replay.plan", watched)
    trace = with_users(
        generate("seren", 250, capacity=64, load=1.3, seed=seed, users=4), None
    )  # fmt: skip
    heaviest = Counter(job.user for job in trace.jobs).most_common(1)[0][0]
    setup = Setup(
        nodes=8, policy=policy, seed=seed, estimates=seed * 0.6, whole_nodes=seed == 2,
        quotas=(Quota(gpus=40), Quota(user=heaviest, gpus=16)), tick_ms=seed % 2 * S,
        windows=(window(3_600, 40_000, "n0", "n1", "n5"), window(30_000.5, 90_000, "n5", "n7")),
        fault_rates=faults.parse("paper:300"), costs=Costs(suspend_ms=7 * S, restart_ms=11 * S),
    )  # fmt: skip
    done = replay(trace, setup)
    assert len(done.runs) + done.too_large + done.over_quota == 250
    assert most[heaviest] == 16
    assert max(most.values()) <= 40
    assert done.ledger.split()["window"] > 0
    check_accounts(done)


def test_the_same_rules_give_the_same_figures() -> None:
    trace = with_users(generate("philly", 300, capacity=64, seed=9), None)

    def once(gpus: int) -> bytes:
        setup = Setup(
            nodes=12, quotas=(Quota(gpus=gpus),), windows=(window(9, 99_999, "n10", "n1", "n2"),)
        )
        return msgspec.json.encode(untimed(measure(replay(trace, setup))))

    assert once(16) == once(16)
    assert once(16) != once(32)
    found = msgspec.json.decode(once(16))
    assert found["windows"][0]["nodes"] == ["n1", "n2", "n10"]
    assert found["quotas"] == [{"user": "", "group": "", "priority": "", "gpus": 16, "nodes": None}]


def test_after_a_fault_the_scheduler_is_told_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float | None] = []

    def watched(cluster: Cluster, now: float) -> list[Action]:
        told.extend(job.estimate_s for job in cluster.in_order())
        return plan(cluster, now)

    broken = faults.Fault(at_ms=250 * S, kind="x", effect="task", node=0, gpu=0.0, repair_ms=0)
    monkeypatch.setattr("fireflyer.hai.simulation.replay.plan", watched)
    monkeypatch.setattr(faults, "stream", lambda *_: iter([broken]))
    costs = Costs(checkpoint_every_ms=90 * S, checkpoint_ms=10 * S, suspend_ms=0, restart_ms=0)
    setup = Setup(
        nodes=1, gpus=1, policy="fifo", costs=costs, fault_rates={"x": 1.0}, estimates=1.0
    )
    assert ends(replay(trace_of((0, 300, 1)), setup)) == [250 + 120 + 10]
    assert told == [300.0, 120.0], "180 s of work were saved"
