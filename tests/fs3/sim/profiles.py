"""How histories are set up: all kinds of faults mixed, or one family of them tuned to one part of the
protocol. The seed chooses."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.fs3.sim.clients import Habits
from tests.fs3.sim.world import Weather

from fireflyer.fs3.manager.leases import Times

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
    "freeze_manager": 0.5,
    "full": 0.7,
    "io_error": 0.7,
    "lie": 1.0,
    "wipe": 0.3,
}
"""Single faults, with their weights in a mixture: methods of `Nemesis`."""

SCRIPTS = {
    "lie_and_power": 1.0,
    "wipe_and_power": 1.0,
    "stale_reader": 1.0,
    "stale_reader_at_takeover": 1.0,
    "late_change": 1.0,
    "broken_sync": 1.0,
    "deaf_sync": 0.5,
    "blackout": 1.0,
    "succession": 1.0,
}
"""Several faults in an order that matters: methods of `Nemesis` too."""

SECONDS = Times(lease_s=0.6, recovery_wait_s=4.0)
"""For a failover well below a second."""


@dataclass(frozen=True)
class Profile:
    """How one history is set up; all of it from the seed."""

    family: str = "mixed"
    targets: int = 3
    clients: int = 2
    managers: int = 1
    habits: Habits = field(default_factory=Habits)
    weather: Weather = field(default_factory=Weather)
    times: Times = SECONDS
    pause: float = 0.5
    """Mean seconds between faults."""
    duration: float = 4.0
    """Seconds in which faults happen."""
    together: float = 0.2
    """Chance that the next fault follows at once."""
    kinds: tuple[str, ...] = tuple(KINDS)
    lossy: float = 0.0
    """Chance that a message to a target that syncs is lost, in the scripts about that."""
    beyond: bool = False
    """Whether disks may lose more than the budget says."""


def mixed(rng: random.Random) -> Profile:
    """Some calm, some wild, most with a few kinds of faults only."""
    kinds = list(KINDS)
    if rng.random() < 0.75:
        kinds = rng.sample(kinds, rng.randrange(1, 4))
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
        managers=rng.choice((1, 1, 1, 2)),
        habits=habits,
        weather=weather,
        pause=rng.choice((0.15, 0.4, 1.0)),
        duration=rng.choice((2.0, 4.0)),
        together=rng.choice((0.1, 0.4)),
        kinds=tuple(kinds),
    )


def lies(rng: random.Random) -> Profile:
    """A disk loses a synced write, and power goes of all before anybody reads it: who lost what is
    found by comparing."""
    habits = Habits(
        operations=70,
        pause=0.03,
        chunks=rng.randrange(1, 5),
        reads=0.3,
        removes=rng.choice((0.03, 0.25)),
    )
    return Profile(clients=rng.randrange(1, 4), habits=habits, pause=0.1, kinds=("lie_and_power",))


def wipes(rng: random.Random) -> Profile:
    """Power goes of all, one disk is replaced, and the others come back when the wait for them is over."""
    habits = Habits(operations=50, pause=0.03, reads=0.4)
    times = Times(lease_s=0.6, recovery_wait_s=rng.choice((0.3, 0.6)))
    return Profile(habits=habits, times=times, pause=0.1, kinds=("wipe_and_power",))


def leases(rng: random.Random) -> Profile:
    """A target that nobody tells that it has left the chain, and a client that believes in it."""
    habits = Habits(
        operations=100,
        pause=0.02,
        chunks=1,
        reads=0.6,
        attempt=0.1,
        deadline=rng.choice((0.5, 1.5)),
    )
    kinds = ("stale_reader", "stale_reader_at_takeover")
    return Profile(
        clients=3,
        habits=habits,
        pause=0.05,
        kinds=(rng.choice(kinds),),
    )


def takeovers(rng: random.Random) -> Profile:
    """Another manager takes over while the primary stands still, and it wakes up."""
    habits = Habits(operations=100, pause=0.02, chunks=1, reads=0.6, attempt=0.1)
    kinds = ("stale_reader_at_takeover", "late_change")
    return Profile(clients=3, managers=2, habits=habits, pause=0.05, kinds=(rng.choice(kinds),))


def syncs(rng: random.Random) -> Profile:
    """Whatever can break while a target syncs breaks then."""
    habits = Habits(operations=100, pause=0.02, chunks=rng.randrange(2, 7), reads=0.3)
    weather = Weather()
    if rng.random() < 0.5:
        weather = Weather(slow_chance=0.1, late_chance=0.1, late=0.05, twice=0.3)
    return Profile(
        targets=rng.choice((2, 3, 3)),
        clients=3,
        habits=habits,
        weather=weather,
        pause=0.05,
        kinds=("broken_sync", "deaf_sync"),
        lossy=rng.choice((0.0, 0.2, 0.4)),
    )


def successions(rng: random.Random) -> Profile:
    """A target is away, comes back, and must go on alone as soon as it serves."""
    habits = Habits(
        operations=90,
        pause=0.03,
        chunks=rng.randrange(1, 5),
        reads=0.3,
        removes=rng.choice((0.06, 0.25)),
        deadline=rng.choice((0.5, 2.0)),
    )
    return Profile(
        targets=rng.choice((2, 3)),
        clients=3,
        habits=habits,
        pause=0.05,
        kinds=("succession",),
        lossy=rng.choice((0.0, 0.3, 0.5)),
    )


def duplicates(rng: random.Random) -> Profile:
    """Messages come twice and late, while chunks are removed and made again."""
    weather = Weather(
        slow_chance=0.1,
        late_chance=rng.choice((0.02, 0.1)),
        late=rng.choice((0.05, 0.4)),
        twice=rng.choice((0.2, 0.4)),
    )
    habits = Habits(operations=70, pause=0.01, chunks=rng.randrange(1, 5), reads=0.2, removes=0.35)
    kinds = rng.sample(("crash", "freeze", "pair", "split", "from_manager"), 2)
    return Profile(clients=3, habits=habits, weather=weather, pause=1.0, kinds=tuple(kinds))


def blackouts(rng: random.Random) -> Profile:
    """Power goes of all again and again, while chunks are removed and made again."""
    habits = Habits(
        operations=150,
        pause=0.005,
        chunks=rng.randrange(2, 7),
        reads=0.15,
        removes=rng.choice((0.2, 0.4)),
    )
    return Profile(
        targets=rng.choice((2, 3)), clients=3, habits=habits, pause=0.1, kinds=("blackout",)
    )


def pauses(rng: random.Random) -> Profile:
    """Processes stand still for longer than their leases, links to the managers fail, managers change."""
    kinds = ("freeze", "freeze_manager", "from_manager", "manager", "split", "one_way")
    return replace(
        mixed(rng), managers=rng.randrange(1, 3), pause=0.2, kinds=tuple(rng.sample(kinds, 3))
    )


def disks(rng: random.Random) -> Profile:
    """Disks are full, fail, and lose power in the middle of a call."""
    kinds = ("full", "io_error", "torn", "power", "power_all")
    return replace(mixed(rng), pause=0.25, kinds=tuple(rng.sample(kinds, 3)))


def beyond(rng: random.Random) -> Profile:
    """Several disks of a chain lose synced data, at any time: more than the budget."""
    kinds = ["lie", *rng.sample(("crash", "power", "power_all", "torn", "wipe"), 2)]
    return replace(mixed(rng), family="beyond", beyond=True, pause=0.2, kinds=tuple(kinds))


FAMILIES: dict[str, Callable[[random.Random], Profile]] = {
    "mixed": mixed,
    "lies": lies,
    "wipes": wipes,
    "leases": leases,
    "takeovers": takeovers,
    "syncs": syncs,
    "successions": successions,
    "duplicates": duplicates,
    "blackouts": blackouts,
    "pauses": pauses,
    "disks": disks,
    "beyond": beyond,
}
SHARES = {"mixed": 8.0, "beyond": 0.0}
"""Of histories whose family the seed chooses; 1 where none is named."""


def draw(rng: random.Random, family: str = "") -> Profile:
    """The profile of a history; of a family, or of one within the budget that `rng` chooses."""
    if not family:
        names = list(FAMILIES)
        (family,) = rng.choices(names, [SHARES.get(name, 1.0) for name in names])
    return replace(FAMILIES[family](rng), family=family)
