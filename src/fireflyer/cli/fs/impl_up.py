"""Implementation of `fireflyer fs up`."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import typer

from fireflyer import log
from fireflyer.errors import FireflyerError, Unavailable
from fireflyer.fs3 import config
from fireflyer.fs3.client import discovery
from fireflyer.fs3.process import ALL, Process
from fireflyer.fs3.roles import Role
from fireflyer.program import allow_descriptors

_ROLES = {role.name.lower(): role for role in Role if role in ALL}


class _Ended(BaseException):
    """SIGTERM or SIGINT arrived."""


def embedded(folder: Path, replicas: int | None, targets: int | None) -> None:
    """Runs all roles, with their data in a folder. Returns when a signal arrives."""
    allow_descriptors()
    with _until_signal():
        settings = config.embed(folder, replicas, targets)
        _log_as(settings, ALL)
        with _started(settings, folder) as process:
            # Before set_up, so that `fs status` can show what set_up waits for.
            discovery.announce(folder, process.manager)
            process.set_up()
            ready = f"the file system in {folder} is ready at {process.manager}"
            _say(f"{ready}{_metrics(process)}; Ctrl-C ends it")
            process.wait()


def _started(settings: config.ClusterConfig, folder: Path) -> Process:
    """Starts all roles.

    Raises:
        Unavailable: another process runs this file system; the message names the process and the
            address.
    """
    try:
        return Process(settings, ALL, settings.nodes)
    except Unavailable as error:
        where = ""
        with suppress(FireflyerError):
            where = f"; the file system answers at {discovery.find(str(folder)).addresses[0]}"
        raise Unavailable(f"{error}{where}") from error


def part(file: Path, role: str | None, name: str | None, *, standby: bool) -> None:
    """Runs some roles of a cluster. Returns when a signal arrives."""
    roles = _roles(role)
    settings = config.load(file)
    if name is None:
        if len(settings.nodes) > 1 and Role.STORAGE in roles:
            known = ", ".join(sorted(settings.nodes))
            raise typer.BadParameter(f"--name is missing: expected one of {known}")
        name = next(iter(settings.nodes))
    what = ", ".join(role.name.lower() for role in sorted(roles))
    allow_descriptors()
    with _until_signal():
        _log_as(settings, roles, name if Role.STORAGE in roles else "")
        _serve(settings, roles, name, what, standby=standby)


def _serve(
    settings: config.ClusterConfig, roles: frozenset[Role], name: str, what: str, *, standby: bool
) -> None:
    with Process(settings, roles, [name], standby=standby) as process:
        process.set_up()
        nodes = process.nodes.items()
        node = "".join(f" of node {its} at {node.address}" for its, node in nodes)
        ready = f"{what}{node}: ready, manager at {process.manager}"
        _say(f"{ready}{_metrics(process)}; Ctrl-C ends it")
        process.wait()


def _roles(text: str | None) -> frozenset[Role]:
    if text is None:
        return ALL
    try:
        return frozenset(_ROLES[word.strip()] for word in text.split(","))
    except KeyError as error:
        known = ", ".join(_ROLES)
        raise typer.BadParameter(f"--role {error.args[0]!r}: expected one of {known}") from None


def _log_as(settings: config.ClusterConfig, roles: frozenset[Role], node: str = "") -> None:
    context = {"role": ",".join(role.name.lower() for role in sorted(roles))}
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    log.configure(level, settings.log, context | ({"node": node} if node else {}))


def _metrics(process: Process) -> str:
    return f", {process.metrics}" if process.metrics else ""


def _say(line: str) -> None:
    sys.stdout.write(f"fireflyer: {line}\n")
    sys.stdout.flush()


@contextmanager
def _until_signal() -> Iterator[None]:
    """Ends the `with` block on SIGTERM or SIGINT; a second signal ends the process."""
    log.configure(logging.INFO)
    os.umask(0o077)

    def end(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        raise _Ended

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    for one in before:
        signal.signal(one, end)
    try:
        yield
    except _Ended:
        return
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
