"""Model of a training step: a rank's operations in order, and the line between hosts.

The model is pure: it has no clock and no process. A rank's program is a list of instructions. A
channel carries one communication at a time: the waiting one with the highest priority. Channels
share the line evenly. The cost of a communication follows from `Costs`, which `costs`
measures.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fireflyer.bench.train.models import Layer
from fireflyer.haiscale.gradients.buckets import plan
from fireflyer.haiscale.gradients.reducer import PIECE_BYTES

BUCKET_BYTES = 2 << 20
MOST_DIRECT = 8  # maximum number of hosts that all send to each other
STEPS = 6  # simulated steps; the first ones fill the pipeline


@dataclass(frozen=True)
class Costs:
    """Costs in seconds.

    Attributes:
        byte_s: per byte on a host's line.
        message_s: per hop: the latency of a message of any length.
        call_s: per collective call of any size.
        memory_byte_s: per byte of one rank that its host reduces in memory, if it has several
            ranks.
        copy_byte_s: per byte of gradients that a rank copies to the place of their reduction.
        optimizer_byte_s: per byte of parameters that the optimizer updates.
    """

    byte_s: float
    message_s: float
    call_s: float
    memory_byte_s: float
    copy_byte_s: float
    optimizer_byte_s: float

    def half(self, size: float, hosts: int, ranks_per_host: int) -> float:
        """Returns the seconds of a reduce-scatter or an all-gather of `size` bytes."""
        rounds = hosts - 1
        line = size * rounds / hosts * self.byte_s + rounds * self.message_s
        return self.call_s + max(line, self._in_memory(size, ranks_per_host) / 2)

    def allreduce(self, size: float, hosts: int, ranks_per_host: int) -> float:
        line = min(
            hops * self.message_s + sent * self.byte_s for hops, sent in programs(size, hosts)
        )
        return self.call_s + max(line, self._in_memory(size, ranks_per_host))

    def _in_memory(self, size: float, ranks_per_host: int) -> float:
        return size * ranks_per_host * self.memory_byte_s if ranks_per_host > 1 else 0.0


def programs(size: float, hosts: int) -> list[tuple[int, float]]:
    """Returns (hops in sequence, bytes on the busiest line) of each way to allreduce `size` bytes.

    The ways are a ring, a double tree and, among few hosts, direct sends between all:
    docs/hfreduce-network.md.
    """
    ring = 2 * (hosts - 1), 2 * size * (hosts - 1) / hosts
    tree = 2 * (hosts - 1).bit_length(), 2 * size
    direct = [(1, size * (hosts - 1))] if hosts <= MOST_DIRECT else []
    return [ring, tree, *direct]


class Compute(NamedTuple):
    seconds: float


class Start(NamedTuple):
    """Start of a communication, which needs `seconds` if it has the line alone."""

    channel: str
    name: object
    seconds: float
    priority: int = 0


class Wait(NamedTuple):
    name: object


class StepEnds(NamedTuple):
    pass


Instruction = Compute | Start | Wait | StepEnds


class _Line:
    """Line between hosts, in simulated time.

    Attributes:
        now: simulated time in seconds.
        done: names of the finished communications.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.done: set[object] = set()
        self._queues: dict[str, list[Start]] = {}
        self._carried: dict[str, tuple[object, float]] = {}  # by channel: name and seconds left

    def start(self, what: Start) -> None:
        self._queues.setdefault(what.channel, []).append(what)
        self._fill(what.channel)

    def _fill(self, channel: str) -> None:
        queue = self._queues[channel]
        if channel not in self._carried and queue:
            first = max(queue, key=lambda start: start.priority)
            queue.remove(first)
            self._carried[channel] = first.name, first.seconds

    def pass_time(self, most: float) -> None:
        """Advances the time until a communication ends, or by `most` seconds."""
        share = len(self._carried)
        left = min((left * share for _, left in self._carried.values()), default=most)
        passed = min(left, most)
        self.now += passed
        for channel, (name, still) in list(self._carried.items()):
            still -= passed / share
            if still <= 1e-12:
                self.done.add(name)
                del self._carried[channel]
                self._fill(channel)
            else:
                self._carried[channel] = name, still

    def compute(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end - 1e-12:
            self.pass_time(end - self.now)

    def wait(self, name: object) -> None:
        while name not in self.done:
            if not self._carried:
                raise ValueError(f"the program waits for {name}, which was not started")
            self.pass_time(float("inf"))


def simulate(program: Sequence[Instruction]) -> list[float]:
    """Returns the end of each step of a rank's program.

    Raises:
        ValueError: the program waits for a communication that was not started.
    """
    line, ends = _Line(), []
    for instruction in program:
        match instruction:
            case Compute(seconds):
                line.compute(seconds)
            case Start():
                line.start(instruction)
            case Wait(name):
                line.wait(name)
            case StepEnds():
                ends.append(line.now)
    return ends


@dataclass(frozen=True)
class Training:
    """Trained model, and the hosts and ranks that train it.

    Attributes:
        local_s: seconds of forward and backward of a rank, without copies and the optimizer.
    """

    layers: Sequence[Layer]
    local_s: float
    hosts: int
    ranks_per_host: int

    def forward_s(self) -> list[float]:
        """Returns the forward seconds of each layer; backward takes twice as long."""
        total = sum(layer.flops for layer in self.layers)
        return [self.local_s / 3 * layer.flops / total for layer in self.layers]


def ddp(training: Training, costs: Costs, crosses: bool = True) -> Iterator[Instruction]:
    """Yields the program of DDP: buckets start in the order of backward.

    With `crosses`, the next forward waits for them, and the bucket started last is carried first.
    """
    shapes = [
        (number, 4 * torch.Size(shape).numel())
        for number, layer in enumerate(training.layers)
        for shape in layer.shapes
    ]
    sizes = [size for _, size in shapes]
    cuts = plan(sizes, [0] * len(sizes), list(reversed(range(len(sizes)))), BUCKET_BYTES)
    bytes_of = [sum(sizes[i] for i in cut) for cut in cuts]
    pieces = [_pieces(size) for size in bytes_of]
    ready = [min(shapes[i][0] for i in cut) for cut in cuts]  # the layer whose backward comes last
    needs: list[list[int]] = [[] for _ in training.layers]
    for bucket, cut in enumerate(cuts):
        for layer in {shapes[i][0] for i in cut}:
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
                yield Compute(bytes_of[bucket] * costs.optimizer_byte_s)

        for layer, seconds in enumerate(forward_s):
            for bucket in needs[layer] if crosses else []:
                yield from arrive(bucket)
            yield Compute(seconds)
        for layer in reversed(range(len(forward_s))):
            yield Compute(2 * forward_s[layer])
            yield Compute(training.layers[layer].nbytes * costs.copy_byte_s)
            for bucket in [one for one, last in enumerate(ready) if last == layer]:
                for n, size in enumerate(pieces[bucket]):
                    seconds = costs.allreduce(size, training.hosts, training.ranks_per_host)
                    yield Start("reduce", (step, bucket, n), seconds, bucket if crosses else 0)
        if not crosses:
            for bucket in range(len(cuts)):
                yield from (Wait((step, bucket, n)) for n, _ in enumerate(pieces[bucket]))
                yield Compute(bytes_of[bucket] * costs.optimizer_byte_s)
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
    """Returns the units in the order of forward, and the outermost unit of the remaining layers."""
    numbers = sorted({layer.unit for layer in layers if layer.unit})
    inner = [[i for i, layer in enumerate(layers) if layer.unit == number] for number in numbers]
    root = [i for i, layer in enumerate(layers) if not layer.unit]
    made = [_Unit(one, sum(layers[i].nbytes for i in one)) for one in [*inner, root]]
    return made[:-1], made[-1]


class _Sharded:
    """Builder of the program of a sharded model."""

    def __init__(self, training: Training, costs: Costs) -> None:
        self._training, self._costs = training, costs
        self.units, self.root = _units(training.layers)
        self.forward_s = training.forward_s()
        first = min((unit.layers[0] for unit in self.units), default=len(self.forward_s))
        self.head = [i for i in self.root.layers if i < first]
        self.tail = [i for i in self.root.layers if i > first]

    def gather(self, unit: _Unit, step: int, way: str) -> Iterator[Instruction]:
        number = self._number(unit)
        if way == "forward" and step > 0:
            yield Wait(("reduced", step - 1, number))
            shard = unit.nbytes / (self._training.hosts * self._training.ranks_per_host)
            yield Compute(shard * self._costs.optimizer_byte_s)
        yield Start("gather", (way, step, number), self._half(unit))

    def gathered(self, unit: _Unit, step: int, way: str) -> Iterator[Instruction]:
        yield Wait((way, step, self._number(unit)))
        yield Compute(unit.nbytes * self._costs.copy_byte_s)

    def reduce(self, unit: _Unit, step: int) -> Iterator[Instruction]:
        """Reduces a unit; the unit that the next forward needs first has the highest priority."""
        yield Compute(unit.nbytes * self._costs.copy_byte_s)
        number = self._number(unit)
        yield Start("reduce", ("reduced", step, number), self._half(unit), -number)

    def forward(self, layers: Sequence[int]) -> Iterator[Instruction]:
        return (Compute(self.forward_s[i]) for i in layers)

    def backward(self, layers: Sequence[int]) -> Iterator[Instruction]:
        return (Compute(2 * self.forward_s[i]) for i in reversed(layers))

    def _number(self, unit: _Unit) -> int:
        return 0 if unit is self.root else 1 + self.units.index(unit)

    def _half(self, unit: _Unit) -> float:
        return self._costs.half(unit.nbytes, self._training.hosts, self._training.ranks_per_host)


def fsdp(training: Training, costs: Costs, reshard: bool = True) -> Iterator[Instruction]:
    """Yields the program of ZeRO-3, or of ZeRO-2 without `reshard`.

    Reductions continue into the next step, and the next unit is gathered while one computes.
    """
    model = _Sharded(training, costs)
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


Program = Callable[[Training, Costs], Iterator[Instruction]]
PROGRAMS: dict[str, Program] = {
    "ddp": ddp,
    "ddp, synchronous": lambda training, costs: ddp(training, costs, crosses=False),
    "ZeRO-3": fsdp,
    "ZeRO-2": lambda training, costs: fsdp(training, costs, reshard=False),
}


def step_s(kind: str, training: Training, costs: Costs) -> float:
    """Returns the seconds of a step in a long run.

    Args:
        kind: name in `PROGRAMS`.
    """
    ends = simulate(list(PROGRAMS[kind](training, costs)))
    return (ends[-1] - ends[2]) / (len(ends) - 3)
