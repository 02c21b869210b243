"""Allreduce against a float64 reference: dtypes, sizes, memory kinds, hosts; and bit-equality of ranks."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init

import fireflyer.hfreduce as hfreduce

COUNTS = (0, 1, 7, 1000, 8192, 8193, 100_003, 700_001)
EPSILON = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def inputs(world: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)
    ]


def allocate(kind: str, rank: int, source: torch.Tensor) -> torch.Tensor:
    zero_copy = kind == "zero-copy" or (kind == "mixed" and rank % 2 == 1)
    return hfreduce.empty_like(source).copy_(source) if zero_copy else source.clone()


def bound(values: list[torch.Tensor], dtype: torch.dtype, hosts: int) -> torch.Tensor:
    """Error bound: fp32 (or fp64) accumulation inside a host, one rounding there and one a hop."""
    magnitude = sum(
        (v.double().abs() for v in values), torch.zeros_like(values[0], dtype=torch.float64)
    )
    accumulate = EPSILON[torch.float64 if dtype == torch.float64 else torch.float32]
    return magnitude * (len(values) * accumulate + (hosts + 1) * EPSILON[dtype]) + 1e-300


@pytest.mark.sample(1, 8)
@pytest.mark.parametrize("kind", ["zero-copy", "staged", "mixed"])
@pytest.mark.parametrize(
    ("world", "nodes"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 3), (4, 2), (5, 2)]
)
def test_sum_and_average_match_the_reference(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int, kind: str
) -> None:
    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        digests = []
        for dtype in EPSILON:
            for count in COUNTS:
                values = inputs(world, count, dtype)
                exact = sum((v.double() for v in values), torch.zeros(count, dtype=torch.float64))
                limit = bound(values, dtype, nodes)
                for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
                    for asynchronous in (False, True):
                        tensor = allocate(kind, rank, values[rank])
                        work = dist.all_reduce(tensor, op=op, async_op=asynchronous)
                        if work is not None:
                            work.wait()
                        error = (tensor.double() * divisor - exact).abs()
                        assert bool((error <= limit * 2).all()), (dtype, count, op, error.max())
                        raw = tensor.view(torch.uint8).numpy().tobytes()
                        digests.append(hashlib.sha256(raw).hexdigest())
        return digests

    first, *others = start_gang(body, world, nodes).results()
    assert all(other == first for other in others), "ranks differ in bits"


def test_one_rounding_inside_a_host(start_gang: Callable[..., Any], store_path: str) -> None:
    """bf16: 256 + 1 + 1 is 258; adding the ones one by one to 256 in bf16 would lose them."""

    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        tensor = torch.full((40_000,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    assert start_gang(body, 3).results() == [258.0] * 3


def test_strided_tensors_and_other_operations(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        matrix = torch.zeros(64, 100)
        columns = matrix.t()
        columns += rank + 1.0
        dist.all_reduce(columns)
        assert bool((matrix == 3.0).all())
        columns.fill_(rank + 1.0)
        work = dist.all_reduce(columns, async_op=True)
        assert work is not None
        (result,) = work.get_future().wait()
        assert result is columns
        assert bool((matrix == 3.0).all())
        integers = torch.tensor([rank, 5])
        dist.all_reduce(integers, op=dist.ReduceOp.MAX)
        assert integers.tolist() == [1, 5]
        gathered = [torch.zeros(2) for _ in range(world)]
        dist.all_gather(gathered, torch.tensor([float(rank), 1.0]))
        assert [g[0].item() for g in gathered] == [0.0, 1.0]
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert objects == [{"rank": 0}, {"rank": 1}]
        dist.barrier()

    start_gang(body, 2).results()


def test_beside_a_gloo_default_group_and_in_subgroups(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> float:
        store = dist.FileStore(store_path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        pairs = [
            dist.new_group([0, 2], backend="hfreduce"),
            dist.new_group([1, 3], backend="hfreduce"),
        ]
        tensor = torch.full((50_000,), float(rank))
        dist.all_reduce(tensor, group=pairs[rank % 2])
        return float(tensor[-1])

    assert start_gang(body, 4).results() == [2.0, 4.0, 2.0, 4.0]


def test_many_operations_in_flight_keep_their_order(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        tensors = [
            (hfreduce.empty(n).fill_(i) if i % 3 else torch.full((n,), float(i)))
            for i, n in enumerate([10, 20_000, 300_000, 5] * 30)
        ]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        futures = [w.get_future() for w in works if w is not None]
        for i, (future, tensor) in enumerate(zip(futures, tensors, strict=True)):
            assert future.wait()[0] is tensor
            assert bool((tensor == 2.0 * i).all())

    start_gang(body, 2).results()


def test_a_dropped_work_keeps_its_tensor_until_it_is_done(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """The memory of a tensor that nobody refers to any more must not be reused under the engine."""

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        dist.barrier()
        for kind in ("zero-copy", "staged"):
            for _ in range(20):
                dist.all_reduce(allocate(kind, rank, torch.ones(400_000)), async_op=True)
                victim = allocate(kind, rank, torch.full((400_000,), 7.0))
                assert bool((victim == 7.0).all())
            last = dist.all_reduce(torch.ones(1), async_op=True)
            assert last is not None
            last.wait()
            assert bool((victim == 7.0).all())

    start_gang(body, 2).results()


def test_zero_copy_memory_is_given_back(start_gang: Callable[..., Any]) -> None:
    from fireflyer._native import hfreduce as native

    def body(rank: int, world: int) -> None:
        for _ in range(200):
            tensor = hfreduce.empty(1000, 1000)
            view = tensor[1:]
            del tensor
            assert native.in_arena(view.data_ptr(), view.nbytes)
        assert native.arena_reserved_bytes() == 8 << 20

    start_gang(body, 1).results()


def test_callers_inside_torch_find_what_they_need(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    import torch.distributed._functional_collectives as functional
    from torch.distributed.algorithms.join import Join
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        group: Any = dist.group.WORLD

        gathered = torch.zeros(2 * world)
        group._allgather_base(gathered, torch.full((2,), float(rank))).wait()
        assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0]
        assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [2.0, 2.0]
        sub_group = dist.new_group(backend="hfreduce")
        dist.all_reduce(torch.ones(2), group=sub_group)
        dist.destroy_process_group(sub_group)

        mesh = init_device_mesh("cpu", (world,))
        linear = torch.nn.Linear(8, 8)
        fully_shard(linear, mesh=mesh)
        linear(torch.ones(2, 8)).sum().backward()

        sparse = torch.nn.Embedding(10, 4, sparse=True)
        model = DistributedDataParallel(sparse)
        model(torch.tensor([rank])).sum().backward()
        assert sparse.weight.grad is not None
        assert sparse.weight.grad.to_dense()[:3, 0].tolist() == [0.5, 0.5, 0.0]

        uneven = DistributedDataParallel(torch.nn.Linear(300, 300))
        with Join([uneven]):
            for _ in range(4 + 2 * rank):
                uneven(torch.ones(2, 300)).sum().backward()

    start_gang(body, 2).results()


@pytest.mark.parametrize("nodes", [1, 2])
def test_types_that_cannot_be_reduced_can_be_copied(
    start_gang: Callable[..., Any], store_path: str, nodes: int
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        for dtype in (torch.uint16, torch.complex128, torch.uint64):
            given = torch.arange(1000).to(dtype)
            got = given.clone() if rank == 0 else torch.zeros_like(given)
            dist.broadcast(got, src=0)
            assert got.tolist() == given.tolist()
            pieces = [torch.zeros_like(given) for _ in range(world)]
            dist.all_gather(pieces, given)
            assert all(piece.tolist() == given.tolist() for piece in pieces)

    start_gang(body, 2, nodes).results()
