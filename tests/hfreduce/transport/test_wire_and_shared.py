"""What torch has no words for: wire codecs between hosts, and results that lie once a host."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.conftest import init

import fireflyer.hfreduce as hfreduce
from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError

COUNT = 300_007


def values(rank: int, count: int = COUNT, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def exact(world: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([values(r, dtype=dtype).double() for r in range(world)]).sum(0)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("codec", "bytes_each"), [("bf16", 2), ("fp16", 2), ("int8", 1 + 4 / 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_codec_keeps_its_bound_and_its_bytes(
    start_gang: Callable[..., Any],
    store_path: str,
    codec: str,
    bytes_each: float,
    dtype: torch.dtype,
) -> None:
    def body(rank: int, world: int) -> tuple[bytes, int]:
        group = init(store_path, rank, world)
        tensor = values(rank, dtype=dtype)
        before = group.network_bytes_sent
        hfreduce.allreduce(tensor, wire=codec)
        sent = group.network_bytes_sent - before
        hosts = torch.stack([values(r, dtype=dtype).double().abs() for r in range(world)]).sum(0)
        step = {"bf16": 2.0**-8 * hosts, "fp16": 2.0**-10 * hosts, "int8": hosts.max() / 127}[codec]
        error = (tensor.double() - exact(world, dtype)).abs()
        limit = 2 * step + 2.0**-7 * hosts * (dtype == torch.bfloat16) + 1e-6
        assert bool((error <= limit).all()), float((error - limit).max())
        return tensor.view(torch.uint8).numpy().tobytes(), sent

    results = start_gang(body, 4, nodes=2).results()
    assert len({raw for raw, _ in results}) == 1, "ranks differ in bits"
    by_host = [sum(sent for _, sent in results[h * 2 : h * 2 + 2]) for h in range(2)]
    for sent in by_host:  # 2 (H-1)/H = 1 times the tensor, and the headers of the calls
        assert COUNT * bytes_each <= sent <= COUNT * bytes_each * 1.01 + 4096


def test_fp32_on_the_wire_does_not_round_on_the_way(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    """256 + 1 + 1 + 1 in bfloat16: each host alone would round its 1 away again."""

    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        tensor = torch.full((50_000,), 256.0 if rank == 0 else 0.75, dtype=torch.bfloat16)
        hfreduce.allreduce(tensor, wire="fp32")
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])

    assert start_gang(body, 4, nodes=4).results() == [258.0] * 4  # 258.25


def test_error_feedback_makes_small_changes_arrive(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> tuple[float, float]:
        init(store_path, rank, world)
        wire = hfreduce.Wire("int8", error_feedback=True)
        totals = torch.zeros(2)
        codecs: list[str | hfreduce.Wire] = ["int8", wire]
        for index, codec in enumerate(codecs):
            for _ in range(50):
                tensor = torch.full((512,), 0.001)
                tensor[::256] = 1.0  # sets the scale of the block: 0.001 is less than half a step
                hfreduce.allreduce(tensor, wire=codec)
                totals[index] += tensor[1]
        with pytest.raises(ConfigError, match="one for each tensor"):
            hfreduce.allreduce(torch.ones(7), wire=wire)
        return float(totals[0]), float(totals[1])

    for without, fed_back in start_gang(body, 2, nodes=2).results():
        assert without == 0.0
        assert abs(fed_back - 50 * 2 * 0.001) < 0.03


def test_stochastic_rounding_is_right_on_average(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> float:
        init(store_path, rank, world)
        wire = hfreduce.Wire("int8", stochastic=True)
        tensor = torch.full((25_600,), 0.002)
        tensor[::256] = 1.0
        hfreduce.allreduce(tensor, wire=wire)
        small = tensor.view(-1, 256)[:, 1:]
        assert len(small.unique()) > 1
        return float(small.mean())

    for mean in start_gang(body, 2, nodes=2).results():
        assert abs(mean - 0.004) < 0.0004


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4"):
        hfreduce.Wire("int4")


def test_ranks_with_different_codecs_are_told_so(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    from fireflyer.errors import CollectiveError

    def body(rank: int, world: int) -> str:
        init(store_path, rank, world)
        with pytest.raises(CollectiveError) as caught:
            hfreduce.allreduce(torch.ones(100_000), wire="int8" if rank == 0 else "bf16")
        return str(caught.value)

    assert any("int8" in m and "bf16" in m for m in start_gang(body, 2, nodes=2).results())


@pytest.mark.sample(1, 4)
@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (3, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("zero_copy", [True, False])
def test_a_shared_result_lies_once_a_host(
    start_gang: Callable[..., Any], store_path: str, world: int, nodes: int, zero_copy: bool
) -> None:
    def body(rank: int, world: int) -> tuple[bytes, int]:
        init(store_path, rank, world)
        given = values(rank)
        tensor = hfreduce.empty_like(given).copy_(given) if zero_copy else given.clone()
        shared = hfreduce.allreduce(tensor, shared=True)
        assert torch.equal(tensor, given), "the input stays as it was"
        error = (shared.double() - exact(world)).abs()
        assert float(error.max()) < 1e-5
        work = hfreduce.allreduce(tensor, op=dist.ReduceOp.AVG, shared=True, async_op=True)
        assert torch.allclose(work.result()[0] * world, shared, atol=1e-6)
        raw = shared.numpy().tobytes()
        before = native.arena_reserved_bytes()
        del shared, work
        gc.collect()
        for _ in range(20):  # blocks are given back when all have let go
            held = hfreduce.allreduce(tensor, shared=True)
            hfreduce.allreduce(tensor, shared=True, async_op=True).wait()
            assert held.numel() == COUNT
        assert native.arena_reserved_bytes() <= before + (8 << 20)
        dist.barrier()
        return raw, native.arena_reserved_bytes()

    results = start_gang(body, world, nodes).results()
    assert len({raw for raw, _ in results}) == 1
    if not zero_copy:
        holders = sum(reserved > 0 for _, reserved in results)
        assert holders == nodes, "one rank a host holds the results"
