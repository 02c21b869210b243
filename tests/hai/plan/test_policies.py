"""The policies' rules, by example."""

import pytest
from tests.hai.plan.bench import Bench, launched, preempted

from fireflyer.errors import ConfigError
from fireflyer.hai.lifecycle import Action, Release
from fireflyer.hai.scheduling.cluster import Cluster, Job, Node
from fireflyer.hai.scheduling.lanes import Lanes
from fireflyer.hai.scheduling.policies import POLICIES

QUANTUM = 1800.0
"""Of a job under timeshare whose costs were not measured."""


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'best': expected one of timeshare"):
        Cluster(policy="best")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_first_come_first_served_among_equals(policy: str) -> None:
    bench = Bench(policy, 1)
    assert launched(bench.submit((1, "ada"))) == [("t1", ("n0",))]
    assert bench.submit((1, "ada"), (1, "ada")) == []
    assert launched(bench.end("t1")) == [("t2", ("n0",))]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_gang_starts_as_a_whole_or_waits(policy: str) -> None:
    bench = Bench(policy, 3)
    bench.submit((2, "ada"))
    assert bench.submit((2, "ada")) == []
    assert launched(bench.end("t1")) == [("t2", ("n0", "n1"))]


def test_fifo_holds_back_all_later_ones() -> None:
    bench = Bench("fifo", 2)
    bench.submit((1, "ada"))
    assert bench.submit((2, "ada"), (1, "bob")) == []
    assert launched(bench.end("t1")) == [("t2", ("n0", "n1"))]


def test_a_job_that_no_longer_fits_the_cluster_is_passed_over() -> None:
    bench = Bench("fifo", 2)
    assert launched(bench.submit((3, "ada"), (1, "ada"))) == [("t2", ("n0",))]


def test_fifo_preempts_nobody_but_serves_priority_first() -> None:
    bench = Bench("fifo", 1)
    bench.submit((1, "ada"))
    assert bench.submit({"user": "ada"}, {"user": "bob", "priority": 30}) == []
    assert launched(bench.end("t1")) == [("t3", ("n0",))]


def test_backfill_lets_those_pass_who_do_not_delay_the_first() -> None:
    bench = Bench("fifo-backfill", 2)
    bench.submit({"estimate_s": 100.0})
    bench.submit({"nodes": 2})
    assert bench.submit({"estimate_s": 101.0}) == [], "it would end too late"
    assert launched(bench.submit({"estimate_s": 100.0})) == [("t4", ("n1",))]


def test_backfill_is_careful_where_an_end_is_not_known() -> None:
    bench = Bench("fifo-backfill", 2)
    bench.submit({})
    assert bench.submit({"nodes": 2}, {"estimate_s": 1.0}) == []


def test_backfill_uses_nodes_that_the_first_does_not_wait_for() -> None:
    bench = Bench("fifo-backfill", 2, gpus=4)
    bench.submit({"gpus": 3, "estimate_s": 10.0}, {"gpus": 2, "estimate_s": 99.0})
    assert bench.submit({"gpus": 4}) == []
    assert launched(bench.submit({"gpus": 2})) == [("t4", ("n1",))]
    assert bench.submit({"gpus": 1}) == [], "n0 is reserved for t3"


def test_timeshare_interrupts_who_had_more_once_the_quantum_is_over() -> None:
    bench = Bench("timeshare", 1)
    bench.submit((1, "ada"))
    assert bench.plan(1500.0) == []
    assert bench.submit((1, "bob")) == [], "ada is still at the same level"
    looks = []
    actions: list[Action] = []
    while not actions:
        look = bench.cluster.next_look(bench.now)
        assert look is not None
        looks.append(look)
        actions = bench.plan(look - bench.now)
    assert looks == [1800.0, 2700.0, 3660.0], (
        "ada's quantum is over; bob has waited; ada has had her first hour"
    )
    assert (preempted(actions), launched(actions)) == (["t1"], [])
    assert bench.plan(1.0) == [], "it waits for t1, and asks nobody else"
    assert launched(bench.leave("t1", after=5.0)) == [("t2", ("n0",))]
    assert bench.cluster.jobs["t1"].checkpoint_s == 6.0


