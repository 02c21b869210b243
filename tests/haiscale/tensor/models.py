"""A language model for the tests of tensor parallelism, and its training."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from fireflyer.haiscale.tensor import Column, Row, Sequence, Vocabulary, cross_entropy

WORDS, WIDTH, HEAD, LENGTH, BATCH, STEPS = 24, 16, 4, 8, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of its bias is rounding only
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            part(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.blocks(self.words(x))))
        return y


def plan(sequence: bool) -> dict[str, Any]:
    column, row = Column(sequence=sequence), Row(sequence=sequence)
    styles: dict[str, Any] = {
        "words": Vocabulary(sequence=sequence),
        "blocks.*.[qkv]": column,
        "blocks.*.up": column,
        "blocks.*.out": row,
        "blocks.*.down": row,
        "head": column,
    }
    return {**styles, "norm": Sequence(), "blocks.*.norm?": Sequence()} if sequence else styles


def data(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def targets_of(batch: torch.Tensor) -> torch.Tensor:
    targets = batch[:, 1:].clone()
    targets[:, 2] = -100  # as many in each share of the batch
    return targets


def train(model: nn.Module, share: slice, group: dist.ProcessGroup | None) -> Any:
    """Trains a share of each batch; with a group, logits are split over it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = data(step)[share]
        optimizer.zero_grad()
        logits, targets = model(batch[:, :-1]), targets_of(batch)
        if group is None:
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            loss = cross_entropy(logits, targets, group)
        loss.backward()
        optimizer.step()
    return optimizer


def init(path: str, rank: int, world: int) -> None:
    store = dist.FileStore(path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def worst(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Greatest norm of a difference over the norm, over all tensors."""
    assert found.keys() == expected.keys()
    return max(
        float((torch.as_tensor(found[name]) - value).norm() / value.norm().clamp(min=1e-30))
        for name, value in expected.items()
    )


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """A state with whole arrays. Collective."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).numpy()
        for name, value in state.items()
    }
