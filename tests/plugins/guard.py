"""End what a run of the tests started, and unmount what it mounted, however the run ends.

Every process that tests start inherits `FIREFLYER_TEST_RUN`, a mark of the run; a test that gives a process
an environment of its own adds `marked()`. The guard waits for the end of pytest, also by SIGKILL, kills every
process with the mark, unmounts the directories of their mounts, and ends: `python guard.py MARK PID`.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import uuid

VARIABLE = "FIREFLYER_TEST_RUN"
MOUNTS = b"fuse.fireflyer"
MNT_DETACH = 2


def marked() -> dict[str, str]:
    """The mark, for the environment of a process that does not inherit this one's."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}


def start() -> None:
    """Marks this process and all that it will start, and starts the guard; once a run."""
    if VARIABLE in os.environ:  # a worker's, from pytest
        return
    mark = uuid.uuid4().hex
    command = [sys.executable, "-P", __file__, mark, str(os.getpid())]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet, setsid=True)
    os.environ[VARIABLE] = mark


def _marked_processes(mark: str) -> list[int]:
    """Returns the processes whose environment, as they began, holds the mark."""
    wanted = f"{VARIABLE}={mark}".encode()
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
            if wanted in environment.read().split(b"\0"):
                found.append(int(name))
    return found


def _wait_for_end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        select.select([process], [], [])
        os.close(process)


def end_marked(mark: str, but: int = 0) -> None:
    """Kills every process with the mark, except one, until there is none; unmounts what they mounted."""
    directories: set[bytes] = set()
    while found := [each for each in _marked_processes(mark) if each != but]:
        directories |= _mounts_of(found)
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
    libc = ctypes.CDLL(None)
    for directory in directories:
        libc.umount2(directory, MNT_DETACH)


def _mounts_of(processes: list[int]) -> set[bytes]:
    """Returns the mounts of Fireflyer that a command line of these processes names."""
    words: set[bytes] = set()
    for each in processes:
        with contextlib.suppress(OSError), open(f"/proc/{each}/cmdline", "rb") as command:
            words.update(command.read().split(b"\0"))
    with open("/proc/mounts", "rb") as mounts:
        rows = [line.split() for line in mounts]
    return {row[1] for row in rows if row[2] == MOUNTS and row[1] in words}


def main() -> None:
    mark, pid = sys.argv[1], int(sys.argv[2])
    _wait_for_end(pid)
    end_marked(mark)


if __name__ == "__main__":
    main()
