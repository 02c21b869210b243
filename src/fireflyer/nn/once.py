"""Rejection of second derivatives for operators without second derivatives."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, _anchor: Tensor, name: str) -> Tensor:
        ctx.name = name
        return g.view_as(g)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Grads:
        raise RuntimeError(
            f"{ctx.name}: the gradient of its gradient is not supported: use torch's operator there"
        )


def once(name: str) -> Callable[[Callable[..., Grads]], Callable[..., Grads]]:
    """Returns a decorator of `backward` whose results cannot be differentiated.

    Unlike torch's `once_differentiable`, it rejects second derivatives even if the incoming
    gradient requires no gradient, because the results also depend on the saved tensors.
    """

    def decorated(backward: Callable[..., Grads]) -> Callable[..., Grads]:
        @functools.wraps(backward)
        def guarded(ctx: Any, *g: Any) -> Grads:
            with torch.no_grad():
                found = backward(ctx, *g)
            if not torch.is_grad_enabled():
                return found
            anchor = torch.empty(0, requires_grad=True, device="cpu")
            return tuple(
                None if d is None else _Refusal.apply(d, anchor, name)  # type: ignore[no-untyped-call]
                for d in found
            )

        return guarded

    return decorated
