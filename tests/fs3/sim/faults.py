"""What goes wrong in a history, by chance and within the budget of docs/guide/fs3.md."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.fs3.sim.profiles import KINDS, SCRIPTS
from tests.fs3.sim.world import Link

from fireflyer.fs3.manager.chains import Public

if TYPE_CHECKING:
    from tests.fs3.sim.cluster import Cluster, Machine

NO_FAULT, EIO, NO_SPACE = range(3)  # SimDisk.fail's
WEIGHTS = KINDS | SCRIPTS
Script = Iterator[float]
"""Does one thing after the other; what it yields are the seconds until it goes on."""


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
        if self.profile.kinds:
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
        kind = self.world.rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        if self.liar is None or self.profile.beyond:
            if kind in SCRIPTS:
                self.follow(getattr(self, kind)())
                return
            getattr(self, kind)()
        elif self.liar.disk.lies_told() < self.lies:
            pass  # it will lie when it next writes
        elif self.lied_at == math.inf:
            self.lied_at = self.world.now
        elif self.cluster.scrubbed_since(self.lied_at):
            self.note(f"the lie of {self.liar.name} is over")
            self.liar = None
        self.next()

    def follow(self, script: Script) -> None:
        """Goes on with a script; nothing else breaks before its end."""
        if self.over:
            return
        for pause in script:
            self.world.after(pause, self.follow, script)
            return
        self.next()

    def note(self, what: str) -> None:
        self.world.note("faults", what)

    def any(self) -> "Machine":
        return self.world.rng.choice(self.cluster.machines)

    def while_down(self) -> float:
        """Seconds until what broke is whole again: sometimes too short to be missed."""
        return self.world.rng.choice((0.05, 0.3, 1.0, 2.0)) * (0.5 + self.world.rng.random())

    def uniform(self, least: float, most: float) -> float:
        return self.world.rng.uniform(least, most)

    # ---- processes and power

    def crash(self) -> None:
        self._crash(self.any(), self.while_down())

    def _crash(self, machine: "Machine", down: float) -> None:
        self.note(f"{machine.name} crashes")
        machine.crash()
        self.world.after(down, machine.start)

    def power(self) -> None:
        self._cut_power(self.any(), self.while_down())

    def power_all(self) -> None:
        for machine in self.cluster.machines:
            self._cut_power(machine, self.while_down())

    def _cut_power(self, machine: "Machine", down: float) -> None:
        if self.over:
            return
        self.note(f"{machine.name} loses power")
        machine.power_cut()
        self.world.after(down, machine.start)

    def torn(self) -> None:
        """Power goes in the middle of a call to the disk."""
        machine = self.any()
        self.note(f"{machine.name} is about to lose power")
        machine.cut_soon(self.world.rng.randrange(1, 30), self.while_down())

    def freeze(self) -> None:
        self._freeze(self.any().name, self.while_down())

    def freeze_manager(self) -> None:
        self._freeze(self.world.rng.choice(self.cluster.managers), self.while_down())

    def _freeze(self, name: str, pause: float) -> None:
        process = self.cluster.network.processes.get(name)
        if process is not None and process.alive:
            process.frozen_until = self.world.now + pause
            self.note(f"{name} stands still until {process.frozen_until:.6f}")

    def manager(self) -> None:
        self._crash_manager(self.world.rng.choice(self.cluster.managers), self.while_down())

    def _crash_manager(self, name: str, down: float) -> None:
        self.note(f"{name} crashes")
        self.cluster.crash_manager(name)
        self.world.after(down, self.cluster.start_manager, name)

    # ---- links

    def _cut(self, links: list[Link], pause: float = 0.0) -> None:
        self.note("cut: " + ", ".join(f"{a}->{b}" for a, b in links))
        self.cluster.network.cut.update(links)
        self.world.after(pause or self.while_down(), self._join, links)

    def _join(self, links: list[Link]) -> None:
        self.note("joined: " + ", ".join(f"{a}->{b}" for a, b in links))
        self.cluster.network.cut.difference_update(links)

    def _around(self, name: str) -> list[Link]:
        return [(name, other) for other in self.cluster.names if other != name]

    def isolate(self) -> None:
        out = self._around(self.any().name)
        self._cut(out + both_ways(out))

    def one_way(self) -> None:
        out = self._around(self.any().name)
        self._cut(out if self.world.rng.random() < 0.5 else [(b, a) for a, b in out])

    def pair(self) -> None:
        one, two = self.world.rng.sample(self.cluster.names, 2)
        self._cut(both_ways([(one, two)]))

    def split(self) -> None:
        """Two parts that do not see each other; in the one without the manager, clients and nodes may."""
        part = self.world.rng.sample(self.cluster.names, self.world.rng.randrange(2, 4))
        others = [name for name in self.cluster.names if name not in part]
        self._cut(both_ways([(a, b) for a in part for b in others]))

    def from_manager(self) -> None:
        self._cut(both_ways([(self.any().name, name) for name in self.cluster.managers]))

    # ---- disks

    def full(self) -> None:
        machine = self.any()
        self.note(f"the disk of {machine.name} is full")
        machine.fail_disk(self.world.rng.randrange(5), NO_SPACE, 1 << 62)
        self.world.after(self.while_down(), machine.mend_disk)

    def io_error(self) -> None:
        machine = self.any()
        self.note(f"the disk of {machine.name} fails")
        machine.fail_disk(self.world.rng.randrange(20), EIO, self.world.rng.choice((1, 3, 1000)))
        self.world.after(self.while_down(), machine.mend_disk)

    def lie(self) -> None:
        """A synced write is lost or lands elsewhere; perhaps power goes soon after, of this node or
        of all."""
        if not self.profile.beyond and not self.cluster.calm():
            return
        machine = self._lie()
        chance, wait = self.world.rng.random(), self.world.rng.random() * 0.3
        victims = [machine] if chance < 0.3 else self.cluster.machines if chance < 0.6 else []
        for victim in victims:
            self.world.after(wait, self._cut_power, victim, self.world.rng.random() * 0.5)

    def _lie(self) -> "Machine":
        """One of the next synced writes of some disk."""
        self.liar = machine = self.any()
        self.lied_at = math.inf  # not yet
        self.note(f"the disk of {machine.name} lies")
        self.lies = machine.disk.lies_told() + 1
        machine.disk.lie(self.world.rng.getrandbits(32))
        self.cluster.honest = False
        return machine

    def wipe(self) -> None:
        """A disk is replaced by an empty one, while others are up to date."""
        if self.cluster.calm():
            machine = self._wipe()
            self.world.after(self.while_down(), machine.start)

    def _wipe(self) -> "Machine":
        self.liar = machine = self.any()
        self.lied_at = self.world.now
        self.lies = 0
        self.note(f"{machine.name} gets an empty disk")
        machine.wipe()
        return machine

    # ---- scripts

    def lie_and_power(self) -> Script:
        """Power goes of all soon after a lie was told; the liar may be back long before the others, but
        they come within the recovery wait."""
        if not self.cluster.calm():
            return
        machine = self._lie()
        while machine.disk.lies_told() < self.lies:
            yield 0.001
        self.lied_at = self.world.now
        yield self.world.rng.choice((0.0, 0.004, 0.03, 0.3)) * self.world.rng.random()
        early = self.world.rng.random() < 0.5
        for other in self.cluster.machines:
            late = early and other is not machine
            self._cut_power(other, self.uniform(1.0, 2.5) if late else self.uniform(0.02, 0.3))

    def blackout(self) -> Script:
        """Power goes of all for a moment, in the midst of what they do."""
        while not self.cluster.calm():
            yield 0.02
        yield self.uniform(0.0, 0.1)
        for machine in self.cluster.machines:
            self._cut_power(machine, self.uniform(0.01, 0.05))

    def wipe_and_power(self) -> Script:
        """Power goes of all, and one comes back first, with an empty disk."""
        if not self.cluster.calm():
            return
        machine = self._wipe()
        self.world.after(self.uniform(0.02, 0.3), machine.start)
        for other in self.cluster.machines:
            if other is not machine:
                self._cut_power(other, self.uniform(1.0, 2.0))
        yield 2.0

    def stale_reader(self) -> Script:
        """What a manager tells a node is long on its way; then the node is not heard any more, and a
        client hears of no change."""
        if not self.cluster.calm():
            return
        name, client = self.any().name, self.world.rng.choice(self.cluster.clients).name
        managers, lag = self.cluster.managers, self.uniform(0.2, 0.5)
        self.note(f"managers are {lag:.3f} s from {name}")
        for manager in managers:
            self.cluster.network.lag[manager, name] = lag
        yield lag + self.uniform(0.1, 0.3)
        pause = self.uniform(1.0, 1.6)
        self._cut([(name, manager) for manager in managers], pause)
        self._cut(both_ways([(client, manager) for manager in managers]), pause)
        yield pause
        self.cluster.network.lag.clear()

    def stale_reader_at_takeover(self) -> Script:
        """A node and a client do not see the manager that takes over."""
        if not self.cluster.calm():
            return
        parted = [self.any().name, self.world.rng.choice(self.cluster.clients).name]
        managers = self.cluster.managers
        if len(managers) == 1:
            pause = self.uniform(0.6, 1.2)
            self._crash_manager(managers[0], self.uniform(0.001, 0.05))
        else:
            primary = self.cluster.primary()
            frozen = self.uniform(0.9, 1.8)
            pause = frozen + 0.7
            self._freeze(primary, frozen)
            managers = [name for name in managers if name != primary]
        self._cut(both_ways([(a, b) for a in parted for b in managers]), pause)
        yield pause

    def late_change(self) -> Script:
        """The primary stands still just when it saves a change, until another one has taken over."""
        primary = self.cluster.primary()
        if not self.cluster.calm() or not primary:
            return
        self._crash(self.any(), self.uniform(0.02, 0.1))
        for _ in range(5000):
            manager = self.cluster.running.get(primary)
            if manager is None or manager.saving:
                break
            yield 0.0002
        self._freeze(primary, self.uniform(0.9, 1.8))
        yield 2.0

    def _until(self, machine: "Machine", state: Public) -> Script:
        """Until the target has that state, for 3 s at most."""
        for _ in range(1500):
            if machine.target in self.cluster.chain.targets(state):
                return
            yield 0.002

    def _come_back(self, machine: "Machine") -> Script:
        """A target was away, and syncs over links that lose messages."""
        self._crash(machine, self.world.rng.choice((0.05, 0.3, 0.8)) * self.uniform(0.8, 1.5))
        for other in self.cluster.machines:
            if self.profile.lossy and other is not machine:
                self.cluster.network.lossy[other.name, machine.name] = self.profile.lossy
        yield from self._until(machine, Public.SYNCING)

    def broken_sync(self) -> Script:
        """Something breaks at some moment of a sync."""
        if not self.cluster.calm():
            return
        machine, rng = self.any(), self.world.rng
        yield from self._come_back(machine)
        yield 0.06 * rng.random() ** 2
        managers, out = self.cluster.managers, self._around(machine.name)
        serving = [m for m in self.cluster.machines if m.target in self.cluster.serving()]
        breaks = rng.randrange(6)
        if breaks == 0:
            self._cut(both_ways([(machine.name, m) for m in managers]), self.uniform(0.7, 1.2))
        elif breaks == 1:
            self._cut([(m, machine.name) for m in managers], self.uniform(0.1, 1.2))
        elif breaks == 2:
            self._cut(both_ways(out), self.uniform(0.1, 1.2))
        elif breaks == 3:
            self._cut_power(machine, self.uniform(0.02, 0.3))
        elif breaks == 4 and serving:
            self._crash(serving[-1], self.uniform(0.02, 1.0))
        else:
            self._freeze(machine.name, self.uniform(0.1, 1.0))
        yield 0.5
        self.cluster.network.lossy.clear()

    def deaf_sync(self) -> Script:
        """A target that has synced hears of nothing, then is not heard either, while the chain goes on
        without it; then it comes back, and first says what was true long ago."""
        if not self.cluster.calm():
            return
        machine = self.any()
        yield from self._come_back(machine)
        managers = self.cluster.managers
        out, joined = self.uniform(0.9, 1.3), self.uniform(0.0, 0.02)
        deaf = [(manager, machine.name) for manager in managers]
        self.cluster.network.cut.update(deaf)
        yield from self._until(machine, Public.SERVING)
        yield self.uniform(0.0, 0.15)
        self._cut([(b, a) for a, b in deaf], out)
        yield out + joined
        self._join(deaf)
        self.cluster.network.lossy.clear()
        yield 0.3

    def succession(self) -> Script:
        """The others crash as soon as a target that was away serves again."""
        if not self.cluster.calm():
            return
        machine = self.any()
        yield from self._come_back(machine)
        yield from self._until(machine, Public.SERVING)
        yield self.world.rng.choice((0.0, 0.002, 0.02, 0.1)) * self.world.rng.random()
        self.cluster.network.lossy.clear()
        for other in self.cluster.machines:
            if other is not machine:
                self._crash(other, self.uniform(0.9, 1.4))
        yield 0.5

    def end(self) -> None:
        """Nothing breaks any more, and what is broken is mended at once."""
        self.over = True
        self.note("faults end")


def both_ways(links: list[Link]) -> list[Link]:
    return links + [(b, a) for a, b in links]
