"""Router that chooses experts for tokens and keeps the experts' loads even."""

import torch
from torch import nn
from torch.nn import functional


class Router(nn.Module):
    """Softmax router that chooses the `top_k` experts with the greatest scores.

    The weights of a token's experts are their scores, divided by the sum of the chosen scores.

    Attributes:
        weight: (experts, features).
        bias: (experts,) added to scores for the choice only; `update_bias` changes it.
    """

    bias: torch.Tensor

    def __init__(self, features: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(experts, features) / features**0.5)
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns scores (tokens, experts), chosen experts (tokens, top_k) and their weights."""
        logits = functional.linear(x, self.weight)
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        scores = logits.softmax(-1)
        chosen = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return scores, chosen, weights / weights.sum(-1, keepdim=True)

    def update_bias(self, loads: torch.Tensor, rate: float = 1e-3) -> None:
        """Lowers the bias of experts above the mean load by `rate`, and raises that of all others.

        Args:
            loads: (experts,) number of tokens that each expert received on all ranks.
        """
        wide = loads.to(self.bias.dtype)
        self.bias += rate * (wide.mean() - wide).sign()
