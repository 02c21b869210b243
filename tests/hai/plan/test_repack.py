"""Jobs that move to GPUs that are free elsewhere, so that a waiting job fits."""

from typing import Any

import pytest
from tests.hai.plan.bench import Bench, launched, preempted

from fireflyer.hai.lifecycle import Preempt
from fireflyer.hai.scheduling.cluster import Node, Quota, Window

WAIT = 6 * 3600.0
"""A job of timeshare that waits longer has others move."""


def apart(nodes: list[Node] | None = None, **mover: Any) -> Bench:
    """On n0 a job of 3 GPUs, t3; on n1 one of 5, t2; and t4, which waits for a whole node. All of one user,
    so that none interrupts another."""
    bench = Bench("timeshare", nodes or [Node(name=f"n{number}", gpus=8) for number in range(2)])
    bench.submit({"gpus": 5}, {"gpus": 5})
    assert launched(bench.submit({"gpus": 3, **mover})) == [("t3", ("n0",))]
    assert bench.end("t1") == []
    assert bench.submit({"gpus": 8}) == []
    return bench


def test_a_job_moves_so_that_one_that_has_waited_fits() -> None:
    bench = apart()
    look = bench.cluster.next_look(bench.now)
    while look is not None and look < WAIT:
        assert bench.plan(look - bench.now) == []
        look = bench.cluster.next_look(bench.now)
    assert look == WAIT
    actions = bench.plan(look - bench.now)
    assert actions == [Preempt("t3", 1, "moves to n1, which makes room for t4", "n1")]
    assert bench.cluster.jobs["t3"].preemptions == 1
    assert bench.plan() == [], "what is decided stays so"
    assert launched(bench.leave("t3", after=5.0)) == [("t3", ("n1",)), ("t4", ("n0",))]
    assert not bench.cluster.moving


def test_its_new_place_is_kept_while_it_saves() -> None:
    bench = apart()
    assert preempted(bench.plan(WAIT)) == ["t3"]
    assert bench.submit({"gpus": 3}) == []
    assert launched(bench.leave("t3")) == [("t3", ("n1",)), ("t4", ("n0",))]


@pytest.mark.parametrize("how", ["remove", "hold"])
def test_the_place_is_free_again_if_the_job_does_not_go_on(how: str) -> None:
    bench = apart()
    bench.plan(WAIT)
    assert bench.submit({"gpus": 3}) == []
    getattr(bench.cluster, how)("t3", bench.now)
    assert launched(bench.plan()) == [("t4", ("n0",)), ("t5", ("n1",))]
    assert not bench.cluster.moving


def test_a_job_that_cannot_go_there_any_more_waits_as_others_do() -> None:
    bench = apart(order=9)
    bench.plan(WAIT)
    bench.cluster.set_node(Node(name="n1", gpus=8, health="drained"))
    assert launched(bench.leave("t3", after=1.0)) == [("t4", ("n0",))]
    assert bench.plan(61.0) == []
    bench.cluster.set_node(Node(name="n1", gpus=8))
    assert launched(bench.submit({"gpus": 3})) == [("t5", ("n1",))], "n1 is kept no more"


@pytest.mark.parametrize(
    "mover",
    [{"priority": 20}, {"avoid": frozenset({"n1"})}, {"memory_mib": 60}, {"group": "vision"}],
    ids=["priority", "avoid", "memory", "window"],
)
def test_a_job_stays_that_may_not_move(mover: dict[str, Any]) -> None:
    """Of a higher priority; after a fault on n1; n1 has 50 MiB; n1 is reserved for another group."""
    nodes = [Node(name=f"n{number}", gpus=8, memory_mib=100 - 50 * number) for number in range(2)]
    bench = apart(nodes, **mover)
    if "group" in mover:
        names = frozenset({"n1"})
        window = Window(id="w1", nodes=names, begin=WAIT, end=1e9, group="speech")
        bench.cluster.set_window(window)
        bench.cluster.jobs["t2"].group = "speech"
    assert bench.plan(WAIT) == []


def test_jobs_do_not_move_to_suspect_nodes() -> None:
    bench = apart()
    bench.cluster.set_node(Node(name="n1", gpus=8, health="suspect"))
    assert bench.plan(WAIT) == []
    bench.cluster.set_node(Node(name="n1", gpus=8))
    assert preempted(bench.plan()) == ["t3"]


def test_a_job_does_not_move_within_its_quantum() -> None:
    bench = Bench("timeshare", 2, gpus=8)
    bench.submit({"gpus": 5}, {"gpus": 5})
    assert bench.submit({"gpus": 8}) == []
    bench.now = WAIT - 600.0
    assert launched(bench.submit({"gpus": 3})) == [("t4", ("n0",))]
    assert bench.end("t1") == []
    assert bench.plan(1799.0) == []
    assert preempted(bench.plan(1.0)) == ["t4"]


@pytest.mark.parametrize(("gpus", "moves"), [(4, ["t1"]), (5, [])])
def test_at_most_half_of_what_is_gained_moves(gpus: int, moves: list[str]) -> None:
    bench = Bench("timeshare", 2, gpus=8)
    bench.submit({"gpus": gpus}, {"gpus": 8 - gpus})
    assert launched(bench.submit({"gpus": 3, "priority": 20})) == [("t3", ("n1",))]
    bench.end("t2")
    assert bench.submit({"gpus": 8}) == []
    assert preempted(bench.plan(WAIT)) == moves


def test_whole_nodes_and_gangs_get_what_others_leave() -> None:
    bench = Bench("timeshare", 4, gpus=8)
    bench.submit({"gpus": 6}, {"gpus": 6}, {"gpus": 6}, {"gpus": 6})
    bench.submit({"gpus": 2}, {"gpus": 2}, {"gpus": 1}, {"gpus": 1})
    bench.end("t1", "t2")
    assert bench.submit({"nodes": 2, "gpus": 0}) == []
    bench.end("t7", "t8")
    actions = bench.plan(WAIT)
    assert [(each.task, each.to) for each in actions if isinstance(each, Preempt)] == [
        ("t5", "n2"), ("t6", "n3"),
    ]  # fmt: skip
    assert launched(bench.leave("t5")) == [("t5", ("n2",))]
    assert launched(bench.leave("t6")) == [("t6", ("n3",)), ("t9", ("n0", "n1"))]


def test_a_quota_that_shrinks_meanwhile_holds() -> None:
    bench = apart()
    bench.plan(WAIT)
    bench.cluster.set_quota("", 10, "*", Quota(gpus=7))
    assert launched(bench.leave("t3")) == [], "t2 has 5 of 7"
