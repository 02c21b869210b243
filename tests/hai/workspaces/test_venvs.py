"""Environments: made once however many want one, and never used half made, whoever is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.platform.test_workspace import wheel
from tests.waiting import LIMIT_S, until

from fireflyer.hai.processes import orphans
from fireflyer.hai.workspaces.venv_builder import END_LIMIT_S, MARK
from fireflyer.hai.workspaces.venvs import Venvs, key

DEADLINE_S = LIMIT_S

SERVER = """
import asyncio, sys
from pathlib import Path
from fireflyer.hai.workspaces.venvs import Venvs

async def main():
    venvs = Venvs(Path(sys.argv[1]))
    await asyncio.gather(*(venvs.make(sys.argv[2], Path(log)) for log in sys.argv[3:]))

asyncio.run(main())
"""
"""Makes an environment for as many tasks as there are logs."""


class Making:
    """A folder of environments, and servers that make the one of a lock file with `tinydep`."""

    def __init__(self, folder: Path) -> None:
        digest = wheel(folder, "locked")
        self.folder = folder
        self.venvs = Venvs(folder / "venvs")
        self.name = self.venvs.take(f"tinydep==1.0 --hash=sha256:{digest}\n".encode())
        self.place = self.venvs.folder / key(self.name)
        self.packages = self.place / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        self.ready = self.venvs.folder / f"{key(self.name)}.ready"
        self._environment = {
            **os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull,
        }  # fmt: skip

    def start(self, *logs: str) -> subprocess.Popen[bytes]:
        files = [str(self.folder / log) for log in logs]
        command = [sys.executable, "-c", SERVER, str(self.venvs.folder), self.name, *files]
        return subprocess.Popen(command, env=self._environment, start_new_session=True)

    def said(self, *logs: str) -> str:
        return "".join((self.folder / log).read_text() for log in logs)

    def works(self) -> None:
        """The environment is whole: what was locked, and pip to the last file."""
        assert self.ready.exists()
        code = "import tinydep, pip._internal.cli.main; print(tinydep.TEXT)"
        python = self.venvs.python(self.name)
        told = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, check=True
        )
        assert told.stdout == "locked\n"
        names = [path.name for path in self.packages.iterdir()]
        assert sum(name.startswith("pip-") for name in names) == 1

    def nobody_left(self) -> bool:
        return orphans.end({MARK: str(self.place)}, END_LIMIT_S) == []


@pytest.fixture
def making(tmp_path: Path) -> Iterator[Making]:
    found = Making(tmp_path)
    yield found
    assert found.nobody_left()


def end(server: subprocess.Popen[Any]) -> int:
    return server.wait(DEADLINE_S)


def await_file(path: Path, server: subprocess.Popen[Any]) -> None:
    """Returns as soon as the file is there."""

    def there() -> bool:
        assert path.exists() or server.poll() is None, "it ended before"
        return path.exists()

    until(there)


@pytest.mark.full
def test_servers_that_want_the_same_environment_make_it_once(making: Making) -> None:
    servers = [making.start("a.log", "b.log"), making.start("c.log")]
    assert [end(server) for server in servers] == [0, 0]
    said = making.said("a.log", "b.log", "c.log")
    assert said.count("making the environment of") == 1
    assert said.count("Successfully installed tinydep-1.0") == 1
    assert said.count("the environment is ready") == 1
    making.works()


@pytest.mark.full
def test_killed_while_it_is_made_again_and_again(making: Making) -> None:
    """At its first file, while pip is put into it, and with the last package there."""
    for number, point in enumerate(("pyvenv.cfg", "pip/_internal", "tinydep.py")):
        server = making.start(f"{number}.log")
        await_file((making.place if number == 0 else making.packages) / point, server)
        os.kill(server.pid, signal.SIGKILL)
        end(server)
        assert not making.ready.exists()
    server = making.start("last.log")
    assert end(server) == 0
    said = making.said("last.log")
    assert said.count("making the environment of") == 1
    making.works()


@pytest.mark.full
def test_what_is_being_made_is_not_pruned(making: Making) -> None:
    server = making.start("log")
    await_file(making.place / "pyvenv.cfg", server)
    assert making.venvs.prune(time.time() + 60, set()) == 0
    assert end(server) == 0
    making.works()
    assert making.venvs.prune(time.time() + 60, set()) == 1
    assert not making.place.exists()
