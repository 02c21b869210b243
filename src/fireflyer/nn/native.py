"""Calls of the native kernels on tensors: which tensors they take, layouts, threads."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu as torch_silu

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
    return torch.empty((tensor.numel() + 63) // 64 * 8, dtype=torch.uint8, device="cpu")


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


def gates(x: Tensor) -> bool:
    """Returns whether the kernels of SwiGLU take a tensor."""
    kinds = x.device.type == "cpu" and x.dtype in TYPES and x.dtype != torch.float64
    return kinds and type(x) in _PLAIN and agrees()


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Returns silu(a) * b of dense tensors of one layout."""
    y = torch.empty_like(a)
    _native.swiglu(
        TYPES[a.dtype], a.data_ptr(), b.data_ptr(), y.data_ptr(), a.numel(), _unit(a),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def swiglu_backward(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `a` and `b`; all are dense, of one layout."""
    da, db = torch.empty_like(a), torch.empty_like(b)
    _native.swiglu_backward(
        TYPES[a.dtype], g.data_ptr(), a.data_ptr(), b.data_ptr(), da.data_ptr(), db.data_ptr(),
        a.numel(), _unit(a), torch.get_num_threads(),
    )  # fmt: skip
    return da, db


def _unit(x: Tensor) -> int:
    """Returns the elements of two of torch's vectors, which its loops take at a time."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (128 if wide else 64) // x.dtype.itemsize


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, h: Tensor, y: Tensor,
    scales: Tensor, eps: float,
) -> None:  # fmt: skip
    """Writes x + residual to `h`, its norm to `y`, the factor of each row to `scales`.

    Without `residual` nothing is written to `h`. All are contiguous.
    """
    width = x.shape[-1]
    _native.rms_norm(
        TYPES[x.dtype], _addresses(x, residual, weight, h, y, scales), x.numel() // width, width,
        eps, torch.get_num_threads(),
    )  # fmt: skip


def rms_norm_backward(
    h: Tensor, weight: Tensor | None, scales: Tensor, g: Tensor, gh: Tensor | None,
    dh: Tensor, apart: Tensor | None, products: Tensor | None,
) -> None:  # fmt: skip
    """Writes the gradients that `NormBackward` of nn/kernels.hpp describes."""
    width = h.shape[-1]
    _native.rms_norm_backward(
        TYPES[h.dtype], _addresses(h, weight, scales, g, gh, dh, apart, products),
        h.numel() // width, width, torch.get_num_threads(),
    )  # fmt: skip


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.cache
def agrees() -> bool:
    """Returns whether kernels that follow torch's sums and exponential give this torch's bits.

    They follow torch 2 on x86-64 with AVX2 or AVX-512. Elsewhere torch's own operators run.
    """
    generator = torch.Generator().manual_seed(0)
    x, b = torch.randn(2, 5, 1003, generator=generator, device="cpu").unbind()
    y, scales = torch.empty_like(x), torch.empty(5, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        rms_norm(x, None, None, x, y, scales, 1e-5)
        norms = torch.equal(y, torch_rms_norm(x, [1003], None, 1e-5))
        da, _ = swiglu_backward(b, x, b)
        gated = torch.equal(swiglu(x, b), torch_silu(x) * b)
        same = norms and gated and torch.equal(da, torch.ops.aten.silu_backward(b * b, x))
    if not same:
        refuse("rms_norm, swiglu", "this torch computes in another order", strict=False)
    return same


def bit_product(a: Tensor, b: Tensor, rows: int) -> Tensor:
    """Returns the int32 product of packed bit planes: (rows, 8 * panels).

    Args:
        a: (planes, rows, words) int64.
        b: (planes, panels, words, 8) int64.
    """
    out = torch.empty(rows, 8 * b.shape[1], dtype=torch.int32, device="cpu")
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
    size = (pooling[2] * pooling[3] * bits + 7) // 8
    codes = torch.empty(planes, size, dtype=torch.uint8, device="cpu")
    _native.encode_places(
        pooling, indices.data_ptr(), planes, codes.data_ptr(), torch.get_num_threads()
    )
    return codes


def decode_places(pooling: Pooling, codes: Tensor, indices: Tensor) -> None:
    """Writes the int64 places in the planes that `encode_places` was given."""
    _native.decode_places(
        pooling, codes.data_ptr(), codes.shape[0], indices.data_ptr(), torch.get_num_threads()
    )
