"""A stage on which gangs are played: an engine, scripts that report through a FIFO, and a look into /proc.

After every test no process may be left whose environment names its task.
"""

import asyncio
import contextlib
import os
import signal
import textwrap
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar
from uuid import uuid4

import msgspec
import pytest
from tests.waiting import LIMIT_S

from fireflyer.hai.engines.inventory import parse_inventory
from fireflyer.hai.engines.link import connect
from fireflyer.hai.engines.local import LocalEngine
from fireflyer.hai.model.engine import (
    EngineEvent,
    Gang,
    GangEnded,
    NodesChanged,
    RankExited,
    RankStarted,
)
from fireflyer.hai.supervisor.cgroups import Base
from fireflyer.hai.supervisor.messages import Request
from fireflyer.rpc import FrameBuffer, frame

SECRET = "5ec7e7" * 8
T = TypeVar("T")

PRELUDE = """\
import os, signal, socket, subprocess, sys, time
RANK = int(os.environ["RANK"])
def report(*words):
    line = " ".join(map(str, (RANK, *words))) + "\\n"
    fd = os.open(os.environ["REPORTS"], os.O_WRONLY)
    os.write(fd, line.encode())
    os.close(fd)
def await_gate(name="GATE"):
    fd = os.open(os.environ[name], os.O_RDONLY)
    os.read(fd, 1)
    os.close(fd)
def forever():
    while True:
        signal.pause()
"""


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


