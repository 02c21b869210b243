"""What a task of the storm does: `work.py JSON` with the fields of `Work`, run by its ranks.

It leaves in the task's folder `output`, each line written by one `write` to a file that is open to append:

    begun     a line each process: place, attempt, incarnation
    done      a line of the attempt that got to the end first
    again     a line of each later one that got there: the attempt before was killed before its end was known
    overlap   a line of each process that found another one in its place

Steps are saved by rank, so an attempt goes on where the one before was killed.
"""

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from fireflyer import hai
from fireflyer.hai.rank import begun, between


class Work(msgspec.Struct, frozen=True):
    """What is to be done."""

    steps: int
    step_s: float
    elastic: bool = False
    detach: bool = False
    """Each rank starts a process in a session of its own that would outlive it by far."""


class Line(NamedTuple):
    """Of one of the files."""

    place: int
    attempt: int
    incarnation: int


def lines(path: Path) -> list[Line]:
    """What is in one of the files."""
    text = path.read_text() if path.exists() else ""
    return [Line(*map(int, line.split())) for line in text.splitlines()]


def _append(path: Path) -> None:
    here = hai.task()
    line = f"{here.rank} {here.attempt} {here.incarnation}\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _take_place(output: Path, place: int) -> None:
    """The lock goes with the process."""
    lock = os.open(output / f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _append(output / "overlap")


def _save(path: Path, step: int) -> None:
    partial = path.with_suffix(".new")
    partial.write_text(str(step))
    partial.rename(path)


def _leave_when_asked() -> None:
    if hai.suspend_requested():
        hai.suspended()


def _work(work: Work, saved: Path) -> None:
    """Steps from the last save on; a suspend is obeyed between two."""
    step = int(saved.read_text()) if saved.exists() else 0
    number = 0
    while step < work.steps:
        number += 1
        if work.elastic:
            begun(1, number)
        _leave_when_asked()
        time.sleep(work.step_s)
        step += 1
        hai.heartbeat(step)
        _save(saved, step)


def _await_others(output: Path, others: list[int]) -> None:
    """Until each other rank of this attempt has done its part."""
    attempt = hai.task().attempt
    while not all((output / f"{place}.{attempt}.arrived").exists() for place in others):
        _leave_when_asked()
        time.sleep(0.02)


def _complete(output: Path) -> None:
    """One line an attempt."""
    lock = os.open(output / "complete.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    done = lines(output / "done")
    ran = {line.attempt for line in (*done, *lines(output / "again"))}
    if hai.task().attempt not in ran:
        _append(output / ("again" if done else "done"))
    os.close(lock)


def main() -> None:
    work = msgspec.json.decode(sys.argv[1], type=Work)
    here = hai.task()
    output = here.output
    _take_place(output, here.rank)
    _append(output / "begun")
    if work.detach:
        subprocess.Popen(
            ["sleep", "3600"], start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    if work.elastic:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(os.environ["FIREFLYER_DOORS"], os.O_CREAT | os.O_EXCL, 0o600))
        hai.hold(here.incarnation)
        between()
    _work(work, output / f"{here.rank}.step")
    if not work.elastic:  # there, whoever is left completes it
        (output / f"{here.rank}.{here.attempt}.arrived").touch()
        if here.rank:
            return
        _await_others(output, list(range(1, here.world_size)))
    _complete(output)


if __name__ == "__main__":
    main()
