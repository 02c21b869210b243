"""Models of `bench train`: stubs, whose layers compute by sleeping, and a real GPT.

A sleep frees the core, as computation on a device does. A layer of a stub has parameters with the
real layer's shapes. It sleeps for its share of the model's floating-point operations: a third of
the time in forward and the rest in backward. The layer's gradients are ready at once: they are
slices of one random tensor. All ranks of a machine share that tensor, each at another offset.
Autograd uses the slices without a copy.
"""

import itertools
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
_APART = 1024  # number of elements between the gradients of two ranks


@dataclass(frozen=True)
class Layer:
    """Layer of a model.

    Attributes:
        shapes: shapes of the layer's parameters.
        flops: the layer's share of the model's operations, on any scale.
        unit: number of the unit with which the layer is sharded; 0 if it belongs only to the whole
            model.
    """

    shapes: tuple[Shape, ...]
    flops: float
    unit: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each parameter, in bytes."""
        return tuple(4 * torch.Size(shape).numel() for shape in self.shapes)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Payload:
    """Bytes of all parameters (`whole`), and of those outside all sharded units (`root`)."""

    whole: int
    root: int


def payload(layers: Sequence[Layer]) -> Payload:
    return Payload(
        sum(layer.nbytes for layer in layers),
        sum(layer.nbytes for layer in layers if not layer.unit),
    )


@dataclass(frozen=True)
class Sizes:
    """Sizes of the models; the default GPT has 17.0 M parameters, the default VGG16 138 M."""

    vocabulary: int = 8320
    context: int = 128
    width: int = 384
    layers: int = 6
    heads: int = 6
    channels: int = 64
    """Number of channels of VGG's first layer; all other layers are in proportion."""


@dataclass
class Workload:
    """Module of a candidate, with its optimizer and loss.

    Attributes:
        units: parts of the module that can be sharded separately.
    """

    module: nn.Module
    units: list[nn.Module]
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
    """Layer that maps x [1] to x; it sleeps `seconds` in forward and backward together."""

    def __init__(self, layer: Layer, pool: Tensor) -> None:
        super().__init__()
        self.seconds = 0.0
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in layer.shapes)
        self._shapes, self._pool = layer.shapes, pool

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            weight.detach()  # accesses it as a real layer does: the wrapper waits for a pending update
        result: Tensor = _Sleep.apply(x, self, *self.weights)  # type: ignore[no-untyped-call]
        return result

    def gradients(self) -> list[Tensor]:
        """Returns a separate tensor object for each parameter, so that autograd does not copy
        it."""
        return [self._pool[: torch.Size(shape).numel()].view(shape) for shape in self._shapes]


class SleepModel(nn.Sequential):
    """Model of sleeping layers.

    Args:
        pool: random numbers, at least as many as the largest parameter has elements; only read.
    """

    def __init__(self, layers: Sequence[Layer], pool: Tensor) -> None:
        sleepers = [SleepLayer(layer, pool) for layer in layers]
        parts: list[nn.Module] = []
        for unit, group in itertools.groupby(zip(layers, sleepers, strict=True), _unit):
            members = [sleeper for _, sleeper in group]
            parts += [nn.Sequential(*members)] if unit else members
        super().__init__(*parts)
        self.sleepers = sleepers
        self._shares = [layer.flops / sum(each.flops for each in layers) for layer in layers]

    def pace(self, seconds: float) -> None:
        """Sets the seconds that forward and backward together take from now on."""
        for sleeper, share in zip(self.sleepers, self._shares, strict=True):
            sleeper.seconds = seconds * share


def _unit(pair: tuple[Layer, SleepLayer]) -> int:
    return pair[0].unit


def pool_for(layers: Sequence[Layer], ranks: int) -> Tensor:
    """Returns the gradients for the stubs of all ranks.

    Call this function before the ranks are forked, so that they share the memory.
    """
    largest = max(torch.Size(shape).numel() for layer in layers for shape in layer.shapes)
    random = torch.Generator().manual_seed(0)
    return torch.randn(largest + ranks * _APART, generator=random).mul_(1e-3)


def stub(layers: Sequence[Layer], pool: Tensor, rank: int) -> Workload:
    model = SleepModel(layers, pool[rank * _APART :])
    x = torch.ones(1, requires_grad=True)
    units = [part for part in model if not isinstance(part, SleepLayer)]
    return Workload(model, units, _sgd, lambda wrapped: wrapped(x).sum())


def pace(work: Workload, seconds: float) -> None:
    """Sets the seconds that a stub's forward and backward together take from now on."""
    assert isinstance(work.module, SleepModel)
    work.module.pace(seconds)


def _sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def even_layers(sizes: Sizes, count: int = 26) -> list[Layer]:
    """Returns equal layers that have as many parameters as the GPT."""
    elements = payload(gpt_layers(sizes)).whole // 4
    return [Layer(((elements // count,),), 1.0, 1 + number // 4) for number in range(count)]


def gpt_layers(sizes: Sizes) -> list[Layer]:
    """Returns the layers of the demo's GPT.

    The embedding computes nothing; the matrices have equal work per parameter.
    """
    with torch.device("meta"):
        model = GPT(sizes.vocabulary, sizes.context, sizes.width, sizes.layers, sizes.heads)
    layers = [Layer((tuple(model.embedding.weight.shape),), 0.0)]
    for number, block in enumerate(model.blocks):
        layers += [_matrix(weight, 1 + number) for weight in block.parameters()]
    return [*layers, _matrix(model.head.weight)]


def _matrix(weight: Tensor, unit: int = 0) -> Layer:
    return Layer((tuple(weight.shape),), float(weight.numel()), unit)


def vgg_layers(sizes: Sizes) -> list[Layer]:
    """Returns the layers of VGG16 for 224 x 224 images and 1000 classes.

    The source is Simonyan and Zisserman, 2015, configuration D.
    """
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
    """Returns the real GPT with AdamW and one sample of random tokens per rank."""
    torch.manual_seed(0)
    model = GPT(sizes.vocabulary, sizes.context, sizes.width, sizes.layers, sizes.heads)
    for block in model.blocks:
        assert isinstance(block, Block)
        for matrix in (block.out, block.down):  # zeros would keep all other gradients at zero
            nn.init.normal_(matrix.weight, std=0.02)
    nn.init.normal_(model.head.weight, std=0.02)
    random = torch.Generator().manual_seed(rank)
    tokens = torch.randint(sizes.vocabulary, (1, sizes.context + 1), generator=random)

    def loss(wrapped: nn.Module) -> Tensor:
        logits = wrapped(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    units = list(model.blocks)
    return Workload(model, units, _adamw, loss)


def _adamw(parameters: Any) -> Optimizer:
    """Returns fused AdamW, which on a CPU makes one call instead of a dozen per parameter.

    DTensors make each call expensive.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)
