"""Formats times, amounts and names as text for users. Pure; templates use the functions as
filters."""

import os
import re
from datetime import UTC, datetime

from fireflyer.hai.database.history_queries import Brief
from fireflyer.hai.model import TaskSpec
from fireflyer.program import plain

NAME = 60
"""Maximum characters of a name in a list."""

TEXT = 300
"""Maximum characters of a reason in a list."""

_ANSI = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]?|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[PX^_][^\x1b\n]*(?:\x1b\\)?|[ -/]*[0-~]?)"
)
"""Terminal escape sequences. A newline ends an unterminated sequence, which would otherwise hide
all text that follows."""

_CONTROLS = dict.fromkeys(
    [*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
)  # fmt: skip


def title(spec: TaskSpec | Brief) -> str:
    """Returns the task's name, or its script's file name."""
    return spec.name or os.path.basename(spec.script)


def short(text: str, most: int = NAME) -> str:
    """Returns one line without terminal controls and direction marks, cut to `most` characters."""
    text = plain(text[: 4 * most])
    return text if len(text) <= most else text[: most - 1] + "…"


def span(seconds: float) -> str:
    """Formats a duration in its two largest units, e.g. "2 h 5 min"."""
    seconds = max(seconds, 0.0)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = int(seconds)
    for unit, size, smaller, part in (
        ("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1),
    ):  # fmt: skip
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError("at least a minute")


def ago(wall: float, now: float) -> str:
    """Formats the time between a moment and `now`."""
    return f"in {span(wall - now)}" if wall > now + 1 else f"{span(now - wall)} ago"


def stamp(wall: float) -> str:
    """Formats a moment for `<time datetime>`."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock(wall: float) -> str:
    """Formats a moment as text; the page's script converts it to the reader's time zone."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def percent(part: float, whole: float) -> str:
    """Formats a share, e.g. "12.5 %"."""
    if not whole:
        return "0 %"
    share = 100 * part / whole
    if 0 < share < 0.05:
        return "< 0.1 %"
    return f"{share:.0f} %" if share >= 99.95 or share == 0 else f"{share:.1f} %"


def hours(microseconds: int) -> str:
    """Formats an amount of the ledger in hours."""
    value = microseconds / 3.6e9
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.4f}"


def log_text(text: str) -> str:
    """Returns a program's output as plain text, without terminal escape sequences, control
    characters and direction marks. If carriage returns overwrote a line, only the last version is
    left."""
    text = _ANSI.sub("", text.replace("\r\n", "\n")).translate(_CONTROLS)
    if "\r" not in text:
        return text
    return "\n".join(_last(line) for line in text.split("\n"))


def _last(line: str) -> str:
    parts = [part for part in line.split("\r") if part]
    return parts[-1] if parts else ""
