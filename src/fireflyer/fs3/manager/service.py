"""A manager process: the shell around `Election` and `Core`, on an asyncio loop.

All state is the loop's; transactions run in a thread, one at a time for each of the two loops.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from fireflyer.clock import Clock, SystemClock
from fireflyer.errors import Corrupted, FireflyerError, NotPrimary
from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.core import Beat, Change, Core, Registered
from fireflyer.fs3.manager.election import Election, Primary
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.metrics import Metrics
from fireflyer.fs3.manager.routing import PREFIX, PRIMARY_KEY, Records, Routing, Table
from fireflyer.log import get_logger
from fireflyer.rpc.server import Call, Connection, Server

log = get_logger("fs3")
T = TypeVar("T")


class Transaction(Protocol):
    """What a manager needs of a transaction of the metadata store."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_range(self, begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]: ...

    def set(self, key: bytes, value: bytes) -> None: ...


class Transact(Protocol):
    """Runs a body as a transaction, durable when it returns; conflicts are retried. Thread-safe."""

    def __call__(self, body: Callable[[Transaction], T]) -> T: ...


class Registration(msgspec.Struct, array_like=True):
    name: str
    address: str
    slots: int


class LayOut(msgspec.Struct, array_like=True):
    table: int
    replicas: int
    one_node: bool = False


class Restart(msgspec.Struct, array_like=True):
    chain: int
    target: int


class Status(msgspec.Struct, array_like=True):
    """For people: who is primary, and how the cluster is."""

    primary: str
    epoch: int
    version: int
    nodes: int
    alive: tuple[int, ...]
    chains: int
    serving: int
    whole: int


