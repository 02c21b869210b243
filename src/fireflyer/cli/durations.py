"""Durations on the command line: "200ms", "90s", "30m" or "30min", "24h", "7d", or seconds."""

import re

from fireflyer.errors import ConfigError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
LONGEST_S = 1e9


def seconds(text: str, option: str) -> float:
    """Returns the duration in seconds, which may be 0.

    Raises:
        ConfigError: the text is not a duration, or is above 30 years; the message names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|min|[smhd]?)", text.strip(), re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else LONGEST_S
    if not value < LONGEST_S:
        raise ConfigError(f"invalid {option} {text!r}: expected e.g. 90s, 30m, 24h or 7d")
    return value
