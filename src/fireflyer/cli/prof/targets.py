"""Processes that a command line of `fireflyer prof` names."""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fireflyer.errors import ConfigError, ProfileError, TaskError
from fireflyer.haiprof.attach.target import Target

_POLL_S = 0.05

PREPARE_TIMEOUT_S = 60.0
"""Time for a process to start and become attachable."""


@dataclass(frozen=True)
class Targets:
    """Processes, and the folder for their profile if they are the ranks of a task."""

    pids: list[int]
    folder: Path | None = None


def find(names: Sequence[str], home: Path | None, *, wait: bool) -> Targets:
    """Returns the processes of process ids or of one task id.

    Raises:
        ConfigError: a name is no process id; or it is a task id, but not the only name.
        ProfileError: the task has no running rank on this machine.
    """
    if len(names) == 1 and re.fullmatch(r"t\d+", names[0]):
        return _ranks(names[0], home, wait=wait)
    for name in names:
        if not re.fullmatch(r"[1-9]\d{0,9}", name):
            raise ConfigError(f"invalid target {name!r}: expected process ids, or one task id")
    return Targets([int(name) for name in names])


def _ranks(task: str, home: Path | None, *, wait: bool) -> Targets:
    from fireflyer.hai.client import Client
    from fireflyer.hai.home import profile_folder

    check_local(home, f"the ranks of {task}")
    client = Client(home)
    while True:
        view = client.task(task)
        pids = [r.pid for r in view.ranks if r.pid is not None and r.ended is None and r.member]
        whole = view.state == "running" and len(pids) == len(view.ranks)
        if whole or (pids and not wait):
            if wait:
                await_preparation(pids)
            return Targets(pids, profile_folder(view.directory, view.attempt))
        if not wait:
            raise ProfileError(f"{task} has no running rank: it is {view.state}")
        try:
            client.wait(task, {"running"})
        except TaskError as error:
            raise ProfileError(f"nothing to profile: {error}") from None
        time.sleep(_POLL_S)


def check_local(home: Path | None, what: str) -> None:
    """Raises ProfileError if tasks of this platform run on other machines."""
    from fireflyer.hai.home import locate

    if locate(home).read_engine().engine != "local":
        raise ProfileError(
            f"{what} run on other machines: on each, run haiprof attach with their process ids"
        )


def await_preparation(pids: Sequence[int]) -> None:
    """Waits until processes that are starting can be attached to.

    Returns early if a process has ended or is not prepared in time; the attempt to attach then
    reports it.
    """
    end = time.monotonic() + PREPARE_TIMEOUT_S
    for pid in pids:
        while time.monotonic() < end:
            with suppress(ProfileError), Target(pid) as target:
                target.signal_number()
                break
            if not Path(f"/proc/{pid}").exists():
                return
            time.sleep(_POLL_S)
