"""torch's DDP over hfreduce where it meets the compiler, the profiler, and C++ code that waits by itself."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.hfreduce.backend.test_torch_users import Net, batch, close
from tests.hfreduce.conftest import Play
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def test_ddp_join_that_divides_by_those_who_are_left(play: Play) -> None:
    """DDP keeps the Work that counts them in C++ alone, until the end of the backward."""

    def body(rank: int, world: int) -> None:
        net = nn.Linear(2, 1, bias=False)
        model = DistributedDataParallel(net)
        with model.join(divide_by_initial_world_size=False):
            for step in range(1 + rank):
                net.zero_grad()
                model(torch.full((1, 2), 1.0 + rank)).sum().backward()
                left = [r + 1.0 for r in range(world) if r >= step]
                assert net.weight.grad is not None
                assert net.weight.grad.tolist() == [[sum(left) / len(left)] * 2]

    play(body, "AAB")


def test_a_rank_that_is_lost_in_a_backward_of_ddp_is_an_error(play: Play) -> None:
    def body(rank: int, world: int) -> None:
        group: Any = dist.group.WORLD
        model = DistributedDataParallel(Net())
        x, y = batch(0)
        loss = (model(x) - y).square().mean()
        if rank == 1:
            group.abort()
            return
        with pytest.raises(RuntimeError, match="aborted"):
            loss.backward()

    play(body, "AAB", leave=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.usefixtures("compiler")
def test_a_compiled_ddp_trains_as_one_that_is_not(play: Play, static: bool) -> None:
    """Its forward broadcasts the buffers: torch.compile must not trace into that."""

    def grads(compiled: bool, rank: int) -> list[torch.Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        model: Any = DistributedDataParallel(net, static_graph=static)
        if compiled:
            model = torch.compile(model, backend="eager")
        for step in range(3):
            model(torch.arange(24.0).view(4, 6).sin() * (rank + step)).sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    def body(rank: int, world: int) -> bool:
        return close(grads(True, rank), grads(False, rank))

    assert all(play(body, "AA"))


@pytest.mark.usefixtures("compiler")
def test_compiled_code_may_call_our_functions(play: Play) -> None:
    from fireflyer import hfreduce

    def body(rank: int, world: int) -> None:
        def twice_the_sum(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor + 1
            hfreduce.allreduce(tensor)
            return tensor * 2

        compiled = torch.compile(twice_the_sum, backend="eager")
        for _ in range(2):
            assert compiled(torch.full((3,), float(rank))).tolist() == [6.0] * 3

    play(body, "AA")


def test_the_profiler_sees_an_event_for_each_collective(play: Play) -> None:
    def body(rank: int, world: int) -> dict[str, int]:
        tensor = torch.ones(100)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(tensor)
            dist.all_reduce(tensor, async_op=True).wait()
            dist.broadcast(tensor, 0)
            dist.all_gather([torch.empty(100) for _ in range(world)], tensor)
            dist.barrier()
        events = [e for e in profile.events() or [] if e.name.startswith("hfreduce:")]
        assert all(event.is_async for event in events)
        names = [event.name for event in events]
        return {name: names.count(name) for name in names}

    wanted = {"all_reduce": 2, "broadcast": 1, "all_gather": 1, "barrier": 1}
    for found in play(body, "AA"):
        assert found == {f"hfreduce:{name}": count for name, count in wanted.items()}
