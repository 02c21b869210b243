"""Gradients of a whole pipeline: tied parameters, averages over replicas, clipping."""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.pipeline.blocks import BlockStage
from fireflyer.haiscale.pipeline.stages import Stage
from fireflyer.haiscale.pipeline.transfers import Mail
from fireflyer.haiscale.tensor.clipping import scale, square_norm
from fireflyer.haiscale.validation import check_max_norm

Stages = Mapping[int, BlockStage | Stage]


def _tied_here(stages: Stages, size: int) -> Iterator[tuple[int, list[int], nn.Parameter]]:
    """Yields the number of each tied set, its ranks, and this rank's parameter."""
    sets = next(iter(stages.values())).tied
    for number, holders in enumerate(sets):
        ranks = list(dict.fromkeys(stage % size for stage, _ in holders))
        for stage, name in holders:
            if stage in stages:
                yield number, ranks, stages[stage].get_parameter(name)
                break


def sum_tied(stages: Stages, size: int, mail: Mail, first_tag: int) -> None:
    """Gives every copy of a tied parameter the sum of all copies' gradients.

    Args:
        stages: this rank's stages by number.
        size: number of ranks of the pipeline.
        mail: transfers between the ranks.
        first_tag: this tag and all greater tags are not used by messages between stages.
    """
    for number, ranks, parameter in _tied_here(stages, size):
        if len(ranks) < 2 or not parameter.requires_grad:
            continue
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        mail.exchange(grad, ranks, first_tag + number)
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


def clip(stages: Stages, group: ProcessGroup, max_norm: float) -> torch.Tensor:
    """Scales the gradients of all stages to a common norm of at most `max_norm`; returns the norm.

    Args:
        stages: this rank's stages by number.
        group: ranks of the pipeline.
        max_norm: upper limit of the norm.
    """
    check_max_norm(max_norm)
    rank = group.rank()
    copies = {id(p) for _, ranks, p in _tied_here(stages, group.size()) if rank != ranks[0]}
    square = square_norm(stages.values(), copies)
    dist.all_reduce(square, group=group)
    norm = square.sqrt()
    scale(stages.values(), norm, max_norm)
    return norm
