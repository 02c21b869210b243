"""A whole cluster in this process: manager, metadata service, storage nodes; and clients of it."""

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fs3.manager.store import Store
from tests.waiting import LIMIT_S

from fireflyer.errors import Unavailable
from fireflyer.fs3.client import Client, Settings, connect
from fireflyer.fs3.client.metadata import METHOD
from fireflyer.fs3.kv import Engine, MemoryEngine
from fireflyer.fs3.manager.chains import Public
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import Routing, Table
from fireflyer.fs3.manager.service import Manager
from fireflyer.fs3.meta import Layout, MetaService
from fireflyer.fs3.meta.messages import Request
from fireflyer.fs3.meta.service import is_reading
from fireflyer.fs3.roles import Role
from fireflyer.fs3.storage.node import NodeSettings, StorageNode
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

SECRET = b"the secret of this cluster"
CHUNK = 16 << 10


class Cluster:
    """One process is manager and metadata service; each storage node has two targets."""

    def __init__(
        self,
        loop: LoopThread,
        folder: Path,
        nodes: int,
        replicas: int,
        engine: Engine | None = None,
        chunk: int = CHUNK,
    ) -> None:
        self._loop, self._folder, self._replicas, self._chunk = loop, folder, replicas, chunk
        self.secret_file = folder / "secret"
        self.secret_file.write_bytes(SECRET)
        self.secret_file.chmod(0o600)
        self._engine = engine or MemoryEngine()
        self._news = threading.Condition()
        self.address = loop.run(self._start())
        self.link = ManagerLink(
            self.address, Secret(SECRET), Role.CLIENT, on_routing=lambda _: self._told(_)
        )
        self.running = {f"n{i}": self._node(f"n{i}") for i in range(nodes)}
        self.link.refresh()
        self.table = self.link.lay_out(1, replicas)
        self.wait_for(replicas)
        self._serve_metadata(self.table)

    async def _start(self) -> str:
        self._server = Server(Secret(SECRET), Role.MANAGER)
        address = str(await self._server.listen("127.0.0.1:0"))
        manager = Manager(self._server, Store(), address, Times(lease_s=0.6), alone=True)
        self._task = asyncio.ensure_future(manager.run())
        return address

    def _serve_metadata(self, table: Table) -> None:
        layout = Layout(table.id, table.version, self._chunk, len(table.chains))
        service = MetaService(self._engine, layout=layout)
        self.service = service
        self._server.on_many(METHOD, Request, service.answer_many, is_reading)

    async def _stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._server.close()

    def _told(self, _: Routing) -> None:
        with self._news:
            self._news.notify_all()

    def _node(self, name: str) -> StorageNode:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        settings = NodeSettings(directory=folder, name=name, workers=3, buffers=64 << 20, targets=2)
        return StorageNode(settings, self.address, Secret(SECRET))

    def stop(self, name: str, *, wipe: bool = False) -> None:
        self.running.pop(name).close()
        if wipe:
            shutil.rmtree(self._folder / name)

    def start(self, name: str) -> None:
        self.running[name] = self._node(name)

    def refuse_metadata(self) -> None:
        """Makes the metadata service answer each request with Unavailable, which clients retry."""

        def refuse(_: object) -> list[object]:
            raise Unavailable("the metadata service is away")

        self._server.on_many(METHOD, Request, refuse, is_reading)

    def wait_for(self, serving: int) -> None:
        """Until each chain has at least so many serving members."""

        self._wait(lambda count: count >= serving)

    def wait_until_stopped(self) -> None:
        """Until no chain has a serving member."""
        self._wait(lambda count: count == 0)

    def _wait(self, wanted: Callable[[int], bool]) -> None:
        """Until the number of serving members of each chain is a wanted one."""

        def there() -> bool:
            chains = [self.link.chain(number) for number in self.table.chains]
            return all(c is not None and wanted(len(c.targets(Public.SERVING))) for c in chains)

        with self._news:
            assert self._news.wait_for(there, LIMIT_S)

    def folder(self, name: str) -> Path:
        return self._folder / name

    def connect(self, settings: Settings | None = None) -> Client:
        return connect(self.address, secret_file=self.secret_file, settings=settings)

    def close(self) -> None:
        for node in self.running.values():
            node.close()
        self.link.close()
        self._loop.run(self._stop())
        self._engine.close()


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose nodes nobody stops; its file system is empty for each test that has `fs`."""
    with LoopThread("manager") as loop:
        cluster = Cluster(loop, tmp_path_factory.mktemp("calm"), nodes=3, replicas=2)
        yield cluster
        cluster.close()


@pytest.fixture
def fs(calm: Cluster) -> Iterator[Client]:
    """A client of the calm cluster."""
    with calm.connect() as client:
        yield client
        for path, directories, files in [*client.walk("/")][::-1]:
            for name in files:
                client.unlink(f"{path}/{name}")
            for name in directories:
                client.rmdir(f"{path}/{name}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own."""
    with LoopThread("manager") as loop:
        cluster = Cluster(loop, tmp_path, nodes=3, replicas=2)
        yield cluster
        cluster.close()
