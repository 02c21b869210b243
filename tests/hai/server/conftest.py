"""Real server processes, on an engine of pretended gangs, with a home in the test's folder."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fireflyer.hai.client import Client
from fireflyer.hai.model import TaskSpec

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


class Server:
    """A server of one home that can be killed and started again."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.client = Client(home)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, nodes: int = 2, port: int = 0) -> None:
        """Starts it and returns once it answers."""
        if self.process is not None:
            self.process.wait(30)
        reader, writer = os.pipe()
        command = [sys.executable, "-P", str(FAKE_SERVER), str(self.home), str(nodes), str(writer)]
        log = (self.home.parent / "server.out").open("ab")
        with log, open(reader, "rb") as ready:
            self.process = subprocess.Popen(
                [*command, str(port)], pass_fds=[writer], stdout=log, stderr=log
            )
            os.close(writer)
            assert ready.read(), (self.home.parent / "server.out").read_text()

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def launches(self) -> list[str]:
        """The gangs launched so far, e.g. "t1.1"."""
        return sorted(p.name for p in (self.home / "engine").iterdir() if p.name != "released")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path / "home")
    yield found
    if found.process is not None:
        found.kill()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., TaskSpec]:
    """Makes specs: the arguments say what the pretended gang does, see fake_server.py."""
    script = tmp_path / "script.py"
    script.write_text("")

    def make(*args: str, **fields: object) -> TaskSpec:
        made = TaskSpec(script=str(script), cwd=str(tmp_path), args=args)
        import msgspec

        return msgspec.structs.replace(made, **fields)

    return make
