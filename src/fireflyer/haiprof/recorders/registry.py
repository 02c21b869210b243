"""Recorders by name, and the user's choice of recorders.

A plug-in is an entry point of the group `fireflyer.haiprof.recorders`: a callable that takes a process
id and returns a `Recorder`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Protocol

from fireflyer.errors import ConfigError
from fireflyer.haiprof.recorders import host, process
from fireflyer.haiprof.recorders.gpu import Gpu

INSIDE = ("phase", "trace")
"""Recorders that run in the agent, inside the process."""

GROUP = "fireflyer.haiprof.recorders"


class Recorder(Protocol):
    """Source of values of one process or its machine. A recorder runs in the profiler."""

    name: str
    interval_s: float

    def missing(self) -> str | None:
        """Returns the reason why this machine or process has no such values; None if the values
        exist."""
        ...

    def sample(self) -> dict[str, float]:
        """Returns the current values. Counters have names that end in `_total`.

        Raises:
            OSError: the process has ended.
        """
        ...


BUILT_IN: Mapping[str, Callable[[int], Recorder]] = {
    "basic": process.Basic,
    "cpu": process.Cpu,
    "mem": process.Memory,
    "io": process.InputOutput,
    "gpu": Gpu,
    "ib": host.InfiniBand,
    "numa": host.Numa,
}


def available() -> dict[str, Callable[[int], Recorder]]:
    """Returns all recorders that run in the profiler, by name."""
    return {**BUILT_IN, **_plug_ins()}


@cache
def _plug_ins() -> dict[str, Callable[[int], Recorder]]:
    """Returns the recorders of other packages; the search of the installed packages takes 10 ms or
    more."""
    found = entry_points(group=GROUP)
    return {point.name: point.load() for point in found if point.name not in BUILT_IN}


def chosen(text: str, intervals: Mapping[str, float] | None = None) -> tuple[list[str], list[str]]:
    """Splits a list of names such as `basic,gpu,phase` or `all` into recorders of the profiler and
    of the agent.

    Raises:
        ConfigError: a name is unknown, or an interval is not positive.
    """
    known = [*available(), *INSIDE]
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["all"]:
        names = known
    for name in [*names, *(intervals or ())]:
        if name not in known:
            raise ConfigError(
                f"invalid recorder {name!r}: expected all, or some of {', '.join(known)}"
            )
    for name, seconds in (intervals or {}).items():
        if not seconds > 0:
            raise ConfigError(f"invalid interval {seconds:g} of recorder {name}: expected seconds")
    return [n for n in names if n not in INSIDE], [n for n in names if n in INSIDE]
