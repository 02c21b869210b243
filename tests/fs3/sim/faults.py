"""What goes wrong in a history, by chance and within the budget of docs/fs3.md."""

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fs3.sim.clients import Habits
from tests.fs3.sim.managing import Times
from tests.fs3.sim.world import Weather

if TYPE_CHECKING:
    from tests.fs3.sim.cluster import Cluster, Machine

NO_FAULT, EIO, NO_SPACE = range(3)  # SimDisk.fail's

KINDS = {
    "crash": 3.0,
    "power": 2.0,
    "power_all": 0.7,
    "torn": 2.0,
    "freeze": 1.5,
    "isolate": 1.5,
    "one_way": 1.0,
    "pair": 1.0,
    "from_manager": 1.0,
    "split": 1.5,
    "manager": 0.7,
    "full": 0.7,
    "io_error": 0.7,
    "lie": 1.0,
    "wipe": 0.3,
}


@dataclass(frozen=True)
class Profile:
    """How one history is set up; all of it from the seed."""

    targets: int = 3
    clients: int = 2
    habits: Habits = field(default_factory=Habits)
    weather: Weather = field(default_factory=Weather)
    times: Times = field(default_factory=Times)
    pause: float = 0.5
    """Mean seconds between faults."""
    duration: float = 4.0
    """Seconds in which faults happen."""
    together: float = 0.2
    """Chance that the next fault follows at once."""
    kinds: tuple[str, ...] = tuple(KINDS)


def draw(rng: random.Random, kinds: tuple[str, ...] | None = None) -> Profile:
    """A random profile: some calm, some wild, most with a few kinds of faults only."""
    chosen = list(KINDS)
    if rng.random() < 0.75:
        chosen = rng.sample(chosen, rng.randrange(1, 4))
    weather = Weather()
    if rng.random() < 0.5:
        weather = Weather(
            slow_chance=rng.choice((0.02, 0.1)),
            late_chance=rng.choice((0.0, 0.002, 0.01)),
            late=rng.choice((0.3, 1.5)),
            loss=rng.choice((0.0, 0.01, 0.03)),
            twice=rng.choice((0.0, 0.01, 0.1)),
        )
    habits = Habits(
        operations=rng.randrange(30, 60),
        pause=rng.choice((0.01, 0.03, 0.08)),
        deadline=rng.choice((0.6, 1.5, 3.0)),
        chunks=rng.randrange(1, 5),
        reads=rng.choice((0.3, 0.45, 0.6)),
        removes=rng.choice((0.0, 0.06, 0.2)),
    )
    return Profile(
        targets=rng.randrange(2, 6),
        clients=rng.choice((1, 2, 3, 3)),
        habits=habits,
        weather=weather,
        pause=rng.choice((0.15, 0.4, 1.0)),
        duration=rng.choice((2.0, 4.0)),
        together=rng.choice((0.1, 0.4)),
        kinds=tuple(kind for kind in chosen if kinds is None or kind in kinds)
        or (kinds or ("crash",)),
    )


