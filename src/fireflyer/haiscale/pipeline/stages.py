"""Division of a module into stages; a stage's state keeps the module's own names."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.errors import ConfigError
from fireflyer.haiscale.pipeline.blocks import outline
from fireflyer.haiscale.validation import check_count, given

BALANCES = ("parameters", "time")
TIMED_CALLS = 3


class Stage(nn.Sequential):
    """Consecutive children of a sequential module, under their names in that module.

    Attributes:
        index: number of this stage.
        sizes: number of children of each stage.
        tied: sets of (stage, parameter name) that share one parameter across stages.
    """

    index: int
    sizes: tuple[int, ...]
    tied: tuple[tuple[tuple[int, str], ...], ...]


def partition(
    module: nn.Module,
    rank: int,
    size: int,
    *,
    balance: Sequence[int] | str = "parameters",
    num_model_chunks: int = 1,
    blocks: str | None = None,
    sample: torch.Tensor | Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """Returns the stage of a rank, or its list of stages if `num_model_chunks` is above 1.

    Stage s of size * num_model_chunks lies on rank s % size. Parts that belong to other ranks are
    freed together with `module`.

    Args:
        module: sequential module, or with `blocks` any module that calls a list of blocks one by
            one, such as a Hugging Face model. It must be the same on all ranks.
        rank, size: rank of this process in its pipeline, and number of ranks in the pipeline.
        balance: number of children, or of blocks, of each stage; or the measure by which the
            largest stage becomes as small as possible: "parameters" or "time". "time" runs `sample`
            on global rank 0 and is collective if torch's default group exists.
        num_model_chunks: number of stages per rank, for `Interleaved1F1B`.
        blocks: name of the module's ModuleList of blocks, for example "model.layers". Modules
            called before the blocks go to the first stage, modules called after them to the last.
        sample: input of `module` for "time"; with `blocks`, a dict of inputs by name, with the same
            names as the inputs of a step. Default: the module's `dummy_inputs`. With `blocks`, the
            module and then its stages run the sample, as a check.

    Raises:
        ConfigError: the module is not sequential and `blocks` is None, the module's code outside
            its blocks cannot run on each stage, or an argument is invalid.
    """
    check_count("size", size, 1)
    check_count("num_model_chunks", num_model_chunks, 1)
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ConfigError(f"invalid rank {given(rank)}: expected 0 to {size - 1}")
    stages = size * num_model_chunks
    parts = (
        _children(module, stages, balance, sample)
        if blocks is None
        else _blocks(module, blocks, stages, balance, sample)
    )
    tied = _tied(parts)
    mine = parts[rank::size]
    for stage in mine:
        stage.tied = tied
    return mine if num_model_chunks > 1 else mine[0]


def _children(
    module: nn.Module, stages: int, balance: Sequence[int] | str, sample: Any
) -> list[Any]:
    if not isinstance(module, nn.Sequential):
        raise ConfigError(
            f"invalid module {type(module).__name__} for partition: expected a "
            "torch.nn.Sequential, or any module with blocks='NAME' of its list of blocks"
        )
    children = [*module.named_children()]

    def costs(measure: str) -> list[float]:
        if measure == "time":
            return _agreed(lambda: _times(children, sample))
        return [float(sum(p.numel() for p in child.parameters())) for _, child in children]

    if sample is None and balance == "time":
        raise ConfigError("balance='time' needs sample=, an input of the module")
    sizes = _sizes("children", len(children), stages, balance, costs)
    found = []
    for index, count in enumerate(sizes):
        first = sum(sizes[:index])
        stage = Stage(OrderedDict(children[first : first + count]))
        stage.index, stage.sizes = index, sizes
        stage.train(module.training)
        found.append(stage)
    return found


def _blocks(
    module: nn.Module, path: str, stages: int, balance: Sequence[int] | str, sample: Any
) -> list[Any]:
    found = outline(module, path, sample, TIMED_CALLS if balance == "time" else 1)

    def costs(measure: str) -> list[float]:
        return _agreed(found.times) if measure == "time" else found.parameters()

    return [*found.stages(_sizes("blocks", len(found.blocks), stages, balance, costs))]


def _sizes(
    what: str,
    count: int,
    stages: int,
    balance: Sequence[int] | str,
    costs: Callable[[str], list[float]],
) -> tuple[int, ...]:
    """Returns the number of parts of each stage.

    Args:
        what: name of the parts in errors.
        costs: returns the cost of each part by a measure.
    """
    if count < stages:
        raise ConfigError(
            f"invalid module for partition: it has {count} {what}, fewer than {stages} stages"
        )
    if isinstance(balance, str):
        if balance not in BALANCES:
            raise ConfigError(
                f"invalid balance {balance!r}: expected a list of numbers, 'parameters' or 'time'"
            )
        return even(costs(balance), stages)
    sizes = tuple(balance) if isinstance(balance, list | tuple) else ()
    if (
        len(sizes) != stages
        or any(not isinstance(n, int) or n < 1 for n in sizes)
        or sum(sizes) != count
    ):
        raise ConfigError(
            f"invalid balance {given(balance)}: expected {stages} numbers of at least 1, one per stage, "
            f"with the sum {count}, the module's number of {what}"
        )
    return sizes


def even(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Returns the sizes of consecutive non-empty parts whose largest cost is as small as
    possible."""
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


def _times(children: Sequence[tuple[str, nn.Module]], sample: torch.Tensor) -> list[float]:
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


def _agreed(measure: Callable[[], list[float]]) -> list[float]:
    """Returns the measurement of global rank 0. Collective if the default group exists."""
    if not dist.is_initialized():
        return measure()
    told = [measure() if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(told, 0)
    return told[0]


def _tied(parts: Sequence[nn.Module]) -> tuple[tuple[tuple[int, str], ...], ...]:
    holders: dict[int, dict[int, str]] = {}
    for stage, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            holders.setdefault(id(parameter), {}).setdefault(stage, name)
    return tuple(tuple(found.items()) for found in holders.values() if len(found) > 1)
