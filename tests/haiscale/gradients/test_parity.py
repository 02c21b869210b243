"""The same training by other means: bits that do not depend on hosts, losses of AdamW in float32."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.sharding.test_fsdp import (
    BATCH,
    BLOCKS,
    OPTIMIZERS,
    STEPS,
    Model,
    data,
    differences,
    init,
    loss_of,
    outcome,
    train,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

PAIRS = [[0, 1], [2, 3]]
CROSSED = [[0, 2], [1, 3]]


def part(rank: int, world: int) -> slice:
    size = BATCH // world
    return slice(rank * size, (rank + 1) * size)


def with_ddp(rank: int, world: int, defers: bool, levels: Any) -> dict[str, Any]:
    core = Model(rank)
    optimizer = OPTIMIZERS["adamw"]([*core.parameters()])
    given = optimizer if defers else None
    model = DistributedDataParallel(core, optimizer=given, bucket_bytes=1024, levels=levels)
    train(model, optimizer, part(rank, world))
    model.settle()
    return {name: tensor.numpy() for name, tensor in core.state_dict().items()}


def with_fsdp(rank: int, world: int, defers: bool, levels: Any) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", levels, mesh_dim_names=("dp_replicate", "dp_shard"))
    return outcome(rank, world, torch.float32, "adamw", defers, mesh=mesh)


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize("trained", [with_ddp, pytest.param(with_fsdp, marks=pytest.mark.full)])
def test_one_hierarchy_gives_the_same_bits_on_one_host_and_on_two(
    start_gang: Callable[..., Any],
    store_path: str,
    trained: Callable[[int, int, bool, Any], dict[str, Any]],
    defers: bool,
) -> None:
    def on(hosts: int, levels: Any) -> dict[str, Any]:
        path = f"{store_path}-{hosts}-{levels is PAIRS}"

        def body(rank: int, world: int) -> dict[str, Any]:
            init(path, rank, world)
            world_group: Any = dist.group.WORLD
            assert len(world_group.hosts) == hosts
            return trained(rank, world, defers, levels)

        first, *others = start_gang(body, 4, hosts).results()
        assert all((other[name] == first[name]).all() for other in others for name in first)
        result: dict[str, Any] = first
        return result

    one, two, crossed = on(1, PAIRS), on(2, PAIRS), on(2, CROSSED)
    assert all((one[name] == two[name]).all() for name in one)
    assert any((one[name] != crossed[name]).any() for name in one), "another tree rounds elsewhere"


def test_a_tree_that_is_none(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> None:
        init(store_path, rank, world)
        with pytest.raises(ConfigError, match="missing ranks: 1"):
            DistributedDataParallel(nn.Linear(2, 2), levels=[[0]])
        with pytest.raises(ConfigError, match="does not encode"):
            DistributedDataParallel(nn.Linear(2, 2), levels=[0, 1], wire="bf16")

    start_gang(body, 2).results()


def losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, share: slice = slice(None)
) -> list[float]:
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, data(step)[share])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


WAYS: dict[str, tuple[dict[str, Any], int, int]] = {
    # options of fsdp, ranks, hosts
    "ddp": ({}, 2, 2),
    "ddp, deferred": ({}, 4, 2),
    "zero-3": ({}, 2, 1),
    "zero-3, deferred": ({}, 4, 2),
    "zero-2, deferred": ({"reshard_after_forward": False}, 2, 2),
    "hybrid, deferred": ({"hybrid": True}, 4, 2),
}


@pytest.mark.sample(1, 4)
@pytest.mark.parametrize("way", WAYS)
def test_losses_of_adamw_in_float32(
    start_gang: Callable[..., Any], store_path: str, way: str
) -> None:
    reference = Model()
    wanted = losses(reference, OPTIMIZERS["adamw"]([*reference.parameters()]))
    given, world, hosts = WAYS[way]
    defers = way.endswith("deferred")

    def body(rank: int, world: int) -> list[float]:
        init(store_path, rank, world)
        core, make = Model(rank), OPTIMIZERS["adamw"]
        share = part(rank, world)
        if way.startswith("ddp"):
            optimizer = make([*core.parameters()])
            return losses(
                DistributedDataParallel(core, optimizer=optimizer if defers else None),
                optimizer,
                share,
            )
        options = dict(given)
        names = ("dp_replicate", "dp_shard")
        hybrid = options.pop("hybrid", False)
        model = FullyShardedDataParallel(
            core,
            optimizer=make if defers else None,
            auto_wrap_policy=BLOCKS,
            mesh=DeviceMesh("cpu", PAIRS, mesh_dim_names=names) if hybrid else None,
            **options,
        )
        return losses(model, model.optimizer or make([*model.parameters()]), share)

    ranks = start_gang(body, world, hosts).results()
    means = [sum(step) / world for step in zip(*ranks, strict=True)]
    assert wanted[0] - wanted[-1] > 0.5, "it learns"
    assert max(abs(a - b) for a, b in zip(means, wanted, strict=True)) <= 1e-4


@pytest.mark.sample(1, 2)
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("reshard", [True, False])
def test_float64_and_both_optimizers(
    start_gang: Callable[..., Any], store_path: str, reshard: bool, kind: str
) -> None:
    reference = Model().double()
    train(reference, OPTIMIZERS[kind]([*reference.parameters()]))

    def body(rank: int, world: int) -> dict[str, Any]:
        init(store_path, rank, world)
        run = partial(outcome, rank, world, torch.float64, kind, True)
        return run(reshard_after_forward=reshard)

    for found in start_gang(body, 2, 2).results():
        assert max(differences(found, reference).values()) <= 1e-10
