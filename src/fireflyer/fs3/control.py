"""Manager and metadata service in one process, because only one process at a time can open their
store.

Thread contract: requests run on the server's loop and threads, `set_up` on the caller's thread.
Invariant: the store is closed only after its last user has ended.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from fireflyer.errors import ConfigError, FireflyerError, Unavailable, WireError
from fireflyer.fs3.client.metadata import METHOD
from fireflyer.fs3.config import STORE, ClusterConfig
from fireflyer.fs3.kv import Engine, SqliteEngine, run
from fireflyer.fs3.kv.database import disk_fault
from fireflyer.fs3.manager.chains import Chain, has_served
from fireflyer.fs3.manager.link import ManagerLink
from fireflyer.fs3.manager.routing import TABLE, Node, Routing, Table
from fireflyer.fs3.manager.service import Manager, Transaction
from fireflyer.fs3.meta import Layout, MetaService
from fireflyer.fs3.meta.messages import Answer, Counts, Request, Statfs, User
from fireflyer.fs3.meta.metrics import Operations, name_of
from fireflyer.fs3.meta.service import is_made, is_reading
from fireflyer.fs3.roles import Role
from fireflyer.log import speaker
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.server import Server

T = TypeVar("T")
log = speaker("fs3", "meta")


class SharedEngine:
    """Metadata store with a count of its users; `close` waits for them."""

    def __init__(self, engine: SqliteEngine) -> None:
        self._engine = engine
        self._free = threading.Condition()
        self._users = 0
        self._closing = False

    @contextlib.contextmanager
    def use(self) -> Iterator[Engine]:
        """Yields the engine; raises Unavailable while the store is being closed."""
        with self._free:
            if self._closing:
                raise Unavailable("the file system is being stopped")
            self._users += 1
        try:
            yield self._engine
        finally:
            with self._free:
                self._users -= 1
                self._free.notify_all()

    def statistics(self) -> dict[str, int]:
        return self._engine.statistics()

    def trouble(self) -> str:
        """Returns why the store accepts no commits until it is reopened; "" if it accepts them."""
        return self._engine.trouble

    def close(self) -> None:
        with self._free:
            self._closing = True
            self._free.wait_for(lambda: self._users == 0)
        self._engine.close()


class Control:
    """Services that run from the constructor to `close`.

    Attributes:
        address: address at which clients reach these services.
        session_ns: see `ClusterConfig.session_s`.
        manager: the manager, for its metrics.
        operations: metrics of the metadata service.
    """

    def __init__(
        self, config: ClusterConfig, secret: Secret, url: str = "", *, standby: bool = False
    ) -> None:
        """Opens the store and starts to listen.

        Args:
            url: URL of the metrics of this process.
            standby: waits until no other process has the store, then takes over.

        Raises:
            ConfigError: an address or folder is not available.
            Unavailable: another process has the store.
        """
        self._config, self._url = config, url
        self.session_ns = int(config.session_s * 1e9)
        self._routing_changed = threading.Condition()  # guards the five attributes below
        self._nodes: dict[int, Node] = {}
        self._chains: dict[int, Chain] = {}
        self._tables: dict[int, Table] = {}  # versions of the table TABLE
        self._adopted = 0  # version of the table that new files use
        self._service: MetaService | None = None
        with contextlib.ExitStack() as started:
            self._store = SharedEngine(_open_store(Path(config.metadata), standby))
            started.callback(self._store.close)
            self.operations = Operations(self._store.statistics, self._unlinked)
            self._loop = LoopThread("fs3-control")
            started.callback(self._loop.close)
            self._server = Server(secret, Role.MANAGER)
            self.address = self._loop.run(self._start())
            started.callback(lambda: self._loop.run(self._stop()))
            self._link = ManagerLink(self.address, secret, Role.META, on_routing=self._on_routing)
            started.callback(self._link.close)
            self._end = started.pop_all()

    def set_up(self) -> None:
        """Waits until the file system can be used: on its first start, until all chains serve.

        On a later start some chains may not serve yet; files on the other chains can be used. Only
        one thread may call this. An exception of a signal handler ends the wait.
        """
        self._wait_until_primary()
        wanted = set(self._config.nodes)
        if not self._tables:
            self._wait(lambda: wanted <= {node.name for node in self._nodes.values()})
            config = self._config
            one_node = config.one_node and len(wanted) < config.replicas
            made = self._link.lay_out(TABLE, config.replicas, one_node=one_node)
            log.info("%d chains of %d targets", len(made.chains), config.replicas)
        self._wait(lambda: bool(self._tables))
        with self._store.use() as engine:
            before = run(engine, is_made)
        table = self._wait(self._usable_or_first if before else self._usable)
        assert table is not None
        layout = Layout(table.id, table.version, self._config.chunk_kib << 10, self._config.stripe)
        with self._store.use() as engine:
            service = MetaService(engine, layout=layout, session_ns=self.session_ns)
        with self._routing_changed:
            self._use(service, table)  # before requests can arrive
            self._adopt(service)
            self._service = service

    def _wait_until_primary(self) -> None:
        """Waits without a limit until this process is the primary manager."""
        while True:
            try:
                self._link.refresh()
                return
            except WireError as error:
                if not error.retryable:
                    raise
                log.warning("waiting for the manager: %s", error)

    def execute(self, request: Request) -> Answer:
        """Executes a client's request; raises Unavailable before `set_up` and during `close`."""
        begun, error = time.perf_counter(), ""
        try:
            service = self._ready()
            with self._store.use():
                return service.execute(request)
        except FireflyerError as raised:
            error = name_of(raised)
            raise
        finally:
            self._count(request, begun, error)

    def _unlinked(self) -> int | None:
        """Returns the number of unlinked files; None if the service or store fails."""
        try:
            service = self._ready()
            with self._store.use():
                counts = service.execute(Request(User(0, 0, ()), 0, Statfs()))
        except FireflyerError:
            return None
        assert isinstance(counts, Counts)
        return counts.unlinked

    def trouble(self) -> str:
        """Returns the fault of the metadata service; "" if there is none. Thread-safe."""
        return "" if self._service else "it waits until its chains serve"

    def close(self) -> None:
        self._end.close()

    async def _start(self) -> str:
        address = str(await self._server.listen(self._config.manager))
        self.manager = manager = Manager(
            *(self._server, self._transact, address, self._config.times),
            alone=True,
            ill=self._store_fault,
        )
        manager.url = self._url
        self._server.on_many(METHOD, Request, self._answer, is_reading)
        self._task = asyncio.ensure_future(manager.run())
        return address

    async def _stop(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._server.close()

    def _store_fault(self) -> str:
        return self._store.trouble() or disk_fault(Path(self._config.metadata))

    def _transact(self, body: Callable[[Transaction], T]) -> T:
        with self._store.use() as engine:
            return run(engine, body)

    def _answer(self, requests: Sequence[Request]) -> Sequence[object]:
        begun = time.perf_counter()
        service = self._ready()
        with self._store.use():
            answers = service.answer_many(requests)
        for request, answer in zip(requests, answers, strict=True):
            error = name_of(answer) if isinstance(answer, FireflyerError) else ""
            self._count(request, begun, error)
        return answers

    def _count(self, request: Request, begun: float, error: str) -> None:
        kind = str(type(request.call).__struct_config__.tag)
        self.operations.done(kind, time.perf_counter() - begun, error)

    def _ready(self) -> MetaService:
        service = self._service
        if service is None:
            raise Unavailable("the file system is being set up")
        return service

    # Routing

    def _on_routing(self, part: Routing) -> None:
        with self._routing_changed:
            self._nodes.update((node.id, node) for node in part.nodes)
            self._chains.update((chain.id, chain) for chain in part.chains)
            self._tables.update((t.version, t) for t in part.tables if t.id == TABLE)
            if self._service is not None:
                self._adopt(self._service)
            self._routing_changed.notify_all()

    def _usable(self) -> Table | None:
        """Returns the newest table whose chains all serve or have served; None if there is none.

        The nodes of a newer table may not have started yet.
        """
        for version in sorted(self._tables, reverse=True):
            if all(map(self._serves, self._tables[version].chains)):
                return self._tables[version]
        return None

    def _usable_or_first(self) -> Table:
        """Returns the usable table; if there is none, the first version of the table."""
        return self._usable() or self._tables[min(self._tables)]

    def _adopt(self, service: MetaService) -> None:
        """Makes new files use the newest version of the table whose chains have all served.

        REQUIRES: the lock of `_routing_changed` is held.
        """
        table = self._usable() if self._adopted != max(self._tables) else None
        if table is not None and table.version > self._adopted:
            self._use(service, table)

    def _use(self, service: MetaService, table: Table) -> None:
        self._adopted = table.version
        service.use_table(table.id, table.version, len(table.chains))
        log.info(
            "new files use %d chains: version %d of the table", len(table.chains), table.version
        )

    def _serves(self, chain: int) -> bool:
        known = self._chains.get(chain)
        return known is not None and has_served(known)

    def _wait(self, ready: Callable[[], T]) -> T:
        """Waits until `ready()` is true and returns its result."""
        with self._routing_changed:
            return self._routing_changed.wait_for(ready)


def _open_store(folder: Path, wait: bool) -> SqliteEngine:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot hold the metadata: {error.strerror}") from None
    if wait:
        log.info("standby: waiting until the metadata in %s is free", folder)
    return SqliteEngine(folder / STORE, wait=wait)
