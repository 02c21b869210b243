"""A trace of torch's profiler names the bucket or unit of each collective and of each wait."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests.haiscale.reporting.test_report import begin
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.fsdp import FullyShardedDataParallel
from fireflyer.haiscale.reporting.spans import span

SGD = partial(torch.optim.SGD, lr=0.1)


def traced(model: nn.Module, optimizer: torch.optim.Optimizer) -> Counter[str]:
    """The spans of one step after a first one, and until all of its gradients have arrived."""

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        model.settle()  # type: ignore[operator]

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return Counter(e.name for e in profile.events() or [] if e.name.startswith("haiscale:"))


def test_a_step_of_replicas_names_its_buckets(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Counter[str]:
        begin(store_path, rank, world)
        layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
        optimizer = SGD(layers.parameters())
        model = DistributedDataParallel(layers, optimizer=optimizer, bucket_bytes=1)
        return traced(model, optimizer)

    kinds = ("all_reduce", "wait")
    wanted = Counter(f"haiscale:{kind} bucket {number}" for kind in kinds for number in range(3))
    assert start_gang(body, 2).results() == [wanted, wanted]


def test_a_step_of_shards_names_its_units(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Counter[str]:
        begin(store_path, rank, world)
        layers = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 2))
        model = FullyShardedDataParallel(
            layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), optimizer=SGD
        )
        assert model.optimizer is not None
        return traced(model, model.optimizer)

    for found in start_gang(body, 2).results():
        for unit in ("0.0", "1"):
            assert found[f"haiscale:reduce_scatter unit {unit}"] == 1
            assert found[f"haiscale:all_gather unit {unit}"] == 2
            assert found[f"haiscale:wait unit {unit}"] >= 3  # torch waits again for gathered units


def test_without_a_profiler_there_is_no_span() -> None:
    assert span("wait", "bucket", 1) is span("wait", "unit", "head")
