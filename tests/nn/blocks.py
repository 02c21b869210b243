"""Small models for the tests of to_hfai."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A transformer block: [batch, time, width] to the same."""

    def __init__(
        self,
        width: int = 32,
        act: type[nn.Module] = nn.GELU,
        p: float = 0.0,
        norm: type[nn.Module] = nn.LayerNorm,
    ) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = norm(width), norm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            act(),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, time, 3, 4, width // 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, time, width)))
        mlp: Tensor = self.drop(self.down(self.act(self.up(self.norm_2(x)))))
        return x + mlp


def transformer(
    act: type[nn.Module] = nn.GELU, p: float = 0.0, norm: type[nn.Module] = nn.LayerNorm
) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(act=act, p=p, norm=norm) for _ in range(2)))


class Residual(nn.Module):
    """Two convolutions beside a short cut: [batch, channels, height, width] to the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(self.relu(self.norm_1(self.conv_1(x)))))
        out: Tensor = self.relu(y + x)
        return out


def resnet() -> nn.Sequential:
    torch.manual_seed(0)
    stem: list[nn.Module] = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    return nn.Sequential(*stem, Residual(8), Residual(8), nn.Flatten(), nn.Linear(8 * 8 * 8, 10))
