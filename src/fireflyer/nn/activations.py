"""Activations that keep one bit per element: ReLU, ReLU6, leaky ReLU. Dropout keeps only its
seed."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as torch_dropout
from torch.nn.functional import leaky_relu as torch_leaky_relu
from torch.nn.functional import relu as torch_relu
from torch.nn.functional import relu6 as torch_relu6

from fireflyer.nn.backend import bits_for, dense, fills, laid_out_as, taken, takes
from fireflyer.nn.recipe import Recipe, attach, recipe_of
from fireflyer.torch_internals.core import is_transformed

_RELU, _RELU6, _LEAKY = 0, 1, 2


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: int, slope: float, inplace: bool) -> Tensor:
        bits = bits_for(x)
        y = x if inplace else torch.empty_like(x)
        taken("relu", x).activate(kind, x, y, bits, slope)
        ctx.save_for_backward(bits)
        ctx.leaking, ctx.slope, ctx.stride = kind == _LEAKY, slope, y.stride()
        if inplace:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (bits,) = ctx.saved_tensors
        g = laid_out_as(g, ctx.stride)
        dx = _Selection.apply(g, bits, ctx.leaking, ctx.slope)  # type: ignore[no-untyped-call]
        return dx, None, None, None


class _Selection(torch.autograd.Function):
    """Gradient of an activation. It is linear in `g`, so its gradient is the same function."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, bits: Tensor, leaking: bool, slope: float) -> Tensor:
        ctx.save_for_backward(bits)
        ctx.leaking, ctx.slope, ctx.stride = leaking, slope, g.stride()
        dx: Tensor = taken("relu", g).select(leaking, g, bits, slope)
        return dx

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (bits,) = ctx.saved_tensors
        g = laid_out_as(g, ctx.stride)
        dg = _Selection.apply(g, bits, ctx.leaking, ctx.slope)  # type: ignore[no-untyped-call]
        return dg, None, None, None


def _activated(kind: int, x: Tensor, slope: float, inplace: bool) -> Tensor:
    recipe = recipe_of(x)
    filled = dense(x)
    result: Tensor = _Activation.apply(  # type: ignore[no-untyped-call]
        filled, kind, slope, inplace and filled is x
    )
    if recipe is None:
        return result
    again = {
        _RELU: torch.relu,
        _RELU6: torch_relu6,
        _LEAKY: lambda value: torch_leaky_relu(value, slope),
    }
    return attach(result, Recipe(again[kind], recipe))


def _packs(name: str, x: Tensor, inplace: bool, strict: bool) -> bool:
    """Returns True if our kernels must run: they exist, and a gradient may be requested later."""
    if is_transformed() or not (torch.is_grad_enabled() and x.requires_grad):
        return False
    if inplace and (x.is_leaf or not fills(x)):
        return False  # torch itself reports the error for a leaf
    return takes(name, x, strict)


def relu(input: Tensor, inplace: bool = False, *, strict: bool = False) -> Tensor:
    """Returns max(x, 0); keeps one bit per element. The result is bit-identical to torch's.

    Raises:
        ConfigError: `strict` is set, and there is no kernel for the dtype or the device.
    """
    if _packs("relu", input, inplace, strict):
        return _activated(_RELU, input, 0.0, inplace)
    return torch_relu(input, inplace)


def relu6(input: Tensor, inplace: bool = False, *, strict: bool = False) -> Tensor:
    """Returns min(max(x, 0), 6); otherwise like `relu`."""
    if _packs("relu6", input, inplace, strict):
        return _activated(_RELU6, input, 0.0, inplace)
    return torch_relu6(input, inplace)


def leaky_relu(
    input: Tensor, negative_slope: float = 0.01, inplace: bool = False, *, strict: bool = False
) -> Tensor:
    """Returns x, multiplied by `negative_slope` where x is negative; otherwise like `relu`."""
    if _packs("leaky_relu", input, inplace, strict):
        return _activated(_LEAKY, input, negative_slope, inplace)
    return torch_leaky_relu(input, negative_slope, inplace)


class _Dropout(torch.autograd.Function):
    """Dropout. It is linear in `x`, so its gradient is the same function. Keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: int, p: float, inplace: bool) -> Tensor:
        y = x if inplace else torch.empty_like(x)
        _drop(x, y, seed, p)
        ctx.seed, ctx.p, ctx.stride = seed, p, y.stride()
        if inplace:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        g = laid_out_as(g, ctx.stride)
        dx = _Dropout.apply(g, ctx.seed, ctx.p, False)  # type: ignore[no-untyped-call]
        return dx, None, None, None


def _drop(x: Tensor, y: Tensor, seed: int, p: float) -> Tensor:
    # As torch does, this computes 1 / (1 - p) in the element type.
    scale = torch.ones((), dtype=x.dtype, device="cpu").div_(1 - p).item()
    taken("dropout", x).drop(x, y, seed, min(round(p * 2**32), 2**32 - 1), scale)
    return y


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    *,
    strict: bool = False,
) -> Tensor:
    """Zeroes each element with probability `p`, and divides all others by 1 - p.

    The mask is a hash of the element's index in memory and a seed drawn from torch's generator. So
    the mask depends only on the generator's state, not on the number of threads, and is never kept.
    Otherwise like `relu`.

    Raises:
        ValueError: `p` is not between 0 and 1.
        ConfigError: `strict` is set, and there is no kernel for the dtype or the device.
    """
    own = training and 0 < p < 1 and not (inplace and not fills(input))
    if is_transformed() or not own or (inplace and input.is_leaf and input.requires_grad):
        return torch_dropout(input, p, training, inplace)
    if not takes("dropout", input, strict):
        return torch_dropout(input, p, training, inplace)
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
    recipe = recipe_of(input)
    filled = dense(input)
    result: Tensor = _Dropout.apply(  # type: ignore[no-untyped-call]
        filled, seed, p, inplace and filled is input
    )
    if recipe is None:
        return result

    stride = filled.stride()

    def again(value: Tensor) -> Tensor:
        value = laid_out_as(value, stride)
        return _drop(value, torch.empty_like(value), seed, p)

    return attach(result, Recipe(again, recipe))
