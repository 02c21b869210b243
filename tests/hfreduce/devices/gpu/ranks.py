"""Runs a test case on a GPU: `python -m tests.hfreduce.devices.gpu.ranks CASE SHAPE`, a process per rank.

RANK and STORE (a path) in the environment say who this rank is; SHAPE has a letter a rank, alike on one host.
"""

import datetime
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.collectives.cases import COLLECTIVES, REDUCING, Call, Case, collectives
from tests.hfreduce.conftest import DTYPES, difference, reference, values

from fireflyer.errors import CollectiveError, RankFailed

SECOND = 2_000_000_000
"""Cycles of `torch.cuda._sleep` that take a second or so."""


class CudaCall(Call):
    """A case whose tensors lie on the GPU."""

    def put(self, source: torch.Tensor) -> torch.Tensor:
        if self.case.memory == "strided":
            return torch.zeros(len(source), 2, dtype=source.dtype, device="cuda")[:, 1].copy_(
                source
            )
        return source.cuda()

    def expect(self, got: torch.Tensor, *arguments: Any, **options: Any) -> None:
        super().expect(got.cpu(), *arguments, **options)


def every_collective(rank: int, world: int, shape: str) -> None:
    for seed, name in enumerate(collectives(world) * 3):
        dtype = DTYPES[seed % len(DTYPES)]
        op = "MAX" if name in REDUCING and seed % 3 == 0 else "SUM"
        memory = ("staged", "staged", "strided")[seed % 3]
        count = (7, 8193, 0, 100_003)[seed % 4]
        call = CudaCall(Case(name, dtype, op, count, memory, seed % 2 == 1, seed % world), shape)
        COLLECTIVES[name](call)
        call.close()
        assert not call.problems, (call.case, call.problems)


def sums_of_all_sizes(rank: int, world: int, shape: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (1, 1000, 300_001):
            inputs = [values(dtype, count, r) for r in range(world)]
            wanted, limit = reference(inputs, "SUM", len(set(shape)))
            tensor = inputs[rank].cuda()
            dist.all_reduce(tensor)
            assert difference(tensor.cpu(), wanted, limit) is None, (dtype, count)
    large = torch.full((40_000_000,), rank + 1.0, device="cuda")  # many parts
    dist.all_reduce(large)
    assert bool((large == world * (world + 1) / 2).all())


def the_stream_orders_everything(rank: int, world: int, shape: str) -> None:
    """The input comes late, the result is used at once, and the host waits for neither."""
    total = world * (world + 1) / 2
    for count in (1000, 10_000_000):
        tensor, seen = torch.zeros(2, count, device="cuda")
        for first in (True, False):  # the first one pins memory and makes streams
            torch.cuda._sleep(SECOND)
            tensor.fill_(rank + 1.0)
            dist.all_reduce(tensor)
            seen.copy_(tensor)
            busy = not torch.cuda.current_stream().query()
            assert first or busy, "the host has waited for the device"
            torch.cuda.synchronize()
            assert bool((seen == total).all())
    side, result = torch.cuda.Stream(), torch.zeros(10_000_000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SECOND)
        result.fill_(rank + 1.0)
        work: Any = dist.all_reduce(result, async_op=True)
    work.wait()  # this stream, not the side stream
    seen = result.clone()
    torch.cuda.synchronize()
    assert bool((seen == total).all())
    assert work.is_completed()


def futures_carry_the_device(rank: int, world: int, shape: str) -> None:
    tensor = torch.zeros(10_000_000, device="cuda")
    torch.cuda._sleep(SECOND)
    tensor.fill_(1.0)
    work: Any = dist.all_reduce(tensor, async_op=True)
    halved = work.get_future().then(lambda future: future.value()[0] / 2).wait()
    assert bool((halved == world / 2).all())


def dropped_tensors_are_not_reused(rank: int, world: int, shape: str) -> None:
    for _ in range(20):
        dist.all_reduce(torch.ones(4_000_000, device="cuda"), async_op=True)
        gc.collect()
        victim = torch.full((4_000_000,), 7.0, device="cuda")
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        assert bool((victim == 7.0).all())


def a_late_input_names_its_rank(rank: int, world: int, shape: str) -> None:
    group: Any = dist.group.WORLD
    tensor = torch.ones(1000, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    group.set_timeout(datetime.timedelta(seconds=1 if rank == 1 else 30))
    if rank == 1:
        torch.cuda._sleep(10 * SECOND)
    work: Any = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(RankFailed) as caught:
        work.wait(datetime.timedelta(seconds=40))
    assert caught.value.rank == 1
    torch.cuda.synchronize()
    assert bool(tensor.isnan().all())
    with pytest.raises(CollectiveError):
        dist.all_reduce(tensor)


def users_of_torch(rank: int, world: int, shape: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)]
        return torch.nn.Sequential(*layers).cuda()

    batches = [
        torch.randn(16, 64, generator=torch.Generator().manual_seed(r)) for r in range(world)
    ]
    alone, data_parallel, sharded = model(), DistributedDataParallel(model()), model()
    fully_shard(sharded, mesh=init_device_mesh("cuda", (world,)))
    for network in (data_parallel, sharded):
        network(batches[rank].cuda()).square().mean().backward()
    alone(torch.cat(batches).cuda()).square().mean().backward()
    for want, parallel, shard in zip(
        alone.parameters(), data_parallel.parameters(), sharded.parameters(), strict=True
    ):
        assert want.grad is not None
        assert parallel.grad is not None
        torch.testing.assert_close(parallel.grad, want.grad, rtol=1e-4, atol=1e-5)
        whole: Any = shard.grad
        torch.testing.assert_close(whole.full_tensor(), want.grad, rtol=1e-4, atol=1e-5)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, rank)
    assert objects == list(range(world))


CASES: dict[str, Callable[[int, int, str], None]] = {
    case.__name__: case
    for case in (
        every_collective,
        sums_of_all_sizes,
        the_stream_orders_everything,
        futures_carry_the_device,
        dropped_tensors_are_not_reused,
        a_late_input_names_its_rank,
        users_of_torch,
    )
}


def main() -> None:
    case, shape = sys.argv[1:]
    rank, world = int(os.environ["RANK"]), len(shape)
    os.environ["FIREFLYER_NODE"] = shape[rank]
    torch.cuda.set_device(0)
    store = dist.FileStore(os.environ["STORE"], world)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world, timeout=timeout)
    CASES[case](rank, world, shape)
    if case != "a_late_input_names_its_rank":
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
