"""Manager process: runs `Election` and `Core` on an asyncio loop.

Only the loop's thread accesses the state. Transactions run in other threads, at most one for each
of the two tasks (`_elect` and `_run_changes`).
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from fireflyer import __version__
from fireflyer.clock import Clock, SystemClock
from fireflyer.errors import ConfigError, Corrupted, FireflyerError, NoSpace, NotPrimary
from fireflyer.fs3.condition_log import ConditionLog
from fireflyer.fs3.manager.admission import (
    Refused,
    Registration,
    check,
    check_heartbeat,
    cluster_of,
)
from fireflyer.fs3.manager.chains import Chain, Local, Public
from fireflyer.fs3.manager.core import Beat, Change, Core, Registered, Vitals
from fireflyer.fs3.manager.election import Election, Primary
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.metrics import Metrics
from fireflyer.fs3.manager.routing import CLUSTER_KEY, PREFIX, PRIMARY_KEY, Records, Routing, Table
from fireflyer.log import speaker
from fireflyer.rpc.server import Call, Connection, Server

log = speaker("fs3", "manager")
T = TypeVar("T")


class Transaction(Protocol):
    """Methods of a transaction of the metadata store that a manager needs."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_range(self, begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]: ...

    def set(self, key: bytes, value: bytes) -> None: ...


class Transact(Protocol):
    """Function that runs a body as a durable transaction and retries conflicts. Thread-safe."""

    def __call__(self, body: Callable[[Transaction], T]) -> T: ...


class LayOut(msgspec.Struct, array_like=True):
    table: int
    replicas: int
    one_node: bool = False
    version: int = 0


class Restart(msgspec.Struct, array_like=True):
    chain: int
    target: int


class NodeStatus(msgspec.Struct, array_like=True):
    """State of a node at its last heartbeat, for display.

    Attributes:
        heard_s: age of the node's newest heartbeat, in seconds.
        locals: reports of the node's targets.
    """

    heard_s: float
    locals: dict[int, Local]
    vitals: Vitals | None


class Status(msgspec.Struct, array_like=True):
    """Primary and condition of the cluster, for display.

    Attributes:
        software: version of the primary's software.
        metrics: URL of the metrics of the primary's process.
        heard: status by node; nodes that sent this primary no heartbeat are missing.
        troubles: faults outside the nodes and chains.
    """

    primary: str
    epoch: int
    version: int
    nodes: int
    alive: tuple[int, ...]
    chains: int
    serving: int
    whole: int
    software: str = ""
    metrics: str = ""
    heard: dict[int, NodeStatus] = msgspec.field(default_factory=dict)
    troubles: list[str] = msgspec.field(default_factory=list)


