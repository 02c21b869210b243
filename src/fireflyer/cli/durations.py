"""Times on the command line: "200ms", "90s", "30m" or "30min", "24h", "7d", or seconds."""

import re

from fireflyer.errors import ConfigError

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
LONGEST_S = 1e9


def seconds(text: str, option: str) -> float:
    """The time in seconds, 0 too.

    Raises:
        ConfigError: it is none, or above 30 years; names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|min|[smhd]?)", text.strip(), re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else LONGEST_S
    if not value < LONGEST_S:
        raise ConfigError(f"{option} {text!r} is no time; write e.g. 90s, 30m, 24h or 7d")
    return value
