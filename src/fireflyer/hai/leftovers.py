"""Processes that outlived who was to end them, found by their environment.

The last resort where every process that could know its descendants was killed in one instant. It finds what
was started with the variables that are asked for, or forked from such a process; who cleared its environment,
or belongs to another user, is not found.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping

LIMIT_S = 1.0
"""A killed process goes within that, unless the kernel holds it."""


def end(marks: Mapping[str, str]) -> list[int]:
    """Kills every process but this one that has all these environment variables, and what it forks meanwhile.

    Returns:
        Those that are not gone after LIMIT_S.
    """
    deadline = time.monotonic() + LIMIT_S
    while (found := _find(marks)) and time.monotonic() < deadline:
        for pid in found:
            _end(pid, marks, deadline)
    return found


def _find(marks: Mapping[str, str]) -> list[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and _marked(pid, marks)]


def _marked(pid: int, marks: Mapping[str, str]) -> bool:
    """False for a process that has ended, and for another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            has = set(file.read().split(b"\0"))
    except OSError:
        return False
    return all(os.fsencode(f"{name}={value}") in has for name, value in marks.items())


def _end(pid: int, marks: Mapping[str, str], deadline: float) -> None:
    """Returns once it has ended."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if _marked(pid, marks):  # the number may be another one's by now
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(process)
