"""Where gangs lie: best fit, leaves, zones, and nodes that are avoided."""

from typing import Any

import pytest
from tests.hai.plan.bench import Bench, launched, preempted

from fireflyer.hai.scheduling.cluster import TICK_S, Node, Quota, Window
from fireflyer.hai.scheduling.jobs import AVOID_S
from fireflyer.hai.scheduling.why import explain


def zoned(*sizes: int, leaf: int = 2) -> list[Node]:
    """Zones of so many nodes, with leaves of `leaf`; "a0", "a1", ..., "b0", ..."""
    return [
        Node(name=f"{zone}{number}", zone=zone, leaf=f"{zone}{number // leaf}")
        for zone, size in zip("abcdefgh", sizes, strict=False)
        for number in range(size)
    ]


def test_best_fit_fills_up_what_is_in_part_taken() -> None:
    bench = Bench("fifo", 3, gpus=8)
    assert launched(bench.submit({"gpus": 3}, {"gpus": 6}, {"gpus": 2}, {"gpus": 8})) == [
        ("t1", ("n0",)), ("t2", ("n1",)), ("t3", ("n1",)), ("t4", ("n2",)),
    ]  # fmt: skip
    assert launched(bench.submit({"gpus": 6}, {"gpus": 5})) == []


def test_whole_nodes_and_parts_do_not_mix() -> None:
    bench = Bench("fifo", 2, gpus=4)
    assert launched(bench.submit({"gpus": 1}, {}, {"gpus": 1})) == [
        ("t1", ("n0",)), ("t2", ("n1",)), ("t3", ("n0",)),
    ]  # fmt: skip
    assert bench.submit({}) == []


def test_a_node_that_is_given_whole_takes_one_job_whatever_it_asks_for() -> None:
    bench = Bench("timeshare", [Node(name=f"n{i}", gpus=8, whole=True) for i in range(2)])
    assert launched(bench.submit({"gpus": 4}, {"gpus": 2}, {"gpus": 2})) == [
        ("t1", ("n0",)), ("t2", ("n1",)),
    ]  # fmt: skip
    assert launched(bench.end("t1")) == [("t3", ("n0",))]
    (urgent,) = preempted(bench.submit({"gpus": 1, "priority": 50}))
    assert urgent in ("t2", "t3")


def test_memory_counts_where_it_is_known() -> None:
    nodes = [Node(name="n0", gpus=4, memory_mib=100), Node(name="n1", gpus=4)]
    bench = Bench("fifo", nodes)
    assert launched(bench.submit(*[{"gpus": 1, "memory_mib": 60}] * 3)) == [
        ("t1", ("n0",)), ("t2", ("n1",)), ("t3", ("n1",)),
    ]  # fmt: skip


def test_a_gang_lies_in_the_smallest_leaf_and_zone_that_hold_it() -> None:
    bench = Bench("fifo", zoned(4, 3, leaf=2))
    assert launched(bench.submit({"nodes": 1})) == [("t1", ("b2",))], "the leaf with least to spare"
    assert launched(bench.submit({"nodes": 2})) == [("t2", ("b0", "b1"))]
    assert launched(bench.submit({"nodes": 3})) == [("t3", ("a0", "a1", "a2"))]


def test_at_most_one_pair_of_neighbours_crosses_zones() -> None:
    bench = Bench("fifo", zoned(2, 3, 2))
    assert launched(bench.submit({"nodes": 4})) == [("t1", ("b0", "b1", "b2", "a0"))]
    bench = Bench("fifo", zoned(2, 2, 2))
    assert bench.submit({"nodes": 5}) == [], "three zones are never used"


