"""Calls of the native kernels on CPU tensors."""

import functools

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu as torch_silu

from fireflyer._native import nn as _native
from fireflyer.nn.backend import refuse

TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Numbers of the element types that the kernels accept."""

OPERATORS = {
    **dict.fromkeys(("relu", "relu6", "leaky_relu", "dropout", "max_pool2d"), TYPES),
    **dict.fromkeys(("rms_norm", "add_rms_norm"), TYPES),
    "swiglu": tuple(TYPES.keys() - {torch.float64}),
}
"""Element types by operator."""

MOST_WIDTH = None
"""Maximum number of elements of a normalized row; None: no limit."""


def activate(kind: int, x: Tensor, y: Tensor, bits: Tensor, slope: float) -> None:
    """Writes activation `kind` of dense `x` to `y`, of the same layout.

    Sets in `bits` the bit of each element through which the gradient passes.
    """
    _native.forward(
        kind, TYPES[x.dtype], x.data_ptr(), y.data_ptr(), bits.data_ptr(), x.numel(), slope,
        torch.get_num_threads(),
    )  # fmt: skip


def select(leaking: bool, g: Tensor, bits: Tensor, slope: float) -> Tensor:
    """Returns elements of dense `g` whose bit is set; elsewhere 0, or `g * slope` if `leaking`."""
    dx = torch.empty_like(g)
    _native.backward(
        leaking, TYPES[g.dtype], g.data_ptr(), bits.data_ptr(), dx.data_ptr(), g.numel(), slope,
        torch.get_num_threads(),
    )  # fmt: skip
    return dx


def drop(x: Tensor, y: Tensor, seed: int, threshold: int, scale: float) -> None:
    """Writes dense `x` to `y`, each element times 0 or `scale`, by the seed and the element's
    index."""
    _native.dropout(
        TYPES[x.dtype], x.data_ptr(), y.data_ptr(), x.numel(), seed, threshold, scale,
        torch.get_num_threads(),
    )  # fmt: skip


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Returns silu(a) * b for dense tensors of the same layout."""
    y = torch.empty_like(a)
    _native.swiglu(
        TYPES[a.dtype], a.data_ptr(), b.data_ptr(), y.data_ptr(), a.numel(), _unit(a),
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def swiglu_backward(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `a` and `b`; all tensors are dense and of the same layout."""
    da, db = torch.empty_like(a), torch.empty_like(b)
    _native.swiglu_backward(
        TYPES[a.dtype], g.data_ptr(), a.data_ptr(), b.data_ptr(), da.data_ptr(), db.data_ptr(),
        a.numel(), _unit(a), torch.get_num_threads(),
    )  # fmt: skip
    return da, db


def _unit(x: Tensor) -> int:
    """Returns the number of elements in two SIMD vectors, which torch's loops process at a time."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (128 if wide else 64) // x.dtype.itemsize


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, h: Tensor, y: Tensor, eps: float
) -> Tensor:
    """Writes x + residual to `h` and the norm of `h` to `y`; returns the scale of each row.

    Without `residual`, `h` is not written. All tensors are contiguous.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    scales = x.new_empty(rows, dtype=torch.float32 if x.dtype.itemsize < 4 else x.dtype)
    _native.rms_norm(
        TYPES[x.dtype], _addresses(x, residual, weight, h, y, scales), rows, width, eps,
        torch.get_num_threads(),
    )  # fmt: skip
    return scales


def rms_norm_backward(
    h: Tensor, weight: Tensor | None, scales: Tensor, g: Tensor, gh: Tensor | None,
    weighed: bool, in_two: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns the gradient of h, its second summand, and the gradient of the weight.

    Args:
        gh: gradient that h receives from other operators.
        weighed: False: the gradient of the weight is None.
        in_two: return the gradient of h as two summands if the norm does not cast its input.
            Otherwise the second summand is None.
    """
    width, dh = h.shape[-1], torch.empty_like(h)
    apart = torch.empty_like(h) if in_two and scales.dtype == h.dtype else None
    products = torch.empty_like(h, dtype=scales.dtype) if weighed else None
    _native.rms_norm_backward(
        TYPES[h.dtype], _addresses(h, weight, scales, g, gh, dh, apart, products),
        h.numel() // width, width, torch.get_num_threads(),
    )  # fmt: skip
    return dh, apart, None if products is None else products.view(-1, width).sum(0)


def _addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@functools.cache
def agrees() -> bool:
    """Returns True if `rms_norm` and `swiglu` give the bits of the installed torch.

    The kernels repeat the order of sums, and the exponential, of torch 2 on x86-64 with AVX2 or
    AVX-512. Elsewhere torch's own operators run.
    """
    generator = torch.Generator().manual_seed(0)
    x, b = torch.randn(2, 5, 1003, generator=generator, device="cpu").unbind()
    y = torch.empty_like(x)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        rms_norm(x, None, None, x, y, 1e-5)
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
"""Height and width of the input and the output, then a pair each for kernel, stride, padding and
dilation."""


def encode_places(pooling: Pooling, indices: Tensor, bits: int) -> Tensor:
    """Returns the positions of maxima in their windows, in `bits` bits each, plane by plane."""
    planes = indices.shape[:-2].numel()
    size = (pooling[2] * pooling[3] * bits + 7) // 8
    codes = torch.empty(planes, size, dtype=torch.uint8, device="cpu")
    _native.encode_places(
        pooling, indices.data_ptr(), planes, codes.data_ptr(), torch.get_num_threads()
    )
    return codes


def decode_places(pooling: Pooling, codes: Tensor, indices: Tensor) -> None:
    """Writes to `indices` the int64 positions in the input's planes that were encoded."""
    _native.decode_places(
        pooling, codes.data_ptr(), codes.shape[0], indices.data_ptr(), torch.get_num_threads()
    )
