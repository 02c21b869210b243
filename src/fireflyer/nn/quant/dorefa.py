"""Weights, activations and gradients of few bits in training: DoReFa and Balanced Quantization.

Forward computes with the rounded values; backward treats rounding as the identity
(straight-through).

Sources: Zhou et al., arXiv 1606.06160 (DoReFa); Zhou et al., arXiv 1706.07145 (balanced).
"""

from typing import Any, Literal

import torch
from torch import Tensor

from fireflyer.errors import ConfigError

By = Literal["median", "mean"]
Scale = Literal["max", "fit"]

FULL = 32
"""Number of bits that means "not quantised"."""


def levels(bits: int) -> int:
    """Returns the greatest integer of `bits` bits.

    Raises:
        ConfigError: `bits` is not between 1 and 16.
    """
    if not 1 <= bits <= 16:
        raise ConfigError(f"invalid bits '{bits}': expected 1 to 16, or {FULL} for none")
    return int(2**bits - 1)


class _Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, rounded: Tensor) -> Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None


def _straight(value: Tensor, rounded: Tensor) -> Tensor:
    """Returns the rounded value, with the gradient of `value`."""
    found: Tensor = _Straight.apply(value, rounded)  # type: ignore[no-untyped-call]
    return found


def rounded(x: Tensor, bits: int) -> Tensor:
    """Rounds x, which lies between 0 and 1, to the nearest of 2^bits levels; straight-through."""
    most = levels(bits)
    return _straight(x, (x.detach() * most).round() / most)


def quantize_weights(weight: Tensor, bits: int) -> Tensor:
    """Returns weights at 2^bits levels between -1 and 1; for one bit, at +/- their mean magnitude.

    Raises:
        ConfigError: `bits` is neither 1 to 16 nor 32 (32 returns `weight` itself).
    """
    if bits == FULL:
        return weight
    levels(bits)
    if bits == 1:
        size = weight.detach().abs().mean()
        return _straight(weight, torch.where(weight.detach() < 0, -size, size))
    squashed = weight.tanh()
    most = squashed.detach().abs().max().clamp_min(torch.finfo(weight.dtype).tiny)
    return 2 * rounded(squashed / (2 * most) + 0.5, bits) - 1


def quantize_activations(x: Tensor, bits: int) -> Tensor:
    """Clips x to [0, 1] and rounds it to 2^bits levels.

    Raises:
        ConfigError: `bits` is neither 1 to 16 nor 32 (32 returns `x` itself).
    """
    return x if bits == FULL else rounded(x.clamp(0, 1), bits)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return quantized_gradient(g, ctx.bits), None


def quantize_gradients(x: Tensor, bits: int) -> Tensor:
    """Returns x; quantises its gradient to `bits` bits with random rounding, row by row.

    Raises:
        ConfigError: `bits` is neither 1 to 16 nor 32 (32 returns `x` itself).
    """
    if bits == FULL:
        return x
    levels(bits)
    found: Tensor = _Gradients.apply(x, bits)  # type: ignore[no-untyped-call]
    return found


def quantized_gradient(g: Tensor, bits: int) -> Tensor:
    """Rounds a gradient (batch, ...) at random to 2^bits levels per row.

    The expected value of the result is the gradient. The noise comes from torch's generator. The
    scale is twice the largest magnitude in a row.
    """
    most = levels(bits)
    rows = g.reshape(len(g), -1) if g.dim() > 1 else g.reshape(1, -1)
    if not rows.numel():
        return g
    scale = 2 * rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)
    noise = (torch.rand_like(rows) - 0.5) / most
    places = (rows / scale + 0.5 + noise).mul_(most).round_().clamp_(0, most)
    return (scale * (places / most - 0.5)).view(g.shape)


def bins(weight: Tensor, bits: int, by: By = "median") -> Tensor:
    """Returns the bin, 0 to 2^bits - 1, of each weight.

    All weights start in one set. Each of `bits` steps splits every set in two.

    Args:
        by: "median" makes bins of equal counts; "mean" splits at means, without a sort.

    Raises:
        ConfigError: `bits` is not 1 to 16, or `by` is unknown.
    """
    most = levels(bits)
    flat = weight.detach().flatten()
    if by == "median":
        order = flat.argsort(stable=True)
        ranks = torch.empty_like(order)
        ranks[order] = torch.arange(len(flat), device=flat.device)
        return (ranks * (most + 1) // max(len(flat), 1)).view(weight.shape)
    if by != "mean":
        raise ConfigError(f"invalid by '{by}': expected median or mean")
    found = torch.zeros_like(flat, dtype=torch.int64)
    for _ in range(bits):
        counts = torch.bincount(found, minlength=most + 1).clamp_min(1)
        sums = torch.zeros(most + 1, dtype=flat.dtype, device=flat.device).index_add_(
            0, found, flat
        )
        found = 2 * found + (flat > (sums / counts)[found])
    return found.view(weight.shape)


def equalize(weight: Tensor, bits: int, by: By = "median", scale: Scale = "max") -> Tensor:
    """Returns balanced weights: bins of equal counts at 2^bits evenly spaced levels;
    straight-through.

    Args:
        by: as for `bins`.
        scale: magnitude of the outermost levels. "max": the largest magnitude of a weight, as
            published; "fit": the magnitude with the least squared error.

    Raises:
        ConfigError: `bits` is neither 1 to 16 nor 32 (which returns `weight`), or `by` or `scale`
            is unknown.
    """
    if bits == FULL:
        return weight
    if scale not in ("max", "fit"):
        raise ConfigError(f"invalid scale '{scale}': expected max or fit")
    even = bins(weight, bits, by).to(weight.dtype) * (2 / levels(bits)) - 1
    given = weight.detach()
    if scale == "max":
        size = given.abs().amax() if given.numel() else given.new_zeros(())
    else:
        size = (given * even).sum() / even.square().sum().clamp_min(torch.finfo(even.dtype).tiny)
    return _straight(weight, even * size)


def bin_entropy(weight: Tensor, bits: int, by: By = "median") -> float:
    """Returns the entropy of the bins' occupancy in bits: `bits` if all are equally full."""
    counts = torch.bincount(bins(weight, bits, by).flatten(), minlength=2**bits).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum())
