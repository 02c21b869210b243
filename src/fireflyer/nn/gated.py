"""SwiGLU: silu(gate) * up; only the two inputs are kept for backward."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu as torch_silu

from fireflyer.nn.backend import agreeing, fills, laid_out_as
from fireflyer.nn.once import once
from fireflyer.nn.recipe import Recipe, attach, keep, source
from fireflyer.torch_internals.core import is_transformed


class _SwiGlu(torch.autograd.Function):
    """SwiGLU of inputs that fill their memory in the same order, so that one loop walks all
    memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _swiglu(a, b)

    @staticmethod
    @once("swiglu")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        g = laid_out_as(g, a.stride())
        if (kernels := agreeing("swiglu", a)) is not None:
            found: tuple[Tensor, Tensor] = kernels.swiglu_backward(g, a, b)
            return found
        return torch.ops.aten.silu_backward(g * b, a), torch_silu(a).mul_(g)


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    kernels = agreeing("swiglu", a)
    y: Tensor = torch_silu(a).mul_(b) if kernels is None else kernels.swiglu(a, b)
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up for inputs of equal shapes and dtypes; keeps only the two inputs.

    For inputs with different layouts or with gaps in memory, torch's operators run.

    Raises:
        RuntimeError: raised in backward if a second derivative is requested.
    """
    if is_transformed() or gate.shape != up.shape or gate.dtype != up.dtype or not gate.numel():
        return torch_silu(gate) * up
    stride = gate.stride()
    if stride != up.stride() or not fills(gate):
        return torch_silu(gate) * up
    result: Tensor = keep(_SwiGlu.apply, gate, up)

    def again(a: Tensor, b: Tensor) -> Tensor:
        return _swiglu(laid_out_as(a, stride), laid_out_as(b, stride))

    return attach(result, Recipe(again, source(gate), source(up)))
