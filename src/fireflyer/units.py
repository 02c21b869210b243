"""Sizes and durations as people write them: "64K", "16M", "1GiB"; "200ms", "90s", "30m", "7d"."""

import re

from fireflyer.errors import ConfigError

_SIZE = re.compile(r"(\d{1,18})\s*(?:([KMGT])(?:iB)?|B)?", re.IGNORECASE | re.ASCII)
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Returns the bytes of "64K", "16M", "1GiB" or "1000"; units are powers of 1024.

    Raises:
        ValueError: the text is not a size above zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _BYTES[(match[2] or "").upper()] if match else 0
    if not size:
        raise ValueError(
            f"invalid size {text[:40]!r}: expected e.g. 64K, 256M, 1G or a number of bytes"
        )
    return size


def parse_bytes(text: str, option: str) -> int:
    """Parses a size like `parse_size`, for the value of a command-line option.

    Raises:
        ConfigError: the text is not a size above zero; the message names the option.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
LONGEST_S = 1e9


def parse_seconds(text: str, option: str) -> float:
    """Returns the seconds of "200ms", "90s", "30m", "30min", "24h", "7d" or a number; 0 is allowed.

    Raises:
        ConfigError: the text is not a duration, or is above 30 years; the message names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|min|[smhd]?)", text.strip(), re.ASCII)
    value = float(found[1]) * _SECONDS[found[2]] if found else LONGEST_S
    if not value < LONGEST_S:
        raise ConfigError(f"invalid {option} {text!r}: expected e.g. 90s, 30m, 24h or 7d")
    return value


def parse_mib(text: str, option: str) -> int:
    """Returns the MiB of e.g. "512MiB", "64GiB", "64G"; a number without a unit is MiB.

    Raises:
        ConfigError: the text is not a size; the message names the option.
    """
    factors = {"TiB": 1 << 20, "T": 1 << 20, "GiB": 1 << 10, "G": 1 << 10, "MiB": 1, "M": 1, "": 1}
    unit = next(unit for unit in factors if text.endswith(unit))
    number = text[: len(text) - len(unit)]
    if not (number.isascii() and number.isdecimal()) or len(number) > 12:
        raise ConfigError(f"invalid {option} {text!r}: expected e.g. 512MiB or 64GiB")
    return int(number) * factors[unit]


def format_mib(mib: int) -> str:
    """Returns MiB in the form that `parse_mib` reads, e.g. "64GiB" or "1536MiB"."""
    return f"{mib >> 10}GiB" if mib and mib % 1024 == 0 else f"{mib}MiB"
