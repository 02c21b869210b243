"""Time, chance and the network of one simulated history: all of it follows from a seed.

One queue of events in true time. A process sees its own clock, whose rate is within half a per cent
of true, and only acts while it lives: events of a dead process are dropped, those of a frozen one
wait. Nothing here reads a real clock or iterates over a set of objects, so a seed gives the same
history everywhere.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

Action = Callable[..., object]
Link = tuple[str, str]  # from, to
DRIFT = 0.0049  # of a clock's rate


class World:
    """The queue, the generator of chances, and the transcript (kept only where `traced`)."""

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.traced = traced
        self.transcript: list[str] = []
        self.after_each: Action | None = None
        self._queue: list[tuple[float, int, Process | None, Action, tuple[Any, ...]]] = []
        self._count = 0
        self.events = 0

    def at(self, moment: float, process: "Process | None", action: Action, *args: Any) -> None:
        """Runs `action(*args)` at true time `moment`, if `process` (None: nature) lives then."""
        self._count += 1
        heapq.heappush(self._queue, (moment, self._count, process, action, args))

    def after(self, delay: float, action: Action, *args: Any) -> None:
        """An event of nature in `delay` true seconds."""
        self.at(self.now + delay, None, action, *args)

    def note(self, who: str, what: str) -> None:
        """One line of the transcript. Callers ask `traced` first where making `what` costs something."""
        if self.traced:
            self.transcript.append(f"{self.now:11.6f} {who:<7} {what}")

    def run(self, until: float) -> None:
        """Runs events up to true time `until`."""
        queue, pop, count = self._queue, heapq.heappop, 0
        while queue and queue[0][0] <= until:
            moment, _, process, action, args = pop(queue)
            self.now = moment
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen_until > moment:
                    self.at(process.frozen_until, process, action, *args)
                    continue
            count += 1
            action(*args)
        self.events += count
        self.now = until


@dataclass(frozen=True)
class Weather:
    """How the network of a history behaves: chances per message, delays in seconds."""

    delay: float = 0.0002
    slow_chance: float = 0.02
    slow: float = 0.02
    late_chance: float = 0.0
    late: float = 1.0
    loss: float = 0.0
    twice: float = 0.0


@dataclass
class Network:
    """Carries messages between names. Any message may be delayed, lost, doubled, overtaken; a request
    reaches whichever process bears the name when it arrives, an answer only the very process that
    asked (its connection)."""

    world: World
    weather: Weather = field(default_factory=Weather)
    processes: dict[str, "Process"] = field(default_factory=dict)
    cut: set[Link] = field(default_factory=set)
    lag: dict[Link, float] = field(default_factory=dict)
    """Seconds that every message of a link takes longer."""
    lossy: dict[Link, float] = field(default_factory=dict)
    """Chance that a message of a link is lost, and as much that it comes up to 50 ms late."""

    def mend(self) -> None:
        """Every link carries what it is given, at once."""
        self.cut.clear()
        self.lag.clear()
        self.lossy.clear()
        self.weather = Weather()

    def _delay(self) -> float:
        rng, weather = self.world.rng, self.weather
        chance = rng.random()
        if chance < weather.late_chance:
            return rng.random() * weather.late
        if chance < weather.late_chance + weather.slow_chance:
            return rng.random() * weather.slow
        return weather.delay * (0.5 + rng.random())

    def _carry(self, link: Link, action: Action, *args: Any) -> None:
        if link in self.cut:
            return
        rng, weather = self.world.rng, self.weather
        copies, more = 1, 0.0
        if weather.loss or weather.twice:
            chance = rng.random()
            copies = (
                0 if chance < weather.loss else 2 if chance < weather.loss + weather.twice else 1
            )
        if self.lag:
            more = self.lag.get(link, 0.0)
        if link in self.lossy:
            chance = rng.random()
            if chance < self.lossy[link]:
                return
            more += 0.05 * rng.random() if chance < 2 * self.lossy[link] else 0.0
        for _ in range(copies):
            self.world.at(self.world.now + self._delay() + more, None, action, *args)

    def request(self, source: "Process", target: str, number: int, message: Any) -> None:
        self._carry((source.name, target), self._arrive, source, target, number, message)

    def _arrive(self, source: "Process", target: str, number: int, message: Any) -> None:
        process = self.processes.get(target)
        if process is None or not process.alive or (source.name, target) in self.cut:
            return
        if process.frozen_until > self.world.now:
            self.world.at(
                process.frozen_until, process, self._arrive, source, target, number, message
            )
            return
        process.received(message, Answering(self, process, source, number))

    def answer(self, source: "Process", target: "Process", number: int, message: Any) -> None:
        link = (source.name, target.name)
        self._carry(link, self._answered, link, target, number, message)

    def _answered(self, link: Link, target: "Process", number: int, message: Any) -> None:
        if not target.alive or link in self.cut:
            return
        if target.frozen_until > self.world.now:
            self.world.at(target.frozen_until, target, target.answered, number, message)
        else:
            target.answered(number, message)


class Answering(msgspec.Struct):
    """Where the answer to a request goes."""

    network: Network
    process: "Process"
    asker: "Process"
    number: int

    def __call__(self, message: Any) -> None:
        if self.process.alive:
            self.network.answer(self.process, self.asker, self.number, message)


class Process:
    """One life of a program on a node: from its start to its crash."""

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.alive = True
        self.frozen_until = 0.0
        chance = world.rng.random()  # half of the clocks are as wrong as they may be
        self.rate = 1.0 + DRIFT * (
            -1.0 if chance < 0.25 else 1.0 if chance < 0.5 else 4 * chance - 3
        )
        self._origin = world.now - world.rng.random() * 1000.0
        self._asked: dict[int, Action] = {}
        self._number = 0
        network.processes[name] = self

    def clock(self) -> float:
        """The process's monotonic clock, in seconds; its value says nothing to others."""
        return (self.world.now - self._origin) * self.rate

    def later(self, delay: float, action: Action, *args: Any) -> None:
        """Runs an action in `delay` seconds of this process's clock, if it still lives."""
        self.world.at(self.world.now + delay / self.rate, self, action, *args)

    def ask(self, target: str, message: Any, timeout: float | None, done: Action) -> None:
        """Sends a request; `done(answer)` is called once, with None when `timeout` seconds pass first
        (timeout None: not at all where no answer comes)."""
        self._number += 1
        number = self._number
        self._asked[number] = done
        self.network.request(self, target, number, message)
        if timeout is not None:
            self.later(timeout, self.answered, number, None)

    def answered(self, number: int, message: Any) -> None:
        done = self._asked.pop(number, None)
        if done is not None:
            done(message)

    def tell(self, target: str, message: Any) -> None:
        """Sends a message that has no answer."""
        self.network.request(self, target, 0, message)

    def received(self, message: Any, answer: Answering) -> None:
        """A request arrived; `answer` may be called now, later, or never."""
        raise AssertionError(f"{self.name} takes no requests")

    def note(self, what: str) -> None:
        self.world.note(self.name, what)

    def crash(self) -> None:
        """The process ends here; what it had not written anywhere is gone."""
        self.alive = False
        self._asked.clear()
