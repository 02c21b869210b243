"""Times on the command line: "90s", "30m", "24h", "7d", or seconds."""

import math
import re

from fireflyer.errors import ConfigError

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text: str, option: str) -> float:
    """The time in seconds.

    Raises:
        ConfigError: it is none; names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip(), re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if not math.isfinite(value):
        raise ConfigError(f"{option} {text!r} is no time; write e.g. 90s, 30m, 24h or 7d")
    return value
