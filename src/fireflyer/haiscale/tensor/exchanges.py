"""Differentiable exchanges inside a tensor-parallel group; each has a forward and a backward step.

A value is *whole* (equal on all ranks), *partial* (each rank has one term of a sum over the ranks),
or *split* along one dimension, in rank order. Every function is collective, and so is its backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fireflyer.errors import ConfigError

_Step = Callable[[torch.Tensor], torch.Tensor]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: _Step, back: _Step) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grads[0]), None, None


def _exchange(x: torch.Tensor, there: _Step, back: _Step) -> torch.Tensor:
    result: torch.Tensor = _Exchange.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _summed(group: ProcessGroup) -> _Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    return step


def _joined(group: ProcessGroup, dim: int) -> _Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        pieces = x.new_empty(group.size(), *x.shape)
        dist.all_gather_single(pieces, x.contiguous(), group=group)
        return torch.cat(list(pieces), dim)

    return step


def _own(group: ProcessGroup, dim: int) -> _Step:
    return lambda x: piece_of(x, dim, group.rank(), group.size()).contiguous()


def _summed_own(group: ProcessGroup, dim: int) -> _Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        pieces = [piece_of(x, dim, rank, group.size()) for rank in range(group.size())]
        mine = torch.empty_like(pieces[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter_single(mine, torch.stack(pieces), group=group)
        return mine

    return step


def piece_of(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Returns a view of the `rank`-th of `size` equal pieces along `dim`.

    Raises:
        ConfigError: `size` does not divide the dimension.
    """
    if x.shape[dim] % size:
        raise ConfigError(
            f"cannot split dimension {dim} of {tuple(x.shape)} among {size} ranks: "
            f"{size} does not divide {x.shape[dim]}"
        )
    count = x.shape[dim] // size
    return x.narrow(dim, rank * count, count)


def enter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Passes a whole value to a computation that differs by rank; sums the partial gradients."""
    return _exchange(x, _same, _summed(group))


def reduce(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Sums a partial value to a whole value."""
    return _exchange(x, _summed(group), _same)


def gather(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Joins a split value for a computation that is equal on all ranks."""
    return _exchange(x, _joined(group, dim), _own(group, dim))


def split(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Takes this rank's piece of a whole value."""
    return _exchange(x, _own(group, dim), _joined(group, dim))


def enter_from(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Joins a split value for a computation that differs by rank; sums and splits the gradients."""
    return _exchange(x, _joined(group, dim), _summed_own(group, dim))


def reduce_to(x: torch.Tensor, dim: int, group: ProcessGroup) -> torch.Tensor:
    """Sums a partial value to a split value."""
    return _exchange(x, _summed_own(group, dim), _joined(group, dim))
