"""Validation of user options: an invalid value is rejected where it is given."""

from typing import Any

from fireflyer.errors import ConfigError

MOST_S = 1e8
"""Maximum number of seconds, about three years; within the range of every timer."""


def check_flag(name: str, value: Any) -> bool:
    """Returns the value if it is True or False.

    Raises:
        ConfigError: if the value is not True or False.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"invalid {name} {value!r}: expected True or False")
    return value


def check_seconds(name: str, value: Any, *, zero: bool = False) -> float:
    """Returns the value as a float; it must be above 0, or at least 0 if `zero`.

    Raises:
        ConfigError: if the value is not such a number, or above MOST_S.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_S or (value == 0 and not zero):
        least = "from 0" if zero else "above 0"
        raise ConfigError(
            f"invalid {name} {value!r}: expected a number of seconds {least} to {MOST_S:g}"
        )
    return float(value)
