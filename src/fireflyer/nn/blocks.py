"""RMSNorm and SwiGLU by torch's own operators on blocks of rows that stay in the cache.

Outside a block only inputs and outputs touch memory, and only inputs are kept. Each row is computed
by the operators that eager execution runs, so values and gradients have its bits.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm
from torch.nn.functional import silu as torch_silu

from fireflyer.nn.native import fills, laid_out_as, takes
from fireflyer.nn.once import once
from fireflyer.nn.recipe import Recipe, attach, keep, plain, source

_BLOCK_ELEMENTS = 1 << 16
"""Elements of a block for each thread, at least: several buffers of this size fit a core's cache."""


def _spans(rows: int, width: int) -> Iterator[slice]:
    """Cuts rows into blocks of a multiple of 64 elements, where torch's vector loops end, too."""
    unit = 64 // math.gcd(64, width)
    step = max(1, _BLOCK_ELEMENTS * torch.get_num_threads() // width // unit) * unit
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


class _SwiGlu(torch.autograd.Function):
    """Inputs fill their memory in one order, so that all are walked as that memory."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _swiglu(a, b)

    @staticmethod
    @once("swiglu")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        flat = [_flat(tensor) for tensor in (laid_out_as(g, a.stride()), a, b, da, db)]
        gates = None
        for span in _spans(a.numel(), 1):
            gs, as_, bs, das, dbs = (tensor[span] for tensor in flat)
            if gates is None or len(gates) != len(gs):
                gates = torch.empty_like(gs)
            torch.ops.aten.silu.out(as_, out=dbs)
            torch.mul(gs, bs, out=gates)
            torch.ops.aten.silu_backward.grad_input(gates, as_, grad_input=das)
            dbs.mul_(gs)
        return da, db


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _swiglu(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    flat = [_flat(tensor) for tensor in (a, b, y)]
    for span in _spans(a.numel(), 1):
        as_, bs, ys = (tensor[span] for tensor in flat)
        torch.ops.aten.silu.out(as_, out=ys)
        ys.mul_(bs)
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up, of equal shapes and dtypes; keeps the two inputs alone.

    Inputs of different layouts, or with gaps, are torch's own.

    Raises:
        RuntimeError: from a second backward through the gradient.
    """
    if plain() or gate.shape != up.shape or gate.dtype != up.dtype or not gate.numel():
        return torch_silu(gate) * up
    stride = gate.stride()
    if stride != up.stride() or not fills(gate):
        return torch_silu(gate) * up
    result: Tensor = keep(_SwiGlu.apply, gate, up)

    def again(a: Tensor, b: Tensor) -> Tensor:
        return _swiglu(laid_out_as(a, stride), laid_out_as(b, stride))

    return attach(result, Recipe(again, source(gate), source(up)))


class _RmsNorm(torch.autograd.Function):
    """RMS norm of h = x + residual, returned with h; of x alone if `residual` is None.

    `same` is x once more: autograd adds the gradient's two summands one after the other to what x
    gets elsewhere, as it does for torch's norm.
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
        return y if residual is None else (h, y)

    @staticmethod
    @once("rms_norm")
    def backward(ctx: Any, *g: Tensor) -> tuple[Tensor | None, ...]:
        h, weight, scales = ctx.saved_tensors
        width, inner = h.shape[-1], scales.dtype
        dh = torch.empty_like(h)
        apart = torch.empty_like(h) if len(g) == 1 and inner == h.dtype else None
        second = None if apart is None else apart.view(-1, width)
        products = None if weight is None else torch.empty(h.shape, dtype=inner).view(-1, width)
        sums, grads, *given = (t.contiguous().view(-1, width) for t in (h, dh, *g))
        for span in _spans(sums.shape[0], width):
            block, scale, part = sums[span].to(inner), scales[span], given[-1][span].to(inner)
            if products is not None:
                normed = torch.mul(block, scale, out=products[span])
                scaled = part * weight
                normed.mul_(part)
                part = scaled
            # The formulas of autograd for x * rsqrt(mean(x^2) + eps), in its order of summands.
            inside = torch.mul(part, block)
            squares = inside.sum(-1, keepdim=True) * -0.5 * scale.pow(3) / width
            through = part * scale if weight is None else part.mul_(scale)
            if len(given) == 2 and inner == h.dtype:
                through.add_(given[0][span])
            torch.mul(block, 2, out=inside)
            if second is not None:
                grads[span] = through
                torch.mul(inside, squares, out=second[span])
                continue
            through.add_(inside.mul_(squares))
            if len(given) == 2 and inner != h.dtype:
                torch.add(given[0][span], through.to(h.dtype), out=grads[span])
            else:
                grads[span] = through
        dw = None if products is None else products.sum(0).to(weight.dtype)
        return dh, apart, (dh if len(given) == 2 else None), dw, None


def _rms_norm_into(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float | None,
    h: Tensor,
    y: Tensor,
) -> Tensor:
    """Writes h = x + residual, and its norm to y; returns the factor of each row (rows, 1)."""
    width, inner = x.shape[-1], torch.float32 if x.dtype.itemsize < 4 else x.dtype
    rows, sums, normed = (tensor.view(-1, width) for tensor in (x, h, y))
    others = None if residual is None else residual.view(-1, width)
    scales = torch.empty(len(rows), 1, dtype=inner)
    least = torch.finfo(inner).eps if eps is None else eps
    for span in _spans(len(rows), width):
        if others is not None:
            torch.add(rows[span], others[span], out=sums[span])
        block = sums[span].to(inner)
        squares = block.pow(2)
        torch.rsqrt(squares.mean(-1, keepdim=True).add_(least), out=scales[span])
        torch.mul(block, scales[span], out=squares)
        if weight is None:
            normed[span] = squares
        else:
            torch.mul(squares, weight, out=normed[span] if inner == y.dtype else squares)
            if inner != y.dtype:
                normed[span] = squares
    return scales


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    strict: bool = False,
) -> Tensor:
    """Returns torch's RMS norm over the last dimension; keeps the input alone.

    Norms over several dimensions, and norms under autocast, are torch's own.

    Raises:
        ConfigError: `strict` is set, and the input is of a dtype or on a device that is torch's own.
        RuntimeError: from a second backward through the gradient.
    """
    if not _blocks("rms_norm", input, normalized_shape, weight, strict):
        return torch_rms_norm(input, list(normalized_shape), weight, eps)
    x = input.contiguous()
    result: Tensor = keep(_RmsNorm.apply, x, x, None, weight, eps)
    return _normed(result, source(x), weight, eps)


def add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float | None = None
) -> tuple[Tensor, Tensor]:
    """Returns h = input + residual, of equal shapes and dtypes, and its norm; keeps h alone.

    Raises:
        RuntimeError: from a second backward through the gradient.
    """
    same = input.shape == residual.shape and input.dtype == residual.dtype
    shape = input.shape[-1:]
    if not same or not _blocks("add_rms_norm", input, shape, weight, False):
        h = input + residual
        return h, torch_rms_norm(h, list(shape), weight, eps)
    h, y = _RmsNorm.apply(  # type: ignore[no-untyped-call]
        input.contiguous(), None, residual.contiguous(), weight, eps
    )
    return h, _normed(y, h, weight, eps)


def _blocks(
    name: str, x: Tensor, shape: Sequence[int], weight: Tensor | None, strict: bool
) -> bool:
    if plain() or tuple(shape) != tuple(x.shape[-1:]) or not x.numel():
        return False
    if weight is not None and weight.dtype != x.dtype:
        return False
    return takes(name, x, strict) and not torch.is_autocast_enabled("cpu")


def _normed(y: Tensor, kept: Tensor | Recipe, weight: Tensor | None, eps: float | None) -> Tensor:
    # A copy, a row long: sharding may free the weight's memory before backward.
    scale = None if weight is None else weight.detach().clone()

    def again(h: Tensor) -> Tensor:
        h = h.contiguous()
        y = torch.empty_like(h)
        _rms_norm_into(h, None, scale, eps, h, y)
        return y

    return attach(y, Recipe(again, kept))
