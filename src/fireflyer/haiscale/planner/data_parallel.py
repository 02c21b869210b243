"""Steps of data-parallel training: a rank's computations, sends and waits, in order. Pure.

The programs follow the code of `ddp` and `fsdp`. Their times are arguments: measured times
(`fireflyer bench scaling`), or the times of a planned layout.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from fireflyer.haiscale.gradients.bucket_plan import DEFAULT_BUCKET_BYTES, PIECE_BYTES, plan
from fireflyer.haiscale.planner.overlap import (
    Compute,
    Instruction,
    Start,
    StepEnds,
    Wait,
    simulate,
)

STEPS = 6  # number of simulated steps; the first steps fill the pipeline


class Layer(Protocol):
    """Layer of a model.

    Attributes:
        sizes: bytes of each of the layer's parameters.
        flops: the layer's share of the model's operations, on any scale.
        unit: number of the unit with which the layer is sharded; 0 if it belongs only to the
            outermost unit.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def flops(self) -> float: ...
    @property
    def unit(self) -> int: ...


@dataclass(frozen=True)
class Prices:
    """Seconds of a rank's operations other than the layers themselves.

    Attributes:
        allreduce: function from a size in bytes to the seconds of its allreduce.
        half: function from a total size in bytes to the seconds of its all-gather or
            reduce-scatter.
        copy_byte_s: seconds per byte of gradients that a rank copies to the memory in which they
            are reduced.
        optimizer_byte_s: seconds per byte of parameters that the optimizer updates.
    """

    allreduce: Callable[[float], float]
    half: Callable[[float], float]
    copy_byte_s: float = 0.0
    optimizer_byte_s: float = 0.0


@dataclass(frozen=True)
class Training:
    """Trained model, and the ranks that train it.

    Attributes:
        local_s: seconds of a rank's forward and backward, without copies and the optimizer.
        ranks: number of ranks that share a sharded model.
    """

    layers: Sequence[Layer]
    local_s: float
    ranks: int

    def forward_s(self) -> list[float]:
        """Returns the forward seconds of each layer; backward takes twice as long."""
        total = sum(layer.flops for layer in self.layers)
        return [self.local_s / 3 * layer.flops / total for layer in self.layers]


def ddp(
    training: Training, prices: Prices, deferred: bool = True, before_s: float = 0.0
) -> Iterator[Instruction]:
    """Yields the program of DDP: buckets start in the order of backward.

    Args:
        deferred: True: the next forward waits for the buckets, and the bucket started last has the
            highest priority. False: the end of backward waits for all buckets.
        before_s: seconds of all micro-batches except the last one; their gradients are only
            accumulated.
    """
    layer_of = [n for n, layer in enumerate(training.layers) for _ in layer.sizes]
    sizes = [size for layer in training.layers for size in layer.sizes]
    cuts = plan(sizes, [0] * len(sizes), list(reversed(range(len(sizes)))), DEFAULT_BUCKET_BYTES)
    bytes_of = [sum(sizes[i] for i in cut) for cut in cuts]
    pieces = [_pieces(size) for size in bytes_of]
    ready = [min(layer_of[i] for i in cut) for cut in cuts]  # the layer whose backward comes last
    needs: list[list[int]] = [[] for _ in training.layers]
    for bucket, cut in enumerate(cuts):
        for layer in {layer_of[i] for i in cut}:
            needs[layer].append(bucket)
    forward_s = training.forward_s()
    for step in range(STEPS):
        arrived: set[int] = set()

        def arrive(
            bucket: int, of: int = step - 1, seen: set[int] = arrived
        ) -> Iterator[Instruction]:
            if of >= 0 and bucket not in seen:
                seen.add(bucket)
                yield from (Wait((of, bucket, n)) for n, _ in enumerate(pieces[bucket]))
                yield Compute(bytes_of[bucket] * prices.optimizer_byte_s)

        for layer, seconds in enumerate(forward_s):
            for bucket in needs[layer] if deferred else []:
                yield from arrive(bucket)
            yield Compute(seconds)
        yield Compute(before_s)
        for layer in reversed(range(len(forward_s))):
            yield Compute(2 * forward_s[layer])
            yield Compute(sum(training.layers[layer].sizes) * prices.copy_byte_s)
            for bucket in [one for one, last in enumerate(ready) if last == layer]:
                for n, size in enumerate(pieces[bucket]):
                    seconds = prices.allreduce(size)
                    yield Start("reduce", (step, bucket, n), seconds, bucket if deferred else 0)
        if not deferred:
            for bucket in range(len(cuts)):
                yield from (Wait((step, bucket, n)) for n, _ in enumerate(pieces[bucket]))
                yield Compute(bytes_of[bucket] * prices.optimizer_byte_s)
        yield StepEnds()


