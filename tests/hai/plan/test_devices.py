"""GPUs: which devices a task gets, which types serve it, and what holds a task whose devices are free."""

import pytest
from tests import draws
from tests.hai.plan.bench import Bench, launched

from fireflyer.errors import ConfigError
from fireflyer.hai.lifecycle import Action, Launch
from fireflyer.hai.model.devices import is_type, mask, matches, members, parse_request, pick
from fireflyer.hai.scheduling.cluster import Job, Node, Quota, Window
from fireflyer.hai.scheduling.why import Why, explain


def devices(actions: list[Action]) -> list[tuple[tuple[int, ...], ...]]:
    return [action.devices for action in actions if isinstance(action, Launch)]


def why(bench: Bench, task: str) -> Why:
    return explain(bench.cluster, bench.cluster.jobs[task], bench.now)


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ([0, 1, 2, 3], 0, ()),
        ([0, 1, 2, 3], 1, (0,)),
        ([1, 2, 3], 1, (1,)),  # the pair 0, 1 is broken already
        ([0, 1, 2, 4, 5, 6, 7], 1, (2,)),
        ([1, 2, 4, 5], 2, (4, 5)),  # 1 and 2 are of different pairs
        ([1, 2, 4, 6, 7], 2, (6, 7)),
        ([1, 2, 4, 6], 2, (1, 2)),  # the first half, as no pair is whole
        ([0, 2, 3, 4, 5, 6, 7], 3, (0, 2, 3)),  # leaves the other half whole
        ([0, 2, 4, 5, 6, 7], 4, (4, 5, 6, 7)),
        ([0, 1, 2, 4, 5, 6], 4, (0, 1, 2, 4)),
        (list(range(6)), 6, (0, 1, 2, 3, 4, 5)),
        ([8, 9, 10, 11, 12], 1, (12,)),
    ],
)
def test_devices_come_from_the_tightest_aligned_block(
    free: list[int], count: int, chosen: tuple[int, ...]
) -> None:
    assert pick(mask(tuple(free)), count) == chosen


def test_a_pick_is_of_free_devices_and_as_many_as_asked() -> None:
    draw = draws.drawn("devices")
    for _ in range(2000):
        free = draw.getrandbits(draw.choice([4, 8, 16]))
        count = draw.randint(0, 8)
        if count > free.bit_count():
            with pytest.raises(ValueError, match="devices are free"):
                pick(free, count)
            continue
        found = pick(free, count)
        assert len(set(found)) == len(found) == count
        assert set(found) <= set(members(free))


def test_requests_name_a_number_and_maybe_a_type() -> None:
    assert parse_request("0") == (0, "")
    assert parse_request("2") == (2, "")
    assert parse_request("A100:2") == (2, "a100")
    assert parse_request("rtx-4090:1") == (1, "rtx-4090")
    for text in (
        "",
        "a100",
        "a100:",
        ":2",
        "a100:0",
        "a 100:2",
        "2:a100",
        "-1",
        "2000",
        "²",
        "a:b:-",
    ):
        with pytest.raises(ConfigError, match="invalid --gpus"):
            parse_request(text)
    assert is_type("a100-pcie-40gb")
    assert not is_type("-a100")


def test_a_type_serves_requests_for_it_and_for_its_family() -> None:
    assert matches("", "v100")
    assert matches("", "")
    assert matches("a100", "a100")
    assert matches("a100", "a100-pcie-40gb")
    assert not matches("a10", "a100")
    assert not matches("a100-pcie-40gb", "a100")
    assert not matches("a100", "")


def test_tasks_share_a_node_and_no_device() -> None:
    bench = Bench("fifo", 1, gpus=8)
    got = devices(bench.submit({"gpus": 2}, {"gpus": 1}, {"gpus": 4}, {"gpus": 1}, {"gpus": 1}))
    assert got == [((0, 1),), ((2,),), ((4, 5, 6, 7),), ((3,),)]
    assert why(bench, "t5").rule == "busy"
    assert devices(bench.end("t1")) == [((0,),)]
    assert why_free(bench) == [1]


def why_free(bench: Bench) -> list[int]:
    return list(members(bench.cluster.devices.free(0)))


def test_a_whole_node_has_all_its_devices() -> None:
    bench = Bench("fifo", 2, gpus=4)
    assert devices(bench.submit({"nodes": 2})) == [((0, 1, 2, 3), (0, 1, 2, 3))]
    bench = Bench("fifo", 2)
    assert devices(bench.submit({"nodes": 2})) == [()], "no GPUs, no devices"


def test_another_scheduler_chooses_where_devices_are_not_indexed() -> None:
    bench = Bench("fifo", [Node(name="n0", gpus=8, indexed=False)])
    assert devices(bench.submit({"gpus": 2}, {"gpus": 6})) == [(), ()]
    bench.end("t1", "t2")
    assert launched(bench.submit({"gpus": 8})) == [("t3", ("n0",))]


def test_only_nodes_of_the_type_are_used() -> None:
    nodes = [
        Node(name="n0", gpus=4, gpu_type="v100"),
        Node(name="n1", gpus=4, gpu_type="a100-pcie-40gb"),
        Node(name="n2", gpus=4),
    ]
    bench = Bench("fifo", nodes)
    assert launched(bench.submit({"gpus": 2, "gpu_type": "a100"})) == [("t1", ("n1",))]
    assert launched(
        bench.submit({"gpus": 4, "gpu_type": "a100"}, {"gpus": 4, "gpu_type": "v100"})
    ) == [("t3", ("n0",))], "a task that waits for one type holds back no task of another"
    found = why(bench, "t2")
    assert (found.rule, found.text) == (
        "busy",
        "waits for 1 node with 4 a100 GPUs; 0 free (at most 2 GPUs on one)",
    )
    bench.submit({"gpus": 1, "gpu_type": "h100"})
    found = why(bench, "t4")
    assert (found.rule, found.earliest) == ("size", None)
    assert found.text == "asks for 1 node with 1 h100 GPU; the server has 0 such nodes"


