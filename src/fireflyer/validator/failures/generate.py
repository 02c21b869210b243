"""Traces of failures drawn from rates. Pure: a preset, a fleet and a seed give the same trace."""

import itertools
import random
import tomllib
from collections.abc import Iterator
from importlib import resources

import msgspec

from fireflyer.errors import ValidatorError
from fireflyer.validator.failures.records import Failure, class_of_xid
from fireflyer.validator.failures.report import DAY_S

MOST_EVENTS = 20_000_000
"""Expected number of failures above which a trace is refused."""


class ClassRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failure rate of one class: `events` failures in `days` days."""

    events: float
    days: float
    of: str = msgspec.field(default="", name="class")
    xid: int | None = None
    bursts: tuple[tuple[int, int], ...] = ()
    """Pairs (events in a day, number of such days). Whole days are drawn, because the failures of a
    day are not independent."""

    @property
    def name(self) -> str:
        return self.of if self.xid is None else class_of_xid(self.xid)


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Failure rates of one site."""

    source: str
    nodes: int
    classes: tuple[ClassRate, ...]


def presets() -> dict[str, Preset]:
    """Returns the presets by name."""
    file = resources.files("fireflyer.validator.failures") / "presets.toml"
    return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), dict[str, Preset])


def preset(name: str) -> Preset:
    """Returns the preset of this name.

    Raises:
        ValidatorError: no such preset.
    """
    known = presets()
    if name not in known:
        raise ValidatorError(f"invalid preset {name!r}: expected one of {', '.join(known)}")
    return known[name]


def generate(of: Preset, nodes: int, days: float, seed: int, begin: float) -> list[Failure]:
    """Draws the failures of a fleet, in order of time.

    Args:
        of: the rates; for a fleet of another size the number of failures scales in proportion.
        nodes: size of the fleet; nodes are named n1, n2, ...
        days: length of the trace.
        begin: start of the trace, in UTC seconds since 1970.

    Raises:
        ValidatorError: the trace would be too large.
    """
    share = nodes / of.nodes
    expected = sum(each.events / each.days * days * share for each in of.classes)
    if expected > MOST_EVENTS:
        raise ValidatorError(
            f"the trace would have {expected:,.0f} failures: ask for fewer nodes or days"
        )
    found = []
    for each in of.classes:
        draw = random.Random(f"{each.name}/{each.xid}/{seed}")
        when = _bursts(draw, each, days, share) if each.bursts else _poisson(draw, each, share)
        for at in itertools.takewhile(lambda at: at < days, when):
            node = f"n{draw.randrange(nodes) + 1}"
            moment = begin + at * DAY_S
            found.append(Failure(when=moment, of=each.name, xid=each.xid, node=node))
    return sorted(found, key=lambda failure: failure.when)


def _poisson(draw: random.Random, each: ClassRate, share: float) -> Iterator[float]:
    """Yields the times of failures, in days, without end."""
    at = 0.0
    while True:
        at += draw.expovariate(each.events / each.days * share)
        yield at


def _bursts(draw: random.Random, each: ClassRate, days: float, share: float) -> Iterator[float]:
    """Yields the times of failures, in days.

    Draws the number of events of each day from `bursts`. Each event becomes `share` failures on
    average.
    """
    counts = [count for count, _ in each.bursts]
    weights = [weight for _, weight in each.bursts]
    whole, rest = divmod(share, 1.0)
    for day in range(int(days) + 1):
        events = draw.choices(counts, weights)[0]
        here = sum(int(whole) + (draw.random() < rest) for _ in range(events))
        yield from sorted(day + draw.random() for _ in range(here))
