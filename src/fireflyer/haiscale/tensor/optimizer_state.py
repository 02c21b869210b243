"""States of optimizers over split parameters, with the shapes of the whole model."""

from typing import Any

import torch
from torch import nn

from fireflyer.haiscale.tensor.layers import ShardedLayer, local_piece, whole_view


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with DTensors for state of split parameters."""
    state = optimizer.state_dict()
    return _mapped(state, module, optimizer, lambda piece, at: whole_view(piece, at.mesh, at.dim))


def load_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Loads a state of whole tensors: of `optimizer_state`, or of the model on one process."""
    optimizer.load_state_dict(
        _mapped(state, module, optimizer, lambda whole, at: local_piece(whole, at.mesh, at.dim))
    )


class _Place:
    def __init__(self, layer: ShardedLayer, dim: int) -> None:
        self.mesh, self.dim = layer.mesh, dim


def _mapped(
    state: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer, convert: Any
) -> dict[str, Any]:
    places = {
        parameter: _Place(layer, dim)
        for layer in module.modules()
        if isinstance(layer, ShardedLayer)
        for name, dim in layer.split_dims.items()
        if (parameter := layer._parameters.get(name)) is not None
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    found = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if (place := places.get(parameter)) is None or number not in found:
            continue
        found[number] = {
            name: convert(value, place)
            if isinstance(value, torch.Tensor) and value.ndim == parameter.ndim
            else value
            for name, value in found[number].items()
        }
    return {**state, "state": found}
