"""Allreduce along planned trees, against a float64 reference and to the bit between ranks."""

import datetime
import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.hfreduce.conftest import die, init, meet

from fireflyer import hfreduce
from fireflyer.errors import CollectiveError, DeadlineExceeded, RankFailed
from fireflyer.hfreduce.backend.planned_hierarchy import PlannedHierarchy, PlannedWork, TreePlan

COUNTS = (0, 1, 7, 1000, 100_003)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
PAIRS = [[0, 1], [2, 3]]


def values(world: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    rows = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(world)]
    return [row.to(dtype) for row in rows]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def check_sums(tree: PlannedHierarchy, rank: int, world: int, nodes: int) -> list[str]:
    """SUM and AVG within the documented bound; the digests of all results."""
    digests = []
    for dtype, epsilon in EPSILON.items():
        for count in COUNTS:
            own = values(world, count, dtype)
            exact = sum((v.double() for v in own), torch.zeros(count, dtype=torch.float64))
            magnitude = sum((v.double().abs() for v in own), torch.zeros_like(exact))
            roundings = len(tree.plan.levels) * (nodes + 1) + (not tree.plan.even)
            limit = magnitude * (world * 2.0**-24 + roundings * epsilon)
            for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
                for memory in (torch.empty_like, hfreduce.empty_like):
                    tensor = memory(own[rank]).copy_(own[rank])
                    tree.allreduce(tensor, op)
                    error = (tensor.double() * divisor - exact).abs()
                    assert bool((error <= limit).all()), (dtype, count, op, error.max())
                    digests.append(digest(tensor))
    return digests


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("levels", "world", "nodes", "even"),
    [
        ([[0, 1]], 2, 1, True),
        ([1, 0], 2, 2, True),
        ([[0, 1], 2], 3, 1, False),
        (PAIRS, 4, 1, True),
        (PAIRS, 4, 2, True),
        ([[3, 0], [1, 2]], 4, 2, True),
        ([[[0], [1]], [[2], [3]]], 4, 1, True),
        ([0, [1, [2, 3]]], 4, 2, False),
        ([[4, 3], [2, 1, 0]], 5, 2, False),
        ([[0, 1, 2], [3, 4, 5]], 6, 2, True),
        ([[[0, 1], 2], [3, [4, 5]]], 6, 1, False),
    ],
)
def test_sums_along_a_tree(
    start_gang: Callable[..., Any],
    store_path: str,
    levels: Any,
    world: int,
    nodes: int,
    even: bool,
) -> None:
    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        tree = PlannedHierarchy(levels)
        assert tree.plan.even == even
        digests = check_sums(tree, rank, world, nodes)
        tree.close()
        return digests

    first, *others = start_gang(body, world, nodes).results()
    assert all(other == first for other in others), "ranks differ in bits"


