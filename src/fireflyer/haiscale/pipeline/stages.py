"""Division of a sequential module into stages, whose state keeps the module's own names."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.errors import ConfigError
from fireflyer.haiscale.validation import check_count, given

BALANCES = ("parameters", "time")
TIMED_CALLS = 3


class Stage(nn.Sequential):
    """Consecutive children of a sequential module, under their names there.

    Attributes:
        index: number of this stage.
        sizes: number of children of each stage.
        tied: sets of (stage, parameter name) that share one parameter across stages.
    """

    index: int
    sizes: tuple[int, ...]
    tied: tuple[tuple[tuple[int, str], ...], ...]


def partition(
    module: nn.Sequential,
    rank: int,
    size: int,
    *,
    balance: Sequence[int] | str = "parameters",
    num_model_chunks: int = 1,
    sample: torch.Tensor | None = None,
) -> Any:
    """Returns the stage of a rank, or its list of stages with `num_model_chunks` above 1.

    Stage s of size * num_model_chunks lies on rank s % size. The parts of other ranks are released
    with `module`.

    Args:
        module: sequential module, the same on all ranks.
        rank, size: rank of this process in its pipeline, and number of ranks in the pipeline.
        balance: number of children of each stage; or "parameters" or "time": make the largest
            stage as small as possible by this measure. "time" runs `sample` through the module on
            global rank 0 and is collective if torch's default group exists.
        num_model_chunks: number of stages a rank, for `Interleaved1F1B`.
        sample: input of `module` for "time".

    Raises:
        ConfigError: the module is not sequential, or an argument is invalid.
    """
    if not isinstance(module, nn.Sequential):
        raise ConfigError(
            f"invalid module {given(type(module).__name__)} for partition: expected a torch.nn.Sequential"
        )
    check_count("size", size, 1)
    check_count("num_model_chunks", num_model_chunks, 1)
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ConfigError(f"invalid rank {given(rank)}: expected 0 to {size - 1}")
    children = [*module.named_children()]
    stages = size * num_model_chunks
    if len(children) < stages:
        raise ConfigError(
            f"invalid module for partition: it has {len(children)} children, fewer than {stages} stages"
        )
    sizes = _sizes(children, stages, balance, sample)
    firsts = [sum(sizes[:stage]) for stage in range(stages)]
    parts = [
        OrderedDict(children[first : first + count])
        for first, count in zip(firsts, sizes, strict=True)
    ]
    tied = _tied(parts)
    mine = []
    for index in range(rank, stages, size):
        stage = Stage(parts[index])
        stage.index, stage.sizes, stage.tied = index, sizes, tied
        stage.train(module.training)
        mine.append(stage)
    return mine if num_model_chunks > 1 else mine[0]


def _sizes(
    children: Sequence[tuple[str, nn.Module]],
    stages: int,
    balance: Sequence[int] | str,
    sample: torch.Tensor | None,
) -> tuple[int, ...]:
    if isinstance(balance, str):
        if balance not in BALANCES:
            raise ConfigError(
                f"invalid balance {balance!r}: expected a list of numbers, 'parameters' or 'time'"
            )
        if balance == "time":
            costs = _agreed(_times(children, sample))
        else:
            costs = [float(sum(p.numel() for p in child.parameters())) for _, child in children]
        return even(costs, stages)
    sizes = tuple(balance)
    if (
        len(sizes) != stages
        or any(not isinstance(n, int) or n < 1 for n in sizes)
        or sum(sizes) != len(children)
    ):
        raise ConfigError(
            f"invalid balance {list(sizes)}: expected {stages} numbers from 1 on, one a stage, with "
            f"the sum {len(children)}, the module's number of children"
        )
    return sizes


def even(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Returns sizes of consecutive non-empty parts whose largest sum of costs is the smallest."""
    count = len(costs)
    until = [0.0]
    for cost in costs:
        until.append(until[-1] + cost)
    best = [[(until[end], 0) for end in range(count + 1)]]
    for part in range(1, parts):
        row = [(float("inf"), 0)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[-1][cut][0], until[end] - until[cut]), cut) for cut in range(part, end)
            )
        best.append(row)
    sizes, end = [], count
    for row in reversed(best):
        cut = row[end][1]
        sizes.append(end - cut)
        end = cut
    return tuple(reversed(sizes))


def _times(children: Sequence[tuple[str, nn.Module]], sample: torch.Tensor | None) -> list[float]:
    if sample is None:
        raise ConfigError("balance='time' needs sample=, an input of the module")
    if dist.is_initialized() and dist.get_rank() != 0:
        return []
    found = []
    value: Any = sample
    with torch.no_grad():
        for _, child in children:
            output, walls = child(value), []
            for _ in range(TIMED_CALLS):
                begin = time.perf_counter()
                child(value)
                walls.append(time.perf_counter() - begin)
            found.append(min(walls))
            value = output
    return found


def _agreed(costs: list[float]) -> list[float]:
    if not dist.is_initialized():
        return costs
    told = [costs]
    dist.broadcast_object_list(told, 0)
    return told[0]


def _tied(parts: Sequence[OrderedDict[str, nn.Module]]) -> tuple[tuple[tuple[int, str], ...], ...]:
    holders: dict[int, dict[int, str]] = {}
    for stage, part in enumerate(parts):
        for child_name, child in part.items():
            for name, parameter in child.named_parameters():
                holders.setdefault(id(parameter), {}).setdefault(stage, f"{child_name}.{name}")
    return tuple(tuple(found.items()) for found in holders.values() if len(found) > 1)
