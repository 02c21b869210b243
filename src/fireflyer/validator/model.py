"""Checks as plug-ins, and their results."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

import msgspec

from fireflyer.errors import ValidatorError

Better = Literal["more", "less"]

Status = Literal["passed", "failed", "not run"]

GROUP = "fireflyer.validator"
"""Group of entry points that name further tuples of checks, as "package.module:CHECKS"."""

BUILT_IN = (
    "fireflyer.validator.checks.system:CHECKS",
    "fireflyer.validator.checks.devices:CHECKS",
    "fireflyer.validator.checks.nvidia:CHECKS",
    "fireflyer.validator.checks.cpu:CHECKS",
    "fireflyer.validator.checks.gemm:CHECKS",
    "fireflyer.validator.checks.memory:CHECKS",
    "fireflyer.validator.checks.disk:CHECKS",
    "fireflyer.validator.checks.network:CHECKS",
    "fireflyer.validator.checks.filesystem:CHECKS",
    "fireflyer.validator.checks.collectives:CHECKS",
)
"""Checks in the order in which they run. Checks that only read logs and counters come first, so
they run even if the time of a quick validation runs out."""


class Figure(msgspec.Struct, frozen=True):
    """Quantity that a check measures."""

    name: str
    unit: str
    better: Better = "more"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """Check of a node's hardware; runs in a process of its own."""

    name: str
    figures: tuple[Figure, ...]
    needs: str = ""
    """Requirements, for users; empty: any Linux."""
    disk: bool = False
    """True if the check measures the disk of `Settings.directory`; other checks need no disk."""
    duration_s: float
    """Usual duration of this check in a quick validation, in seconds."""
    function: str
    """ "package.module:name" of a function that takes Settings and yields a Measured for each
    figure. The function raises NotRun if it cannot run."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a validation."""

    quick: bool = True
    """True: limit the whole validation to a minute."""
    directory: str = ""
    """Folder for the disk checks; empty: the folder for temporary files."""
    fs3: str = ""
    """Address of a file system for the fs3 checks; empty: none."""
    peers: tuple[str, ...] = ()
    """HOST:PORT of listeners for the network checks between nodes."""
    any_peer: bool = False
    """True: the figures are those of the best peer, and an unreachable peer is no fault of this
    node.
    False: the figures are those of the worst peer, and an unreachable peer is a fault."""
    secret_file: str = ""
    """File with the secret of the listeners in `peers`."""
    memory_mib: int = 0
    """Memory of the pattern test; 0: 256 MiB if quick, else three quarters of the free memory."""
    drill: str = ""
    """Check into which a fault is injected, to see that the check finds it."""


class Measured(msgspec.Struct, frozen=True):
    """Measurement of one figure; the check's process reports it."""

    name: str
    value: float | None = None
    failed: str = ""
    """Reason why the hardware is bad; empty: the check found no fault."""
    skipped: str = ""
    """Reason why this figure was not measured."""
    samples: tuple[float, ...] = ()
    """Individual measurements, by which nodes of a fleet are compared; empty: only `value`."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one figure."""

    name: str
    status: Status
    value: float | None
    unit: str
    reason: str
    better: Better = "more"
    samples: tuple[float, ...] = ()


class NotRun(Exception):
    """The check cannot run here; the text says why."""


def all_checks() -> tuple[Check, ...]:
    """Returns the built-in checks, then those of installed plug-ins.

    Raises:
        ValidatorError: a plug-in cannot be loaded, or uses the name of another check.
    """
    found: dict[str, Check] = {}
    names = [*BUILT_IN, *(point.value for point in entry_points(group=GROUP))]
    for name in names:
        try:
            checks = tuple(load(name))
        except (AttributeError, ImportError, TypeError) as error:
            raise ValidatorError(
                f"cannot load the checks {name!r}: {error}; repair or uninstall the plug-in"
            ) from None
        for check in checks:
            if check.name in found:
                raise ValidatorError(f"two checks are named {check.name!r}: rename one in {name!r}")
            found[check.name] = check
    return tuple(found.values())


def load(name: str) -> Iterable[Check]:
    """Returns the checks at "package.module:name"."""
    module, _, attribute = name.partition(":")
    found: Iterable[Check] = getattr(import_module(module), attribute)
    return found


def function_of(check: Check) -> Callable[[Settings], Iterable[Measured]]:
    """Returns the function that runs a check."""
    module, _, attribute = check.function.partition(":")
    found: Callable[[Settings], Iterable[Measured]] = getattr(import_module(module), attribute)
    return found


def chosen(checks: Iterable[Check], only: Iterable[str]) -> tuple[Check, ...]:
    """Returns the checks of these names; all checks if there are no names.

    Raises:
        ValidatorError: there is no check of such a name.
    """
    checks, wanted = tuple(checks), tuple(only)
    names = [check.name for check in checks]
    for name in wanted:
        if name not in names:
            raise ValidatorError(f"invalid check {name!r}: expected one of {', '.join(names)}")
    return tuple(check for check in checks if not wanted or check.name in wanted)


def read_text(path: Path) -> str | None:
    """Returns the stripped text of a file of /proc or /sys; None: the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
