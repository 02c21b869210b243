"""Cross-entropy of logits whose vocabulary is split over ranks: no rank holds all logits."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from fireflyer.errors import ConfigError


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    where: DeviceMesh | ProcessGroup,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Returns the cross-entropy of split logits; equal on all ranks. Collective.

    The ranks exchange three numbers per target instead of a row of logits.

    Args:
        logits: (..., vocabulary / ranks), split in rank order.
        targets: (...) of int64, equal on all ranks.
        where: the tensor-parallel mesh or group.
        ignore_index: target that does not count.
        reduction: "mean" over the targets that count, "sum", or "none".

    Raises:
        ConfigError: shapes do not fit, or a target lies outside the vocabulary.
    """
    group = where.get_group() if isinstance(where, DeviceMesh) else where
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"invalid reduction '{reduction}': expected mean, sum or none")
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)} do not fit targets of {tuple(targets.shape)}"
        )
    counted = targets != ignore_index
    vocabulary = logits.shape[-1] * group.size()
    if (counted & ((targets < 0) | (targets >= vocabulary))).any():
        raise ConfigError(f"a target lies outside the vocabulary: expected 0 to {vocabulary - 1}")
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, counted, group
    )
    if reduction == "none":
        return losses
    return losses.sum() / (counted.sum() if reduction == "mean" else 1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor,
        group: ProcessGroup,
    ) -> torch.Tensor:
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        greatest = wide.amax(-1)
        dist.all_reduce(greatest, ReduceOp.MAX, group=group)
        shifted = wide - greatest.unsqueeze(-1)
        local = targets - group.rank() * logits.shape[-1]
        mine = counted & (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~mine, 0).unsqueeze(-1)
        found = shifted.gather(-1, local).squeeze(-1).masked_fill(~mine, 0)
        powers = shifted.exp_()
        sums = torch.stack((powers.sum(-1), found))
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), local, mine, counted)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).masked_fill(~counted, 0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        softmax, local, mine, counted = ctx.saved_tensors
        gradient = softmax.scatter_add(-1, local, -mine.to(softmax.dtype).unsqueeze(-1))
        gradient = gradient * grads[0].masked_fill(~counted, 0).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None
