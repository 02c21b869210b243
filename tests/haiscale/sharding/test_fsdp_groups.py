"""Groups of a sharded model end with it; arguments are alike on all ranks; activations are counted."""

import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.waiting import LIMIT_S
from torch import nn

from fireflyer import finalizer, haiscale
from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh, shard_mesh

SGD = partial(torch.optim.SGD, lr=0.1)


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def drop() -> None:
    """What nobody has any more ends before this returns."""
    gc.collect()
    ended = threading.Event()
    finalizer.later(ended.set)
    assert ended.wait(LIMIT_S)


def held() -> tuple[int, int]:
    """Groups, and open files."""
    return len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/fd"))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "defers"), [("group", True), ("mesh", False), ("hybrid", False)])
def test_groups_end_with_the_model(
    start_gang: Callable[..., Any], store_path: str, kind: str, defers: bool
) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        gc.freeze()  # what was there before the fork: collections are quick
        mesh: Any = {"group": None, "mesh": shard_mesh(), "hybrid": hybrid_mesh}[kind]
        seen = []
        for _ in range(3):
            core = nn.Linear(8, 8)
            model = FullyShardedDataParallel(core, optimizer=SGD if defers else None, mesh=mesh)
            before = held()[0]
            del model
            drop()
            assert held()[0] == before, "the module trains on without the wrapper"
            core(torch.ones(1, 8)).sum().backward()
            assert float(core.weight.grad.full_tensor().sum()) == 64.0  # type: ignore[union-attr]
            del core
            drop()
            dist.barrier()
            seen.append(held())
        assert {groups for groups, _ in seen} == {
            3 if kind == "hybrid" else 1
        }  # torch keeps one mesh
        assert seen[-1][1] <= seen[0][1] + 4, seen  # a wrapping opens 20 files

    start_gang(body, 4 if kind == "hybrid" else 2, 2 if kind == "hybrid" else 1).results()


def test_stop(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        model = FullyShardedDataParallel(nn.Linear(2, 1, bias=False), optimizer=SGD)
        assert model.optimizer is not None
        assert held()[0] == 2
        before = model.state_dict(full=True)["weight"]
        model(torch.ones(1, 2)).sum().backward()
        model.optimizer.step()
        model.stop()
        model.stop()
        assert held()[0] == 1
        assert "step" not in vars(model.optimizer)
        after = model.state_dict(full=True)["weight"]
        assert torch.allclose(after, before - 0.1)
        with pytest.raises(ConfigError, match=r"stop\(\) was called"):
            model(torch.ones(1, 2))
        model.reshard()
        model(torch.ones(1, 2)).sum().backward()
        again = model.module.weight.grad.full_tensor()  # type: ignore[operator, union-attr]
        assert again.tolist() == [[1.0, 1.0]]

    start_gang(body, 2).results()


def test_arguments_that_differ(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        init(store_path, rank, world)
        said = []

        def differ(wrap: Callable[..., object], name: str, one: Any, other: Any) -> None:
            with pytest.raises(ConfigError) as caught:
                wrap(nn.Linear(4, 4), **{name: other if rank else one})
            said.append(str(caught.value))

        differ(FullyShardedDataParallel, "reshard_after_forward", True, False)
        differ(FullyShardedDataParallel, "optimizer", None, SGD)
        differ(FullyShardedDataParallel, "forward_prefetch", 1, 2)
        differ(DistributedDataParallel, "bucket_bytes", 1 << 20, 1 << 21)
        differ(DistributedDataParallel, "levels", None, [0, 1])
        net = nn.Linear(4, 4)
        with pytest.raises(ConfigError) as caught:
            DistributedDataParallel(net, optimizer=SGD(net.parameters()) if rank else None)
        return [*said, str(caught.value)]

    reshard, optimizer, ahead, size, levels, defers = start_gang(body, 2).results()[0]
    assert (
        "rank 0 has reshard_after_forward=True, rank 1 has reshard_after_forward=False" in reshard
    )
    assert "rank 0 has optimizer=None, rank 1 has optimizer='given'" in optimizer
    assert "rank 0 has forward_prefetch=1, rank 1 has forward_prefetch=2" in ahead
    assert "rank 0 has bucket_bytes=1048576, rank 1 has bucket_bytes=2097152" in size
    assert "rank 0 has levels=None, rank 1 has levels='given'" in levels
    assert "rank 0 has optimizer=None, rank 1 has optimizer='SGD'" in defers


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_activations_are_counted_without_gathered_parameters(
    start_gang: Callable[..., Any], store_path: str, defers: bool, reshard: bool
) -> None:
    """Two layers save their inputs; the loss saves what it squares outside of the module."""

    def body(rank: int, world: int) -> int | None:
        init(store_path, rank, world)
        core = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        model = FullyShardedDataParallel(
            core,
            optimizer=SGD if defers else None,
            auto_wrap_policy={nn.Linear},
            reshard_after_forward=reshard,
        )
        optimizer = model.optimizer or SGD(model.parameters())
        with haiscale.record(model, activations=True):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).square().sum().backward()
                optimizer.step()
            model.settle()
        memory = haiscale.report(model).memory
        assert memory.parameters == 2 * (64 * 64 + 64) * 4 / world
        return memory.activations

    for found in start_gang(body, 2).results():
        assert found == 2 * (2 * 64 * 4)  # the input and what tanh gave
