"""Real server processes, on an engine of pretended gangs, with a home in the test's folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest
from tests.hai.server.database.postgres import Postgres, missing
from tests.plugins import costs
from tests.waiting import LIMIT_S

from fireflyer.hai.client import Client
from fireflyer.hai.database.connection import Database, PostgreSQL
from fireflyer.hai.model import TaskSpec

_numbers = count(1)

FAKE_SERVER = Path(__file__).with_name("fake_server.py")


class Forks:
    """The process that forks servers; it has imported everything."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(LIMIT_S)
        with theirs:
            command = [sys.executable, "-P", str(FAKE_SERVER), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        costs.watch(self._process.pid)
        self._codes: dict[int, int] = {}

    def fork(self, options: dict[str, Any], ready: int, output: int) -> int:
        message = msgspec.json.encode(options)
        socket.send_fds(self._control, [message], [ready, output])
        while (answer := self._receive())[1] is not None:
            pass
        return answer[0]

    def code(self, pid: int) -> int:
        """Waits for the end of a server; its exit code."""
        while pid not in self._codes:
            self._receive()
        return self._codes[pid]

    def kill(self, pid: int) -> None:
        """SIGKILL; returns once it is gone."""
        if pid not in self._codes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.code(pid)

    def _receive(self) -> tuple[int, int | None]:
        answer = msgspec.json.decode(self._control.recv(65536), type=tuple[int, int | None])
        if answer[1] is not None:
            self._codes[answer[0]] = answer[1]
        return answer

    def close(self) -> None:
        self._control.close()
        self._process.wait(LIMIT_S)


class Server:
    """A server of one home that can be killed and started again."""

    def __init__(self, home: Path, forks: Forks) -> None:
        self.home = home
        self.client = Client(home)
        self.pid = 0
        self._forks = forks

    def start(self, **options: Any) -> None:
        """Starts it, with these options of a server, and returns once it answers."""
        with self.starting(**options) as ready:
            assert ready.read(), (self.home.parent / "server.out").read_text()

    def starting(self, **options: Any) -> BinaryIO:
        """Starts it. What is returned has a line once it answers; and ends when it dies before."""
        if self.pid:
            self.wait()
        reader, writer = os.pipe()
        with (self.home.parent / "server.out").open("ab") as output:
            said = {"home": str(self.home), **options}
            self.pid = self._forks.fork(said, writer, output.fileno())
        os.close(writer)
        return open(reader, "rb")

    def output(self) -> str:
        """All that servers of this folder have written."""
        return (self.home.parent / "server.out").read_text()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        return self._forks.code(self.pid)

    def kill(self) -> None:
        """SIGKILL; returns once it is gone."""
        self._forks.kill(self.pid)

    def launches(self) -> list[str]:
        """The gangs launched so far, e.g. "t1.1"."""
        return sorted(p.name for p in (self.home / "engine").iterdir() if p.name != "released")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    found = Forks()
    yield found
    found.close()


@pytest.fixture
def server(tmp_path: Path, forks: Forks) -> Iterator[Server]:
    found = Server(tmp_path / "home", forks)
    yield found
    if found.pid:
        found.kill()


@pytest.fixture
def spec(tmp_path: Path) -> Callable[..., TaskSpec]:
    """Makes specs: the arguments say what the pretended gang does, see fake_server.py."""
    script = tmp_path / "script.py"
    script.write_text("")

    def make(*args: str, **fields: object) -> TaskSpec:
        made = TaskSpec(script=str(script), cwd=str(tmp_path), args=args)
        return msgspec.structs.replace(made, **fields)

    return make


@pytest.fixture(scope="session")
def postgres_of_session() -> Iterator[Postgres]:
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ffpg") as root:
        found = Postgres(Path(root))
        found.start()
        yield found
        found.stop()


@pytest.fixture
def own_postgres() -> Iterator[Postgres]:
    """A PostgreSQL that the test may kill."""
    if why := missing():
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ffpg") as root:
        found = Postgres(Path(root))
        found.start()
        yield found
        found.stop()


@pytest.fixture
def postgresql(postgres_of_session: Postgres) -> PostgreSQL:
    """An empty database."""
    name = f"test{next(_numbers)}"
    postgres_of_session.create(name)
    return PostgreSQL(url=postgres_of_session.url(name))


POSTGRESQL = pytest.param(
    "postgresql", marks=[pytest.mark.full, pytest.mark.xdist_group("postgresql")]
)


@pytest.fixture(params=["sqlite", POSTGRESQL])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | PostgreSQL:
    """Where an empty database is, of each kind."""
    if request.param == "sqlite":
        return tmp_path / "hai.sqlite"
    found: PostgreSQL = request.getfixturevalue("postgresql")
    return found


@pytest.fixture
def opened() -> Iterator[Callable[[Path | PostgreSQL], Database]]:
    """Opens databases that are closed with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda where: stack.enter_context(contextlib.closing(Database(where)))


@pytest.fixture
def database(place: Path | PostgreSQL, opened: Callable[[Path | PostgreSQL], Database]) -> Database:
    return opened(place)
