"""Memory that each rank of a sharded model keeps: the bytes of live tensors."""

import gc
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.hosts import Area, Place
from fireflyer.bench.harness.report import Row
from fireflyer.bench.train import models
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

STEPS = 2


class Kept(NamedTuple):
    """Bytes after two steps, with gradients present, on the rank that keeps most.

    Attributes:
        state: memory of parameters, gradients and the optimizer's states.
        everything: memory of all tensors that did not exist before the training.
        ideal: bytes of all parameters, gradients and two moments, divided by the number of ranks.
    """

    state: int
    everything: int
    ideal: int


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the size in bytes of each storage of the tensors, by address.

    A sharded tensor counts with its local part.
    """
    found: dict[int, int] = {}
    for tensor in tensors:
        part = getattr(tensor, "_local_tensor", tensor)
        plain = type(part) in (Tensor, torch.nn.Parameter) and part.layout is torch.strided
        if plain and part.device.type == "cpu":
            memory = part.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return found


def _live() -> dict[int, int]:
    """Returns the storages of all tensors of this process."""
    gc.collect()
    return _storages(thing for thing in gc.get_objects() if issubclass(type(thing), Tensor))


def kept(place: Place, sizes: models.Sizes) -> Kept:
    """Trains a sharded GPT and returns the memory that it keeps. Collective."""
    before = _live()
    work = models.gpt(sizes, place.rank)
    elements = sum(parameter.numel() for parameter in work.module.parameters())
    units = set(work.units)
    model = FullyShardedDataParallel(
        work.module,
        auto_wrap_policy=partial(lambda_auto_wrap_policy, lambda_fn=units.__contains__),
    )
    optimizer = work.optimizer(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        work.loss(model).backward()
        optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = sum(_storages([*model.parameters(), *gradients, *states]).values())
    everything = sum(size for at, size in _live().items() if before.get(at) != size)
    most = torch.tensor([state, everything])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=place.session.gloo)
    return Kept(int(most[0]), int(most[1]), 4 * 4 * elements // place.session.ranks)


def memory_rows(case: str, area: Area, sizes: models.Sizes, goals_of: str) -> list[Row]:
    found = area.run(lambda place: kept(place, sizes))
    goal = 1 / goals.SHARDED_MEMORY if goals_of else None
    return [
        Row.of_times(
            f"{case}, ZeRO-3, {what}, a rank", "B", [size], "ideal", [found.ideal], (), asked
        )
        for what, size, asked in (
            ("parameters + gradients + optimizer", found.state, goal),
            ("all that stays", found.everything, None),
        )
    ]
