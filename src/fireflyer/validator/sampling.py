"""Samples of figures that other processes and stalls of the machine can only worsen. Pure."""

import statistics
from collections.abc import Sequence

from fireflyer.validator.model import Better, Measured


def best_of(measured: Sequence[float], group: int, better: Better) -> tuple[float, ...]:
    """Returns the best measurement of each group.

    A slow node is slow even in its best measurement, while a stall of the machine affects only a
    few measurements. The groups are interleaved, so one stall spreads over all of them: measurement
    i belongs to group i modulo the number of groups.

    Args:
        measured: measurements in the order of time; must not be empty.
        group: minimum number of measurements per group; if there are fewer in all, they form one
            group.
        better: whether more or less is better.
    """
    count = max(len(measured) // group, 1)
    best = max if better == "more" else min
    return tuple(best(measured[at::count]) for at in range(count))


def sampled(name: str, measured: Sequence[float], group: int, better: Better) -> Measured:
    """Returns the median of the samples that `best_of` takes, as a figure."""
    samples = best_of(measured, group, better)
    return Measured(name, statistics.median(samples), samples=samples)
