"""Muon, the optimizer of the demo's matrices (Jordan et al., 2024)."""

from typing import Any

import torch
from torch import Tensor, nn


def orthogonalize(g: Tensor) -> Tensor:
    """Moves the singular values of matrices [..., rows, columns] towards 1 by 5 Newton-Schulz
    iterations."""
    wide = g if g.size(-2) <= g.size(-1) else g.mT
    x: Tensor = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if g.size(-2) <= g.size(-1) else x.mT


# The demo does not use torch.optim.Muon, because that class iterates in bfloat16. CPUs without
# bfloat16 instructions emulate bfloat16 slowly.
class Muon(torch.optim.Optimizer):
    """Momentum optimizer with orthogonalized steps, for the matrices inside a network."""

    separable = True

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(velocity, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)
