"""Sharded training over a real network of hosts: the bytes that each way of sharding needs, and no more."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer.errors import LabError
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh
from fireflyer.lab.hosts import Lab

STEPS = 3
WIDTH = 384


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def build() -> nn.Module:
    """Layers of their own, and an outermost unit of the first and the last."""
    torch.manual_seed(0)
    inner = [Layer() for _ in range(4)]
    return nn.Sequential(nn.Linear(300, WIDTH), *inner, nn.Linear(WIDTH, 100))


@pytest.fixture
def lab() -> Iterator[Lab]:
    try:
        with Lab(hosts=2) as lab:
            yield lab
    except LabError as error:
        pytest.skip(f"needs network namespaces: {error}")


BF16 = torch.bfloat16
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "zero-2": ({"reshard_after_forward": False}, 1.0),
    "zero-3": ({}, 1.0),
    "hybrid": ({"hybrid": True}, 1.0),
    "zero-3, bf16 both ways": ({"gather_dtype": BF16, "wire": "bf16"}, 0.5),
    "zero-3, bf16 compute": ({"mixed_precision": MixedPrecisionPolicy(BF16)}, 0.5),
}


def bound(mode: str) -> float:
    """Bytes that leave a host in a step."""
    module: Any = build()
    total: float = sum(p.numel() for p in module.parameters()) * 4.0
    outermost: float = sum(p.numel() for end in (0, -1) for p in module[end].parameters()) * 4.0
    if mode == "hybrid":
        return total  # an allreduce: 2 (H - 1)/H
    travels = 2 * total if mode == "zero-2" else 3 * total - outermost
    return travels / 2 * MODES[mode][1]  # (n - 1)/n


@pytest.mark.sample(2)
@pytest.mark.netns
@pytest.mark.parametrize(
    ("mode", "defers"), [("zero-3", False), *((mode, mode != "zero-2") for mode in MODES)]
)
def test_bytes_of_a_step(
    start_gang: Callable[..., Any], store_path: str, lab: Lab, mode: str, defers: bool
) -> None:
    def body(rank: int, world: int) -> int:
        host = lab.hosts[rank * 2 // world]
        host.enter()
        os.environ["FIREFLYER_IFNAME"] = host.interface
        os.environ["FIREFLYER_NODE"] = ""  # the namespace alone tells the hosts apart
        store = dist.FileStore(store_path, world)
        dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)
        options = dict(MODES[mode][0])
        mesh = hybrid_mesh() if options.pop("hybrid", False) else None
        make = partial(torch.optim.SGD, lr=0.1)
        model = FullyShardedDataParallel(
            build(),
            optimizer=make if defers else None,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            mesh=mesh,
            **options,
        )
        optimizer = model.optimizer or make([*model.parameters()])

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()

        def sent() -> int:
            model.settle()
            dist.barrier()
            return host.tx_bytes

        step()
        before = sent()
        for _ in range(STEPS):
            step()
        return sent() - before

    for found in start_gang(body, 4 if mode == "hybrid" else 2).results():
        least = bound(mode) * STEPS
        assert least <= found <= least * 1.02, found / least
