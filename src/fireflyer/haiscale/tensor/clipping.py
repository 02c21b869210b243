"""Norm of gradients of modules with split layers, and clipping by that norm."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.haiscale.tensor.layers import ShardedLayer
from fireflyer.haiscale.validation import check_max_norm


def clip_grad_norm_(module: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales gradients as `torch.nn.utils.clip_grad_norm_` scales those of the whole model.

    Collective over the ranks that share layers.

    Returns:
        The norm before scaling, float64.

    Raises:
        ConfigError: `max_norm` is not a number of at least 0.
    """
    check_max_norm(max_norm)
    norm = square_norm([module]).sqrt()
    scale([module], norm, max_norm)
    return norm


def square_norm(modules: Iterable[nn.Module], skipped: Collection[int] = ()) -> torch.Tensor:
    """Returns the sum of squares of all gradients; a split parameter counts as a whole.

    Collective over the ranks that share layers.

    Args:
        skipped: ids of parameters that do not count.
    """
    split: dict[int, tuple[ShardedLayer, str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for module in modules:
        parameters.update({id(p): p for p in module.parameters()})
        for layer in module.modules():
            if isinstance(layer, ShardedLayer):
                owned = ((name, layer._parameters.get(name)) for name in layer.split_dims)
                split.update({id(p): (layer, name) for name, p in owned if p is not None})
    whole = torch.zeros((), dtype=torch.float64)
    shares: dict[dist.ProcessGroup, torch.Tensor] = {
        layer.group: torch.zeros((), dtype=torch.float64) for layer, _ in split.values()
    }
    for key, parameter in parameters.items():
        if parameter.grad is None or key in skipped:
            continue
        gradient = parameter.grad.detach()
        if key in split:
            layer, name = split[key]
            shares[layer.group] += layer.square_of(name, gradient)
        else:
            whole += gradient.double().square().sum()
    for group, share in shares.items():
        dist.all_reduce(share, group=group)
        whole += share
    return whole


def scale(modules: Iterable[nn.Module], norm: torch.Tensor, max_norm: float) -> None:
    """Scales gradients whose norm is `norm` to a norm of at most `max_norm`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    distinct = {id(p): p for module in modules for p in module.parameters()}
    for parameter in distinct.values():
        if parameter.grad is not None:
            parameter.grad.detach().mul_(factor.to(parameter.grad.dtype))
