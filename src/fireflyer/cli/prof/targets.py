"""Processes that a command line of `fireflyer prof` names."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fireflyer.errors import ConfigError, ProfileError

_POLL_S = 0.1


@dataclass(frozen=True)
class Targets:
    """Processes, and the folder for their profile if they are the ranks of a task."""

    pids: list[int]
    folder: Path | None = None


def find(names: Sequence[str], home: Path | None, *, wait: bool) -> Targets:
    """Returns the processes of process ids or of one task id.

    Raises:
        ConfigError: a name is neither.
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
    from fireflyer.hai.home import locate

    if locate(home).read_engine().engine != "local":
        raise ProfileError(
            f"the ranks of {task} run on other machines: on each, run haiprof attach with their "
            "process ids"
        )
    client = Client(home)
    while True:
        view = client.task(task)
        pids = [r.pid for r in view.ranks if r.pid is not None and r.ended is None and r.member]
        whole = view.state == "running" and len(pids) == len(view.ranks)
        if whole or (pids and not wait):
            folder = Path(view.directory) / str(view.attempt) / "haiprof"
            return Targets(pids, folder)
        if not wait or view.state in ("finished", "failed", "stopped"):
            raise ProfileError(f"{task} has no running rank: it is {view.state}")
        time.sleep(_POLL_S)
