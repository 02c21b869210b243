"""Checks of what users give as options: what cannot work is refused where it is written."""

from typing import Any

from fireflyer.errors import ConfigError

MOST_S = 1e8
"""Three years: what timers of all kinds still hold."""


def check_flag(name: str, value: Any) -> bool:
    """The value itself.

    Raises:
        ConfigError: if it is not True or False.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: write True or False")
    return value


def check_seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """The value itself, above 0, or from 0 on.

    Raises:
        ConfigError: if it is no such number, or beyond MOST_S.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_S or (value == 0 and not zero):
        least = "from 0" if zero else "above 0"
        raise ConfigError(f"{name}={value!r}: write a number of seconds {least} to {MOST_S:g}")
    return float(value)
