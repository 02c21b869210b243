"""Which jobs make room: those that lose least, with what falls idle when they leave."""

import pytest
from tests.hai.plan.bench import Bench, launched, preempted

from fireflyer.hai.scheduling import preemption
from fireflyer.hai.scheduling.cluster import Job, Node

GANG, SINGLE = (64, "gang"), (1, "single")


@pytest.mark.parametrize("first", [GANG, SINGLE])
@pytest.mark.parametrize("policy", ["timeshare", "las", "timeshare-fixed"])
def test_an_urgent_job_of_one_node_stops_no_gang_of_64(policy: str, first: tuple[int, str]) -> None:
    """Whichever of the two is older, and has the lower places."""
    bench = Bench(policy, 65)
    bench.submit(first, SINGLE if first is GANG else GANG)
    (single,) = (job for job in bench.cluster.jobs.values() if job.nodes == 1)
    assert preempted(bench.submit({"priority": 30})) == [single.id]
    place = single.placement
    assert launched(bench.leave(single.id)) == [("t3", place)]


def test_not_even_one_that_has_had_much_more_of_the_cluster() -> None:
    bench = Bench("timeshare", 65)
    bench.submit(GANG)
    bench.now += 100 * 3600.0
    bench.submit(SINGLE)
    bench.plan(60.0)
    jobs = bench.cluster.jobs
    assert jobs["t1"].standing > jobs["t2"].standing + 2
    assert preempted(bench.submit({"priority": 30})) == ["t2"]


def test_a_lower_priority_makes_room_first_whatever_it_holds() -> None:
    bench = Bench("timeshare", 65)
    bench.submit({"nodes": 64, "priority": 8}, SINGLE)
    assert preempted(bench.submit({"priority": 30})) == ["t1"]


def test_a_gang_goes_where_one_gang_leaves_all_that_is_needed() -> None:
    bench = Bench("timeshare", 12)
    bench.submit((8, "ada"), (4, "bob"))
    assert preempted(bench.submit({"nodes": 4, "priority": 30})) == ["t2"], "4 nodes, not 8"


@pytest.mark.parametrize(("gpus", "victim"), [(2, "t3"), (5, "t2"), (8, "t1")])
def test_the_smallest_part_of_a_node_that_is_enough_makes_room(gpus: int, victim: str) -> None:
    bench = Bench("timeshare", 2, gpus=8)
    bench.submit({"gpus": 8}, {"gpus": 6}, {"gpus": 2})
    assert preempted(bench.submit({"gpus": gpus, "priority": 30})) == [victim]


def test_a_gang_counts_as_one_set_of_victims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "LOOKS", 2)
    bench = Bench("timeshare", [Node(name=f"n{number}") for number in range(9)])
    bench.submit((4, "ada"), (1, "bob"), (4, "eve"))
    assert preempted(bench.submit({"priority": 30})) == ["t2"]


def test_of_two_gangs_that_cost_the_same_one_is_interrupted_not_parts_of_both() -> None:
    bench = Bench("timeshare", 4)
    for number, placement in enumerate((("n0", "n2"), ("n1", "n3")), start=1):
        gang = Job(
            id=f"g{number}", order=number, nodes=2, user="ada", phase="running", placement=placement
        )
        bench.cluster.adopt(gang, 0.0)
    bench.count = 2
    assert preempted(bench.submit({"nodes": 2, "user": "bob", "priority": 30})) == ["g1"]
