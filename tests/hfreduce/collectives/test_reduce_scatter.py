"""`hfreduce.reduce_scatter`: torch's, with a codec on the wire and a priority."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init

import fireflyer.hfreduce as hfreduce
from fireflyer.errors import ConfigError

COUNT = 100_003


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.sample(3, 8)
@pytest.mark.parametrize("zero_copy", [True, False])
@pytest.mark.parametrize(("codec", "bytes_each"), [("bf16", 2), ("fp16", 2), ("int8", 1 + 4 / 256)])
@pytest.mark.parametrize(("world", "nodes"), [(2, 2), (4, 2), (3, 3), (3, 2)])
def test_a_codec_keeps_its_bound_and_its_bytes(
    start_gang: Callable[..., Any],
    store_path: str,
    world: int,
    nodes: int,
    codec: str,
    bytes_each: float,
    zero_copy: bool,
) -> None:
    def body(rank: int, world: int) -> int:
        group = init(store_path, rank, world)
        given = values(rank, world * COUNT)
        source = hfreduce.empty_like(given).copy_(given) if zero_copy else given.clone()
        output = torch.empty(COUNT)
        before = group.network_bytes_sent
        hfreduce.reduce_scatter(output, source, dist.ReduceOp.AVG, wire=codec)
        sent: int = group.network_bytes_sent - before
        assert torch.equal(source, given), "the input is read only"
        all_inputs = torch.stack([values(r, world * COUNT).double() for r in range(world)])
        mine = all_inputs[:, rank * COUNT : (rank + 1) * COUNT]
        size = mine.abs().sum(0)
        step = {"bf16": 2.0**-8 * size, "fp16": 2.0**-10 * size, "int8": size.max() / 127}[codec]
        error = (output.double() * world - mine.sum(0)).abs()
        assert bool((error <= nodes * step + 1e-6).all()), float((error - nodes * step).max())
        assert not torch.allclose(output.double() * world, mine.sum(0), rtol=1e-6, atol=1e-7)
        return sent

    sent = sum(start_gang(body, world, nodes).results())
    if world != 3 or nodes == 3:  # hosts of one size: each sends all but its own ranks' pieces once
        bound = (nodes - 1) * world * COUNT * bytes_each
        assert bound <= sent <= bound * 1.01 + 4096 * world


@pytest.mark.parametrize(("world", "nodes"), [(4, 4), (4, 2)])
def test_fp32_on_the_wire_does_not_round_on_the_way(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int
) -> None:
    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        source = torch.full((world * 5_000,), 256.0 if rank == 0 else 0.75, dtype=torch.bfloat16)
        output = torch.empty(5_000, dtype=torch.bfloat16)
        hfreduce.reduce_scatter(output, source, wire="fp32")
        assert bool((output == output[0]).all())
        return float(output[0])

    assert start_gang(body, world, nodes).results() == [258.0] * 4  # 258.25


def test_the_wire_of_the_group_holds_for_torch_too(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> int:
        group = init(store_path, rank, world)
        group.wire = hfreduce.Wire("bf16")
        before = group.network_bytes_sent
        dist.reduce_scatter_single(torch.empty(COUNT), torch.ones(world * COUNT))
        sent: int = group.network_bytes_sent - before
        return sent

    for sent in start_gang(body, 2, 2).results():
        assert COUNT * 2 <= sent <= COUNT * 2.02 + 4096


def test_error_feedback_makes_small_changes_arrive(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        wire = hfreduce.Wire("int8", error_feedback=True)
        total, output = 0.0, torch.empty(512)
        for _ in range(50):
            source = torch.full((1024,), 0.001)
            source[::256] = 1.0  # sets the scale of the block: 0.001 is less than half a step
            hfreduce.reduce_scatter(output, source, wire=wire)
            total += float(output[1])
        return total

    for total in start_gang(body, 2, nodes=2).results():
        assert abs(total - 50 * 2 * 0.001) < 0.03


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_priorities(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int
) -> None:
    """The last rank begins when all others have submitted everything, and rank 0 waits for it."""

    def body(rank: int, world: int) -> list[int]:
        group = init(store_path, rank, world)
        made = dist.FileStore(store_path + "-made", world)
        first = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        assert first is not None
        works, outputs = [], [torch.empty(1_000 + i) for i in range(5)]
        for index, output in enumerate(outputs):
            source = torch.full((world * output.numel(),), float(index))
            works.append(hfreduce.reduce_scatter(output, source, priority=1 + index, async_op=True))
        made.set(f"{rank}", "")
        for other in range(world):
            made.get(f"{other}")
        for work in [first, *works]:
            work.wait()
        for index, output in enumerate(outputs):
            assert bool((output == float(index * world)).all())
        records = [r for r in group.flight_records() if r["started_ns"]]
        return [r["number"] for r in sorted(records, key=lambda r: r["started_ns"])]

    orders = start_gang(body, world, nodes).results()
    assert all(order == orders[0] for order in orders)
    assert sorted(orders[0]) == list(range(6))


def test_a_work_lets_go_of_its_memory(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> bool:
        import weakref

        init(store_path, rank, world)
        source = torch.ones(world * 10)
        alive = weakref.ref(source)
        work = hfreduce.reduce_scatter(torch.empty(10), source, async_op=True)
        del source
        assert alive() is not None or work.is_completed()
        work.wait()
        return alive() is None

    assert start_gang(body, 2).results() == [True, True]


def test_what_does_not_fit(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        with pytest.raises(ValueError, match="cannot be divided"):
            hfreduce.reduce_scatter(torch.empty(2), torch.ones(5))
        with pytest.raises(ValueError, match="expected 2 tensors of 3 elements"):
            hfreduce.reduce_scatter(torch.empty(3), torch.ones(8))
        with pytest.raises(ValueError, match="priority"):
            hfreduce.reduce_scatter(torch.empty(2), torch.ones(4), priority=2**31)
        gloo: Any = dist.new_group(backend="gloo")
        with pytest.raises(ConfigError, match=r"hfreduce\.reduce_scatter"):
            hfreduce.reduce_scatter(torch.empty(2), torch.ones(4), group=gloo)
        dist.barrier()  # gloo's group may be made here and not yet on the other rank

    start_gang(body, 2).results()
