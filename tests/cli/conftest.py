"""The command line as a process, with a home of its own."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import LIMIT_S

from fireflyer.hai.client import Client

OPTIONS = ["-P", "-m", "fireflyer.cli"]
COMMAND = [sys.executable, *OPTIONS]


class Shell:
    """Runs `fireflyer` in a folder with $FIREFLYER_HOME set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.env = {**os.environ, "FIREFLYER_HOME": str(self.home), "PYTHONWARNINGS": "error"}
        self.client = Client(self.home)

    def run(
        self, *arguments: str, code: int = 0, python: str | Path = sys.executable
    ) -> subprocess.CompletedProcess[str]:
        """Runs to the end and asserts the exit code."""
        done = subprocess.run(
            [python, *OPTIONS, *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def start(self, *arguments: str) -> "Running":
        """Starts it with pipes at its stdout and stderr."""
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return Running(process)

    def script(self, text: str, name: str = "script.py") -> str:
        """Writes a script and returns its name."""
        (self.folder / name).write_text(text)
        return name


def end_at_once(pid: int) -> None:
    """Two signals: the server stops its tasks with no grace."""
    process = os.pidfd_open(pid)
    try:
        for _ in range(2):
            signal.pidfd_send_signal(process, signal.SIGTERM)
            ready, _, _ = select.select([process], [], [], 1)
            if ready:
                return
        ready, _, _ = select.select([process], [], [], LIMIT_S)
        assert ready, f"the server (pid {pid}) does not end"
    finally:
        os.close(process)


class Running:
    """A command that goes on."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.seen = {"stdout": "", "stderr": ""}

    def until(self, stream: str, text: str, deadline_s: float = 60.0) -> str:
        """Reads a stream until `text` shows up in it."""
        pipe = getattr(self.process, stream)
        end = time.monotonic() + deadline_s
        while text not in self.seen[stream]:
            ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{text!r} did not come in {stream}: {self.seen}"
            data = os.read(pipe.fileno(), 65536)
            assert data, f"{stream} ended without {text!r}: {self.seen}"
            self.seen[stream] += data.decode()
        return self.seen[stream]

    def end(self, code: int) -> tuple[str, str]:
        """Waits for the exit and asserts its code; all of stdout and stderr."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        self.seen["stdout"] += out.decode()
        self.seen["stderr"] += err.decode()
        assert self.process.returncode == code, self.seen
        return self.seen["stdout"], self.seen["stderr"]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    found = Shell(tmp_path)
    yield found
    if found.client.home.served():
        end_at_once(found.client.server().pid)


@pytest.fixture
def started() -> Iterator[Callable[[Running], Running]]:
    """Commands given to it are ended with the test."""
    commands: list[Running] = []

    def keep(command: Running) -> Running:
        commands.append(command)
        return command

    yield keep
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()
