"""What a call may say: a timeout of its own, torch's short forms, means of integers, pieces of any size."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init, meet

from fireflyer import hfreduce
from fireflyer.errors import RankFailed

StartGang = Callable[..., Any]

SHORT = datetime.timedelta(seconds=0.3)
NAMES = (
    *("barrier", "barrier by place", "allreduce", "broadcast", "reduce", "allgather", "gather"),
    *("scatter", "reduce_scatter", "alltoall", "all_to_all_single"),
)


def _calls(group: Any, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    own = torch.ones(world)
    pieces = [torch.ones(1) for _ in range(world)]
    late = {"timeout": SHORT}
    mine, all_of = [torch.ones(1)], [list(pieces)]
    at_root = all_of if rank == 0 else []
    return {
        "barrier": lambda: group.barrier(**late),
        "barrier by place": lambda: group.barrier(SHORT),
        "allreduce": lambda: group.allreduce([own], dist.ReduceOp.SUM, SHORT),
        "broadcast": lambda: group.broadcast(own, 1, SHORT),
        "reduce": lambda: group.reduce(own, 0, dist.ReduceOp.SUM, SHORT),
        "allgather": lambda: group.allgather([pieces], mine, **late),
        "gather": lambda: group.gather(at_root, mine, 0, SHORT),
        "scatter": lambda: group.scatter(mine, all_of if rank == 1 else [], 1, SHORT),
        "reduce_scatter": lambda: group.reduce_scatter(mine, all_of, dist.ReduceOp.SUM, SHORT),
        "alltoall": lambda: group.alltoall(pieces, [t.clone() for t in pieces], **late),
        "all_to_all_single": lambda: group.alltoall_base(own, own.clone(), [], [], **late),
    }


@pytest.mark.sample(4)
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_ends_by_its_own_timeout_and_says_so(
    start_gang: StartGang, store_path: str, name: str, nodes: int
) -> None:
    """In a group that would wait for an hour. Rank 1 does not call."""

    def body(rank: int, world: int) -> Any:
        group = init(store_path, rank, world, 3600.0)
        dist.barrier()
        if rank == 0:
            calls = _calls(group, rank, world)
            assert tuple(calls) == NAMES
            with pytest.raises(RuntimeError, match="timed out") as caught:
                calls[name]().wait()
            assert isinstance(caught.value, RankFailed)
            assert caught.value.rank == 1
        meet(store_path, rank, world)

    start_gang(body, 2, nodes).results()


@pytest.mark.filterwarnings("error")
def test_the_timeout_of_a_group_is_changed_without_a_warning(
    start_gang: StartGang, store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world, 3600.0)
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(datetime.timedelta(seconds=0.3))
        if rank == 0:
            with pytest.raises(RankFailed, match="timed out"):
                dist.all_reduce(torch.ones(1))
        meet(store_path, rank, world)

    start_gang(body, 2).results()


def test_the_short_forms_do_what_the_options_do(start_gang: StartGang, store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        group = init(store_path, rank, world)
        tensor = torch.full((3,), rank + 1.0)
        group.allreduce([tensor], op=dist.ReduceOp.MAX).wait()
        assert tensor.tolist() == [3.0] * 3
        tensor = torch.full((3,), float(rank))
        group.broadcast(tensor, root=2).wait()
        assert tensor.tolist() == [2.0] * 3
        tensor = torch.ones(2)
        group.reduce(tensor, 1).wait()
        assert tensor.tolist() == ([3.0, 3.0] if rank == 1 else [1.0, 1.0])
        output, pieces = torch.zeros(1), [[torch.tensor([float(r)]) for r in range(3)]]
        group.scatter([output], pieces if rank == 2 else [], 2).wait()
        assert output.item() == rank

    start_gang(body, 3).results()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_the_mean_of_integers_is_rounded_towards_zero(
    start_gang: StartGang, store_path: str, dtype: torch.dtype
) -> None:
    signed = dtype is not torch.uint8

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        values = torch.tensor([rank, 7, 10 * rank, 3], dtype=dtype)
        sums = torch.tensor([3, 21, 30, 9])
        if signed:
            values, sums = -values, -sums
        mean = torch.div(sums, 3, rounding_mode="trunc").to(dtype)
        tensor = values.clone()
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        assert torch.equal(tensor, mean)
        apart = values.repeat_interleave(2)[::2]  # not contiguous
        dist.all_reduce(apart, dist.ReduceOp.AVG, async_op=True).wait()
        assert torch.equal(apart, mean)
        tensor = values.clone()
        dist.reduce(tensor, 1, dist.ReduceOp.AVG)
        assert torch.equal(tensor, mean if rank == 1 else values)
        output = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_single(output, values.repeat(3), dist.ReduceOp.AVG)
        assert torch.equal(output, mean)
        with pytest.raises(TypeError, match="AVG is not defined"):
            hfreduce.allreduce(values, dist.ReduceOp.AVG, shared=True)

    start_gang(body, 3).results()


def test_flags_have_no_mean(start_gang: StartGang, store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        with pytest.raises(TypeError, match="AVG is not defined"):
            dist.all_reduce(torch.tensor([True]), dist.ReduceOp.AVG)

    start_gang(body, 1).results()


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("sizes", [(1, 2, 3), (4, 0, 5), (0, 0, 7)])
def test_pieces_of_a_reduce_scatter_may_have_any_sizes(
    start_gang: StartGang, store_path: str, sizes: tuple[int, ...], nodes: int
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        pieces = [torch.arange(float(size)) + rank + owner for owner, size in enumerate(sizes)]
        kept = [piece.clone() for piece in pieces]
        output = torch.full((sizes[rank],), -1.0)
        dist.reduce_scatter(output, pieces)
        assert torch.equal(output, 3 * torch.arange(float(sizes[rank])) + 3 + 3 * rank)
        assert all(map(torch.equal, pieces, kept))
        numbers = [piece.to(torch.int32) for piece in pieces]
        whole = torch.zeros(sizes[rank], dtype=torch.int32)
        dist.reduce_scatter(whole, numbers, dist.ReduceOp.AVG)
        assert torch.equal(whole, torch.arange(sizes[rank], dtype=torch.int32) + 1 + rank)
        with pytest.raises(ValueError, match="of which number"):
            dist.reduce_scatter(torch.zeros(9), pieces)

    start_gang(body, 3, nodes).results()


@pytest.mark.parametrize("factor", [0.5, torch.tensor([3.0])])
def test_values_may_be_multiplied_before_they_are_added(
    start_gang: StartGang, store_path: str, factor: Any
) -> None:
    number = float(factor)

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        op = dist._make_nccl_premul_sum(factor)
        tensor = torch.tensor([1.0, rank])
        dist.all_reduce(tensor, op)
        assert tensor.tolist() == [3 * number, 3 * number]
        tensor = torch.ones(2)
        dist.reduce(tensor, 2, op)
        assert tensor.tolist() == ([3 * number] * 2 if rank == 2 else [1.0, 1.0])
        output, source = torch.empty(1), torch.arange(3.0)
        dist.reduce_scatter_single(output, source, op)
        assert output.item() == 3 * rank * number
        assert source.tolist() == [0.0, 1.0, 2.0]

    start_gang(body, 3).results()