class Stage:
    """One task, called `self.task`, and whatever engines play it."""

    names = tuple(f"n{i}" for i in range(10))
    """Of nodes; a gang gets the first ones."""

    base: Base | None = None
    """Where cgroups are made; None: nowhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deadline_s = LIMIT_S
        self.task = f"t{uuid4().hex[:12]}"
        reports = folder / "reports"
        os.mkfifo(reports)
        self._reports = os.open(reports, os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""
        gate, door = folder / "gate", folder / "door"
        os.mkfifo(gate)
        os.mkfifo(door)
        self._gate, self._door = os.open(gate, os.O_RDWR), os.open(door, os.O_RDWR)
        self._engines: list[LocalEngine] = []
        self._scripts = 0
        self.env = {**os.environ, "REPORTS": str(reports), "GATE": str(gate), "DOOR": str(door)}

    def play(self, scene: Callable[["Stage"], Coroutine[Any, Any, None]]) -> None:
        """Runs the scene; then releases the task and closes the engines, also after a failure."""

        async def whole() -> None:
            try:
                async with asyncio.timeout(self.deadline_s):
                    await scene(self)
            finally:
                for engine in self._engines:
                    await engine.release(self.task)
                    await engine.close()

        asyncio.run(whole())

    # -- what is played ------------------------------------------------------------------------

    def engine(self, nodes: int = 2, preload: tuple[str, ...] = (), gpus: str = "0") -> LocalEngine:
        devices = parse_inventory(gpus)
        engine = LocalEngine(nodes, preload=preload, devices=devices, base=self.base)
        self._engines.append(engine)
        return engine

    async def close(self, engine: LocalEngine) -> None:
        self._engines.remove(engine)
        await engine.close()

    def script(self, text: str) -> Path:
        self._scripts += 1
        path = self.folder / f"script{self._scripts}.py"
        path.write_text(PRELUDE + textwrap.dedent(text))
        return path

    def gang(
        self,
        script: str | Path,
        *,
        nodes: int = 2,
        on: tuple[str, ...] = (),
        ranks: int = 1,
        attempt: int = 1,
        start: Literal["auto", "fork", "exec"] = "fork",
        args: tuple[str, ...] = (),
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        elastic: bool = False,
        rejoins: int = 0,
        devices: tuple[tuple[int, ...], ...] = (),
        memory_mib: int = 0,
        cpus: int = 0,
    ) -> Gang:
        path = script if isinstance(script, Path) else self.script(script)
        return Gang(
            task=self.task,
            attempt=attempt,
            script=str(path),
            args=args,
            cwd=cwd or str(self.folder),
            env={**self.env, **(env or {})},
            nodes=on or self.names[:nodes],
            ranks_per_node=ranks,
            start=start,
            secret=SECRET,
            directory=self.folder / self.task / str(attempt),
            elastic=elastic,
            rejoins=rejoins,
            devices=devices,
            memory_mib=memory_mib,
            cpus=cpus,
        )

    # -- what is seen --------------------------------------------------------------------------

    @staticmethod
    async def until(engine: LocalEngine, last: Callable[[EngineEvent], bool]) -> list[EngineEvent]:
        """The next events, up to the first that is `last`."""
        seen: list[EngineEvent] = []
        async for event in engine.events():
            if isinstance(event, NodesChanged):
                continue
            seen.append(event)
            if last(event):
                return seen
        raise AssertionError(f"the engine was closed after {seen}")

    async def ended(self, engine: LocalEngine) -> tuple[list[EngineEvent], GangEnded]:
        """All events up to the next GangEnded, and that."""
        *events, end = await self.until(engine, lambda e: isinstance(e, GangEnded))
        assert isinstance(end, GangEnded)
        return events, end

    async def reports(self, count: int) -> list[list[str]]:
        """The next `count` lines that ranks reported, each as its words; the first is the rank."""
        loop = asyncio.get_running_loop()
        while self._unread.count(b"\n") < count:
            readable = asyncio.Event()
            loop.add_reader(self._reports, readable.set)
            await readable.wait()
            loop.remove_reader(self._reports)
            self._unread += os.read(self._reports, 65536)
        *lines, self._unread = self._unread.split(b"\n", count)
        return [line.decode().split() for line in lines]

    def open_gate(self, ranks: int) -> None:
        """Lets so many ranks go on that wait in `await_gate`, now or later."""
        os.write(self._gate, b"g" * ranks)

    def let_in(self, ranks: int) -> None:
        """The same for `await_gate("DOOR")`."""
        os.write(self._door, b"d" * ranks)

    def ask(self, node: str, request: Request) -> bytes:
        """Asks a supervisor what the engine would not; returns the frame of its answer."""
        stream = connect(self.folder / self.task, node)
        assert stream is not None
        with stream:
            stream.settimeout(LIMIT_S)
            stream.sendall(frame(msgspec.msgpack.encode(request)))
            buffer = FrameBuffer()
            while True:
                for answer in buffer.feed(stream.recv(65536)):
                    return answer

    def log(self, rank: int, attempt: int = 1) -> str:
        return (self.folder / self.task / str(attempt) / f"{rank}.log").read_text()

    def processes(self) -> dict[int, str]:
        """Live processes whose environment names the task: pid -> command line."""
        wanted = f"FIREFLYER_TASK={self.task}".encode()
        return {
            int(pid): _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode().strip()
            for pid in filter(str.isdigit, os.listdir("/proc"))
            if wanted in _read(f"/proc/{pid}/environ").split(b"\0")
        }

    @staticmethod
    def _stat(pid: int) -> list[str]:
        stat = _read(f"/proc/{pid}/stat").decode()
        return stat[stat.rindex(")") :].split()

    def parent(self, pid: int) -> int:
        return int(self._stat(pid)[2])

    def state(self, pid: int) -> str:
        """One letter: R runs, S sleeps, ..."""
        return self._stat(pid)[1]

    def guard(self, node: str) -> int:
        ours = f"fireflyer.hai.supervisor {self.task} {node} "
        pids = {pid for pid, command in self.processes().items() if ours in f"{command} "}
        (guard,) = (pid for pid in pids if self.parent(pid) not in pids)
        return guard

    def supervisor(self, node: str) -> int:
        ours = f"fireflyer.hai.supervisor {self.task} {node} "
        guard = self.guard(node)
        (pid,) = (
            pid
            for pid, command in self.processes().items()
            if ours in f"{command} " and self.parent(pid) == guard
        )
        return pid

    def fork_server(self, node: str) -> int:
        """The first fork server child of the supervisor: its ranks look the same, and are younger."""
        supervisor = self.supervisor(node)
        return min(
            pid
            for pid, command in self.processes().items()
            if "fireflyer.hai.forkserver" in command and self.parent(pid) == supervisor
        )

    @staticmethod
    async def gone(pid: int) -> None:
        """Returns when the process has ended."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            ended = asyncio.Event()
            loop.add_reader(pidfd, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)

    @staticmethod
    def alive(pid: int) -> bool:
        """Whether it exists; a zombie counts."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True

    @staticmethod
    def exits(events: list[EngineEvent]) -> dict[int, tuple[int | None, int | None]]:
        """rank -> (code, signal)"""
        return {e.rank: (e.code, e.signal) for e in events if isinstance(e, RankExited)}

    @staticmethod
    def pids(events: list[EngineEvent]) -> dict[int, int]:
        return {e.rank: e.pid for e in events if isinstance(e, RankStarted)}

    def clear(self) -> None:
        os.close(self._reports)
        os.close(self._gate)
        os.close(self._door)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    left = stage.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    stage.clear()
    assert not left
