"""Network namespaces of labs: functions that create, enter, list and remove them.

The name of a namespace, `fflab-<pid>-<start>-<n>-<role>`, identifies the process that owns it, so
any process can find the namespaces of dead owners. The machine's own namespace never changes:
bridge and links live in a separate namespace, the "switch".
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from fireflyer.errors import LabError

NETNS = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_NAME = re.compile(r"fflab-(\d+)-(\d+)-(\d+)-(switch|h\d+)")
_END_DEADLINE_S = 10.0

T = TypeVar("T")


def start_time(pid: int) -> int | None:
    """Returns the start of a process in ticks since boot; None if it is dead.

    Pids are reused, but the pair of pid and start is unique.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _stat_fields(pid: int) -> list[str]:
    """Returns the fields of /proc/<pid>/stat from `state` on; [] if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text[text.rindex(")") + 2 :].split()


def namespace_name(number: int, role: str) -> str:
    """Returns the namespace name of a role ("switch" or "h<host>") in the `number`-th lab."""
    return f"fflab-{os.getpid()}-{start_time(os.getpid())}-{number}-{role}"


def why_not() -> str | None:
    """Returns the reason why this process cannot create namespaces; None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian: apt-get install iproute2)"
    return None


def tool(*argv: str, lines: Iterable[str] = ()) -> str:
    """Runs ip or tc, with `lines` on its standard input; returns its output.

    Raises:
        LabError: the tool failed; the error has the tool's message.
    """
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise LabError(f"{' '.join(argv)} failed: {message}")
    return done.stdout


def enter(name: str) -> None:
    """Moves the calling thread into a namespace; a process with one thread moves as a whole."""
    fd = os.open(NETNS / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET) != 0:
            raise LabError(f"cannot enter namespace {name}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(fd)


def inside(name: str, function: Callable[[], T]) -> T:
    """Calls `function` in a namespace, in a separate thread; sockets that it creates stay there."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            enter(name)
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name=f"in {name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def make(name: str) -> None:
    """Creates a namespace without IPv6, whose automatic packets would disturb the counters."""
    tool("ip", "netns", "add", name)

    def quiet() -> None:
        for scope in ("all", "default"):
            switch = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
            if switch.exists():
                switch.write_text("1")

    inside(name, quiet)


def remove(names: Iterable[str]) -> None:
    """Kills the processes in the namespaces and removes them; missing namespaces are ignored."""
    present = [name for name in names if (NETNS / name).exists()]
    end_all(lambda: members(present))
    for name in present:
        tool("ip", "netns", "delete", name)


def stale() -> list[str]:
    """Returns the names of lab namespaces with a dead owner."""
    found = []
    for name in sorted(os.listdir(NETNS)) if NETNS.exists() else []:
        match = _NAME.fullmatch(name)
        if match and start_time(int(match[1])) != int(match[2]):
            found.append(name)
    return found


def members(names: Iterable[str]) -> set[int]:
    """Returns the pids of all processes in the namespaces, except this process."""
    wanted = {
        (status.st_dev, status.st_ino) for status in map(os.stat, (NETNS / name for name in names))
    }
    return {pid for pid in _pids() if wanted and _network_of(pid) in wanted}


def in_sessions(sessions: set[int]) -> set[int]:
    """Returns the pids of the live processes in any of the sessions."""
    found = set()
    for pid in _pids():
        fields = _stat_fields(pid)
        if fields and fields[0] not in "ZX" and int(fields[3]) in sessions:
            found.add(pid)
    return found


def _pids() -> list[int]:
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdecimal() and int(entry) != os.getpid()
    ]


def _network_of(pid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{pid}/ns/net")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # ended; or protected even from root, so no lab started it
    return status.st_dev, status.st_ino


def end_all(alive: Callable[[], set[int]]) -> None:
    """Sends SIGKILL to the processes that `alive` returns, until it returns none.

    Raises:
        LabError: if a process does not die.
    """
    _until_none(alive, signal.SIGKILL, "end")


def stop_all(alive: Callable[[], set[int]]) -> None:
    """Sends SIGSTOP to the processes that `alive` returns, until all are stopped."""
    _until_none(
        lambda: {pid for pid in alive() if _stat_fields(pid)[:1] not in ([], ["T"])},
        signal.SIGSTOP,
        "stop",
    )


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to each process that is still alive."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _until_none(left: Callable[[], set[int]], number: signal.Signals, verb: str) -> None:
    end = time.monotonic() + _END_DEADLINE_S
    while pids := left():
        if time.monotonic() > end:
            raise LabError(
                f"processes {sorted(pids)} of the lab do not {verb} within {_END_DEADLINE_S:g} s"
            )
        send(pids, number)
        time.sleep(0.001)
