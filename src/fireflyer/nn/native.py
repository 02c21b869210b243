"""Calls of the native kernels on tensors: which tensors they take, layouts, threads."""

import torch
from torch import Tensor

from fireflyer._native import nn as _native
from fireflyer.errors import ConfigError
from fireflyer.log import get_logger

TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Numbers of the element types that the kernels take."""

_said: set[tuple[str, str]] = set()


def takes(name: str, tensor: Tensor, strict: bool) -> bool:
    """Returns whether the kernels of operator `name` take a tensor; says once why not.

    Raises:
        ConfigError: they do not, and `strict` is set.
    """
    if tensor.device.type == "cpu" and tensor.dtype in TYPES and type(tensor) in _PLAIN:
        return True
    if tensor.device.type != "cpu":
        reason = f"device {tensor.device.type}"
    elif tensor.dtype not in TYPES:
        reason = f"dtype {str(tensor.dtype).removeprefix('torch.')}"
    else:
        reason = f"tensor class {type(tensor).__name__}"
    refuse(name, f"{reason} has no kernel", strict)
    return False


_PLAIN = (Tensor, torch.nn.Parameter)


def refuse(name: str, reason: str, strict: bool) -> None:
    """Says once for each operator and reason that torch's operator is used.

    Raises:
        ConfigError: `strict` is set.
    """
    if strict:
        raise ConfigError(f"{name}: {reason}; without strict=True torch's operator is used")
    if (name, reason) not in _said:
        _said.add((name, reason))
        get_logger("nn").warning("%s: %s: torch's operator is used", name, reason)


def fills(tensor: Tensor) -> bool:
    """Returns whether the elements fill their memory, in whatever order of dimensions."""
    return tensor.is_contiguous() or (
        torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )


def dense(tensor: Tensor) -> Tensor:
    """Returns the tensor itself if its elements fill their memory, a contiguous copy otherwise."""
    return tensor if fills(tensor) else tensor.contiguous()


def laid_out_as(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns the tensor with the given strides, copied if it has others."""
    if tensor.stride() == stride:
        return tensor
    found = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return found.copy_(tensor)


def bits_for(tensor: Tensor) -> Tensor:
    """Returns uninitialized bits, one an element, in whole words."""
    return torch.empty((tensor.numel() + 63) // 64 * 8, dtype=torch.uint8)


def activate(kind: int, x: Tensor, y: Tensor, bits: Tensor, slope: float) -> None:
    """Writes activation `kind` of dense `x` to `y`, of the same layout, and the gradient's bits."""
    _native.forward(
        kind, TYPES[x.dtype], x.data_ptr(), y.data_ptr(), bits.data_ptr(), x.numel(), slope,
        torch.get_num_threads(),
    )  # fmt: skip


def select(leaking: bool, g: Tensor, bits: Tensor, slope: float) -> Tensor:
    """Returns dense `g` where its bit is set; elsewhere 0, or `g * slope` if `leaking`."""
    dx = torch.empty_like(g)
    _native.backward(
        leaking, TYPES[g.dtype], g.data_ptr(), bits.data_ptr(), dx.data_ptr(), g.numel(), slope,
        torch.get_num_threads(),
    )  # fmt: skip
    return dx


def drop(x: Tensor, y: Tensor, seed: int, threshold: int, scale: float) -> None:
    """Writes dense `x` to `y` times 0 or `scale`, by the seed and each element's number."""
    _native.dropout(
        TYPES[x.dtype], x.data_ptr(), y.data_ptr(), x.numel(), seed, threshold, scale,
        torch.get_num_threads(),
    )  # fmt: skip


def bit_product(a: Tensor, b: Tensor, rows: int) -> Tensor:
    """Returns the int32 product of packed bit planes: (rows, 8 * panels).

    Args:
        a: (planes, rows, words) int64.
        b: (planes, panels, words, 8) int64.
    """
    out = torch.empty(rows, 8 * b.shape[1], dtype=torch.int32)
    _native.bit_product(
        a.data_ptr(), a.shape[0], b.data_ptr(), b.shape[0], rows, b.shape[1], b.shape[2],
        out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


Pooling = tuple[int, ...]
"""Height, width; of the output; of the kernel, stride, padding and dilation, a pair each."""


def encode_places(pooling: Pooling, indices: Tensor, bits: int) -> Tensor:
    """Returns the places of maxima in their windows, in `bits` bits each, plane by plane."""
    planes = indices.shape[:-2].numel()
    codes = torch.empty(planes, (pooling[2] * pooling[3] * bits + 7) // 8, dtype=torch.uint8)
    _native.encode_places(
        pooling, indices.data_ptr(), planes, codes.data_ptr(), torch.get_num_threads()
    )
    return codes


def decode_places(pooling: Pooling, codes: Tensor, indices: Tensor) -> None:
    """Writes the int64 places in the planes that `encode_places` was given."""
    _native.decode_places(
        pooling, codes.data_ptr(), codes.shape[0], indices.data_ptr(), torch.get_num_threads()
    )
