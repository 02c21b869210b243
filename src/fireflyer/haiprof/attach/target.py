"""Checks of a process before it is signalled.

The signal would kill an unprepared process. So `Target.signal_number` checks that the process is
prepared, and `wake` checks again right before it signals. A pid descriptor ensures that both checks
and the signal concern the same process.
"""

import contextlib
import os
import platform
import pwd
import re
import signal
from pathlib import Path

from fireflyer.errors import ProfileError
from fireflyer.haiprof.inside.prepare import ENDING

_STATES = {
    "T": "is stopped: continue it first (kill -CONT {pid})",
    "t": "is stopped by a debugger: detach the debugger first",
    "Z": "is a zombie: it has ended, and its parent has not collected it",
    "X": "has ended",
}


_BLOCKING = {
    0: "read", 19: "readv", 43: "accept", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 202: "futex",
    247: "waitid", 288: "accept4",
}  # fmt: skip
"""System calls of x86-64 that the kernel restarts after a signal with SA_RESTART, so that they do
not return to Python."""


class NotPrepared(ProfileError):
    """Error: the process is alive but has no signal handler. Its stacks can still be read from
    outside."""


class Target:
    """A process that may be attached to. A context manager, which holds a descriptor of the process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.uid = -1
        try:
            self._handle = os.pidfd_open(pid)
        except (ProcessLookupError, OSError):
            raise ProfileError(f"process {pid} does not exist") from None
        try:
            self._check()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    def _check(self) -> None:
        """Raises ProfileError with the reason if this user cannot attach to the process."""
        status = self._status()
        self.uid = int(status.get("Uid", "-1 -1").split()[1])
        if self.uid != os.geteuid():
            raise ProfileError(
                f"process {self.pid} belongs to {_user(self.uid)}: run haiprof as that user"
            )
        self._check_state(status)
        for kind, name in (("pid", "process"), ("mnt", "mount"), ("user", "user")):
            try:
                other = os.readlink(f"/proc/{self.pid}/ns/{kind}")
            except OSError:
                continue
            if other != os.readlink(f"/proc/self/ns/{kind}"):
                raise ProfileError(
                    f"process {self.pid} is in another {name} namespace: run haiprof inside its "
                    f"container (nsenter --target {self.pid} --all)"
                )

    def _status(self) -> dict[str, str]:
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            raise ProfileError(f"process {self.pid} has ended") from None
        return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}

    def _check_state(self, status: dict[str, str]) -> None:
        reason = _STATES.get(status.get("State", "X")[:1])
        if reason:
            raise ProfileError(f"process {self.pid} {reason.format(pid=self.pid)}")

    def signal_number(self) -> int:
        """Returns the number of the signal that the process handles.

        Raises:
            NotPrepared: the process was not prepared, or does not handle that signal now.
            ProfileError: the process is stopped, or has ended.
        """
        status = self._status()
        self._check_state(status)
        number = self._marked()
        caught = int(status.get("SigCgt", "0"), 16)
        if number is None or not caught >> (number - 1) & 1:
            raise NotPrepared(
                f"process {self.pid} is not prepared: start it with `haiprof run SCRIPT` or "
                "`fireflyer run SCRIPT`, or run `haiprof enable` before it starts"
            )
        return number

    def _marked(self) -> int | None:
        page = os.sysconf("SC_PAGESIZE")
        pattern = re.compile(rf" ([0-9a-f]+) \S+ \d+ +.*{re.escape(ENDING)}( \(deleted\))?$")
        try:
            with open(f"/proc/{self.pid}/maps") as file:
                for line in file:
                    if ENDING in line and (found := pattern.search(line.rstrip("\n"))):
                        return int(found[1], 16) // page
        except OSError:
            return None
        return None

    def wake(self) -> None:
        """Signals the process.

        Raises:
            NotPrepared, ProfileError: as `signal_number`.
        """
        number = self.signal_number()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def obstacle(self) -> str:
        """Returns the reason why the main thread does not notice a signal now, as a clause."""
        try:
            number = Path(f"/proc/{self.pid}/syscall").read_text().split()[0]
        except (OSError, IndexError):
            number = ""
        known = platform.machine() == "x86_64" and number.isdecimal()
        if known and (name := _BLOCKING.get(int(number))):
            return (
                f"its main thread is blocked in {name}(), and answers when that returns: wait longer "
                "with --timeout"
            )
        return "its main thread is inside a long native call: wait longer with --timeout"

    def alive(self) -> bool:
        """Returns whether the process has not ended."""
        try:
            signal.pidfd_send_signal(self._handle, 0)
        except ProcessLookupError:
            return False
        return self._status_letter() not in "ZX"

    def _status_letter(self) -> str:
        try:
            return self._status().get("State", "X")[:1]
        except ProfileError:
            return "X"


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
