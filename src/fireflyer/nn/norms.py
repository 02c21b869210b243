"""RMS norm, of a tensor or of a sum, in one pass over memory forward and one pass backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from fireflyer.nn.backend import agreeing, taken, takes
from fireflyer.nn.once import once
from fireflyer.nn.recipe import Recipe, attach, keep, source
from fireflyer.torch_internals.core import is_transformed

_SPLIT_ROW = 32768
"""Minimum number of elements of a single row that torch sums on several threads, and therefore in
another order than our kernels."""


class _RmsNorm(torch.autograd.Function):
    """RMS norm of h = x + residual, returned with h; if `residual` is None, the norm of x alone.

    `same` is x once more, as a second input, so the gradient of x has two summands. Autograd adds
    them one after the other to the other gradients of x, as for torch's norm.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        same: Tensor | None,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        h = x if residual is None else torch.empty_like(x)
        y = torch.empty_like(x)
        scales = _rms_norm_into(x, residual, weight, eps, h, y)
        ctx.save_for_backward(h, weight, scales)
        ctx.set_materialize_grads(False)
        return y if residual is None else (h, y)

    @staticmethod
    @once("rms_norm")
    def backward(ctx: Any, *g: Tensor | None) -> tuple[Tensor | None, ...]:
        h, weight, scales = ctx.saved_tensors
        gh, gy = (None, *g) if len(g) == 1 else g
        if gy is None:
            return gh, None, gh, None, None
        weighed = weight is not None and ctx.needs_input_grad[3]
        given = gy.contiguous(), None if gh is None else gh.contiguous()
        dh, apart, dw = taken("rms_norm", h).rms_norm_backward(
            h, weight, scales, *given, weighed, len(g) == 1
        )
        return dh, apart, (dh if len(g) == 2 else None), dw if dw is None else dw.to(h.dtype), None


def _rms_norm_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float | None,
    h: Tensor,
    y: Tensor,
) -> Tensor:
    """Writes x + residual to h, and the norm of h to y; returns the scale of each row."""
    inner = torch.float32 if x.dtype.itemsize < 4 else x.dtype
    least = torch.finfo(inner).eps if eps is None else eps
    weight = None if weight is None else weight.contiguous()
    scales: Tensor = taken("rms_norm", x).rms_norm(x, residual, weight, h, y, least)
    return scales


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    strict: bool = False,
) -> Tensor:
    """Returns torch's RMS norm over the last dimension; keeps only the input.

    For norms over several dimensions, and for norms under autocast, torch's operator runs.

    Raises:
        ConfigError: `strict` is set, and there is no kernel for the input's dtype or device.
        RuntimeError: raised in backward if a second derivative is requested.
    """
    if not _fits("rms_norm", input, normalized_shape, weight, strict):
        return torch_rms_norm(input, list(normalized_shape), weight, eps)
    x = input.contiguous()
    result: Tensor = keep(_RmsNorm.apply, x, x, None, weight, eps)
    return _normed(result, source(x), weight, eps)


def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns h = input + residual, of equal shapes and dtypes, and the norm of h; keeps only h.

    Raises:
        RuntimeError: raised in backward if a second derivative is requested.
    """
    same = input.shape == residual.shape and input.dtype == residual.dtype
    shape = input.shape[-1:]
    if not same or not _fits("add_rms_norm", input, shape, weight, False):
        h = input + residual
        return h, torch_rms_norm(h, list(shape), weight, eps)
    h, y = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        input.contiguous(), None, residual.contiguous(), weight, eps
    )
    return h, _normed(y, h, weight, eps)


def _fits(name: str, x: Tensor, shape: Sequence[int], weight: Tensor | None, strict: bool) -> bool:
    if is_transformed() or tuple(shape) != tuple(x.shape[-1:]) or not x.numel():
        return False
    if weight is not None and weight.dtype != x.dtype:
        return False
    if x.numel() == x.shape[-1] >= _SPLIT_ROW:
        return False
    if not takes(name, x, strict) or torch.is_autocast_enabled(x.device.type):
        return False
    found = agreeing(name, x)
    return found is not None and x.shape[-1] <= (found.MOST_WIDTH or x.shape[-1])


def _normed(y: Tensor, kept: Tensor | Recipe, weight: Tensor | None, eps: float | None) -> Tensor:
    # A copy (one row): sharding may free the weight's memory before backward.
    scale = None if weight is None else weight.detach().clone()

    def again(h: Tensor) -> Tensor:
        h = h.contiguous()
        y = torch.empty_like(h)
        _rms_norm_into(h, None, scale, eps, h, y)
        return y

    return attach(y, Recipe(again, kept))
