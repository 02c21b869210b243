"""A sharded model goes on over other ranks, from memory: nothing of it changes on the way."""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which optimizers import: once here, not in each forked rank
import torch.distributed as dist
from tests.haiscale.test_fsdp import BLOCKS, LENGTH, WORDS, Model, differences, init
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CollectiveError, ConfigError, ShardsLost
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)
BATCH = 12
BEFORE, AFTER = 3, 3


def batch(step: int, rank: int = 0, world: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)[rank::world]


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class Training:
    """A model and an optimizer of which some time is spent on each of several groups."""

    def __init__(self, crossing: bool, **options: Any) -> None:
        joins = options.get("joins", False)
        self.core = Model(9 if joins else 0).double()
        self.model = FullyShardedDataParallel(
            self.core, optimizer=ADAMW if crossing else None, auto_wrap_policy=BLOCKS, **options
        )
        self.optimizer = self.model.optimizer or ADAMW([*self.model.parameters()])
        self.own = [] if crossing else [self.optimizer]
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def train(self, steps: range, group: dist.ProcessGroup | None = None) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        for step in steps:
            self.core.calls = step
            self.optimizer.zero_grad()
            loss_of(self.model, batch(step, rank, world)).backward()
            self.optimizer.step()
            self.schedule.step()

    def state(self) -> dict[str, Any]:
        """All of it, whole."""
        found = {name: t.numpy() for name, t in self.model.state_dict(full=True).items()}
        names = {id(p): name for name, p in self.core.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{names[id(parameter)]}: {key}"] = whole.numpy()
        found["lr"] = torch.tensor(self.optimizer.param_groups[0]["lr"]).numpy()
        return found

    def parameters(self) -> list[nn.Parameter]:
        return [*self.model.parameters()]


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all((left[k] == right[k]).all() for k in left)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    model = Model().double()
    optimizer = ADAMW([*model.parameters()])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for step in range(BEFORE + AFTER):
        model.calls = step
        optimizer.zero_grad()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        schedule.step()
    return model


def wrong(found: dict[str, Any], reference: nn.Module) -> dict[str, float]:
    return {name: d for name, d in differences(found, reference).items() if not d <= 1e-10}


MODES = [
    pytest.param(way, reshard, id=f"{'crossing' if way else 'classic'} {reshard}")
    for way, reshard in ((True, True), (False, False), (True, False), (False, True))
]


@pytest.mark.parametrize(("crossing", "zero3"), MODES)
def test_through_several_layouts(
    start_gang: Callable[..., Any],
    store_path: str,
    reference: nn.Module,
    crossing: bool,
    zero3: bool,
) -> None:
    """4 ranks with replicas -> 2 of them -> 4, two of which come new -> 3."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        group = {n: dist.new_group([*range(n)], backend="hfreduce") for n in (2, 3)}
        training = Training(crossing, mesh=hybrid_mesh(), reshard_after_forward=zero3)
        kept = [training.model, training.optimizer, *training.parameters()]
        training.train(range(1))
        before = training.state()
        if rank < 2:
            moved = training.model.reshard(group[2], steps=1, optimizers=training.own)
            assert moved.received == 0, "every rank had its part"
            assert training.model._layout.mesh.shape == (2,)
            assert same(training.state(), before)
            training.train(range(1, 2), group[2])
            before = training.state()
        else:
            training = Training(crossing, joins=True, reshard_after_forward=zero3)
            with pytest.raises(ConfigError, match="joins"):
                training.model(batch(0)[:, :-1])
            kept = [training.model, training.optimizer, *training.parameters()]
            assert all(p.to_local().numel() == 0 for p in training.parameters())  # type: ignore[operator]
        moved = training.model.reshard(steps=2, optimizers=training.own)
        assert moved.steps == 2
        assert training.model._layout.mesh.shape == (2, 2), "as wished at first"
        after = training.state()
        assert rank >= 2 or same(after, before)
        training.schedule.last_epoch = 2
        training.train(range(2, 3))
        before = training.state()
        if rank == 3:
            return None
        training.model.reshard(group[3], steps=3, optimizers=training.own)
        assert same(training.state(), before)
        training.train(range(3, 6), group[3])
        now = [training.model, training.optimizer, *training.parameters()]
        assert all(a is b for a, b in zip(kept, now, strict=True))
        assert len(training.optimizer.state) > 10
        return training.state()

    results = start_gang(body, 4, 2).results()
    for found in results[:3]:
        assert wrong(found, reference) == {}
        assert same(found, results[0])
