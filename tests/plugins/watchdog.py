"""End a process of pytest whose test is past its deadline, with the stacks of its threads and children.

`python watchdog.py PID` reads lines from standard input: `SECONDS NAME` begins a deadline, `0` ends it.
It is a process of its own because a test that waits in native code may hold the interpreter's lock.
It ends with its input.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

PRINTING_S = 1.0
"""For processes to print their stacks before they are killed."""
GUARD = str(Path(__file__).with_name("guard.py"))
"""Command of the guard, which ends what the test's process detached; a child of pytest without workers."""


def descendants(pid: int) -> list[int]:
    """Returns the processes below this one, parents first."""
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def _read(pid: int, name: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text().replace("\0", " ").strip()
    return ""


def _prints_stacks_on_abort(pid: int) -> bool:
    caught = [line for line in _read(pid, "status").splitlines() if line.startswith("SigCgt:")]
    return bool(caught) and bool(int(caught[0].split()[1], 16) >> (signal.SIGABRT - 1) & 1)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _print_stacks(pid: int) -> None:
    print(f"--- process {pid}: {_read(pid, 'cmdline')[:200]}", file=sys.stderr)
    if _prints_stacks_on_abort(pid):
        _send(pid, signal.SIGCONT)
        _send(pid, signal.SIGABRT)
        time.sleep(PRINTING_S)  # one after the other, so that their stacks do not mix
    else:
        print(f"waits in {_read(pid, 'wchan')}\n{_read(pid, 'stack')}", file=sys.stderr)


def end(worker: int) -> None:
    """Prints the stacks of a process and all below it (Python's where they can), and kills them.

    The process itself is the last: its end may end the run, and the run's end ends this one. The run's guard
    goes on: it ends what is no longer below the process.
    """
    family = [
        pid
        for pid in descendants(worker)
        if pid != os.getpid() and GUARD not in _read(pid, "cmdline")
    ]
    for pid in family:
        _print_stacks(pid)
    for pid in family:
        _send(pid, signal.SIGKILL)
    _print_stacks(worker)
    _send(worker, signal.SIGKILL)


def main() -> None:
    worker = int(sys.argv[1])
    deadline, name, told = None, "", b""
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], left)[0]:
            print(f"\n{name} is past its deadline; it is ended", file=sys.stderr, flush=True)
            end(worker)
            return
        if not (more := os.read(0, 4096)):
            return
        *lines, told = (told + more).split(b"\n")
        if lines:
            limit, _, name = lines[-1].decode().partition(" ")
            deadline = time.monotonic() + float(limit) if float(limit) else None


if __name__ == "__main__":
    main()
