"""What `bench train` trains: models whose layers compute by sleeping, and a real GPT.

A sleep frees the core, as a device that computes would. A layer of the stub has parameters of the real
layer's shapes, sleeps for its share of the model's floating-point operations, a third of it in forward and
the rest in backward, and its gradients are there at once: slices of one random tensor that all ranks of a
machine share (each begins at another place), which autograd takes over without a copy.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from fireflyer.demo.gpt import GPT, Block

Shape = tuple[int, ...]
_APART = 1024  # elements between the gradients of two ranks


@dataclass(frozen=True)
class Layer:
    """Shapes of a layer's parameters, and its share of the model's operations in any unit."""

    shapes: tuple[Shape, ...]
    flops: float


@dataclass(frozen=True)
class Sizes:
    """Of the models; the default GPT has 17.0 M parameters, the default VGG16 138 M."""

    vocabulary: int = 8320
    context: int = 128
    width: int = 384
    layers: int = 6
    heads: int = 6
    channels: int = 64
    """Of VGG's first layer; the others are in proportion."""


@dataclass
class Workload:
    """What a candidate wraps and trains."""

    module: nn.Module
    optimizer: Callable[[Any], Optimizer]
    loss: Callable[[nn.Module], Tensor]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "SleepLayer", *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.layer.seconds * 2 / 3)
        return grad.clone(), None, *ctx.layer.gradients()


class SleepLayer(nn.Module):
    """x [1] to the same; `seconds` in forward and backward together."""

    def __init__(self, layer: Layer, pool: Tensor) -> None:
        super().__init__()
        self.seconds = 0.0
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in layer.shapes)
        self._shapes, self._pool = layer.shapes, pool

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Sleep.apply(x, self, *self.weights)  # type: ignore[no-untyped-call]
        return result

    def gradients(self) -> list[Tensor]:
        """A tensor of its own each, so that autograd keeps it instead of a copy."""
        return [self._pool[: torch.Size(shape).numel()].view(shape) for shape in self._shapes]


class SleepModel(nn.Sequential):
    """Args: pool: at least as many random numbers as the largest parameter has elements; only read."""

    def __init__(self, layers: Sequence[Layer], pool: Tensor) -> None:
        super().__init__(*(SleepLayer(layer, pool) for layer in layers))
        self._shares = [layer.flops / sum(each.flops for each in layers) for layer in layers]

    def pace(self, seconds: float) -> None:
        """From now on forward and backward together last so long."""
        for layer, share in zip(self, self._shares, strict=True):
            assert isinstance(layer, SleepLayer)
            layer.seconds = seconds * share


def pool_for(layers: Sequence[Layer], ranks: int) -> Tensor:
    """Gradients for stubs of all ranks; to be made before they are forked, so that they share it."""
    largest = max(torch.Size(shape).numel() for layer in layers for shape in layer.shapes)
    random = torch.Generator().manual_seed(0)
    return torch.randn(largest + ranks * _APART, generator=random).mul_(1e-3)


def stub(layers: Sequence[Layer], pool: Tensor, rank: int) -> Workload:
    model = SleepModel(layers, pool[rank * _APART :])
    x = torch.ones(1, requires_grad=True)
    return Workload(model, _sgd, lambda wrapped: wrapped(x).sum())


def pace(work: Workload, seconds: float) -> None:
    """From now on a stub's forward and backward together last so long."""
    assert isinstance(work.module, SleepModel)
    work.module.pace(seconds)


def _sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def even_layers(sizes: Sizes, count: int = 26) -> list[Layer]:
    """As many parameters as the GPT has, in equal layers."""
    total = sum(torch.Size(s).numel() for layer in gpt_layers(sizes) for s in layer.shapes)
    return [Layer(((total // count,),), 1.0)] * count


def gpt_layers(sizes: Sizes) -> list[Layer]:
    """The demo's GPT: an embedding that computes nothing, matrices of equal work a parameter."""
    with torch.device("meta"):
        model = GPT(sizes.vocabulary, sizes.context, sizes.width, sizes.layers, sizes.heads)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return [
        Layer((shape,), 0.0 if index == 0 else float(torch.Size(shape).numel()))
        for index, shape in enumerate(shapes)
    ]


def vgg_layers(sizes: Sizes) -> list[Layer]:
    """VGG16 for 224 x 224 images and 1000 classes (Simonyan and Zisserman, 2015, configuration D)."""
    c = sizes.channels
    plan = ((c, 2, 224), (2 * c, 2, 112), (4 * c, 3, 56), (8 * c, 3, 28), (8 * c, 3, 14))
    layers, before = [], 3
    for channels, count, side in plan:
        for _ in range(count):
            weight = (channels, before, 3, 3)
            layers.append(Layer((weight, (channels,)), torch.Size(weight).numel() * side**2))
            before = channels
    for out, features in ((64 * c, before * 49), (64 * c, 64 * c), (1000, 64 * c)):
        layers.append(Layer(((out, features), (out,)), out * features))
    return layers


def gpt(sizes: Sizes, rank: int) -> Workload:
    """The real one, with one sample of random tokens a rank and AdamW."""
    torch.manual_seed(0)
    model = GPT(sizes.vocabulary, sizes.context, sizes.width, sizes.layers, sizes.heads)
    for block in model.blocks:
        assert isinstance(block, Block)
        for matrix in (block.out, block.down):  # zeros would keep the gradients of the others zero
            nn.init.normal_(matrix.weight, std=0.02)
    nn.init.normal_(model.head.weight, std=0.02)
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randint(sizes.vocabulary, (1, sizes.context + 1), generator=random)

    def loss(wrapped: nn.Module) -> Tensor:
        logits = wrapped(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), loss)
