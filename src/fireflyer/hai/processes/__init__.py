"""Finding and killing every descendant of a subreaper.

A subreaper adopts the orphans among its descendants. When a child is killed and reaped, its own
children become children of the subreaper, in any process group or session. If no child is left, no
descendant is left. This module imports very little, to keep the guard process small.
"""

import contextlib
import os
import signal


def children() -> list[int]:
    """Returns the children of this process, zombies included. REQUIRES: the process has one thread,
    and no other code reaps the children."""
    pid = os.getpid()
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
    return [p for p in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(p) == pid]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            stat = file.read()
    except OSError:
        return None
    return int(stat[stat.rindex(")") :].split()[2])


def kill(pid: int, number: int) -> None:
    """Signals a process that may have ended. REQUIRES: only the caller reaps the process, so its
    pid is not reused."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill_group(pid: int, number: int) -> None:
    """Signals a rank's process group, or only the rank if it has not created its group yet."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        kill(pid, number)


def catches(pid: int, number: int) -> bool:
    """Returns whether a process has its own handler for the signal; False if the process has
    ended."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            masks = [line for line in file if line.startswith(b"SigCgt:")]
    except OSError:
        return False
    return any(int(mask.split()[1], 16) >> (number - 1) & 1 for mask in masks)


def tell_state(pid: int) -> str:
    """Returns the kernel's state of each thread of a process, and where in the kernel the thread
    waits."""
    lines = [f"process {pid}\n"]
    with contextlib.suppress(OSError):
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task"))):
            state = _first(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split(" ")
            name = _first(f"/proc/{pid}/task/{thread}/comm")
            where = _first(f"/proc/{pid}/task/{thread}/wchan") or "-"
            letter = state[1] if len(state) > 1 else "?"
            lines.append(f"  thread {thread} {name}: state {letter} in {where}\n")
    return "".join(lines)


def _first(path: str) -> str:
    """Returns the first line of a file of /proc; "" if the file cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().rstrip("\n")
    except OSError:
        return ""


def kill_descendants() -> None:
    """Kills and reaps until no descendant is left. REQUIRES: this process is a subreaper with one
    thread."""
    while True:
        for pid in children():
            kill(pid, signal.SIGKILL)
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED)
        except ChildProcessError:
            return


def describe_exit(code: int | None, number: int | None) -> str:
    """Describes an exit as text, for example "exited with status 3" or "was killed by SIGKILL"."""
    if number is None:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(number).name}"
    except ValueError:
        return f"was killed by signal {number}"