class Nemesis:
    """Breaks a cluster until `end()`. While a disk has lied and no scrub has found what it lost,
    nothing else breaks: the budget wants another up-to-date replica until then."""

    def __init__(self, cluster: "Cluster") -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.profile = cluster.profile
        self.over = False
        self.liar: Machine | None = None
        self.lied_at = 0.0
        self.lies = 0
        self.next()

    def next(self) -> None:
        rng = self.world.rng
        pause = (
            0.0
            if rng.random() < self.profile.together
            else rng.expovariate(1.0 / self.profile.pause)
        )
        self.world.after(pause, self.strike)

    def strike(self) -> None:
        if self.over:
            return
        kinds = self.profile.kinds
        kind = self.world.rng.choices(kinds, [KINDS[kind] for kind in kinds])[0]
        if self.liar is None:
            getattr(self, kind)()
        elif self.liar.disk.lies_told() < self.lies:
            pass  # it will lie when it next writes
        elif self.lied_at == math.inf:
            self.lied_at = self.world.now
        elif self.cluster.scrubbed_since(self.lied_at):
            self.note(f"the lie of {self.liar.name} is over")
            self.liar = None
        self.next()

    def note(self, what: str) -> None:
        self.world.note("faults", what)

    def any(self) -> "Machine":
        return self.world.rng.choice(self.cluster.machines)

    def while_down(self) -> float:
        """Seconds until what broke is whole again: sometimes too short to be missed."""
        return self.world.rng.choice((0.05, 0.3, 1.0, 2.0)) * (0.5 + self.world.rng.random())

    def crash(self) -> None:
        machine = self.any()
        self.note(f"{machine.name} crashes")
        machine.crash()
        self.world.after(self.while_down(), machine.start)

    def power(self) -> None:
        machine = self.any()
        self.note(f"{machine.name} loses power")
        machine.power_cut()
        self.world.after(self.while_down(), machine.start)

    def power_all(self) -> None:
        self.note("all lose power")
        for machine in self.cluster.machines:
            machine.power_cut()
            self.world.after(self.while_down(), machine.start)

    def torn(self) -> None:
        """Power goes in the middle of a call to the disk."""
        machine = self.any()
        self.note(f"{machine.name} is about to lose power")
        machine.cut_soon(self.world.rng.randrange(1, 30), self.while_down())

    def freeze(self) -> None:
        machine = self.any()
        if machine.process is not None:
            machine.process.frozen_until = self.world.now + self.while_down()
            self.note(f"{machine.name} stands still until {machine.process.frozen_until:.6f}")

    def _cut(self, pairs: list[tuple[str, str]]) -> None:
        cut = self.cluster.network.cut
        self.note("cut: " + ", ".join(f"{a}->{b}" for a, b in pairs))
        cut.update(pairs)
        self.world.after(self.while_down(), self._join, pairs)

    def _join(self, pairs: list[tuple[str, str]]) -> None:
        self.note("joined: " + ", ".join(f"{a}->{b}" for a, b in pairs))
        self.cluster.network.cut.difference_update(pairs)

    def isolate(self) -> None:
        name = self.any().name
        others = [other for other in self.cluster.names if other != name]
        self._cut([(name, other) for other in others] + [(other, name) for other in others])

    def one_way(self) -> None:
        name = self.any().name
        others = [other for other in self.cluster.names if other != name]
        out = self.world.rng.random() < 0.5
        self._cut([(name, other) if out else (other, name) for other in others])

    def pair(self) -> None:
        one, two = self.world.rng.sample(self.cluster.names, 2)
        self._cut([(one, two), (two, one)])

    def split(self) -> None:
        """Two parts that do not see each other; in the one without the manager, clients and nodes may."""
        part = self.world.rng.sample(self.cluster.names, self.world.rng.randrange(2, 4))
        others = [name for name in self.cluster.names if name not in part]
        self._cut([pair for a in part for b in others for pair in ((a, b), (b, a))])

    def from_manager(self) -> None:
        name = self.any().name
        self._cut([(name, "mgr"), ("mgr", name)])

    def manager(self) -> None:
        self.note("the manager crashes")
        self.cluster.crash_manager()
        self.world.after(self.while_down(), self.cluster.start_manager)

    def full(self) -> None:
        machine = self.any()
        self.note(f"the disk of {machine.name} is full")
        machine.disk.fail(self.world.rng.randrange(5), NO_SPACE)
        self.world.after(self.while_down(), machine.mend_disk)

    def io_error(self) -> None:
        machine = self.any()
        self.note(f"the disk of {machine.name} fails")
        machine.disk.fail(self.world.rng.randrange(20), EIO, self.world.rng.choice((1, 3, 1000)))
        self.world.after(self.while_down(), machine.mend_disk)

    def lie(self) -> None:
        """A synced write is lost or lands elsewhere; perhaps power goes soon after, of this node or
        of all."""
        if not self.cluster.calm():
            return
        machine = self.liar = self.any()
        self.lied_at = math.inf  # not yet
        self.note(f"the disk of {machine.name} lies")
        self.lies = machine.disk.lies_told() + 1
        machine.disk.lie(self.world.rng.getrandbits(32))
        chance, wait = self.world.rng.random(), self.world.rng.random() * 0.3
        victims = [machine] if chance < 0.3 else self.cluster.machines if chance < 0.6 else []
        for victim in victims:
            self.world.after(wait, self._cut_power, victim, self.world.rng.random() * 0.5)

    def wipe(self) -> None:
        """A disk is replaced by an empty one, while others are up to date."""
        if not self.cluster.calm():
            return
        machine = self.liar = self.any()
        self.lied_at = self.world.now
        self.lies = 0
        self.note(f"{machine.name} gets an empty disk")
        machine.wipe()
        self.world.after(self.while_down(), machine.start)

    def _cut_power(self, machine: "Machine", down: float) -> None:
        if self.over:
            return
        self.note(f"{machine.name} loses power")
        machine.power_cut()
        self.world.after(down, machine.start)

    def end(self) -> None:
        """Nothing breaks any more, and what is broken is mended at once."""
        self.over = True
        self.note("faults end")
