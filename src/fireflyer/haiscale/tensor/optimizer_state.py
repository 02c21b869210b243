"""States of optimizers over split parameters, with the shapes of the whole model."""

from typing import Any

import torch
from torch import nn

from fireflyer.haiscale.tensor.layers import ShardedLayer


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns `optimizer.state_dict()`, with DTensors for the state of split parameters."""
    state = optimizer.state_dict()
    return _mapped(state, module, optimizer, ShardedLayer.whole_of.__name__)


def load_optimizer_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Loads a state of whole tensors, from `optimizer_state` or from a model on one process."""
    optimizer.load_state_dict(_mapped(state, module, optimizer, ShardedLayer.piece_of.__name__))


def _mapped(
    state: dict[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer, method: str
) -> dict[str, Any]:
    places = {
        parameter: (layer, name)
        for layer in module.modules()
        if isinstance(layer, ShardedLayer)
        for name in layer.split_dims
        if (parameter := layer._parameters.get(name)) is not None
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    found = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        if (place := places.get(parameter)) is None or number not in found:
            continue
        layer, name = place
        convert = getattr(layer, method)
        found[number] = {
            key: convert(name, value)
            if isinstance(value, torch.Tensor) and value.ndim == parameter.ndim
            else value
            for key, value in found[number].items()
        }
    return {**state, "state": found}
