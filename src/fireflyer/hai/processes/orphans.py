"""Orphaned processes of a task, found by their environment.

This is the last resort if guard and supervisor, which track the descendants, were killed at the
same time. The search finds processes that were started with the given variables, or forked from
such a process. It does not find a process that cleared its environment or belongs to another user.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping

LIMIT_S = 1.0
"""Default wait for killed processes, for a caller that must not block for long."""


def end(marks: Mapping[str, str], limit_s: float = LIMIT_S) -> list[int]:
    """Kills every other process that has all these environment variables, and all processes that
    such a process forks meanwhile.

    Args:
        limit_s: maximum wait for the processes. A killed process needs processor time to end, so on
            a busy machine it may exist for seconds.

    Returns:
        Processes that still exist after the limit.
    """
    deadline = time.monotonic() + limit_s
    while (found := _find(marks)) and time.monotonic() < deadline:
        for pid in found:
            _end(pid, marks, deadline)
    return found


def _find(marks: Mapping[str, str]) -> list[int]:
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return [pid for pid in pids if pid != os.getpid() and _marked(pid, marks)]


def _marked(pid: int, marks: Mapping[str, str]) -> bool:
    """Returns whether a process has these environment variables; False for a process that has ended
    or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            has = set(file.read().split(b"\0"))
    except OSError:
        return False
    return all(os.fsencode(f"{name}={value}") in has for name, value in marks.items())


def _end(pid: int, marks: Mapping[str, str], deadline: float) -> None:
    """Kills the process and waits until it has ended or the deadline passes."""
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            if _marked(pid, marks):  # the pid may belong to another process by now
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(process)