def _pieces(size: int) -> list[int]:
    """Returns the sizes of a bucket's pieces."""
    return [min(PIECE_BYTES, size - at) for at in range(0, size, PIECE_BYTES)]


@dataclass(frozen=True)
class _Unit:
    """Layers that are gathered and reduced together."""

    layers: list[int]
    nbytes: int


def _units(layers: Sequence[Layer]) -> tuple[list[_Unit], _Unit]:
    """Returns the units in the order of forward, and the outermost unit with all other layers."""
    numbers = sorted({layer.unit for layer in layers if layer.unit})
    inner = [[i for i, layer in enumerate(layers) if layer.unit == number] for number in numbers]
    root = [i for i, layer in enumerate(layers) if not layer.unit]
    made = [_Unit(one, sum(sum(layers[i].sizes) for i in one)) for one in [*inner, root]]
    return made[:-1], made[-1]


class _Sharded:
    """Builder of the program of a sharded model."""

    def __init__(self, training: Training, prices: Prices) -> None:
        self._training, self._prices = training, prices
        self.units, self.root = _units(training.layers)
        self.forward_s = training.forward_s()
        first = min((unit.layers[0] for unit in self.units), default=len(self.forward_s))
        self.head = [i for i in self.root.layers if i < first]
        self.tail = [i for i in self.root.layers if i > first]

    def gather(self, unit: _Unit, step: int, way: str) -> Iterator[Instruction]:
        number = self._number(unit)
        if way == "forward" and step > 0:
            yield Wait(("reduced", step - 1, number))
            shard = unit.nbytes / self._training.ranks
            yield Compute(shard * self._prices.optimizer_byte_s)
        yield Start("gather", (way, step, number), self._half(unit))

    def gathered(self, unit: _Unit, step: int, way: str) -> Iterator[Instruction]:
        yield Wait((way, step, self._number(unit)))
        yield Compute(unit.nbytes * self._prices.copy_byte_s)

    def reduce(self, unit: _Unit, step: int) -> Iterator[Instruction]:
        """Reduces a unit; the unit that the next forward needs first has the highest priority."""
        yield Compute(unit.nbytes * self._prices.copy_byte_s)
        number = self._number(unit)
        yield Start("reduce", ("reduced", step, number), self._half(unit), -number)

    def forward(self, layers: Sequence[int]) -> Iterator[Instruction]:
        return (Compute(self.forward_s[i]) for i in layers)

    def backward(self, layers: Sequence[int]) -> Iterator[Instruction]:
        return (Compute(2 * self.forward_s[i]) for i in reversed(layers))

    def _number(self, unit: _Unit) -> int:
        return 0 if unit is self.root else 1 + self.units.index(unit)

    def _half(self, unit: _Unit) -> float:
        return self._prices.half(unit.nbytes)


def fsdp(training: Training, prices: Prices, reshard: bool = True) -> Iterator[Instruction]:
    """Yields the program of ZeRO-3, or of ZeRO-2 without `reshard`.

    Reductions continue into the next step. While one unit computes, the next unit is gathered.
    """
    model = _Sharded(training, prices)
    root, units = model.root, model.units
    order = [root, *units] if root.layers else units
    for step in range(STEPS):
        yield from model.gather(order[0], step, "forward")
        for number, unit in enumerate(order):
            for following in order[number + 1 : number + 2]:
                yield from model.gather(following, step, "forward")
            yield from model.gathered(unit, step, "forward")
            yield from model.forward(model.head if unit is root else unit.layers)
        yield from model.forward(model.tail)
        yield from model.backward(model.tail)
        behind = units[::-1]
        for unit in behind[:1] if reshard else []:
            yield from model.gather(unit, step, "backward")
        for number, unit in enumerate(behind):
            if reshard:
                for following in behind[number + 1 : number + 2]:
                    yield from model.gather(following, step, "backward")
                yield from model.gathered(unit, step, "backward")
            yield from model.backward(unit.layers)
            yield from model.reduce(unit, step)
        if root.layers:
            yield from model.backward(model.head)
            yield from model.reduce(root, step)
        yield StepEnds()


Program = Callable[[Training, Prices], Iterator[Instruction]]
PROGRAMS: dict[str, Program] = {
    "ddp": ddp,
    "ddp, synchronous": lambda training, prices: ddp(training, prices, deferred=False),
    "ZeRO-3": fsdp,
    "ZeRO-2": lambda training, prices: fsdp(training, prices, reshard=False),
}


def step_s(kind: str, training: Training, prices: Prices) -> float:
    """Returns the seconds of a step in a long run.

    Args:
        kind: key of `PROGRAMS`.
    """
    return steady_s(PROGRAMS[kind](training, prices))


def steady_s(program: Iterable[Instruction]) -> float:
    """Returns the seconds of a step of a program in a long run."""
    ends = simulate(program)
    return (ends[-1] - ends[2]) / (len(ends) - 3)
