"""Times of a rank's communication, counted by the wrapper for reports."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Times:
    """Times of this rank since construction, in seconds of `clock`.

    Attributes:
        exposed_s: time spent waiting for reductions.
        optimizer_s: time of the wrapper's optimizer steps on buckets; without `optimizer=` the
            script itself steps.
        under_way_s: time with some reduction, or all-gather of a sharded model, in flight.
        steps: number of synchronised backwards.
        reductions: number of reductions started.
    """

    exposed_s: float = 0.0
    optimizer_s: float = 0.0
    under_way_s: float = 0.0
    steps: int = 0
    reductions: int = 0
    clock: Callable[[], float] = time.monotonic


class CommunicationTimer:
    """Records the time during which an owner's communication is in flight."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._count = 0
        self._since = 0.0

    def begin(self) -> None:
        if not self._count:
            self._since = self._times.clock()
        self._count += 1

    def end(self) -> None:
        """Ends a communication that `begin` began."""
        self._count -= 1
        if not self._count:
            self._times.under_way_s += self._times.clock() - self._since
