"""When to save: `every` as a user writes it, and the decision, which has no clock of its own."""

import re

from fireflyer.errors import ConfigError

_UNITS_S = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)")


def parse_duration(text: str) -> float:
    """Seconds of "5min", "30s", "1.5h" or "500ms".

    Raises:
        ConfigError: if the text is no such duration above zero.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigError(
            f'every={text!r} is no duration: write a number of ms, s, min or h, e.g. "5min"'
        )
    return seconds


def check_steps(steps: int) -> int:
    """The number itself.

    Raises:
        ConfigError: if it is below 1.
    """
    if steps < 1:
        raise ConfigError(
            f"every={steps} steps is too few: write at least 1, or None for no schedule"
        )
    return steps


class Interval:
    """Decides at which steps a save is due by time; one rank asks it and all obey.

    Not every step needs a decision: each one also names the next step to ask at, half of the way
    that the recent pace leaves, so that ranks talk a few times an interval instead of every step.
    """

    def __init__(self, interval_s: float, now: float) -> None:
        self._interval_s = interval_s
        self._last_save = now
        self._asked: tuple[int, float] | None = None

    def decide(self, step: int, now: float) -> tuple[bool, int]:
        """(is a save due at `step`, the step from which on to ask again)."""
        left = self._last_save + self._interval_s - now
        due = left <= 0
        if due:
            self._last_save = now
            left = self._interval_s
        ahead = 1
        if self._asked is not None and step > self._asked[0]:
            step_s = (now - self._asked[1]) / (step - self._asked[0])
            if step_s > 0:
                ahead = max(1, int(min(left / step_s / 2, 2**31)))
        self._asked = (step, now)
        return due, step + ahead
