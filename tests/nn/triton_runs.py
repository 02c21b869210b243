"""Triton's kernels on CPUs, interpreted, against torch's operators; prints "triton: ok".

The interpreter cuts bfloat16 off where GPUs round, so its results differ by a unit there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as theirs

from fireflyer.nn import backend, native, triton_calls
from fireflyer.nn import functional as ours

TYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def compare(operators: tuple[Callable[..., Any], ...], *inputs: Tensor, exact: bool) -> None:
    """Checks values and gradients: equal, or within a few roundings of the largest."""
    found = []
    for operator in operators:
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = operator(*leaves)
        outputs = y if isinstance(y, tuple) else (y,)
        grads = [
            normal(*one.shape, dtype=one.dtype, seed=9) if one.dim() else None for one in outputs
        ]
        torch.autograd.backward(outputs, grads)
        found.append([*outputs, *(leaf.grad for leaf in leaves)])
    for mine, its in zip(*found, strict=True):
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
        if exact:
            assert torch.equal(mine.nan_to_num(5), its.nan_to_num(5))
        else:
            apart = (mine.double() - its.double()).abs().max().item()
            largest = its.double().abs().max().item()
            assert apart <= ROUNDING[mine.dtype] * largest, (apart, largest, mine.dtype)


def elementwise(dtype: torch.dtype) -> None:
    x = normal(17, 71, dtype=dtype, seed=0)
    x[0, :6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 6.0, float("nan")])
    for name in ("relu", "relu6", "leaky_relu"):
        sound = x if name == "relu" else x.nan_to_num(3, 9, -9)
        exact = name != "leaky_relu" or dtype != torch.bfloat16
        compare((getattr(ours, name), getattr(theirs, name)), sound, exact=exact)
    turned = x.nan_to_num(3).t()
    compare((ours.relu, theirs.relu), turned, exact=True)


def masks(dtype: torch.dtype) -> None:
    x = normal(5000, dtype=dtype, seed=1)
    for seed in (7, 2**62 + 12345):
        mine, its = torch.empty_like(x), torch.empty_like(x)
        triton_calls.drop(x, mine, seed, 2**32 // 5, 1.25)
        native.drop(x, its, seed, 2**32 // 5, 1.25)
        assert torch.equal(mine == 0, its == 0)
        assert torch.equal(mine, its) or dtype == torch.bfloat16
        assert 0.15 < (mine == 0).float().mean().item() < 0.25
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = ours.dropout(leaf, 0.2)
    y.backward(torch.ones_like(y))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad != 0, (y != 0) | (x == 0))


def norms(dtype: torch.dtype) -> None:
    def added(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        h = x + residual
        return h, theirs.rms_norm(h, (70,), weight)

    x, residual = (normal(40, 70, dtype=dtype, seed=seed) for seed in (2, 3))
    weight = normal(70, dtype=dtype, seed=4)
    compare((ours.add_rms_norm, added), x, residual, weight, exact=False)
    for extra in ((), (weight,)):
        pair = tuple(lambda x, *w, f=f: f(x, (70,), *w) for f in (ours.rms_norm, theirs.rms_norm))
        compare(pair, x, *extra, exact=False)


def gates(dtype: torch.dtype) -> None:
    inputs = (normal(17, 71, dtype=dtype, seed=seed) for seed in (5, 6))
    compare((ours.swiglu, lambda a, b: theirs.silu(a) * b), *inputs, exact=False)


def losses(dtype: torch.dtype) -> None:
    x, weight = normal(15, 24, dtype=dtype, seed=7) / 8, normal(5000, 24, dtype=dtype, seed=8) / 8
    target = torch.arange(15) * 151
    target[::7] = -100
    for reduction in ("mean", "sum"):
        pair = tuple(
            lambda x, w, f=f, reduction=reduction: f(x, w, target, reduction=reduction)
            for f in (ours.linear_cross_entropy, theirs.linear_cross_entropy)
        )
        compare(pair, x, weight, exact=False)


def main() -> None:
    backend.MODULES["cpu"] = "triton_calls"
    triton_calls._PROGRAMS = 16
    assert backend.kernels("relu", torch.ones(1)) is triton_calls
    assert backend.kernels("relu", torch.ones(1, dtype=torch.float64)) is None
    for dtype in TYPES:
        for run in (elementwise, masks, norms, gates, losses):
            run(dtype)
    print("triton: ok")


if __name__ == "__main__":
    main()
