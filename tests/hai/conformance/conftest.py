"""The stage of the local engine's tests, for every engine."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.hai.engine.conftest import SECRET, Stage
from tests.hai.slurm.cluster import NODES, Cluster
from tests.waiting import LIMIT_S

from fireflyer.hai.engines.local import LocalEngine
from fireflyer.hai.engines.slurm.engine import SlurmEngine
from fireflyer.hai.model.engine import Engine
from fireflyer.hai.supervisor.messages import Request
from fireflyer.hai.supervisor.parts import ROLE, Announcement
from fireflyer.rpc import FrameBuffer, frame
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.proof import Secret


class SlurmStage(Stage):
    """As the local one; supervisors are asked over TCP."""

    names = NODES

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.deadline_s = 3 * LIMIT_S

    def engine(self, nodes: int = 4, preload: tuple[str, ...] = (), gpus: str = "0") -> SlurmEngine:
        """A partition has the nodes it has."""
        engine = SlurmEngine(self.folder, "low", preload=preload)
        self._engines.append(engine)
        return engine

    @staticmethod
    async def breathe() -> None:
        """Between two looks at what sends no word."""
        await asyncio.sleep(0.02)

    @staticmethod
    def commands_of_everybody() -> list[str]:
        """What `ps` shows."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def ask(self, node: str, request: Request) -> bytes:
        with self.connect(node) as stream:
            stream.sendall(frame(msgspec.msgpack.encode(request)))
            buffer = FrameBuffer()
            while True:
                for answer in buffer.feed(stream.recv(65536)):
                    return answer

    def connect(self, node: str) -> socket.socket:
        """To the node's supervisor, both sides having proved the secret."""
        text = (self.folder / self.task / f"{node}.address").read_bytes()
        where = msgspec.json.decode(text, type=Announcement)
        handshake = Handshake("client", Secret(SECRET.encode()), ROLE)
        stream = socket.create_connection((where.host, where.port), LIMIT_S)
        stream.sendall(handshake.opening)
        while not handshake.done:
            stream.sendall(handshake.feed(stream.recv(4096)))
        return stream


def make_engine(kind: str, folder: Path) -> Engine:
    """For another process."""
    return SlurmEngine(folder, "low", preload=()) if kind == "slurm" else LocalEngine(4, preload=())


SLURM = pytest.param("slurm", marks=[pytest.mark.full, pytest.mark.xdist_group("slurm")])


@pytest.fixture(params=["local", SLURM])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    found: Any
    if request.param == "slurm":
        found = SlurmStage(tmp_path, request.getfixturevalue("cluster"))
    else:
        found = Stage(tmp_path)
    yield found
    left = found.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    found.clear()
    assert not left
