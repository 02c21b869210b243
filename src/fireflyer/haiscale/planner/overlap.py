"""Overlap of a rank's computation with its communication, in simulated time. Pure.

A rank's program is a list of instructions. A channel carries one communication at a time. When it
is free, it starts the waiting communication with the highest priority. Channels share the network
link between hosts evenly.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class Compute(NamedTuple):
    seconds: float


class Start(NamedTuple):
    """Start of a communication, which takes `seconds` if no other channel uses the link."""

    channel: str
    name: object
    seconds: float
    priority: int = 0


class Wait(NamedTuple):
    name: object


class StepEnds(NamedTuple):
    pass


Instruction = Compute | Start | Wait | StepEnds


class _Link:
    """Network link between hosts, in simulated time.

    Attributes:
        now: simulated time in seconds.
        done: names of the finished communications.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.done: set[object] = set()
        self._queues: dict[str, list[tuple[int, int, Start]]] = {}  # by priority, then by age
        self._started = 0
        self._carried: dict[str, tuple[object, float]] = {}  # by channel: name and seconds left

    def start(self, what: Start) -> None:
        self._started += 1
        queue = self._queues.setdefault(what.channel, [])
        heapq.heappush(queue, (-what.priority, self._started, what))
        self._fill(what.channel)

    def _fill(self, channel: str) -> None:
        queue = self._queues[channel]
        if channel not in self._carried and queue:
            _, _, first = heapq.heappop(queue)
            self._carried[channel] = first.name, first.seconds

    def pass_time(self, most: float) -> None:
        """Advances the time until a communication ends, but by at most `most` seconds."""
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


def simulate(program: Iterable[Instruction]) -> list[float]:
    """Returns the end of each step of a rank's program.

    Raises:
        ValueError: the program waits for a communication that was not started.
    """
    link, ends = _Link(), []
    for instruction in program:
        match instruction:
            case Compute(seconds):
                link.compute(seconds)
            case Start():
                link.start(instruction)
            case Wait(name):
                link.wait(name)
            case StepEnds():
                ends.append(link.now)
    return ends
