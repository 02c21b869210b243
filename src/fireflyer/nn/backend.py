"""Choice of kernels by device: native on CPUs, Triton on GPUs, and torch's operator elsewhere."""

import functools
import importlib
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fireflyer.errors import ConfigError
from fireflyer.log import get_logger

MODULES = {"cpu": "native", "cuda": "triton_calls"}
"""Modules of kernels by type of device. OPERATORS of a module names the operators that its
functions implement."""

_PLAIN = (Tensor, torch.nn.Parameter)
_said: set[tuple[str, str]] = set()


@functools.cache
def _module(name: str) -> ModuleType | None:
    if name == "triton_calls" and importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"fireflyer.nn.{name}")


def kernels(operator: str, tensor: Tensor) -> ModuleType | None:
    """Returns the kernels of an operator that accept a tensor; None if torch's operator must
    run."""
    name = MODULES.get(tensor.device.type)
    module = _module(name) if name is not None and type(tensor) in _PLAIN else None
    if module is None or tensor.dtype not in module.OPERATORS.get(operator, ()):
        return None
    return module


def taken(operator: str, tensor: Tensor) -> Any:
    """Returns the kernels of an operator for a tensor that `takes` has accepted."""
    module = kernels(operator, tensor)
    assert module is not None
    return module


def agreeing(operator: str, tensor: Tensor) -> ModuleType | None:
    """Returns the same as `kernels`, but None if native kernels give other bits than the installed
    torch."""
    module = kernels(operator, tensor)
    return module if module is not None and module.agrees() else None


def takes(operator: str, tensor: Tensor, strict: bool) -> bool:
    """Returns True if an operator has kernels for a tensor; otherwise logs the reason once.

    Raises:
        ConfigError: there are no such kernels, and `strict` is set.
    """
    if kernels(operator, tensor) is not None:
        return True
    name = MODULES.get(tensor.device.type)
    if type(tensor) not in _PLAIN:
        reason = f"tensor class {type(tensor).__name__}"
    elif name is None or (found := _module(name)) is None or operator not in found.OPERATORS:
        reason = f"device {tensor.device.type}"
    else:
        reason = f"dtype {str(tensor.dtype).removeprefix('torch.')}"
    refuse(operator, f"{reason} has no kernel", strict)
    return False


def refuse(operator: str, reason: str, strict: bool) -> None:
    """Logs, once per operator and reason, that torch's operator is used.

    Raises:
        ConfigError: `strict` is set.
    """
    if strict:
        raise ConfigError(f"{operator}: {reason}; without strict=True torch's operator is used")
    if (operator, reason) not in _said:
        _said.add((operator, reason))
        get_logger("nn").warning("%s: %s: torch's operator is used", operator, reason)


def fills(tensor: Tensor) -> bool:
    """Returns True if the elements fill their memory, in any order of dimensions."""
    return tensor.is_contiguous() or (
        torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if its elements fill their memory, else a contiguous copy."""
    return tensor if fills(tensor) else tensor.contiguous()


def laid_out_as(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns the tensor with the given strides; copies it if it has other strides."""
    if tensor.stride() == stride:
        return tensor
    found = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)


def bits_for(tensor: Tensor) -> Tensor:
    """Returns uninitialized bits, one per element, padded to whole 64-bit words."""
    size = (tensor.numel() + 63) // 64 * 8
    return torch.empty(size, dtype=torch.uint8, device=tensor.device)
