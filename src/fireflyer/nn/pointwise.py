"""torch's own operators with outputs that carry recipes: norms, GELU, SiLU, linear, convolutions.

Forward and backward are torch's; only the tensors kept differ. See `recipe`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import layer_norm as torch_layer_norm
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu as torch_silu

from fireflyer.nn.once import once
from fireflyer.nn.recipe import Recipe, attach, keep, recipe_of, source
from fireflyer.torch_internals.core import is_transformed

TensorFunction = Callable[[Tensor], Tensor]


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Returns torch's GELU; operators that take the result compute it again from the input."""
    again = partial(torch_gelu, approximate=approximate)
    return _with_recipe(keep(again, input), input, again)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Returns torch's SiLU. If `inplace` is False, operators that take the result compute it
    again."""
    if is_transformed() or inplace:
        return torch_silu(input, inplace)
    return _with_recipe(keep(torch_silu, input), input, torch_silu)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Returns torch's layer norm; operators that take the result compute it again."""
    shape = list(normalized_shape)
    result = keep(torch_layer_norm, input, shape, weight, bias, eps)
    if is_transformed() or not result.requires_grad:
        return result
    # Copies (one row each): sharding may free the parameters' memory before backward.
    dtype = result.dtype
    scale, shift = (None if one is None else one.detach().clone() for one in (weight, bias))
    if dtype != input.dtype:  # autocast
        scale, shift = (None if one is None else one.to(dtype) for one in (scale, shift))

    def again(value: Tensor) -> Tensor:
        return torch_layer_norm(value.to(dtype), shape, scale, shift, eps)

    return _with_recipe(result, input, again)


def _with_recipe(result: Tensor, input: Tensor, again: TensorFunction) -> Tensor:
    if is_transformed() or not result.requires_grad:
        return result
    return attach(result, Recipe(again, source(input)))


def lowered(input: Tensor) -> Tensor:
    """Casts an input that has a recipe to autocast's dtype; the result has a recipe, too.

    Returns other inputs unchanged. Without this function, autocast would make the same copy inside
    the operator, and the copy would be kept for backward.
    """
    recipe = None if is_transformed() else recipe_of(input)
    if recipe is None or not torch.is_autocast_enabled(input.device.type):
        return input
    dtype = torch.get_autocast_dtype(input.device.type)
    if input.dtype != torch.float32 or dtype == input.dtype:
        return input
    return attach(input.to(dtype), Recipe(lambda value: value.to(dtype), recipe))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns torch's linear; keeps the input's recipe instead of the input, if there is one."""
    return keep(torch_linear, lowered(input), weight, bias)


def convolution(
    operator: Callable[..., Tensor], input: Tensor, *args: Any, **options: Any
) -> Tensor:
    """Returns torch's convolution; keeps the input's recipe instead of the input, if there is
    one."""
    return keep(lambda value: operator(value, *args, **options), lowered(input))


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: TensorFunction, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        kind = x.device.type
        ctx.function, ctx.kind, ctx.dtype = function, kind, torch.get_autocast_dtype(kind)
        ctx.casting = torch.is_autocast_enabled(kind)
        return function(x)

    @staticmethod
    @once("this norm")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(ctx.kind, ctx.dtype, enabled=ctx.casting):
            y = ctx.function(x)
        wanted = [one for one in (x, *parameters) if one.requires_grad]
        found = iter(torch.autograd.grad(y, wanted, g))
        return None, *(next(found) if one.requires_grad else None for one in (x, *parameters))


def run_again(function: TensorFunction, x: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
    """Returns `function(x)`; keeps only x, and runs the function again in backward.

    Args:
        function: deterministic function; may use `parameters`, but no other tensors that require
            gradients.
    """
    if is_transformed() or not torch.is_grad_enabled():
        return function(x)
    return keep(lambda value: _Recomputed.apply(function, value, *parameters), x)  # type: ignore[no-any-return, no-untyped-call]