class Manager:
    """Answers on `server`, which the caller listens with and closes."""

    def __init__(
        self,
        server: Server,
        transact: Transact,
        address: str,
        times: Times,
        *,
        alone: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            address: under which others reach this process.
            alone: the metadata store admits one process at a time.
        """
        self.metrics = Metrics()
        self._server, self._transact, self._times = server, transact, times
        self._address = address
        self._clock = clock or SystemClock()
        self._election = Election(secrets.randbits(63), address, times, alone=alone)
        self._core: Core | None = None
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._subscribers: set[Connection] = set()
        server.on_close = self._subscribers.discard
        server.on("register", Registration, self._register)
        server.on("incarnation", type(None), self._incarnation)
        server.on("heartbeat", Beat, self._heartbeat)
        server.on("routing", int, self._routing)
        server.on("lay_out", LayOut, self._lay_out)
        server.on("restart_chain", Restart, self._restart_chain)
        server.on("status", type(None), self._status)
        server.on("metrics", type(None), self._metrics)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._elect())
                group.create_task(self._act())
        finally:
            self._end_term()

    # Election

    async def _elect(self) -> None:
        while True:
            try:
                await self._campaign()
            except FireflyerError as error:
                log.warning("the election could not be held: %s", error)
            await asyncio.sleep(self._times.heartbeat_s)

    async def _campaign(self) -> None:
        begun = self._clock.monotonic()
        decided = await asyncio.to_thread(self._transact, self._vote)
        if decided is None:
            self._election.lost()
            self._end_term()
            return
        new = decided.epoch != self._election.epoch
        if new:
            self._end_term()
        self._election.written(decided, begun)
        if new:
            rows = await asyncio.to_thread(self._transact, _all_rows)
            records, now = Records.load(rows), self._clock.monotonic()
            self._core = Core(records, decided.epoch, self._times, now)
            log.info("%s is primary manager, epoch %d", self._address, decided.epoch)

    def _vote(self, transaction: Transaction) -> Primary | None:
        seen = _primary(transaction)
        row = self._election.decide(self._clock.monotonic(), seen)
        if row is not None:
            transaction.set(PRIMARY_KEY, msgspec.msgpack.encode(row))
        return row

    def _end_term(self) -> None:
        self._core = None
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_exception(self._not_primary())

    def _term(self) -> Core:
        """The core, while this process is primary."""
        if self._core is None or not self._election.holds(self._clock.monotonic()):
            raise self._not_primary()
        return self._core

    def _not_primary(self) -> NotPrimary:
        primary = self._election.primary
        other = "" if primary == self._address else primary
        return NotPrimary(f"{self._address} is not the primary manager", other)

    # Changes

    async def _act(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self._times.tick_s)
            self._wake.clear()
            now = self._clock.monotonic()
            core = self._core if self._election.holds(now) else None
            self.metrics.look(core, self._election.epoch, now)
            if core is None:
                continue
            change = core.tick(now)
            if change:
                await self._save(core, change)

    async def _save(self, core: Core, change: Change) -> None:
        epoch = self._election.epoch
        try:
            await asyncio.to_thread(self._transact, self._written(change, epoch))
        except FireflyerError as error:
            log.warning("version %d of the routing could not be saved: %s", change.version, error)
            if self._core is core:
                self._election.lost()
                self._end_term()
            return
        self._publish(core.saved())
        if core.settled and self._core is core:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def _written(self, change: Change, epoch: int) -> Callable[[Transaction], None]:
        def body(transaction: Transaction) -> None:
            row = _primary(transaction)
            if row is None or row.epoch != epoch:
                raise NotPrimary(f"{self._address} is not the primary manager any more")
            for key, value in change.rows.items():
                transaction.set(key, value)

        return body

    def _publish(self, part: Routing) -> None:
        self.metrics.changes.inc()
        for chain in part.chains:
            members = ", ".join(f"{m.target} {m.state.name}" for m in chain.members)
            log.info("chain %d version %d: %s", chain.id, chain.version, members)
        for connection in self._subscribers:
            connection.push("routing", part)

    async def _settled(self, core: Core) -> None:
        """Returns when all that was asked of the core is durable."""
        self._wake.set()
        while not core.settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    # Methods

    async def _register(self, call: Call, body: Registration) -> Registered:
        core = self._term()
        registered = core.register(body.name, body.address, body.slots)
        await self._settled(core)
        return registered

    def _incarnation(self, call: Call, body: None) -> int:
        return self._term().incarnation()

    def _heartbeat(self, call: Call, body: Beat) -> Routing:
        core = self._term()
        answer = core.heartbeat(body, self._clock.monotonic())
        self._subscribers.add(call.connection)
        self.metrics.heartbeats.inc()
        if core.news:
            self._wake.set()
        return answer

    def _routing(self, call: Call, body: int) -> Routing:
        """What changed after that version; later changes are pushed to this connection."""
        core = self._term()
        self._subscribers.add(call.connection)
        return core.records.after(body)

    async def _lay_out(self, call: Call, body: LayOut) -> Table:
        core = self._term()
        table = core.lay_out(body.table, body.replicas, one_node=body.one_node)
        await self._settled(core)
        return table

    async def _restart_chain(self, call: Call, body: Restart) -> Chain:
        core = self._term()
        chain = core.restart_chain(body.chain, body.target)
        await self._settled(core)
        return chain

    def _status(self, call: Call, body: None) -> Status:
        core = self._term()
        records, chains = core.records, core.records.chains.values()
        serving = [len(chain.targets(Public.SERVING)) for chain in chains]
        return Status(
            self._address,
            self._election.epoch,
            records.version,
            len(records.nodes),
            tuple(core.alive(self._clock.monotonic())),
            len(chains),
            sum(count > 0 for count in serving),
            sum(count == len(c.members) for count, c in zip(serving, chains, strict=True)),
        )

    def _metrics(self, call: Call, body: None) -> str:
        return self.metrics.text()


def _primary(transaction: Transaction) -> Primary | None:
    value = transaction.get(PRIMARY_KEY)
    if value is None:
        return None
    try:
        return msgspec.msgpack.decode(value, type=Primary)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupted(f"the row of the primary manager cannot be read: {error}") from None


def _all_rows(transaction: Transaction) -> list[tuple[bytes, bytes]]:
    end = PREFIX[:-1] + bytes([PREFIX[-1] + 1])
    return [row for row in transaction.get_range(PREFIX, end) if row[0] != PRIMARY_KEY]


__all__ = ["LayOut", "Manager", "Registration", "Restart", "Status", "Transact", "Transaction"]
