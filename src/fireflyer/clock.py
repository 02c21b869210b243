"""Clocks as arguments, so that code that waits or measures can be tested without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time source of a module with side effects; pure cores take `now` as an argument instead."""

    def monotonic(self) -> float:
        """Returns seconds that never go back; comparable between processes of one boot."""
        ...

    def wall(self) -> float:
        """Returns seconds since 1970-01-01 UTC; for display, never for durations."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told; for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Moves the clock forward.

        Raises:
            ValueError: if `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
