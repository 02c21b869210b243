"""What Slurm's text says, and times of other machines."""

import pytest

from fireflyer.hai.engines.clocks import translated
from fireflyer.hai.engines.gang import Now
from fireflyer.hai.engines.slurm.cli import (
    PartitionNode,
    TreePosition,
    expand_hosts,
    parse_node,
    parse_tree,
    share_of,
)
from fireflyer.hai.model.engine import Node, RankStarted
from fireflyer.hai.supervisor.messages import PartEnded, Record


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("(null)", []),
        ("login", ["login"]),
        ("fn[1-3]", ["fn1", "fn2", "fn3"]),
        ("gpu[008-010,7]-ib,login", ["gpu008-ib", "gpu009-ib", "gpu010-ib", "gpu7-ib", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    ("line", "node"),
    [
        (
            "fn1|10.0.0.1|idle|gpu:8|16000|96|none",
            Node(
                name="fn1",
                gpus=8,
                cpus=96,
                memory_mib=16000,
                leaf="leaf1",
                zone="p1",
                indexed=False,
            ),
        ),
        (
            "fn2|fn2|mixed|gpu:a100:4(S:0,2),gpu:t4:2,nvme:1|8|2|none",
            Node(name="fn2", gpus=6, cpus=2, memory_mib=8, indexed=False),
        ),
        (
            "fn8|fn8|idle|gpu:A100:8(S:0-1)|8|2|none",
            Node(name="fn8", gpus=8, gpu_type="A100", cpus=2, memory_mib=8, indexed=False),
        ),
        (
            "fn3|fn3|draining|(null)|8|2|gemm | twice",
            Node(
                name="fn3",
                state="drained",
                reason="draining: gemm | twice",
                cpus=2,
                memory_mib=8,
                indexed=False,
            ),
        ),
        (
            "fn4|fn4|allocated*|(null)|8|2|none",
            Node(
                name="fn4",
                state="drained",
                reason="allocated*",
                cpus=2,
                memory_mib=8,
                indexed=False,
            ),
        ),
        (
            "fn5|fn5|down*|(null)|8|2|Not responding",
            Node(
                name="fn5",
                state="down",
                reason="down*: Not responding",
                cpus=2,
                memory_mib=8,
                indexed=False,
            ),
        ),
        (
            "fn6|fn6|never heard of|(null)|8|2|none",
            Node(
                name="fn6",
                state="down",
                reason="never heard of",
                cpus=2,
                memory_mib=8,
                indexed=False,
            ),
        ),
        (
            "fn7|fn7|unknown|(null)|8|2|none",
            Node(
                name="fn7", state="drained", reason="unknown", cpus=2, memory_mib=8, indexed=False
            ),
        ),
    ],
)
def test_lines_of_sinfo(line: str, node: Node) -> None:
    unresponsive = node.reason in ("allocated*", "unknown")
    assert parse_node(line, {"fn1": TreePosition("leaf1", "p1")}) == PartitionNode(
        node, line.split("|")[1], unresponsive
    )


def _node(gpus: int = 8, *, whole: bool = False) -> Node:
    return Node(name="fn", gpus=gpus, cpus=96, memory_mib=16000, whole=whole)


@pytest.mark.parametrize(
    ("gpus", "memory_mib", "nodes", "options"),
    [
        (0, 0, [_node()], ["--exclusive", "--mem=0", "--gres=gpu:8"]),
        (0, 0, [_node(0)], ["--exclusive", "--mem=0"]),
        (4, 0, [_node()], ["--cpus-per-task=48", "--mem=8000M", "--gres=gpu:4"]),
        (4, 99, [_node(), _node()], ["--cpus-per-task=48", "--mem=99M", "--gres=gpu:4"]),
        (2, 0, [_node(4), _node(8)], ["--cpus-per-task=24", "--mem=4000M", "--gres=gpu:2"]),
        (2, 0, [_node(whole=True)], ["--exclusive", "--mem=0", "--gres=gpu:8"]),
    ],
)
def test_what_a_job_asks_slurm_for(
    gpus: int, memory_mib: int, nodes: list[Node], options: list[str]
) -> None:
    assert share_of(gpus, memory_mib, nodes).options() == options


def test_a_job_gets_the_limits_of_its_task() -> None:
    shared = share_of(4, 99, [_node()], cpus=3).options()
    assert shared == ["--cpus-per-task=3", "--mem=99M", "--gres=gpu:4"]
    whole = share_of(0, 99, [_node(0)], cpus=3).options()
    assert whole == ["--exclusive", "--cpus-per-task=3", "--mem=99M"]


def test_a_job_names_the_type_that_all_its_nodes_have() -> None:
    nodes = [Node(name=f"fn{n}", gpus=8, gpu_type="A100", cpus=8) for n in range(2)]
    assert "--gres=gpu:A100:2" in share_of(2, 0, nodes, typed=True).options()
    assert "--gres=gpu:2" in share_of(2, 0, nodes).options()
    nodes.append(Node(name="fn2", gpus=8, gpu_type="A100-80GB", cpus=8))
    assert "--gres=gpu:2" in share_of(2, 0, nodes, typed=True).options()


ONE_ROOT = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=fn[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=fn3
SwitchName=spine Level=1 LinkSpeed=1 Nodes=fn[1-3] Switches=leaf[1-2]
"""
THREE_LEVELS = """\
SwitchName=a1 Level=0 LinkSpeed=1 Nodes=gpu[001-002]
SwitchName=a2 Level=0 LinkSpeed=1 Nodes=gpu003
SwitchName=b1 Level=0 LinkSpeed=1 Nodes=gpu[004,006]
SwitchName=core Level=2 LinkSpeed=1 Nodes=gpu[001-004,006] Switches=poda,podb
SwitchName=poda Level=1 LinkSpeed=1 Nodes=gpu[001-003] Switches=a[1-2]
SwitchName=podb Level=1 LinkSpeed=1 Nodes=gpu[004,006] Switches=b1
"""
TWO_ROOTS = """\
SwitchName=l1 Level=0 LinkSpeed=1 Nodes=n1
SwitchName=l2 Level=0 LinkSpeed=1 Nodes=n2
SwitchName=l3 Level=0 LinkSpeed=1 Nodes=n3
SwitchName=mid Level=1 LinkSpeed=1 Nodes=n1 Switches=l1
SwitchName=west Level=2 LinkSpeed=1 Nodes=n[1-2] Switches=mid,l2
SwitchName=east Level=1 LinkSpeed=1 Nodes=n3 Switches=l3
"""
UNEVEN = """\
SwitchName=l1 Level=0 LinkSpeed=1 Nodes=n1
SwitchName=l2 Level=0 LinkSpeed=1 Nodes=n2
SwitchName=pod Level=1 LinkSpeed=1 Nodes=n1 Switches=l1
SwitchName=root Level=2 LinkSpeed=1 Nodes=n1,n2,n9 Switches=l2,pod
"""
BLOCKS = """\
BlockName=block1 BlockIndex=0 Nodes=node[01-04] BlockSize=4
BlockName=block2 BlockIndex=1 Nodes=node[05-08] BlockSize=4
AggregatedBlock=block[1-2] BlockIndex=2 Nodes=node[01-08] BlockSize=8
"""


@pytest.mark.parametrize(
    ("text", "positions"),
    [
        (ONE_ROOT, {"fn1": "leaf1", "fn2": "leaf1", "fn3": "leaf2"}),
        (
            THREE_LEVELS,
            {
                "gpu001": "a1 poda", "gpu002": "a1 poda", "gpu003": "a2 poda",
                "gpu004": "b1 podb", "gpu006": "b1 podb",
            },
        ),
        (TWO_ROOTS, {"n1": "l1 west", "n2": "l2 west", "n3": "l3 east"}),
        (UNEVEN, {"n1": "l1 pod", "n2": "l2"}),
        ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=a\nSwitchName=s2 Level=0 LinkSpeed=1 Nodes=b\n",
         {"a": "s1", "b": "s2"}),
        (BLOCKS, {}),
        ("No topology information available\n", {}),
        ("", {}),
    ],
    ids=["one-root", "three-levels", "two-roots", "uneven", "leaves", "blocks", "none", "empty"],
)  # fmt: skip
def test_leaf_and_zone_of_a_node(text: str, positions: dict[str, str]) -> None:
    """Leaf: the lowest switch; zone: the highest one above it that does not hold all nodes."""
    assert parse_tree(text) == {
        node: TreePosition(*words.split()) for node, words in positions.items()
    }


def test_times_of_a_machine_that_booted_at_another_time() -> None:
    event = RankStarted(task="t1", attempt=1, rank=0, node="a", pid=1, monotonic_ns=7, wall=100.0)
    now = Now(monotonic_ns=50_000_000_000, wall=102.5)
    (moved,) = [translated(Record(attempt=1, seq=1, event=event), now).event]
    assert moved.monotonic_ns == 47_500_000_000
    part = PartEnded(
        node="a", cause="failed", reason="", told=False, highest=0, failed_ns=5,
        monotonic_ns=7, wall=100.0,
    )  # fmt: skip
    ended = translated(Record(attempt=1, seq=2, event=part), now).event
    assert isinstance(ended, PartEnded)
    assert (ended.monotonic_ns, ended.failed_ns) == (47_500_000_000, 47_499_999_998)


def test_times_of_this_machine_stay_as_they_are() -> None:
    event = RankStarted(task="t1", attempt=1, rank=0, node="a", pid=1, monotonic_ns=7, wall=100.0)
    record = Record(attempt=1, seq=1, event=event)
    assert translated(record, Now(monotonic_ns=2_000_000_007, wall=102.01)) is record