def test_a_quantum_is_as_long_as_an_interruption_is_dear() -> None:
    bench = Bench("timeshare", 1)
    bench.submit((1, "ada"))
    job = bench.cluster.jobs["t1"]
    job.checkpoint_s, job.restart_s = 400.0, 200.0
    bench.plan(5000.0)
    assert bench.submit((1, "bob")) == []
    while bench.now < 20 * 600.0:
        look = bench.cluster.next_look(bench.now)
        assert look is not None
        actions = bench.plan(look - bench.now)
        assert preempted(actions) == (["t1"] if bench.now == 20 * 600.0 else [])


@pytest.mark.parametrize("priority", [10, 30])
def test_timeshare_spares_the_user_s_own_jobs_of_the_same_priority(priority: int) -> None:
    bench = Bench("timeshare", 1)
    bench.submit({"user": "ada", "priority": priority})
    bench.plan(1e6)
    assert bench.submit({"user": "ada", "priority": priority}) == []
    assert bench.plan(1e6) == []
    assert preempted(bench.submit({"user": "ada", "priority": 40})) == ["t1"]


@pytest.mark.parametrize("policy", ["timeshare", "las"])
def test_higher_priority_makes_room_at_once(policy: str) -> None:
    bench = Bench(policy, 2)
    bench.submit({"user": "ada"}, {"user": "bob", "priority": 20})
    assert preempted(bench.submit({"user": "ada", "priority": 30})) == ["t1"]
    assert bench.submit({"user": "ada", "priority": 8}) == []


def test_levels_are_of_users_not_of_jobs() -> None:
    bench = Bench("timeshare", 1)
    bench.submit((1, "ada"))
    bench.plan(4 * 3600.0)
    assert bench.submit((1, "ada"), (1, "bob")) == []
    assert preempted(bench.plan(1200.0)) == ["t1"]
    assert launched(bench.leave("t1")) == [("t3", ("n0",))], "ada's second job is not new"


def test_adopting_a_long_queue_of_one_user_moves_no_job_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster([Node(name="n0")], "timeshare")
    moves: list[str] = []
    take = Lanes.take

    def counted(lanes: Lanes, entry: tuple[int, str]) -> None:
        moves.append(entry[1])
        take(lanes, entry)

    monkeypatch.setattr(Lanes, "take", counted)
    for order in range(1, 501):
        cluster.adopt(Job(id=f"t{order}", order=order, user="ada", attained=100.0), 0.0)
    level = cluster.jobs["t500"].standing
    assert level > 1
    assert all(job.standing == level for job in cluster.jobs.values())
    assert 0 < len(moves) <= 500 * level


def test_an_overdue_gang_gets_its_nodes_from_a_stream_of_small_jobs() -> None:
    bench = Bench("timeshare", 4)
    bench.submit(*[(1, f"u{number}") for number in range(4)])
    bench.submit((4, "gang"))
    started = None
    number = 10
    while started is None and number < 2000:
        oldest = min(
            (job for job in bench.cluster.jobs.values() if job.phase == "running"),
            key=lambda job: job.launched_at,
        )
        number += 1
        actions = bench.submit({"id": f"s{number}", "order": number, "user": f"s{number}"})
        bench.now += 300.0
        actions += bench.end(oldest.id)
        for task in list(bench.cluster.leaving):
            actions += bench.leave(task)
        started = next((bench.now for task, _ in launched(actions) if task == "t5"), None)
    assert started is not None, "the gang starves"
    assert started <= POLICIES["timeshare"].patience_s + 2 * QUANTUM


def test_las_looks_at_jobs_and_waits_for_no_quantum() -> None:
    bench = Bench("las", 1)
    bench.submit((1, "ada"))
    bench.plan(3500.0)
    assert bench.submit((1, "ada")) == []
    assert preempted(bench.plan(101.0)) == ["t1"]


def test_fairshare_serves_who_had_least_and_preempts_nobody() -> None:
    bench = Bench("fairshare", 1)
    bench.submit((1, "ada"))
    assert bench.plan(86_400.0) == []
    assert bench.submit((1, "ada"), (1, "bob")) == []
    assert launched(bench.end("t1")) == [("t3", ("n0",))]


def test_a_job_that_has_to_wait_gives_back_what_is_kept_warm() -> None:
    bench = Bench("fifo", 2)
    bench.submit((2, "ada"))
    bench.cluster.jobs["t1"].previous = ("n1", "n0")
    bench.cluster.submit(Job(id="t0", order=0, nodes=2), 0.0)
    bench.cluster.requeue("t1", 1.0)
    actions = bench.plan()
    assert launched(actions) == [("t0", ("n0", "n1"))]
    assert actions[1:] == [Release("t1", 1)]
    assert not bench.cluster.jobs["t1"].previous
