"""What is done to a cluster: kills within the rules, or anything."""

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fs3.soak.cluster import MANAGERS, Cluster, Versions, free_bytes

KILL_EVERY_S = 2.0
RESTART_S = 1.0
FLIPS = 40
HEAL_S = 60.0


class Fault(NamedTuple):
    """What was done, and when by the monotonic clock."""

    at: float
    what: str


def kills(
    cluster: Cluster, seed: int, seconds: float, every_s: float = KILL_EVERY_S
) -> tuple[list[Fault], Counter[str]]:
    """A kill -9 every 2 s (`every_s`), restarted after 1 s, never of the last up-to-date target of a chain.

    Returns:
        Each of them; how many of each role.
    """
    chance = random.Random(seed)
    done: list[Fault] = []
    counts: Counter[str] = Counter()
    begun = time.monotonic()
    for turn in range(int(seconds / every_s)):
        _sleep_until(begun + turn * every_s)
        wanted = chance.choice(["manager", "manager", "standby", *5 * ["storage"]])
        state = cluster.health()
        spared = cluster.sole_holders(state)
        active = _active(cluster)
        choice = {
            "manager": [active],
            "standby": [name for name in MANAGERS if name != active],
            "storage": [name for name in cluster.nodes if name not in spared],
        }[wanted]
        if not choice:
            counts["nobody could be spared"] += 1
            continue
        victim = cluster.parts[chance.choice(choice)]
        victim.kill()
        cluster.note(f"kill {victim.name}")
        done.append(Fault(time.monotonic(), f"kill {victim.name}"))
        counts[wanted] += 1
        _sleep_until(done[-1].at + RESTART_S)
        victim.start()
        cluster.note(f"start {victim.name}")
    return done, counts


def _active(cluster: Cluster) -> str:
    """The manager that is no standby: whose log named it primary last."""
    last = {name: _primary_since(cluster.parts[name].log) for name in MANAGERS}
    return max(last, key=lambda name: last[name])


