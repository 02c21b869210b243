"""A model with two MoE layers for tests, and its training on shares of tokens."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fireflyer.haiscale.expert import MoE

WIDTH, HIDDEN, EXPERTS, TOP, TOKENS, STEPS = 8, 12, 8, 3, 24, 3


class Model(nn.Module):
    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = MoE(WIDTH, HIDDEN, EXPERTS, TOP, shared=1, **options)
        self.second = MoE(WIDTH, HIDDEN, EXPERTS, TOP, **options)
        self.norm = nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        y: torch.Tensor = x + self.second(self.norm(x))
        return y


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    return x, y


def loss_of(model: Model, x: torch.Tensor, y: torch.Tensor, ranks: int) -> torch.Tensor:
    """This rank's part of the loss, so that the mean over ranks is that of all tokens."""
    error = (model(x) - y).square().sum() * ranks / (TOKENS * WIDTH)
    loss: torch.Tensor = error + 0.1 * (model.first.aux_loss + model.second.aux_loss)
    return loss


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)
