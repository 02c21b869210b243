"""Functions that find and kill the processes of one run of the demo, and `Interrupts`.

A mark in the environment, which /proc shows, tells which processes belong to a run.
"""

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import msgspec


class Process(msgspec.Struct, frozen=True):
    """Process that is alive."""

    pid: int
    command: str


MARK = "FFDEMO_RUN"
"""Environment variable that the platform, and thus every process of a run, inherits."""


GOING_S = 3.0
"""Maximum number of seconds to wait for the end of processes, after the end of the server or after
a SIGKILL."""
EXEC_S = 1.0
"""Maximum number of seconds that one search waits for processes in the middle of an exec."""


def marked(run: str, proc: Path = Path("/proc")) -> list[Process]:
    """Returns the living processes, except this one, that were started with MARK set to `run`.

    A forked process shows the environment block of its parent's program. A process in the middle of
    an exec briefly shows no block; the search waits for the block.
    """
    wanted = f"{MARK}={run}".encode()
    deadline = time.monotonic() + EXEC_S
    found = []
    for folder in proc.iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):  # the process is gone, or belongs to another user
                if wanted in _environment(folder, deadline).split(b"\0"):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(
                        Process(int(folder.name), command.decode(errors="replace").strip())
                    )
    return found


def _environment(folder: Path, deadline: float) -> bytes:
    """Returns the environment block once a process has one; empty for kernel threads and
    zombies."""
    while not (block := (folder / "environ").read_bytes()):
        os.readlink(folder / "exe")  # fails for a process that runs no program
        if (folder / "cmdline").read_bytes() or time.monotonic() >= deadline:
            return (folder / "environ").read_bytes()  # an exec shows arguments, then the block
        time.sleep(0.001)
    return block


def outliving(processes: list[Process], within_s: float) -> list[Process]:
    """Returns the members of `processes` that are still alive after `within_s` seconds."""
    with ExitStack() as stack:
        left: dict[int, Process] = {}
        for process in processes:
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                left[descriptor] = process
        deadline = time.monotonic() + within_s
        while left:
            gone, _, _ = select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))
            if not gone:
                break
            for descriptor in gone:
                del left[descriptor]
        return list(left.values())


def kill(pid: int) -> None:
    """Sends SIGKILL.

    Raises:
        ProcessLookupError: there is no such process.
    """
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def end(run: str) -> int:
    """Ends every remaining process of the run; returns the number of processes found."""
    ended: set[int] = set()
    for _ in range(5):  # a process may start another one before it ends
        left = marked(run)
        if not left:
            break
        for process in left:
            with suppress(ProcessLookupError):
                kill(process.pid)
        ended.update(process.pid for process in left)
        outliving(left, GOING_S)
    return len(ended)


class Interrupts:
    """Converts SIGINT, SIGTERM and SIGHUP to KeyboardInterrupt, but never within a `held` block.

    After the first signal, further signals are ignored, so that they cannot interrupt the cleanup.
    """

    def __init__(self) -> None:
        self.pending = False
        self._held = 0

    @contextmanager
    def installed(self) -> Iterator["Interrupts"]:
        """Handles the signals inside the block, then restores the earlier handlers."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        earlier = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defers an interrupt to the end of the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if self.pending and not self._held:
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.pending:
            return
        self.pending = True
        if not self._held:
            raise KeyboardInterrupt