def _primary_since(log: str) -> int:
    """The epoch of the newest term in a log."""
    epochs = re.findall(r"is primary manager, epoch (\d+)", log)
    return int(epochs[-1]) if epochs else 0


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class Anything:
    """Faults of all kinds, some at a time; each has an end. `calm` ends them all."""

    def __init__(self, cluster: Cluster, seed: int, filled: str, every_s: float) -> None:
        """
        Args:
            filled: the node whose disk is small.
            every_s: between two faults, on average.
        """
        self._every_s = every_s
        self._cluster, self._chance = cluster, random.Random(seed)
        self._filled = filled
        self._filler = cluster.folder / filled / "filler"
        self._ends: dict[str, tuple[float, Callable[[], None]]] = {}  # by what is held
        self.done: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self.flipped = 0
        self.problems: list[str] = []

    def run(self, seconds: float, victim: str) -> None:
        """For so long, and until every kind was had.

        Args:
            victim: the one node whose bytes are flipped in this time.
        """
        kinds: dict[str, Callable[[], bool]] = {
            "kill": self._kill,
            "kill all": self._kill_all,
            "cut": self._cut,
            "freeze": self._freeze,
            "fill": self._fill,
            "flip": lambda: self._flip(victim),
        }
        end = time.monotonic() + seconds
        deck: list[str] = []
        missing = set(kinds)
        while time.monotonic() < end or missing:
            self._expire()
            if not deck:
                deck = [*kinds, "kill", "kill", "flip"]
                self._chance.shuffle(deck)
            kind = deck.pop()
            if kinds[kind]():
                self.counts[kind] += 1
                self.done.append(Fault(time.monotonic(), kind))
                missing.discard(kind)
            pause = time.monotonic() + self._every_s * self._chance.uniform(0.5, 1.5)
            while time.monotonic() < pause:
                self._expire()
                time.sleep(0.05)

    def calm(self) -> None:
        """Ends every fault."""
        while self._ends:
            _, (_, undo) = self._ends.popitem()
            undo()

    def _expire(self) -> None:
        for held in [held for held, (end, _) in self._ends.items() if end <= time.monotonic()]:
            self._ends.pop(held)[1]()

    def _hold(self, held: str, seconds: float, undo: Callable[[], None]) -> None:
        self._cluster.note(f"{held} for {seconds:.2f} s")
        self._ends[held] = (time.monotonic() + seconds, undo)

    def _kill(self) -> bool:
        up = [name for name in self._cluster.parts if name not in self._ends]
        for name in self._chance.sample(up, min(len(up), self._chance.choice((1, 1, 2, 3)))):
            self._end(name, self._chance.uniform(0.1, 4.0))
        return bool(up)

    def _kill_all(self) -> bool:
        """As a power cut that loses nothing: all storage nodes at once."""
        up = [name for name in self._cluster.nodes if name not in self._ends]
        for name in up:
            self._end(name, self._chance.uniform(0.1, 3.0))
        return bool(up)

    def _end(self, name: str, seconds: float) -> None:
        part = self._cluster.parts[name]
        part.kill()
        self._hold(name, seconds, part.start)

    def _cut(self) -> bool:
        host = self._chance.choice([*range(5)])
        held = f"cable {host}"
        if held in self._ends:
            return False
        self._cluster.lab.cut(host)
        self._hold(held, self._chance.uniform(0.5, 4.0), lambda: self._cluster.lab.mend(host))
        return True

    def _freeze(self) -> bool:
        up = [name for name in self._cluster.parts if name not in self._ends]
        if not up:
            return False
        part = self._cluster.parts[name := self._chance.choice(up)]
        part.signal(signal.SIGSTOP)
        seconds = self._chance.uniform(0.5, 5.0)
        self._hold(name, seconds, lambda: part.signal(signal.SIGCONT))
        return True

    def _fill(self) -> bool:
        """The small disk is full for a while, but for a few blocks."""
        if "disk" in self._ends:
            return False
        with self._filler.open("wb") as file:
            while (size := free_bytes(self._filler.parent) - 65_536) > 65_536:
                with contextlib.suppress(OSError):  # the node takes some meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
        self._hold("disk", self._chance.uniform(1.0, 4.0), self._filler.unlink)
        return True

    def _flip(self, victim: str) -> bool:
        """Bytes of chunk files of one node, which may die then, while all others stay.

        Within the budget: until that node is whole again it is nowhere the only up-to-date one of a chain.
        So the manager has seen the end of all that was done before, and then that the node is back. Where
        the machine was so slow that another node lost its lease meanwhile, the flips are counted as
        `beyond the budget`.
        """
        self.calm()
        before = self._cluster.wait_until_settled(HEAL_S)
        files = sorted((self._cluster.folder / victim).glob("target-*/data-*"))
        for _ in range(FLIPS if files else 0):
            place = _flip_one(path := self._chance.choice(files), self._chance)
            if place >= 0:
                self._cluster.note(f"flip byte {place} of {path.relative_to(self._cluster.folder)}")
                self.flipped += 1
        if self._chance.random() < 0.5:
            self._end(victim, self._chance.uniform(0.1, 2.0))
            while self._ends:
                time.sleep(0.05)
                self._expire()
        after = self._mended()
        self._cluster.note("nothing is damaged any more")
        self.counts["beyond the budget"] += self._cluster.alone(victim, before, after)
        return bool(files)

    def _mended(self) -> Versions:
        """Returns when no replica is damaged any more; only those that serve can be looked at."""
        versions = Versions()
        while versions != (now := self._cluster.wait_until_settled(HEAL_S)):
            versions = now
            self.problems += self._cluster.verify([]).problems
        return versions


def _flip_one(path: Path, chance: random.Random) -> int:
    """Another value for one byte of a chunk file, where it has any; its place, or -1."""
    number = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(number).st_size
        if not size:
            return -1
        place = os.lseek(number, chance.randrange(size), os.SEEK_DATA)
        old = os.pread(number, 1, place)
        os.pwrite(number, bytes([old[0] ^ chance.randrange(1, 256)]), place)
    except OSError:  # no data behind that place
        return -1
    finally:
        os.close(number)
    return place
