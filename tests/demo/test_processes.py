"""Finding and ending the processes of a run, and interrupts that do not cut a start in half."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fireflyer.demo import processes

WAIT = "import sys; print(flush=True); sys.stdin.read()"
FORK = (
    "import os, sys, signal\n"
    "os.environ.clear()\n"
    "if os.fork() == 0:\n"
    "    print(os.getpid(), flush=True); signal.pause()\n"
    "sys.stdin.read()"
)


@contextmanager
def waiting(code: str, run: str) -> Iterator[tuple["subprocess.Popen[bytes]", bytes]]:
    """A process of `run` that has said its first line and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, processes.MARK: run},
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def pids(run: str) -> list[int]:
    return sorted(process.pid for process in processes.marked(run))


def test_finds_what_was_started_for_this_run_alone(tmp_path: Path) -> None:
    mine, other = str(tmp_path / "run-a"), str(tmp_path / "run-ab")
    with waiting(WAIT, mine) as (first, _), waiting(WAIT, other) as (second, _):
        assert pids(mine) == [first.pid]
        assert pids(other) == [second.pid]
        assert WAIT.split(";")[0] in processes.marked(mine)[0].command
    assert pids(mine) == []


def test_finds_a_forked_process_that_cleared_its_environment(tmp_path: Path) -> None:
    run = str(tmp_path)
    with waiting(FORK, run) as (parent, line):
        child = int(line)
        assert pids(run) == sorted([parent.pid, child])
        for process in processes.marked(run):
            processes.kill(process.pid)
        assert processes.outliving(processes.marked(run), 10) == []


def test_waits_for_a_process_in_the_middle_of_an_exec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process runs a program and shows neither arguments nor environment."""
    starting, thread = tmp_path / "7001", tmp_path / "7002"
    for folder in (starting, thread):
        folder.mkdir()
        (folder / "environ").write_bytes(b"")
        (folder / "cmdline").write_bytes(b"")
    (starting / "exe").symlink_to(sys.executable)
    waits = []

    def finish_the_exec(seconds: float) -> None:
        waits.append(seconds)
        (starting / "cmdline").write_bytes(b"python\0")
        (starting / "environ").write_bytes(f"A=1\0{processes.MARK}=r\0".encode())

    monkeypatch.setattr("fireflyer.demo.processes.time.sleep", finish_the_exec)
    assert processes.marked("r", proc=tmp_path) == [processes.Process(7001, "python")]
    assert len(waits) == 1


def test_tells_who_outlives_the_deadline(tmp_path: Path) -> None:
    run = str(tmp_path)
    with waiting(WAIT, run) as (process, _):
        found = processes.marked(run)
        assert processes.outliving(found, 0.01) == found
        processes.kill(process.pid)
        assert processes.outliving(found, 10) == []
        assert process.wait() == -signal.SIGKILL


def test_killing_nobody_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(ProcessLookupError):
        processes.kill(process.pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_once(number: signal.Signals) -> None:
    earlier = signal.getsignal(number)
    with processes.Interrupts().installed() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(number)  # while cleaning up: ignored
        assert interrupts.pending
    assert signal.getsignal(number) == earlier


def test_a_held_interrupt_comes_at_the_end_of_the_block() -> None:
    reached = []
    with processes.Interrupts().installed() as interrupts:

        def start() -> None:
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
                reached.append("end of the block")

        with pytest.raises(KeyboardInterrupt):
            start()
    assert reached == ["end of the block"]


def test_an_error_in_a_held_block_is_not_replaced() -> None:
    with processes.Interrupts().installed() as interrupts:

        def start() -> None:
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
                raise ValueError("of the block")

        with pytest.raises(ValueError, match="of the block"):
            start()