def test_nodes_to_avoid_are_taken_last_or_not_at_all() -> None:
    nodes = [
        Node(name="n0", health="suspect"),
        Node(name="n1", health="drained"),
        Node(name="n2", health="down"),
        Node(name="n3"),
    ]
    bench = Bench("fifo", nodes)
    assert launched(bench.submit({}, {}, {})) == [("t1", ("n3",)), ("t2", ("n0",))]
    bench = Bench("fifo", 2)
    assert launched(bench.submit({"avoid": frozenset({"n0"})})) == [("t1", ("n1",))]
    assert bench.submit({"avoid": frozenset({"n0"})}) == [], "it waits for n1"
    for policy in ("fifo", "timeshare"):  # the node returns: it is not left idle for good
        bench = Bench(policy, 2)
        bench.submit({})
        name = bench.cluster.jobs["t1"].placement[0]
        other = "n1" if name == "n0" else "n0"
        assert bench.submit({"avoid": frozenset({other})}) == []
        assert bench.plan(AVOID_S - 1) == []
        look = bench.cluster.next_look(AVOID_S - 1)
        assert look is not None
        assert look <= AVOID_S + TICK_S
        assert ("t2", (other,)) in launched(bench.plan(look - (AVOID_S - 1)))
    bench = Bench("fifo", 2)
    assert launched(bench.submit({"nodes": 2, "avoid": frozenset({"n0"})})) == [
        ("t1", ("n0", "n1"))
    ]


def test_why_knows_when_a_job_takes_the_nodes_that_it_avoids() -> None:
    bench = Bench("fifo", 2)
    bench.submit({"avoid": frozenset({"n0"}), "estimate_s": 2 * AVOID_S})
    bench.plan(10.0)
    bench.submit({"avoid": frozenset({"n0"})})
    found = explain(bench.cluster, bench.cluster.jobs["t2"], 10.0)
    assert found.rule == "avoided"
    assert found.text == "waits for 1 node; 0 free, 1 more that it avoids for 5 min after a fault"
    assert found.earliest == 10.0 + AVOID_S
    bench.plan(AVOID_S / 2)
    assert explain(bench.cluster, bench.cluster.jobs["t2"], bench.now).earliest == 10.0 + AVOID_S
    bench = Bench("fifo", 2)  # the other node is free sooner
    bench.submit({"avoid": frozenset({"n0"}), "estimate_s": AVOID_S / 2})
    bench.submit({"avoid": frozenset({"n0"})})
    assert explain(bench.cluster, bench.cluster.jobs["t2"], 0.0).earliest == AVOID_S / 2


def test_a_drained_node_is_ready_again_at_its_time() -> None:
    bench = Bench("fifo", [Node(name="n0", health="drained", until=100.0)])
    assert bench.submit({}) == []
    assert bench.cluster.next_look(0.0) == 100.0
    assert launched(bench.plan(100.0)) == [("t1", ("n0",))]


def test_a_restart_prefers_its_nodes_in_their_old_order() -> None:
    bench = Bench("fifo", 4)
    bench.submit({"nodes": 2})
    bench.cluster.requeue("t1", 1.0)
    bench.cluster.jobs["t1"].previous = ("n3", "n1")
    assert launched(bench.plan()) == [("t1", ("n3", "n1"))]


def test_a_quota_limits_what_a_user_holds_at_a_priority() -> None:
    bench = Bench("fifo", 3)
    bench.cluster.set_quota("ada", 10, "*", Quota(nodes=1))
    asked = [{"user": "ada"}, {"user": "ada"}, {"user": "bob"}]
    assert launched(bench.submit(*asked)) == [("t1", ("n0",)), ("t3", ("n1",))]
    assert launched(bench.end("t1")) == [("t2", ("n0",))]
    assert bench.submit({"id": "t4", "user": "ada"}) == []
    bench.cluster.set_quota("ada", 10, "*", None)
    assert launched(bench.plan()) == [("t4", ("n2",))]


