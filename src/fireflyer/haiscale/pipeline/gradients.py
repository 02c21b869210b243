"""Gradients of a whole pipeline: tied parameters, averages over replicas, clipping."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.tensor.clipping import scale, square_norm
from fireflyer.haiscale.validation import check_max_norm

if TYPE_CHECKING:
    from fireflyer.haiscale.pipeline.executor import Pipeline


def _tied_here(pipe: "Pipeline") -> Iterator[tuple[int, list[int], nn.Parameter]]:
    """Yields the number of each tied set, its ranks, and this rank's parameter."""
    sets = next(iter(pipe.stages.values())).tied
    for number, holders in enumerate(sets):
        ranks = list(dict.fromkeys(stage % pipe.size for stage, _ in holders))
        for stage, name in holders:
            if stage in pipe.stages:
                yield number, ranks, pipe.stages[stage].get_parameter(name)
                break


def sum_tied(pipe: "Pipeline") -> None:
    """Gives every copy of a tied parameter the sum of all copies' gradients."""
    base = 2 * pipe.schedule.stages * (pipe.chunks + 1)  # beyond the tags of activations
    for number, ranks, parameter in _tied_here(pipe):
        if len(ranks) < 2 or not parameter.requires_grad:
            continue
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        pipe.mail.exchange(grad, ranks, base + number)
        parameter.grad = grad


def reduce_over_replicas(parts: Sequence[DistributedDataParallel]) -> None:
    """Averages the local gradients of wrapped stages over their replicas."""
    for part in parts:
        local = [p for p in part.module.parameters() if p.requires_grad and p.grad is not None]
        grads = [p.grad for p in local]
        for parameter in local:
            parameter.grad = None
        if local:
            torch.autograd.backward(local, grads)


def clip(pipe: "Pipeline", max_norm: float) -> torch.Tensor:
    """Scales the gradients of all stages to a common norm of at most `max_norm`; returns the norm."""
    check_max_norm(max_norm)
    copies = {id(p) for _, ranks, p in _tied_here(pipe) if pipe.rank != ranks[0]}
    square = square_norm(pipe.stages.values(), copies)
    dist.all_reduce(square, group=pipe._group)
    norm = square.sqrt()
    scale(pipe.stages.values(), norm, max_norm)
    return norm
