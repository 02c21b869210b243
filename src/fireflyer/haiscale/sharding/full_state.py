"""Conversion between shards and whole tensors: states, full parameters, the gradients' norm."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, distribute_tensor

from fireflyer.haiscale.mesh import DataLayout
from fireflyer.haiscale.sharding.gradients import Unit


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with each DTensor gathered. Collective."""
    return {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }


def cut(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state; whole tensors that are sharded in `like` are cut to this rank's part."""
    return {key: _cut(value, like.get(key)) for key, value in state.items()}


def _cut(value: Any, like: Any) -> Any:
    if not isinstance(like, DTensor) or isinstance(value, DTensor) or value.shape != like.shape:
        return value  # load_state_dict reports a wrong shape
    part = distribute_tensor(
        value.detach().to(like.dtype), like.device_mesh, like.placements, src_data_rank=None
    )
    return part


@contextlib.contextmanager
def summoned(units: Sequence[Unit], writeback: bool) -> Iterator[None]:
    """Makes the modules show whole parameters, in the parameters' own types. Collective.

    With `writeback`, each rank keeps its part of the values that it wrote.
    """
    shown: list[tuple[Any, nn.Parameter]] = []
    try:
        for unit in units:
            unit.group._to_sharded()
            for one in unit.group.fsdp_params:
                sharded = one.sharded_param
                full = nn.Parameter(sharded.detach().full_tensor(), sharded.requires_grad)
                one._setattr_on_modules(full)
                shown.append((one, full))
        yield
    finally:
        with torch.no_grad():
            for one, full in shown:
                if writeback:
                    part = _cut(full.detach(), one.sharded_param)
                    one.sharded_param.copy_(part)
                one._setattr_on_modules(one.sharded_param)


@torch.no_grad()
def clip(
    parameters: Sequence[nn.Parameter], layout: DataLayout, limit: float, norm_type: float
) -> torch.Tensor:
    """Scales the sharded gradients so that their common norm is at most `limit`. Collective.

    Returns:
        The norm before scaling, a 0-dimensional float64 tensor, equal on all ranks.

    Raises:
        ValueError: `limit` is negative, or `norm_type` is not positive.
    """
    if not limit >= 0 or not norm_type > 0:
        raise ValueError(
            f"clip_grad_norm_(max_norm={limit}, norm_type={norm_type}): expected max_norm >= 0 and "
            "norm_type > 0 (or inf)"
        )
    grads = [cast(DTensor, p.grad).to_local() for p in parameters if p.grad is not None]
    parts = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in grads if g.numel()
    ]
    own = torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64)
    if math.isinf(norm_type):
        norm = own.max()
        dist.all_reduce(norm, ReduceOp.MAX, layout.gather)
    else:
        norm = own.pow(norm_type).sum()
        dist.all_reduce(norm, ReduceOp.SUM, layout.gather)
        norm = norm.pow(1.0 / norm_type)
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.dtype))
    return norm
