"""What each rank of a sharded model keeps: bytes of live tensors, counted."""

import gc
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from fireflyer.bench import goals
from fireflyer.bench import train_models as models
from fireflyer.bench.report import Row
from fireflyer.bench.train_place import Area, Place
from fireflyer.haiscale.fsdp import FullyShardedDataParallel

STEPS = 2


def live() -> dict[int, int]:
    """Bytes of the memory behind every tensor of this process, by address, each once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor):
            continue
        part = getattr(thing, "_local_tensor", thing)
        if part.layout is torch.strided and part.device.type == "cpu" and not _is_fake(part):
            memory = part.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return found


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, torch.nn.Parameter)


def kept(place: Place, sizes: models.Sizes) -> tuple[int, int]:
    """Collective.

    Returns:
        Of the rank that keeps most: bytes of what wrapping and two steps have left behind, with gradients
        still there; and the least possible, a world's share of parameters, gradients and two moments.
    """
    before = live()
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
    most = torch.tensor(sum(size for at, size in live().items() if before.get(at) != size))
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=place.session.gloo)
    return int(most), 4 * 4 * elements // place.session.ranks


def memory_rows(case: str, area: Area, sizes: models.Sizes, goals_of: str) -> list[Row]:
    ours, least = area.train(lambda place: kept(place, sizes))
    goal = 1 / goals.SHARDED_MEMORY if goals_of else None
    about = f"{case}, ZeRO-3, parameters + gradients + optimizer, a rank"
    return [Row.of_times(about, "B", [ours], "ideal", [least], [least], goal)]
