"""Rates of failures with confidence intervals, and nodes that fail too often. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

CONFIDENCE = 0.95

LEMON = 0.01
"""Maximum probability that any healthy node of the fleet is called a lemon."""


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Rate of one class of failures in a fleet."""

    of: str
    failures: int
    days: float
    """Length of the observation."""
    mtbf_h: float | None
    """Mean time between failures of the fleet, in hours; None if there was no failure."""
    low_h: float
    """Lower end of the 95 % confidence interval of the mean time between failures, in hours."""
    high_h: float | None
    """Upper end; None if there was no failure."""
    dispersion: float | None
    """Variance of the daily counts divided by their mean; about 1 if failures are independent.
    Above 1, failures come in bursts and the interval is wider. None: daily counts are unknown."""
    per_1000_node_days: float | None
    """Failures per 1000 node-days; None: the number of nodes is unknown."""


class Lemon(msgspec.Struct, frozen=True, kw_only=True):
    """Node that failed more often than chance explains."""

    node: str
    failures: int
    expected: float
    """Failures to expect of this node, by the rate of all other nodes."""
    chance: float
    """Probability that any node of the fleet reaches this number of failures."""


def rate(
    of: str, failures: int, days: float, nodes: int | None, daily: Sequence[int] | None
) -> Rate:
    """Computes a rate and its interval.

    The interval is the exact interval of a Poisson process (Garwood, 1936). Failures in bursts
    carry less information: they count as failures / dispersion.

    Args:
        failures: number of failures in the observation.
        days: length of the observation, above 0.
        nodes: size of the fleet; None: unknown.
        daily: count of each day, including days without failures; None: unknown.
    """
    from scipy import stats

    dispersion = None
    if daily is not None and failures:
        dispersion = float(np.var(daily, ddof=1) / np.mean(daily)) if len(daily) > 1 else None
    spread = max(dispersion or 1.0, 1.0)
    effective, hours = failures / spread, 24.0 * days
    tail = (1 - CONFIDENCE) / 2
    most = float(stats.gamma.isf(tail, effective + 1)) * spread
    least = float(stats.gamma.ppf(tail, effective)) * spread if failures else 0.0
    return Rate(
        of=of,
        failures=failures,
        days=days,
        mtbf_h=hours / failures if failures else None,
        low_h=hours / most,
        high_h=hours / least if least else None,
        dispersion=dispersion,
        per_1000_node_days=None if nodes is None else 1000 * failures / (days * nodes),
    )


def lemons(failures: Mapping[str, int], nodes: int) -> list[Lemon]:
    """Returns the nodes that failed too often, worst first.

    The expected number is the mean of all other nodes, without the lemons already found. The
    probability that a Poisson variable with this mean reaches the node's count is multiplied by the
    number of nodes. So a large fleet names no more healthy nodes than a small one.

    Args:
        failures: number of failures of each node that had failures.
        nodes: size of the fleet.
    """
    from scipy import stats

    found: list[Lemon] = []
    left = Counter(dict(failures))
    total = sum(left.values())
    for node, count in left.most_common():
        others = nodes - len(found) - 1
        if others < 1:
            break
        expected = (total - count) / others
        # If no other node failed, the true mean is still above 0: assume half a failure in total.
        chance = float(stats.poisson.sf(count - 1, expected or 0.5 / others)) * nodes
        if chance > LEMON:
            break
        found.append(Lemon(node=node, failures=count, expected=expected, chance=chance))
        total -= count
    return found
