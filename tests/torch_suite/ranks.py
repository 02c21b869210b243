"""Forked ranks of one of torch's tests: start, outcome, deadline."""

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

DEADLINE_S = 60.0
GRACE_S = 2.0  # for the other ranks, once a rank has failed
ABORT_S = 30.0  # for a rank that hangs, to print its stacks
_PR_SET_PDEATHSIG = 1

Kind = Literal["passed", "failed", "skipped"]


class Outcome(NamedTuple):
    """The end of a test, or of one rank of it; `text`: the reason of a skip, the trace of a failure."""

    kind: Kind
    text: str = ""


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent `parent` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outcome_of(body: Callable[[], None], skip_codes: dict[int, str]) -> Outcome:
    """Run a rank's part; torch's tests end it by an exit, whose code tells a skip."""
    try:
        body()
    except unittest.SkipTest as skip:
        return Outcome("skipped", str(skip))
    except SystemExit as end:
        if end.code in skip_codes:
            return Outcome("skipped", skip_codes[int(end.code or 0)])
        return Outcome("passed") if end.code in (None, 0) else Outcome("failed", f"exit {end.code}")
    except BaseException:  # noqa: BLE001  # carried to the parent
        return Outcome("failed", traceback.format_exc())
    return Outcome("passed")


class Ranks:
    """Processes forked from this one, a session of its own each, which end with this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pids: dict[int, int] = {}  # by pidfd
        self._ranks: dict[int, int] = {}  # rank by pidfd

    def start(self, rank: int, body: Callable[[], Outcome]) -> None:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.setsid()
                die_with(parent)
                self._redirect(rank)
                faulthandler.enable(sys.stderr)
                outcome = body()
                sys.stdout.flush()
                sys.stderr.flush()
                self._result(rank).write_text(json.dumps(outcome))
            finally:
                os._exit(0)
        fd = os.pidfd_open(pid)
        self._pids[fd] = pid
        self._ranks[fd] = rank

    def _redirect(self, rank: int) -> None:
        for fd, name in ((0, os.devnull), (1, str(self.output(rank))), (2, str(self.output(rank)))):
            new = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(new, fd)
            os.close(new)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def output(self, rank: int) -> Path:
        """File with what the rank prints."""
        return self._folder / f"{rank}.out"

    def _result(self, rank: int) -> Path:
        return self._folder / f"{rank}.json"

    def outcomes(self, deadline_s: float) -> list[tuple[int, Outcome]]:
        """Wait for all ranks; kill those left at the deadline, or GRACE_S after the first failure.

        Returns:
            Rank and outcome, in the order in which the ranks ended.
        """
        found: list[tuple[int, Outcome]] = []
        deadline = time.monotonic() + deadline_s
        hurried = False
        while self._pids:
            left = deadline - time.monotonic()
            ready, _, _ = select.select(list(self._pids), [], [], max(left, 0.0))
            for fd in ready or list(self._pids):
                late = None if ready else "killed: another rank failed" if hurried else "hung"
                found.append(self._reap(fd, late))
                if found[-1][1].kind == "failed" and not hurried:
                    hurried = True
                    deadline = time.monotonic() + GRACE_S
        return found

    def _reap(self, fd: int, late: str | None) -> tuple[int, Outcome]:
        pid, rank = self._pids.pop(fd), self._ranks.pop(fd)
        if late == "hung":
            os.kill(pid, signal.SIGABRT)  # prints the stacks of its threads
            select.select([fd], [], [], ABORT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # with whatever it has started
        _, status = os.waitpid(pid, 0)
        os.close(fd)
        try:
            kind, text = json.loads(self._result(rank).read_text())
            return rank, Outcome(kind, text)
        except FileNotFoundError:
            if late is None:
                late = f"ended with wait status {status}"
            return rank, Outcome("failed", late)

    def kill(self) -> None:
        for fd in list(self._pids):
            self._reap(fd, "")


def temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    """A folder for the files of one test."""
    return tempfile.TemporaryDirectory(prefix="torch-suite-")