class Manager:
    """Manager that answers on `server`; the caller listens with the server and closes it."""

    def __init__(
        self,
        server: Server,
        transact: Transact,
        address: str,
        times: Times,
        *,
        alone: bool = False,
        ill: Callable[[], str] = str,
        clock: Clock | None = None,
    ) -> None:
        """Registers the methods on `server`.

        Args:
            address: address at which other processes reach this one.
            alone: True if the metadata store admits one process at a time.
            ill: callback that returns the fault of the metadata store, or ""; any thread calls it.
        """
        self.metrics = Metrics()
        self.url = ""
        """URL of this process's metrics, for display."""
        self._server, self._transact, self._times = server, transact, times
        self._address, self._store_fault = address, ill
        self._store = ConditionLog(log, "the metadata store works again")
        self._elected = ConditionLog(log, "the election is held again")
        self._saved = ConditionLog(log, "the routing is saved again")
        self._clock = clock or SystemClock()
        self._election = Election(secrets.randbits(63), address, times, alone=alone)
        self._core: Core | None = None
        self._cluster = ""  # known while there is a core
        self._refused = Refused()
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        self._asked = 0  # newest question that was pushed
        self._scrub = 0  # newest request for a scrub
        self._subscribers: set[Connection] = set()
        server.on_close = self._subscribers.discard
        server.on("register", Registration, self._register)
        server.on("incarnation", type(None), self._incarnation)
        server.on("heartbeat", Beat, self._heartbeat)
        server.on("routing", int, self._routing)
        server.on("lay_out", LayOut, self._lay_out)
        server.on("restart_chain", Restart, self._restart_chain)
        server.on("scrub", int, self._scrub_now)
        server.on("status", type(None), self._status)

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._elect())
                group.create_task(self._run_changes())
        finally:
            self._end_term()

    # Election

    async def _elect(self) -> None:
        while True:
            self._store.update(await asyncio.to_thread(self._store_fault))
            try:
                await self._campaign()
                self._elected.update("")
            except FireflyerError as error:
                self._elected.update(f"the election could not be held: {error}")
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
        if self._core is None:
            self._cluster = await asyncio.to_thread(self._transact, cluster_of)
            rows = await asyncio.to_thread(self._transact, entries)
            records, now = Records.load(rows), self._clock.monotonic()
            self._core = Core(records, decided.epoch, self._times, now)
            log.info("%s is primary manager, epoch %d", self._address, decided.epoch)

    def _vote(self, transaction: Transaction) -> Primary | None:
        return vote(transaction, self._election, self._clock.monotonic)

    def _end_term(self) -> None:
        self._core = None
        self._answer(self._not_primary())

    def _term(self) -> Core:
        """Returns the core; raises NotPrimary unless this process is primary."""
        if self._core is None or not self._election.holds(self._clock.monotonic()):
            raise self._not_primary()
        return self._core

    def _not_primary(self) -> NotPrimary:
        primary = self._election.primary
        other = "" if primary == self._address else primary
        why = f": {self._elected.why}" if self._elected.why else ""
        return NotPrimary(f"{self._address} is not the primary manager{why}", other)

    # Changes

    async def _run_changes(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # `wait_for` could lose a cancellation
                async with asyncio.timeout(self._times.tick_s):
                    await self._wake.wait()
            self._wake.clear()
            now = self._clock.monotonic()
            core = self._core if self._election.holds(now) else None
            self.metrics.update(core, self._election.epoch, now)
            if core is None:
                continue
            change = core.tick(now)
            self._push_question(core)
            if change and not await self._save(core, change):
                # A longer sleep would look to `tick` like a delay of the event loop.
                await asyncio.sleep(self._times.heartbeat_s / 2)
            elif core.settled and not core.dirty:
                self._saved.update("")

    def _push_question(self, core: Core) -> None:
        """Pushes a new question to all subscribers; other nodes get it in the answer to their next
        heartbeat."""
        if core.question != self._asked:
            self._asked, version = core.question, core.records.version
            self._push(Routing(version, version, question=core.question))

    async def _save(self, core: Core, change: Change) -> bool:
        """Saves a change; returns False if it could not be saved.

        If the disk is full, the change is not in the store and can be retried. Any other failure
        ends the term.
        """
        epoch = self._election.epoch
        try:
            await asyncio.to_thread(self._transact, self._written(change, epoch))
        except FireflyerError as error:
            self._saved.update(f"the routing could not be saved: {error}")
            if self._core is core and isinstance(error, NoSpace):
                core.defer()
                self._answer(error)
            elif self._core is core:
                self._election.lost()
                self._end_term()
            return False
        self._saved.update("")
        self._publish(core.saved())
        if core.settled and self._core is core:
            self._answer(None)
        return True

    def _answer(self, error: FireflyerError | None) -> None:
        """Answers all requests that wait until their entries are saved."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if future.done():
                continue
            if error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def _written(self, change: Change, epoch: int) -> Callable[[Transaction], None]:
        return lambda transaction: save(transaction, change, epoch)

    def _publish(self, part: Routing) -> None:
        self.metrics.changes.inc()
        for chain in part.chains:
            members = ", ".join(f"{m.target} {m.state.name}" for m in chain.members)
            log.info("chain %d version %d: %s", chain.id, chain.version, members)
        self._push(part)

    def _push(self, part: Routing) -> None:
        for connection in self._subscribers:
            connection.push("routing", part)

    async def _settled(self, core: Core) -> None:
        """Waits until all requested entries are durable."""
        self._wake.set()
        while not core.settled:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    # Methods

    async def _register(self, call: Call, body: Registration) -> Registered:
        known = any(node.name == body.name for node in self._term().records.nodes.values())
        try:
            self._check(body, known)
            await self._wait_for_rival(body)
        except ConfigError as error:
            log.error("refused a process: %s", error)
            raise
        self._refused.taken(body.name)
        core = self._term()
        registered = core.register(body.name, body.address, body.slots, body.local, body.identity)
        await self._settled(core)
        return msgspec.structs.replace(registered, cluster=self._cluster)

    def _check(self, body: Registration, known: bool) -> None:
        try:
            check(body, self._cluster, known=known)
        except ConfigError as error:
            self._refused.note(body.name, str(error))
            raise

    async def _wait_for_rival(self, body: Registration) -> None:
        """Waits until the lease of a process of that name with another folder has expired.

        Raises:
            ConfigError: that process sent a heartbeat during the wait.
        """
        begun = self._clock.monotonic()
        while True:
            rival = self._term().rival(body.name, body.identity, self._clock.monotonic())
            if rival is None:
                return
            if rival >= begun:
                raise ConfigError(
                    f"node {body.name} is already running with another folder: a second process cannot use "
                    "its name. To replace its disk, end the first process"
                )
            await asyncio.sleep(self._times.tick_s)

    def _incarnation(self, call: Call, body: None) -> int:
        return self._term().incarnation()

    def _heartbeat(self, call: Call, body: Beat) -> Routing:
        core = self._term()
        check_heartbeat(body.node, body.cluster, self._cluster)
        answer = core.heartbeat(body, self._clock.monotonic())
        self._subscribers.add(call.connection)
        self.metrics.heartbeats.inc()
        if core.dirty:
            self._wake.set()
        return msgspec.structs.replace(answer, scrub=self._scrub)

    def _scrub_now(self, call: Call, body: int) -> int:
        """Records a scrub request, which the answers to heartbeats carry.

        Numbers of requests are seconds since 1970, so those of a new primary are larger.
        """
        self._term()
        self._scrub = max(body or int(self._clock.wall()), self._scrub + (not body))
        return body or self._scrub

    def _routing(self, call: Call, body: int) -> Routing:
        """Returns the changes after a version, and subscribes the connection to later changes."""
        core = self._term()
        self._subscribers.add(call.connection)
        return core.records.after(body)

    async def _lay_out(self, call: Call, body: LayOut) -> Table:
        core = self._term()
        table = core.lay_out(
            body.table, body.replicas, one_node=body.one_node, version=body.version
        )
        await self._settled(core)
        return table

    async def _restart_chain(self, call: Call, body: Restart) -> Chain:
        core = self._term()
        chain = core.restart_chain(body.chain, body.target)
        await self._settled(core)
        return chain

    def _status(self, call: Call, body: None) -> Status:
        core = self._term()
        now = self._clock.monotonic()
        records, chains = core.records, core.records.chains.values()
        serving = [len(chain.targets(Public.SERVING)) for chain in chains]
        return Status(
            self._address,
            self._election.epoch,
            records.version,
            len(records.nodes),
            tuple(core.alive(now)),
            len(chains),
            sum(count > 0 for count in serving),
            sum(count == len(c.members) for count, c in zip(serving, chains, strict=True)),
            __version__,
            self.url,
            {
                node: NodeStatus(now - heard[0], heard[1], core.vitals.get(node))
                for node in records.nodes
                if (heard := core.last_heartbeat(node))
            },
            self._troubles(),
        )

    def _troubles(self) -> list[str]:
        return [its.why for its in (self._store, self._saved) if its.why] + self._refused.lines()

    def trouble(self) -> str:
        """Returns the fault of this manager; "" if there is none. Thread-safe."""
        primary = self._election.primary
        elsewhere = primary not in ("", self._address)
        none = "" if self._core is not None or elsewhere else "no manager is primary"
        return self._elected.why or self._store.why or none


# Transactions


def vote(
    transaction: Transaction, election: Election, clock: Callable[[], float]
) -> Primary | None:
    """Takes, renews or keeps the row of the primary, as `election` decides; returns that row."""
    seen = _primary(transaction)
    row = election.decide(clock(), seen)
    if row is not None and row != seen:
        transaction.set(PRIMARY_KEY, msgspec.msgpack.encode(row))
    return row


def save(transaction: Transaction, change: Change, epoch: int) -> None:
    """Writes a change on behalf of the primary of that epoch.

    Raises:
        NotPrimary: another epoch has begun.
    """
    row = _primary(transaction)
    if row is None or row.epoch != epoch:
        raise NotPrimary(f"epoch {epoch} is over: this manager is no longer the primary")
    for key, value in change.rows.items():
        transaction.set(key, value)


def entries(transaction: Transaction) -> list[tuple[bytes, bytes]]:
    """Returns the rows of all entries, for `Records.load`."""
    end = PREFIX[:-1] + bytes([PREFIX[-1] + 1])
    return [
        row
        for row in transaction.get_range(PREFIX, end)
        if row[0] not in (PRIMARY_KEY, CLUSTER_KEY)
    ]


def _primary(transaction: Transaction) -> Primary | None:
    value = transaction.get(PRIMARY_KEY)
    if value is None:
        return None
    try:
        return msgspec.msgpack.decode(value, type=Primary)
    except (msgspec.DecodeError, ValueError) as error:
        raise Corrupted(f"the row of the primary manager cannot be read: {error}") from None


__all__ = [
    "LayOut",
    "Manager",
    "Restart",
    "Status",
    "Transact",
    "Transaction",
    "entries",
    "save",
    "vote",
]
