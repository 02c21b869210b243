"""`should_suspend=`: one rank is asked to leave, and all know it behind the same step."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.haiscale.elastic.elastic_job import Job, die, init
from tests.haiscale.elastic.test_elastic_shards import Sharded
from tests.waiting import until
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError, CollectiveError, ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.elastic.training import Elastic
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh

Start = Callable[..., Any]
Asked = Callable[[], bool]
LAST = 8

SGD = partial(torch.optim.SGD, lr=0.1)
MODES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "ddp": (DistributedDataParallel, {}, 0),
    "ddp, static graph": (DistributedDataParallel, {"static_graph": True}, 0),
    "ddp, deferred": (DistributedDataParallel, {"optimizer": SGD}, 1),
    "fsdp": (FullyShardedDataParallel, {}, 0),
    "fsdp, hybrid": (FullyShardedDataParallel, {"mesh": hybrid_mesh}, 0),
    "fsdp, deferred": (FullyShardedDataParallel, {"optimizer": SGD}, 1),
}
"""Class, arguments, and how many backwards later than it is said it is known."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def wrap(mode: str, should_suspend: Asked) -> tuple[Any, torch.optim.Optimizer]:
    kind, options, _ = MODES[mode]
    core = build()
    how: dict[str, Any] = {**options, "should_suspend": should_suspend}
    if kind is FullyShardedDataParallel:
        model = FullyShardedDataParallel(
            core, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **how
        )
        return model, model.optimizer or SGD(model.parameters())
    optimizer = SGD(core.parameters())
    if "optimizer" in how:
        how["optimizer"] = optimizer
    return DistributedDataParallel(core, bucket_bytes=64, **how), optimizer


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Behind each."""
    for step in range(1, LAST + 1):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).sum().backward()
        optimizer.step()
        yield step


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", MODES)
def test_all_leave_behind_the_same_step_and_have_saved(
    start_gang: Start, store_path: str, tmp_path: Path, mode: str
) -> None:
    """Rank 1 is asked with its third backward."""

    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        asked = 0

        def should_suspend() -> bool:
            nonlocal asked
            asked += 1
            return rank == 1 and asked == 3

        model, optimizer = wrap(mode, should_suspend)
        ckpt = CheckpointManager(tmp_path / "c")
        assert not model.suspending
        left, known = 0, []
        for step in steps(model, optimizer):
            known.append(model.suspending)
            if ckpt.should_save(step, leave=model.suspending) and not left:
                ckpt.save(step, {"step": step}).wait()
                left = step
        assert ckpt.suspending
        return left, known, asked, ckpt.steps()

    first = 3 + MODES[mode][2]
    known = [step >= first for step in range(1, LAST + 1)]
    results = start_gang(body, 2, nodes=2).results()
    assert results == [(first, known, 3, [first])] * 2, "nobody is asked once it was said"


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_cannot_tell_fails_all_in_the_same_backward(
    start_gang: Start, store_path: str, mode: str
) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        asked = 0

        def should_suspend() -> bool:
            nonlocal asked
            asked += 1
            if rank == 0 and asked == 2:
                raise RuntimeError("no page")
            return False

        model, optimizer = wrap(mode, should_suspend)
        kind, match = (
            (RuntimeError, "no page") if rank == 0 else (CollectiveError, "failed on another rank")
        )
        ahead, done = steps(model, optimizer), 0
        for _ in range(1 + MODES[mode][2]):
            done = next(ahead)
        with pytest.raises(kind, match=match):
            next(ahead)
        assert not model.suspending
        return done

    assert start_gang(body, 2).results() == [1 + MODES[mode][2]] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "world", "nodes"), [(Job, 3, 1), (Sharded, 4, 2)])
def test_elastic_ranks_that_have_lost_one_ask_again_and_leave_together(
    start_gang: Start, store_path: str, tmp_path: Path, kind: type[Job], world: int, nodes: int
) -> None:
    """Rank 2 dies behind the step in which rank 1 is asked; the step counts, and the next one tells again."""

    def body(rank: int, world: int) -> Any:
        group = init(store_path, rank, world)
        job = kind(rank, rank, world)
        options = {"mesh": hybrid_mesh} if kind is Sharded else {}
        elastic: Elastic
        elastic = job.wrap(should_suspend=lambda: rank == 1 and elastic.steps >= 3, **options)
        ckpt = CheckpointManager(tmp_path / "c", commit_deadline_s=20)
        elastic.fenced.append(ckpt.fence)
        batches, model, told = job.batches(), job.model, []
        leaving = model._sharding.leaving if kind is Sharded else model._leaving
        while elastic.steps < LAST and not model.suspending:
            with elastic.step() as step:
                mine = next(batches)
                step.weight = len(mine)
                job.update(mine)
                if elastic.steps == 4 and world == group.size():
                    told.append(leaving.suspending)
                    if rank == 2:
                        die()
                    until(lambda: group.errored() is not None)
                told.append(model.suspending)
                with contextlib.suppress(CheckpointError):
                    if ckpt.should_save(elastic.steps, leave=model.suspending):
                        ckpt.save(elastic.steps, {"step": elastic.steps})
        ckpt.wait()
        return elastic.steps, elastic.generation, told, ckpt.steps()

    results = start_gang(body, world, nodes).results()
    told = [False, False, False, True, False, True]
    assert results.pop(2) is None
    assert results == [(5, 1, told, [5])] * (world - 1)


def test_wrong_use(start_gang: Start, store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        init(store_path, rank, world)
        for kind in (DistributedDataParallel, FullyShardedDataParallel):
            wrong: Any = True
            with pytest.raises(ConfigError, match=r"should_suspend True \(bool\): expected a f"):
                kind(build(), should_suspend=wrong)
            given = (lambda: False) if rank == 1 else None
            with pytest.raises(ConfigError, match="should_suspend='given'"):
                kind(build(), should_suspend=given)
            assert kind(build()).suspending is False

    start_gang(body, 2).results()
