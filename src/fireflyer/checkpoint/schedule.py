"""Save schedule: the user's `every` option, and decisions whether a save is due.

The caller passes in the current time.
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from fireflyer.errors import ConfigError

AUTO = "auto"
SHORTEST_S, LONGEST_S = 60.0, 3600.0
"""Bounds of the interval for `every="auto"`. At a shorter interval, a restart costs more than the
lost work. At a longer interval, a wrong estimate of the failure rate could cost half a day."""
PRIOR_S = 86_400.0
"""Prior for the time between failures, in seconds, weighted as one failure. If a save costs half a
second, the prior leads to an interval of five minutes, that of the Fire-Flyer paper."""

_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)")


def parse_duration(text: str) -> float:
    """Returns the seconds of "5min", "30s", "1.5h" or "500ms".

    Raises:
        ConfigError: if the text is not such a duration above zero.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(
            f'invalid every {text!r}: expected "auto" or a number of ms, s, min or h, e.g. "5min"'
        )
    return seconds


def check_steps(steps: int) -> int:
    """Returns `steps` if it is a valid interval.

    Raises:
        ConfigError: if the number is below 1.
    """
    if steps < 1:
        raise ConfigError(
            f"invalid every {steps}: expected at least 1 step, or None for no schedule"
        )
    return steps


def best_interval(cost_s: float, between_failures_s: float) -> float:
    """Returns the seconds of training between saves that minimize the expected loss.

    This is Daly's higher-order estimate (2006) of the optimum of Young's model: a save costs
    `cost_s`, and failures occur at random.
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    share = cost_s / (2 * between_failures_s)
    young_s = math.sqrt(2 * cost_s * between_failures_s)
    return young_s * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def auto_interval(cost_s: float | None, failures: int, seen_s: float) -> float:
    """Returns the seconds between saves for `every="auto"`.

    Args:
        cost_s: the cost of a save. None before the first measurement: a save is then due after
            SHORTEST_S.
        failures: number of failures in the observed time.
        seen_s: observed running time, in seconds.
    """
    if cost_s is None:
        return SHORTEST_S
    between_s = (PRIOR_S + seen_s) / (1 + failures)
    return min(max(best_interval(cost_s, between_s), SHORTEST_S), LONGEST_S)


class Run(NamedTuple):
    """Run in a directory; times in seconds since 1970."""

    started: float
    left: float | None
    """Time at which the run left on request; None if it ended otherwise or is still running."""


def failures_seen(runs: Sequence[Run], now: float) -> tuple[int, float]:
    """Returns (failures, seconds of running) of consecutive runs; the last run is still running.

    A run that did not leave on request counts as failed when the next run starts.
    """
    failures, seen_s = 0, 0.0
    for index, run in enumerate(runs):
        last = index == len(runs) - 1
        end = now if last else runs[index + 1].started
        if run.left is not None:
            end = min(end, run.left)
        elif not last:
            failures += 1
        seen_s += max(0.0, end - run.started)  # clocks of different machines may disagree
    return failures, seen_s


class SaveCost:
    """Cost of a save to training: its stall, and the slowdown of steps during the save."""

    def __init__(self) -> None:
        self._free_s: deque[float] = deque(maxlen=64)
        self._costs_s: deque[float] = deque(maxlen=5)
        self._noted: tuple[int, float] | None = None
        self._stall_s = 0.0
        self._open: list[float] | None = None
        """Save in flight: [its stall in seconds, seconds since its start, steps since its
        start]."""

    @property
    def cost_s(self) -> float | None:
        """Median cost of the last five saves; None before the end of the first save."""
        return median(self._costs_s) if self._costs_s else None

    def began(self, stall_s: float) -> None:
        """Records the start of a save that stalled its caller for `stall_s` since the last
        `note`."""
        self._finish()
        self._stall_s += stall_s
        self._open = [stall_s, 0.0, 0.0]

    def note(self, step: int, now: float, saving: bool) -> None:
        """Records the time after each step; `saving` is True while the last save is in flight."""
        if self._noted is not None and step > self._noted[0]:
            steps = step - self._noted[0]
            took_s = now - self._noted[1] - self._stall_s
            if self._open is None:
                self._free_s.append(took_s / steps)
            else:
                self._open[1] += took_s
                self._open[2] += steps
        self._noted, self._stall_s = (step, now), 0.0
        if not saving:
            self._finish()

    def _finish(self) -> None:
        if self._open is not None:
            stall_s, busy_s, steps = self._open
            slower_s = busy_s - steps * median(self._free_s) if self._free_s else 0.0
            self._costs_s.append(stall_s + max(0.0, slower_s))
            self._open = None


class Interval:
    """Decides at which steps a time-based save is due; one rank asks it, and all ranks follow.

    Each decision also names the step of the next decision. At the recent pace that step lies half
    of the remaining time ahead, so ranks communicate a few times per interval rather than at every
    step.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        self.interval_s = interval_s
        """Seconds between saves; infinite if no save is ever due. May change at any time."""
        self._last_save = now
        self._asked: tuple[int, float] | None = None

    def saved(self, now: float) -> None:
        """Records that another rank has decided to save."""
        self._last_save = now

    def decide(self, step: int, now: float, within_s: float = math.inf) -> tuple[bool, int]:
        """Returns (True if a save is due at `step`, the first step at which to ask again).

        At the recent pace, training reaches that step within `within_s` seconds, unless already the
        next step takes longer.
        """
        left = self._last_save + self.interval_s - now
        due = left <= 0
        if due:
            self._last_save = now
            left = self.interval_s
        ahead = 1
        if self._asked is not None and step > self._asked[0]:
            step_s = (now - self._asked[1]) / (step - self._asked[0])
            if step_s > 0:
                ahead = max(1, int(min(left / 2 / step_s, within_s / step_s, 2**31)))
        self._asked = (step, now)
        return due, step + ahead