def test_a_change_of_type_counts_at_once() -> None:
    bench = Bench("fifo", [Node(name="n0", gpus=4), Node(name="n1", gpus=4, gpu_type="v100")])
    assert launched(bench.submit({"gpus": 1, "gpu_type": "a100"})) == []
    bench.cluster.set_node(Node(name="n1", gpus=4, gpu_type="a100"))
    assert launched(bench.plan()) == [("t1", ("n1",))]


def test_a_gang_of_a_type_interrupts_tasks_on_that_type_only() -> None:
    nodes = [Node(name=f"n{n}", gpus=2, gpu_type="a100" if n % 2 else "v100") for n in range(4)]
    bench = Bench("timeshare", nodes)
    bench.submit(*[{"user": "low", "priority": 8, "gpus": 2} for _ in range(4)])
    actions = bench.submit(
        {"nodes": 2, "gpus": 2, "gpu_type": "a100", "user": "high", "priority": 30}
    )
    victims = {action.task for action in actions}
    assert {bench.cluster.jobs[task].placement[0] for task in victims} == {"n1", "n3"}


def test_a_node_may_change_its_size_while_a_task_has_it_whole() -> None:
    bench = Bench("fifo", [Node(name="n0", gpus=4)])
    bench.submit({})
    bench.cluster.set_node(Node(name="n0", gpus=8))
    assert devices(bench.submit({"gpus": 4})) == [((4, 5, 6, 7),)]
    bench.end("t1", "t2")
    assert bench.cluster.capacity.free == [8]
    bench.submit({})
    bench.cluster.set_node(Node(name="n0", gpus=2))
    bench.end("t3")
    assert bench.cluster.capacity.free == [2]
    assert devices(bench.submit({"gpus": 2})) == [((0, 1),)]


def test_adopted_tasks_keep_their_devices() -> None:
    bench = Bench("fifo", 1, gpus=4)
    job = Job(id="t1", order=1, gpus=2, phase="running", placement=("n0",), devices=((1, 2),))
    bench.cluster.adopt(job, 0.0)
    bench.count = 1
    assert devices(bench.submit({"gpus": 2})) == [((0, 3),)]


# -- the rules that `why` names --------------------------------------------------------------------


def test_why_names_a_quota_and_one_that_is_kept_for_another_task() -> None:
    bench = Bench("las", 2, gpus=4)
    bench.cluster.set_quota("ada", 10, "*", Quota(gpus=4))
    bench.submit({"gpus": 4, "user": "bob"}, {"gpus": 4, "user": "bob"})
    bench.cluster.suspending("t1", 0.0)
    bench.submit({"gpus": 4, "user": "ada"}, {"gpus": 4, "user": "ada"})
    found = why(bench, "t4")
    assert found.rule == "quota"
    assert (
        found.text == "the room in its quota is kept for t3, which waits for other tasks to leave"
    )
    bench.submit({"gpus": 8, "user": "eve"})
    assert why(bench, "t5").rule == "size"


def test_why_names_the_task_that_free_devices_are_reserved_for() -> None:
    bench = Bench("fifo", 2, gpus=4)
    bench.submit({"gpus": 3}, {"nodes": 2, "gpus": 2}, {"gpus": 1})
    found = why(bench, "t3")
    assert found.rule == "reserved"
    assert found.text == ("waits for 1 node with 1 GPU; 2 free, reserved for t2, which comes first")
    assert why(bench, "t2").rule == "busy"


def test_a_short_task_uses_nodes_reserved_under_backfill() -> None:
    bench = Bench("fifo-backfill", 1, gpus=4)
    bench.submit({"gpus": 3, "estimate_s": 100.0}, {"gpus": 4, "estimate_s": 100.0})
    got = launched(bench.submit({"gpus": 1, "estimate_s": 200.0}, {"gpus": 1, "estimate_s": 50.0}))
    assert got == [("t4", ("n0",))]
    assert why(bench, "t3").rule == "busy"
    bench.end("t4")
    assert why(bench, "t3").text.endswith("reserved for t2, which comes first")


def test_why_names_windows_and_avoided_nodes() -> None:
    bench = Bench("fifo", 2, gpus=4)
    bench.cluster.set_window(Window(id="w", nodes=frozenset(["n0"]), begin=0.0, end=60.0))
    bench.submit({"gpus": 3}, {"gpus": 3})
    found = why(bench, "t2")
    assert found.rule == "window"
    bench = Bench("fifo", 2, gpus=4)
    bench.submit({"gpus": 3}, {"gpus": 3, "avoid": frozenset(["n1"])})
    assert why(bench, "t2").rule == "avoided"
    bench.cluster.set_node(Node(name="n1", gpus=4, health="down"))
    bench.submit({"gpus": 3, "nodes": 2})
    assert why(bench, "t3").rule == "health"


def test_no_lane_ends_before_its_last_job() -> None:
    """Forty tasks that may not use the free node come before one that may."""
    bench = Bench("timeshare", 2, gpus=4)
    bench.submit({"gpus": 4})
    avoid = frozenset(bench.cluster.jobs["t1"].placement)
    other = ({"n0", "n1"} - avoid).pop()
    bench.submit(*[{"gpus": 4, "avoid": frozenset([other])} for _ in range(40)], {"gpus": 4})
    assert bench.cluster.jobs["t42"].placement == (other,)
