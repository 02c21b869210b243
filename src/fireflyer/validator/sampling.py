"""Samples of figures that other processes and stalls of the machine only make worse. Pure."""

import statistics
from collections.abc import Sequence

from fireflyer.validator.model import Better, Measured


def best_of(measured: Sequence[float], group: int, better: Better) -> tuple[float, ...]:
    """Returns the best measurement of each group.

    A slow node is slow in its best measurement, too; a stall of the machine is in a few only. The
    groups alternate, so that one stall meets all of them: measurement i belongs to group
    i modulo the number of groups.

    Args:
        measured: measurements in the order of time, at least one.
        group: measurements of a group, at least; fewer in all are one group.
        better: whether more or less is better.
    """
    count = max(len(measured) // group, 1)
    best = max if better == "more" else min
    return tuple(best(measured[at::count]) for at in range(count))


def sampled(name: str, measured: Sequence[float], group: int, better: Better) -> Measured:
    """Returns the median of the samples that `best_of` takes, as a figure."""
    samples = best_of(measured, group, better)
    return Measured(name, statistics.median(samples), samples=samples)
