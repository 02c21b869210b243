"""The platform under fire: a home, a server that is started again and again, and all of its processes.

Every process of a run has an environment variable of its own value, whatever started it. Nothing else is ever
signalled or counted.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal, NamedTuple
from uuid import uuid4

import msgspec

from fireflyer.hai.client import Client
from fireflyer.hai.database.connection import PostgreSQL
from fireflyer.hai.home import write_private

ROOT = Path(__file__).parents[3]
MARK = "FIREFLYER_SOAK_RUN"
START_S = 60.0

Role = Literal["server", "guard", "supervisor", "fork server", "rank", "other"]
KILLED: tuple[Role, ...] = ("server", "guard", "supervisor", "fork server", "rank")


class Process(NamedTuple):
    pid: int
    role: Role
    task: str
    node: str


class _Seen(NamedTuple):
    pid: int
    parent: int
    started: int
    words: list[str]
    environment: dict[str, str]


class Platform:
    """One home. One thread."""

    def __init__(self, folder: Path, nodes: int, database: PostgreSQL | None = None) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.client = Client(self.home)
        self.shared: set[str] = set()
        """Names in /dev/shm that processes of this run had mapped."""
        self._mark = uuid4().hex
        self._nodes = nodes
        self._server: subprocess.Popen[bytes] | None = None
        self._environment = {
            **os.environ, MARK: self._mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1",
            "FIREFLYER_KERNEL_LOG": "off",
        }  # fmt: skip
        if database is not None:
            self.client.home.create()
            write_private(self.client.home.database_file, msgspec.json.encode(database))

    # -- the server --------------------------------------------------------------------------------

    @property
    def served(self) -> bool:
        """Whether the server's process lives."""
        return self._server is not None and self._server.poll() is None

    def begin(self) -> int:
        """Starts a server; returns a pipe that ends, with a line if it answers."""
        assert not self.served
        self.home.mkdir(mode=0o700, exist_ok=True)
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "tests.hai.soak.serving", str(self.home)]
        command += [str(self._nodes), str(writer)]
        with (self.folder / "server.out").open("ab") as output:
            self._server = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[writer], start_new_session=True, env=self._environment,
            )  # fmt: skip
        os.close(writer)
        return reader

    def up(self) -> None:
        """Starts a server and waits until it answers."""
        with open(self.begin(), "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], START_S)
            assert ready, f"no server after {START_S} s"
            said = self.folder / "server.out"
            assert pipe.read(), f"the server does not start:\n{said.read_text()[-2000:]}"

    def end(self) -> None:
        """Ends server and tasks; kills what is left, for whoever asks has failed already."""
        if self.served:
            with contextlib.suppress(Exception):
                self.client.shutdown()
        for process in self.processes():
            self.kill(process)
        if self._server is not None:
            self._server.wait()

    # -- processes ---------------------------------------------------------------------------------

    def processes(self) -> list[Process]:
        """All that live, and what each is for."""
        seen = {found.pid: found for found in map(self._look, _pids()) if found is not None}
        oldest: dict[int, _Seen] = {}
        for found in sorted(seen.values(), key=lambda found: found.started):
            if "fireflyer.hai.forkserver" in found.words:
                oldest.setdefault(found.parent, found)
        return [
            Process(
                found.pid,
                _role(found, seen, oldest),
                found.environment.get("FIREFLYER_TASK", ""),
                found.environment.get("FIREFLYER_NODE", _node(found.words)),
            )
            for found in seen.values()
        ]

    def _look(self, pid: int) -> _Seen | None:
        """A process of this run; None: it is none, or ended."""
        try:
            environment = _environment(pid)
            if environment.get(MARK) != self._mark:
                return None
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            return None
        self.shared |= {word for word in maps.split() if word.startswith("/dev/shm/")}
        return _Seen(pid, int(stat[1]), int(stat[19]), words, environment)

    def kill(self, process: Process) -> bool:
        """SIGKILL, unless it ended meanwhile."""
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            return False
        try:
            if _environment(process.pid).get(MARK) != self._mark:
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except (OSError, ProcessLookupError):
            return False
        finally:
            os.close(descriptor)
        if process.role == "server" and self._server is not None:
            self._server.wait()
        return True


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> dict[str, str]:
    """As it was when the program began.

    Raises:
        OSError: it has ended, or belongs to another user.
    """
    data = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(item.split("=", 1) for item in data.split("\0") if "=" in item)


def _role(found: _Seen, seen: dict[int, _Seen], oldest: dict[int, _Seen]) -> Role:
    words = found.words
    if "tests.hai.soak.serving" in words:
        return "server"
    if "fireflyer.hai.supervisor" in words:
        parent = seen.get(found.parent)
        return "supervisor" if parent is not None and parent.words == words else "guard"
    if "fireflyer.hai.forkserver" in words:  # a forked rank has its words and environment
        return "fork server" if oldest[found.parent] is found else "rank"
    return "rank" if any(word.endswith("/work.py") for word in words) else "other"


def _node(words: list[str]) -> str:
    return words[-2] if "fireflyer.hai.supervisor" in words else ""