def test_auto_takes_the_highest_priority_with_quota_left() -> None:
    bench = Bench("fifo", 4)
    bench.cluster.set_quota("ada", 50, "*", Quota(nodes=0))
    bench.cluster.set_quota("ada", 30, "*", Quota(nodes=1))
    bench.submit({"user": "ada", "priority": -1}, {"user": "ada", "priority": -1})
    assert {job.id: job.level for job in bench.cluster.jobs.values()} == {"t1": 30, "t2": 10}
    bench.end("t1")
    bench.cluster.requeue("t2", bench.now)
    assert bench.cluster.jobs["t2"].level == 30


def test_auto_is_not_below_normal_where_that_has_no_limit() -> None:
    bench = Bench("timeshare", 1)
    bench.cluster.set_quota("ada", 8, "*", Quota(nodes=1))
    bench.submit({"user": "ada", "priority": 8})
    assert preempted(bench.submit({"user": "ada", "priority": -1})) == ["t1"]
    assert launched(bench.leave("t1")) == [("t2", ("n0",))], "not t1 again, for ever"


def test_a_window_empties_its_nodes_and_keeps_them_empty() -> None:
    bench = Bench("fifo", 2)
    bench.submit({"nodes": 2}, {"estimate_s": 5000.0}, {"estimate_s": 900.0})
    window = Window(id="w1", nodes=frozenset({"n0"}), begin=1000.0, end=2000.0, reason="new switch")
    bench.cluster.set_window(window)
    actions = bench.end("t1")
    assert launched(actions) == [("t2", ("n1",)), ("t3", ("n0",))], "t2 would not be done by then"
    assert bench.submit({}) == []
    assert launched(bench.end("t3")) == [("t4", ("n0",))]
    assert bench.submit({}) == []
    assert bench.cluster.next_look(bench.now) == 400.0
    actions = bench.plan(1000.0)
    assert (preempted(actions), launched(actions)) == (["t4"], [])
    assert bench.leave("t4") == []
    assert launched(bench.plan(999.0)) == []
    assert launched(bench.plan(1.0)) == [("t4", ("n0",))]


@pytest.mark.parametrize("policy", ["fifo", "fifo-backfill"])
def test_a_window_that_draws_near_lets_go_what_a_long_job_keeps(policy: str) -> None:
    """The gang cannot be over before the window any more; until then it keeps n1 from those behind it."""
    bench = Bench(policy, 2)
    window = Window(id="w1", nodes=frozenset({"n1"}), begin=10_000.0, end=20_000.0)
    bench.cluster.set_window(window)
    asked: list[dict[str, Any]] = [{}, {"nodes": 2, "estimate_s": 4_000.0}, {"estimate_s": 1_000.0}]
    assert launched(bench.submit(*asked)) == [("t1", ("n0",))]
    look = bench.cluster.next_look(bench.now)
    assert look == 6_000.0
    assert launched(bench.plan(look - 1.0)) == []
    assert bench.cluster.next_look(bench.now) == 6_000.0
    assert launched(bench.plan(1.0)) == [("t3", ("n1",))]


def test_a_window_wakes_for_jobs_that_were_there_before_it_and_for_no_others() -> None:
    bench = Bench("fifo", 1)
    bench.submit({}, {"estimate_s": 4_001.0}, {"estimate_s": 3_000.0, "user": "ada"})
    for name, begin in (("w1", 10_000.0), ("w2", 12_000.0)):
        bench.cluster.set_window(
            Window(id=name, nodes=frozenset({"n0"}), begin=begin, end=2e4, user="ada")
        )
    assert bench.plan() == []
    assert bench.cluster.next_look(bench.now) == 6_000.0, "5,999 s, on the minute"
    bench.cluster.remove("t2", bench.now)
    assert bench.cluster.next_look(bench.now) == 9_400.0, "t3 is let in; the lead of w1 comes next"


def test_a_reservation_lets_its_user_in() -> None:
    bench = Bench("fifo", 1)
    window = Window(id="w1", nodes=frozenset({"n0"}), begin=0.0, end=99.0, user="ada")
    bench.cluster.set_window(window)
    assert launched(bench.submit({"user": "bob"}, {"user": "ada"})) == [("t2", ("n0",))]
