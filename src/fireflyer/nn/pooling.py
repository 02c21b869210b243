"""Max-pooling that keeps each maximum's position in its window, in 2, 4 or 8 bits."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d as torch_max_pool2d

from fireflyer.nn import native
from fireflyer.nn.backend import takes
from fireflyer.nn.once import once
from fireflyer.nn.recipe import Recipe, attach, recipe_of
from fireflyer.torch_internals.core import is_transformed

Size = int | tuple[int, ...]
Pair = tuple[int, int]

_MOST_PLACES = 256


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Pair, stride: Pair, pad: Pair, dilation: Pair, ceil: bool
    ) -> Tensor:
        y: Tensor
        indices: Tensor
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, pad, dilation, ceil)
        numbers = (*x.shape[-2:], *y.shape[-2:], *kernel, *stride, *pad, *dilation)
        places = kernel[0] * kernel[1]
        bits = 2 if places <= 4 else 4 if places <= 16 else 8
        codes = native.encode_places(numbers, indices.contiguous(), bits)
        ctx.save_for_backward(codes)
        ctx.numbers, ctx.shape, ctx.rest = numbers, x.shape, (kernel, stride, pad, dilation, ceil)
        return y

    @staticmethod
    @once("max_pool2d")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (codes,) = ctx.saved_tensors
        g = g.contiguous()
        indices = torch.empty_like(g, dtype=torch.int64)
        native.decode_places(ctx.numbers, codes, indices)
        shaped = g.new_empty(()).expand(ctx.shape)  # torch only asks for the input's shape
        dx = torch.ops.aten.max_pool2d_with_indices_backward(g, shaped, *ctx.rest, indices)
        return dx, None, None, None, None, None


def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    strict: bool = False,
) -> Any:
    """Returns torch's max-pooling of (..., height, width); keeps 2, 4 or 8 bits per output.

    Raises:
        ConfigError: `strict` is set, and there is no kernel for the dtype or the device.
        RuntimeError: raised in backward if a second derivative is requested.
    """

    def theirs() -> Any:
        return torch_max_pool2d(
            input,
            kernel_size,
            stride,
            padding,
            dilation,
            ceil_mode,
            return_indices,  # type: ignore[call-overload, misc]
        )

    if is_transformed() or return_indices or not (torch.is_grad_enabled() and input.requires_grad):
        return theirs()
    kernel = _pair(kernel_size)
    if kernel[0] * kernel[1] > _MOST_PLACES or not input.numel():
        return theirs()
    if not takes("max_pool2d", input, strict):
        return theirs()
    step = kernel if stride is None or stride == () else _pair(stride)
    options = (kernel, step, _pair(padding), _pair(dilation), ceil_mode)
    recipe = recipe_of(input)
    result: Tensor = _MaxPool.apply(input, *options)  # type: ignore[no-untyped-call]
    if recipe is None:
        return result
    return attach(result, Recipe(lambda value: torch_max_pool2d(value, *options), recipe))


def _pair(size: Size) -> Pair:
    if isinstance(size, int):
        return size, size
    return (size[0], size[-1])
