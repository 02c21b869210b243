"""Models whose kept bytes and step peaks are measured: plain eager torch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Transformer block; input and output are [batch, time, width]."""

    def __init__(self, width: int, act: type[nn.Module], p: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = width // 64, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width), act(), nn.Linear(4 * width, width),
        )  # fmt: skip
        self.drop_1, self.drop_2 = nn.Dropout(p), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.drop_1(self.proj(y.transpose(1, 2).reshape(batch, time, width)))
        mlp: Tensor = self.drop_2(self.down(self.act(self.up(self.norm_2(x)))))
        return x + mlp


class Gpt(nn.Module):
    """Token and position embeddings, blocks, a norm, and the mean loss of the next token."""

    def __init__(self, vocabulary: int, width: int, depth: int, time: int, p: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(time, width)
        self.blocks = nn.Sequential(*(Block(width, nn.GELU, p, True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        x = self.norm(self.blocks(x))
        return functional.linear_cross_entropy(
            x.flatten(0, 1), self.tokens.weight, targets.flatten()
        )


class Residual(nn.Module):
    """Basic block of a ResNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outside)
        self.conv_2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Identity() if stride == 1 else nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(self.relu(self.norm_1(self.conv_1(x)))))
        out: Tensor = self.relu(y + self.short(x))
        return out


def resnet18() -> nn.Module:
    """Makes ResNet-18 as published: from pictures [batch, 3, height, width] to 1,000 logits."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    blocks = [
        Residual(inside, outside, 2 if inside != outside and first else 1)
        for inside, outside in ((64, 64), (64, 128), (128, 256), (256, 512))
        for first, inside in ((True, inside), (False, outside))
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


class Head(nn.Module):
    """Last linear layer of a language model with its loss: from [rows, width] to a number."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) / width**0.5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.linear_cross_entropy(x, self.weight, targets)


@dataclass(frozen=True)
class Case:
    """Model with its inputs.

    Attributes:
        most: required maximum ratio of kept bytes to eager's, and the aim; None if there is none.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    most: tuple[float, float | None] | None


def block_of(act: type[nn.Module], p: float, causal: bool, width: int) -> Callable[[], nn.Module]:
    return lambda: Block(width, act, p, causal)


def tokens_of(vocabulary: int, batch: int, time: int) -> Callable[[], tuple[Tensor, ...]]:
    def make() -> tuple[Tensor, ...]:
        found = torch.randint(vocabulary, (batch, time + 1))
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    return make


def cases(scale: int) -> list[Case]:
    """Returns the models, with batches and widths divided by `scale`."""
    batch, width = max(1, 8 // scale), 384 // min(scale, 6)

    def sequence() -> tuple[Tensor, ...]:
        return (torch.randn(batch, 256, width, requires_grad=True),)

    def rows() -> tuple[Tensor, ...]:
        count, words = 2048 // scale, 32_768 // scale
        return torch.randn(count, 256, requires_grad=True), torch.randint(words, (count,))

    return [
        Case("GPT block, dropout 0.1", block_of(nn.GELU, 0.1, True, width), sequence, (0.60, 0.40)),
        Case("GPT block", block_of(nn.GELU, 0.0, True, width), sequence, None),
        Case("ViT block", block_of(nn.GELU, 0.0, False, width), sequence, (0.65, 0.40)),
        Case("ReLU block, dropout 0.1", block_of(nn.ReLU, 0.1, True, width), sequence, (0.75, None)),
        Case("ReLU block", block_of(nn.ReLU, 0.0, True, width), sequence, None),
        Case(
            "ResNet-18", resnet18, lambda: (torch.randn(batch, 3, 224 // min(scale, 4), 224),),
            (0.70, 0.55),
        ),
        Case(
            "LM head, 32k words", lambda: Head(32_768 // scale, 256), rows, (0.15, None),
        ),
    ]  # fmt: skip
