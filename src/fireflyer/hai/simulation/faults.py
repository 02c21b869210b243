"""Faults of a cluster of 1,250 nodes in one year, scaled to the simulated cluster.

Numbers: tables VI (Xid errors of one year), VII (failures by month, October 2023 to March 2024) and
VIII (flash cuts of links by day) of arXiv 2408.14158. In five of the six months, the network
failures of table VII are flash cuts that table VIII also counts, so the model takes network
failures from table VIII only. The Xid errors of table VII are also in table VI, so the model takes
Xid errors from table VI only. No table has repair times, so the repair times are assumptions.
"""

import heapq
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from fireflyer.errors import ConfigError
from fireflyer.hai.simulation.trace import HOUR_MS

FLEET_NODES = 1250
"""Size of the cluster of the tables: 10,000 GPUs, 8 per node."""

DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS

Effect = Literal["task", "link", "node"]
"""task: the program on one GPU dies; link: gangs of several nodes with a member on the node die,
but the node stays up; node: all tasks on the node die, and the node is down for some time."""

XID_YEAR: Mapping[str, Mapping[int, int]] = {
    "software": {13: 45, 31: 2487, 43: 4342, 45: 240},
    "nvlink": {74: 5521},
    "ecc": {63: 245, 64: 2, 94: 13, 95: 17},
    "gpu": {44: 1, 48: 2, 61: 13, 62: 3, 69: 1, 79: 37, 119: 1},
}
"""Xid errors of the fleet in one year (table VI), by kind of fault and Xid code."""

MEMORY_ECC = 54
"""ECC errors of main memory in the MEMORY_DAYS days of table VII."""

MEMORY_DAYS = 183
FLASH_CUT_DAYS: Mapping[int, int] = {0: 248, 1: 54, 2: 22, 3: 12, 4: 3, 5: 3, 7: 2, 8: 1, 10: 3}
"""Number of days, by the number of flash cuts in a day, over 348 days from 2023-04-19 to
2024-03-31. Cuts come in bursts, so the model draws the number of cuts for each day."""


class Fault(msgspec.Struct, frozen=True):
    at_ms: int
    kind: str
    effect: Effect
    node: int
    gpu: float
    """Number from 0 to 1 that selects the GPU whose program dies: 0 is the node's first GPU, almost
    1 the last."""
    repair_ms: int


class Kind(msgspec.Struct, frozen=True):
    """One row of the model."""

    effect: Effect
    a_year: float
    """Events of the fleet in a year; 0 for flash cuts, which are drawn by day."""
    repair_ms: int


KINDS: Mapping[str, Kind] = {
    "software": Kind("task", sum(XID_YEAR["software"].values()), 0),
    "nvlink": Kind("node", sum(XID_YEAR["nvlink"].values()), 10 * 60_000),
    "ecc": Kind("node", sum(XID_YEAR["ecc"].values()), 10 * 60_000),
    "gpu": Kind("node", sum(XID_YEAR["gpu"].values()), 24 * HOUR_MS),
    "memory": Kind("node", MEMORY_ECC * 365 / MEMORY_DAYS, 24 * HOUR_MS),
    "network": Kind("link", 0.0, 0),
}
"""Kinds of faults. The repair times are assumptions: a reset of GPUs takes 10 minutes, a
replacement of parts one day. A cut link is up again immediately."""

SETS = {
    "none": (),
    "paper": tuple(KINDS),
    "hardware": ("nvlink", "ecc", "gpu", "memory", "network"),
}


def parse(words: str) -> dict[str, float]:
    """Parses the kinds of faults to inject, for example `paper`, `hardware:2,software:0.5` or
    `none`. Returns the kinds, each with the factor by which its rate is multiplied.

    Raises:
        ConfigError: a word is not a known name with an optional factor.
    """
    rates: dict[str, float] = {}
    for word in filter(None, (word.strip() for word in words.split(","))):
        name, _, factor = word.partition(":")
        kinds = SETS.get(name, (name,))
        try:
            times = float(factor) if factor else 1.0
        except ValueError:
            times = -1.0
        if any(kind not in KINDS for kind in kinds) or not 0 <= times <= 1e6:
            known = ", ".join([*SETS, *KINDS])
            raise ConfigError(
                f"invalid faults {word!r}: expected NAME or NAME:FACTOR, with a NAME of {known}"
            )
        rates.update(dict.fromkeys(kinds, times))
    return {kind: times for kind, times in rates.items() if times}


def stream(rates: Mapping[str, float], nodes: int, seed: int) -> Iterator[Fault]:
    """Returns an endless iterator over faults in order of time, or an empty iterator if `rates` is
    empty. The faults do not depend on the policy.

    Args:
        rates: factors on the rates of the kinds, from `parse`.
        nodes: number of nodes of the simulated cluster.
        seed: seed of the generators. Each kind has its own generator, so that an additional kind
            does not change the faults of the others.
    """
    streams = []
    for kind, times in rates.items():
        draw = random.Random(f"{kind}/{seed}")
        share = times * nodes / FLEET_NODES
        when = _flash_cuts(draw, share) if kind == "network" else _poisson(draw, kind, share)
        streams.append(_faults(draw, kind, when, nodes))
    return heapq.merge(*streams, key=lambda fault: fault.at_ms)


def _poisson(draw: random.Random, kind: str, share: float) -> Iterator[int]:
    rate = KINDS[kind].a_year * share / YEAR_MS
    at = 0.0
    while True:
        at += draw.expovariate(rate)
        yield round(at)


def _flash_cuts(draw: random.Random, share: float) -> Iterator[int]:
    """Draws each day from the table. The probability that a cut hits this cluster is the cluster's
    share of the fleet."""
    counts, days = list(FLASH_CUT_DAYS), list(itertools.accumulate(FLASH_CUT_DAYS.values()))
    whole, rest = divmod(share, 1.0)
    for day in itertools.count():
        cuts = draw.choices(counts, cum_weights=days)[0]
        here = sum(int(whole) + (draw.random() < rest) for _ in range(cuts))
        yield from sorted(day * DAY_MS + int(draw.random() * DAY_MS) for _ in range(here))


def _faults(draw: random.Random, kind: str, when: Iterator[int], nodes: int) -> Iterator[Fault]:
    row = KINDS[kind]
    for at_ms in when:
        yield Fault(at_ms, kind, row.effect, draw.randrange(nodes), draw.random(), row.repair_ms)
