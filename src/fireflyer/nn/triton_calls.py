"""Launches of the Triton kernels on GPU tensors, with the same functions as `native`.

ReLUs and dropout write the same values, bits and masks as the native kernels. Norms, SwiGLU and
cross-entropy compute in float32, and their order of summation differs from torch's.
TRITON_INTERPRET=1 runs all of them on CPUs, for tests.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from fireflyer.nn import triton_kernels as kernels

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
OPERATORS = dict.fromkeys(
    (
        *("relu", "relu6", "leaky_relu", "dropout", "swiglu", "rms_norm", "add_rms_norm"),
        "linear_cross_entropy",
    ),
    _TYPES,
)
"""Element types by operator."""

MOST_WIDTH = 32768
"""Maximum number of elements of a normalized row, because a program holds the whole row."""

_BLOCK = 1024
_CLASSES = 4096
_PROGRAMS = 256


def agrees() -> bool:
    """Returns True without a comparison, because these kernels do not promise torch's bits."""
    return True


def _launch(kernel: Any, programs: int, x: Tensor, *args: Any, **options: Any) -> None:
    with torch.cuda.device_of(x):
        kernel[(programs,)](*args, **options)


def _blocks(x: Tensor) -> int:
    blocks: int = triton.cdiv(x.numel(), _BLOCK)
    return blocks


def activate(kind: int, x: Tensor, y: Tensor, bits: Tensor, slope: float) -> None:
    """Writes activation `kind` of dense `x` to `y`, of the same layout.

    Sets in `bits` the bit of each element through which the gradient passes.
    """
    _launch(kernels.activate, _blocks(x), x, x, y, bits, x.numel(), slope, KIND=kind, BLOCK=_BLOCK)


def select(leaking: bool, g: Tensor, bits: Tensor, slope: float) -> Tensor:
    """Returns elements of dense `g` whose bit is set; elsewhere 0, or `g * slope` if `leaking`."""
    dx = torch.empty_like(g)
    _launch(
        kernels.select, _blocks(g), g, g, bits, dx, g.numel(), slope, LEAKING=leaking, BLOCK=_BLOCK
    )
    return dx


def drop(x: Tensor, y: Tensor, seed: int, threshold: int, scale: float) -> None:
    """Writes dense `x` times 0 or `scale` to `y`, with the same mask as the native kernel."""
    for first in range(0, x.numel(), 2**32):  # each range has its own keys
        key = (seed + (first >> 32) * 0x9E3779B97F4A7C15) % 2**64
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
        key ^= key >> 31
        end = min(x.numel(), first + 2**32)
        _launch(
            kernels.drop, triton.cdiv(end - first, _BLOCK), x, x, y, first, end, key % 2**32,
            key >> 32, threshold, scale, BLOCK=_BLOCK,
        )  # fmt: skip


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """Returns silu(a) * b for dense tensors of the same layout."""
    y = torch.empty_like(a)
    _launch(kernels.gate, _blocks(a), a, a, b, y, a.numel(), BLOCK=_BLOCK)
    return y


def swiglu_backward(g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `a` and `b`; all tensors are dense and of the same layout."""
    da, db = torch.empty_like(a), torch.empty_like(b)
    _launch(kernels.gate_backward, _blocks(a), a, g, a, b, da, db, a.numel(), BLOCK=_BLOCK)
    return da, db


def rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, h: Tensor, y: Tensor, eps: float
) -> Tensor:
    """Writes x + residual to `h` and the norm of `h` to `y`; returns the scale of each row."""
    width = x.shape[-1]
    rows = x.numel() // width
    scales = x.new_empty(rows, dtype=torch.float32)
    _launch(
        kernels.norm, rows, x, x, x if residual is None else residual,
        x if weight is None else weight, h, y, scales, width, eps, ADDED=residual is not None,
        SCALED=weight is not None, **_whole(width),
    )  # fmt: skip
    return scales


def _whole(width: int) -> dict[str, Any]:
    return {"BLOCK": triton.next_power_of_2(width), "num_warps": 4 if width <= 2048 else 16}


def rms_norm_backward(
    h: Tensor, weight: Tensor | None, scales: Tensor, g: Tensor, gh: Tensor | None,
    weighed: bool, _in_two: bool,
) -> tuple[Tensor, None, Tensor | None]:  # fmt: skip
    """Returns the gradient of h, None, and the gradient of the weight (None unless `weighed`)."""
    width, dh = h.shape[-1], torch.empty_like(h)
    rows = h.numel() // width
    programs = min(rows, _PROGRAMS)
    parts = h.new_empty(programs, width, dtype=torch.float32) if weighed else None
    _launch(
        kernels.norm_backward, programs, h, h, h if weight is None else weight, scales, g,
        g if gh is None else gh, dh, scales if parts is None else parts, rows, width,
        ADDED=gh is not None, SCALED=weight is not None, WEIGHED=weighed, **_whole(width),
    )  # fmt: skip
    return dh, None, None if parts is None else parts.sum(0)


def cross_entropy(
    logits: Tensor, target: Tensor, picked: Tensor, ignored: int, share: float, gradient: bool
) -> None:
    """Writes each row's log-probability of its target to `picked`.

    If `gradient` is set, overwrites the logits with `share` times the gradient of that value with
    respect to the logits. In ignored rows, overwrites them with 0.
    """
    rows, classes = logits.shape
    _launch(
        kernels.cross_entropy,
        rows,
        logits,
        logits,
        target,
        picked,
        classes,
        ignored,
        share,
        GRADIENT=gradient,
        BLOCK=_CLASSES,
    )