@pytest.mark.parametrize("levels", [PAIRS, [[0, 1], 2, 3]])
def test_other_operations_dtypes_and_layouts(
    start_gang: Callable[..., Any], store_path: str, levels: Any
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        tree = PlannedHierarchy(levels)
        numbers = torch.arange(101) + 7 * rank
        everybody = torch.stack([torch.arange(101) + 7 * r for r in range(world)])
        for op, wanted in (
            (dist.ReduceOp.MIN, everybody.amin(0)),
            (dist.ReduceOp.MAX, everybody.amax(0)),
            (dist.ReduceOp.PRODUCT, everybody.prod(0)),
            (dist.ReduceOp.BOR, everybody[0] | everybody[1] | everybody[2] | everybody[3]),
        ):
            tensor = numbers.clone()
            tree.allreduce(tensor, op)
            assert torch.equal(tensor, wanted), op
        matrix = torch.zeros(9, 11)
        columns = matrix.t()
        columns += rank
        tree.allreduce(columns)
        assert bool((matrix == 6).all())
        flags = torch.arange(10) == rank
        tree.allreduce(flags, dist.ReduceOp.MAX)
        assert flags.tolist() == [True] * 4 + [False] * 6
        weights = torch.full((5,), rank + 1.0, requires_grad=True)
        tree.allreduce(weights, dist.ReduceOp.AVG)
        assert weights.tolist() == [2.5] * 5
        with pytest.raises(CollectiveError, match=r"layout torch\.sparse_coo"):
            tree.allreduce(torch.eye(3).to_sparse())
        with pytest.raises(TypeError, match="AVG is not defined"):
            tree.allreduce(numbers, dist.ReduceOp.AVG)

    start_gang(body, 4).results()


def test_pairs_keep_what_crosses_between_hosts_in_halves(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    size = 1 << 20

    def body(rank: int, world: int) -> tuple[int, int]:
        init(store_path, rank, world)
        tensor = torch.zeros(size // 4)
        inside, across = PlannedHierarchy(PAIRS), PlannedHierarchy([[0, 2], [1, 3]])
        inside.allreduce(tensor)
        across.allreduce(tensor)
        return inside.network_bytes_sent, across.network_bytes_sent

    for inside, across in start_gang(body, 4, 2).results():
        assert size / 2 <= inside <= 1.02 * size / 2  # 2S(H-1)/H a host, two ranks a host
        assert (
            size <= across <= 1.02 * size
        )  # half of the tensor to the pair's other rank, and back


def test_calls_under_way_keep_their_order(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        tree = PlannedHierarchy(PAIRS)
        tensors = [torch.full((50_000,), float(rank + k)) for k in range(4)]
        works = [tree.allreduce(t, async_op=True) for t in tensors[:3]]
        tree.allreduce(tensors[3])
        assert all(isinstance(w, PlannedWork) and w.is_success() for w in works)
        for k, tensor in enumerate(tensors):
            assert bool((tensor == 6 + 4 * k).all())
        later = tree.allreduce(tensors[0], async_op=True)
        assert later is not None
        (result,) = later.get_future().wait()
        assert result is tensors[0]
        assert later.wait()
        assert later.result()[0] is result
        assert (later.exception(), float(result[0])) == (None, 24)
        tree.close()

    start_gang(body, 4).results()


def test_in_a_subgroup_beside_gloo(start_gang: Callable[..., Any], store_path: str) -> None:
    """Ranks are those of the group, and two hierarchies of one group do not mix."""

    def body(rank: int, world: int) -> float:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        group = dist.new_group([3, 1, 2])
        tensor = torch.full((10,), float(rank))
        if rank > 0:
            PlannedHierarchy([[0, 1], 2], group).allreduce(tensor)
            PlannedHierarchy([2, [1, 0]], group).allreduce(tensor, dist.ReduceOp.MAX)
        return float(tensor[0])

    assert start_gang(body, 4).results() == [0, 6, 6, 6]


@pytest.mark.parametrize("levels", [PAIRS, [[0, 1, 2], 3]])
def test_a_death_ends_the_call_on_every_rank(
    start_gang: Callable[..., Any], store_path: str, levels: Any
) -> None:
    def body(rank: int, world: int) -> tuple[str, int | None]:
        init(store_path, rank, world)
        tree = PlannedHierarchy(levels)
        tensor = torch.ones(100_000)
        tree.allreduce(tensor)
        meet(store_path, rank, world)
        if rank == 3:
            die()
        try:
            while True:
                tree.allreduce(tensor, dist.ReduceOp.MAX)
        except CollectiveError as error:
            first = error
        work = tree.allreduce(tensor, async_op=True)
        assert work is not None
        with pytest.raises(CollectiveError):
            work.wait()
        assert not work.is_success()
        # Nobody leaves before all have seen it, or he would be the next to be missed.
        seen = dist.FileStore(store_path + ".seen", 3)
        seen.set(f"{rank}", "yes")
        seen.wait(["0", "1", "2"])
        return str(first), first.rank if isinstance(first, RankFailed) else None

    *survivors, dead = start_gang(body, 4).results()
    assert dead is None
    assert all("rank 3" in message for message, _ in survivors), survivors
    assert {rank for _, rank in survivors} <= {3, None}
    assert 3 in {rank for _, rank in survivors}


def test_a_wait_has_its_own_limit(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        tree = PlannedHierarchy([0, 1])
        tensor = torch.ones(10)
        if rank == 0:
            work = tree.allreduce(tensor, async_op=True)
            assert work is not None
            with pytest.raises(DeadlineExceeded):
                work.wait(datetime.timedelta(milliseconds=1))
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            tree.allreduce(tensor)
        assert tensor[0] == 2

    start_gang(body, 2).results()


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([[0, 1], [2]], "missing ranks: 3"),
        ([[0, 1], [1, 2, 3]], "rank 1 occurs more than once"),
        ([[0, 1], [2, 3, 4]], "rank 4 does not exist in a group of 4 ranks"),
        ([[0, 1, -1], [2, 3]], "rank -1 does not exist in a group of 4 ranks"),
        ([[0, 1, 2, 3], []], "a group is empty"),
        ([], "a group is empty"),
        ([[0, 1], "23"], "'23': expected a rank or a list"),
        ([[False, True], [2, 3]], "False: expected a rank"),
        ([0, 1, 2, 3.0], "3.0: expected a rank"),
    ],
)
def test_wrong_trees(levels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreePlan.of(levels, 4)


def test_trees_that_differ_between_ranks(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        with pytest.raises(ValueError, match="levels must be equal") as raised:
            PlannedHierarchy([[0, 1], [2]] if rank < 2 else ((0, 1), 2))
        return str(raised.value)

    assert start_gang(body, 3).results() == [
        "levels must be equal on all ranks: rank 0 has [[0, 1], [2]], rank 2 has [[0, 1], 2]",
        "levels must be equal on all ranks: rank 1 has [[0, 1], [2]], rank 2 has [[0, 1], 2]",
        "levels must be equal on all ranks: rank 2 has [[0, 1], 2], rank 0 has [[0, 1], [2]]",
    ]


def test_plans() -> None:
    assert TreePlan.of([[0, 1], [2, 3]], 4).levels == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert TreePlan.of([[0, 1], 2, [3, 4]], 5).levels == (((0, 1), (3, 4)), ((0, 2, 3),))
    assert TreePlan.of([[[0]]], 1).levels == ()


@given(st.data())
def test_every_plan_joins_all_ranks(data: st.DataObject) -> None:
    """Following the groups of the plan, what every rank has reaches every other one."""
    ranks = data.draw(st.permutations(range(data.draw(st.integers(1, 12)))))
    tree = data.draw(trees(list(ranks)))
    plan = TreePlan.of(tree, len(ranks))
    known = {rank: {rank} for rank in ranks}
    for level in plan.levels:
        members = [rank for group in level for rank in group]
        assert len(members) == len(set(members)), "a rank in two groups of a level"
        for group in level:
            together = set().union(*(known[rank] for rank in group))
            for rank in group:
                known[rank] = together
    if plan.even:
        assert all(known[rank] == set(ranks) for rank in ranks)
    elif plan.levels:
        (root,) = plan.levels[-1]
        assert all(known[rank] == set(ranks) for rank in root)


@st.composite
def trees(draw: st.DrawFn, ranks: list[int]) -> Any:
    """Any nesting of the ranks, in their order."""
    if len(ranks) == 1 and draw(st.booleans()):
        return ranks[0]
    if len(ranks) == 1:
        return [ranks[0]]
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks) - 1))))
    if not cuts:
        return ranks
    bounds = [0, *cuts, len(ranks)]
    return [draw(trees(ranks[a:b])) for a, b in itertools.pairwise(bounds)]
