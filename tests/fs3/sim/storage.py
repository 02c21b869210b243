"""A simulated storage process: the real replica and the real chunk store, and the shell between them.

It does what docs/internals/fs3-chain.md asks of a shell, with virtual time for disk and network. Group
commits come in batches: what the replica gives to the store waits a little, one sync takes all of it, and its
results are told a little later.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.fs3.sim.deeds import HANDLERS, LOCAL
from tests.fs3.sim.messages import Between, Contents, Read, Report, Write, good
from tests.fs3.sim.node import Node
from tests.fs3.sim.world import Answering, Network, World

from fireflyer._native.fs3 import ChunkId, Kind, Status, StoreLookup, Tag, replica, store
from fireflyer.errors import FireflyerError, StorageError
from fireflyer.fs3.manager.chains import Chain, Local, LocalState
from fireflyer.fs3.manager.routing import Routing

if TYPE_CHECKING:
    from tests.fs3.sim.cluster import Machine

INODE = 7
KINDS = {
    "write": Kind.write,
    "truncate": Kind.truncate,
    "extend": Kind.extend,
    "remove": Kind.remove,
}
STATES = list(replica.State.__members__.values())
WHOLE = 1 << 26


class PowerLost(Exception):
    """The machine went in the middle of a call of the disk: what the call answered is known to nobody."""


def chunk_id(index: int) -> ChunkId:
    return ChunkId(INODE, index)


class StorageProcess(Node):
    """One life of the storage process of a machine, with one target."""

    def __init__(self, world: World, network: Network, machine: "Machine") -> None:
        cluster = machine.cluster
        lease_s = cluster.profile.times.lease_s
        super().__init__(world, network, machine.name, cluster.managers, lease_s)
        self.machine = machine
        self.target = machine.target
        self.store: store.Store | None = None
        self.replica: replica.Replica | None = None
        self.local = (LocalState.ONLINE, 0)
        self.payloads: dict[int, Any] = {}
        self.last_number = 0
        self.clients: dict[int, Callable[[Any], None]] = {}
        self.reads: dict[int, Read] = {}
        self.neighbours: dict[tuple[int, int], Answering] = {}
        self.riding: list[int] = []  # ops that the next sync makes durable beside the store's own
        self.given = 0  # applies that the store has taken since the last sync
        self.syncing = False
        self.ending = False
        self.deaf = False  # the replica is told nothing more

    # ---- life

    def begin(self) -> None:
        """Opens the store, then registers; all that a process does at its start."""
        if self.guarded(self.open_store) and self.store is not None:
            self.register(self.registered)

    def open_store(self) -> None:
        machine = self.machine
        log_bytes = self.world.rng.choice((2048, 16384, 1 << 26))
        try:
            self.store = store.Store(machine.disk, self.target, 1, log_bytes, 0)
        except (FireflyerError, ValueError) as error:
            self.powered()
            self.note(f"cannot open its store: {error}")
            self.store = None
            if isinstance(error, StorageError):
                self.restart()
            else:
                machine.wipe()
                self.world.after(0.1, machine.start)
            return
        self.powered()
        if not machine.store_number:
            machine.store_number = self.world.rng.getrandbits(48) + 1

    def registered(self) -> None:
        assert self.store is not None
        assert self.me is not None
        lookup = StoreLookup(self.store.core)
        self.replica = replica.Replica(self.target, self.me.session, lookup)
        told = self.replica.local
        self.local = (LOCAL[told.state], told.version)
        self.beat_always()
        self.later(
            self.machine.cluster.scrub_pause * self.world.rng.random(),
            self.scrub,
            None,
            self.world.now,
            False,
        )

    def restart(self) -> None:
        """The process gives up; another one is started a little later."""
        self.note("gives up")
        machine = self.machine
        machine.crash()
        self.world.after(0.05 + 0.2 * self.world.rng.random(), machine.start)

    def crash(self) -> None:
        super().crash()
        self.reads.clear()
        self.payloads.clear()
        self.replica = None
        if self.store is not None:
            self.store.close()
            self.store = None

    def powered(self) -> None:
        """Raises where power went in the call of the disk that has just come back."""
        if self.machine.power_gone():
            raise PowerLost

    def guarded(self, action: Callable[..., None], *args: Any) -> bool:
        """Whether power stayed on in an action on the disk. Where it went, the machine goes down once
        nothing of the action is left that holds the store."""
        try:
            action(*args)
        except PowerLost:
            pass
        else:
            return True
        self.machine.lose_power()
        return False

    # ---- events in, actions out

    def step(self, event: Any) -> None:
        """Gives the replica one event and carries its actions out, in order."""
        self.check_lease()
        if self.replica is not None and not self.deaf:
            self.guarded(self.carry_out, event)

    def carry_out(self, event: Any) -> None:
        assert self.replica is not None
        traced = self.world.traced
        if traced:
            self.note(f"-> {event}")
        for action in self.replica.step(event):
            if traced:
                self.note(f"   {action}")
            HANDLERS[type(action)](self, action)
            if not self.alive:
                return

    def route(self, chain: Chain) -> None:
        members = [replica.Member(m.target, STATES[m.state], m.incarnation) for m in chain.members]
        self.step(replica.Routing(chain.version, members))

    def lease_changed(self) -> None:
        if self.replica is not None:
            self.guarded(self.carry_out, replica.Lease(self.leased, self.lease_version))

    def locals_(self) -> dict[int, Local]:
        assert self.me is not None
        state, version = self.local
        return {self.target: Local(self.me.session, state, version, self.machine.store_number)}

    def take(self, between: Between) -> None:
        """Gives the replica a message of another, with a payload for what came along."""
        if between.cargo is not None:
            between.message.payload = self.keep(between.cargo)
        self.step(between.message)

    def keep(self, cargo: Any) -> int:
        """A payload's number."""
        if cargo is None:
            return 0
        self.last_number += 1
        self.payloads[self.last_number] = cargo
        return self.last_number

    # ---- what others ask

    def received(self, message: Any, answer: Answering) -> None:
        if self.replica is None:
            return
        if isinstance(message, Between):
            self.neighbours[message.message.from_target, message.message.op] = answer
            self.take(message)
        elif isinstance(message, Write):
            self.last_number += 1
            op = self.last_number
            self.clients[op] = answer
            payload = self.keep(message.data or None)
            tag = Tag(*message.tag)
            self.step(
                replica.ClientWrite(
                    op,
                    message.chain_version,
                    chunk_id(message.chunk),
                    KINDS[message.kind],
                    message.offset,
                    message.length,
                    tag,
                    payload,
                )
            )
        elif isinstance(message, Read):
            self.last_number += 1
            op = self.last_number
            self.clients[op] = answer
            self.reads[op] = message
            self.step(replica.Read(op, message.chain_version, chunk_id(message.chunk)))
        elif isinstance(message, Report):
            self.verify(chunk_id(message.chunk))
        else:
            assert isinstance(message, Routing)
            self.learn(message)

    # ---- the store's side

    def sync_soon(self) -> None:
        """A group commit shortly, if none is on its way."""
        if not self.syncing:
            self.syncing = True
            self.later(self.disk_time(), self.sync)

    def disk_time(self) -> float:
        rng = self.world.rng
        return rng.expovariate(1.0 / 0.0005) if rng.random() < 0.95 else rng.random() * 0.1

    def sync(self) -> None:
        done: list[tuple[int, Status, int]] = []
        if self.guarded(self.group_commit, done):
            self.later(self.disk_time(), self.synced, done)

    def group_commit(self, done: list[tuple[int, Status, int]]) -> None:
        """One sync of the store, and what it made durable."""
        assert self.store is not None
        riding, self.riding, self.given = self.riding, [], 0
        done += [(op, Status(status), length) for op, status, _, length, _ in self.store.sync()]
        self.powered()
        status = Status.io_error if self.store.failed() else Status.ok
        if status is Status.ok and not self.store.synced():
            self.riding = riding + self.riding  # no space in the log: it goes with the next
        else:
            done += [(op, status, 0) for op in riding]
        if status is Status.io_error:
            self.restart_soon()  # even where nobody waits for this sync
        if self.store.snapshot_due():
            self.store.snapshot()
            self.powered()

    def synced(self, done: list[tuple[int, Status, int]]) -> None:
        assert self.store is not None
        self.syncing = False
        if self.riding or self.given:
            self.sync_soon()
        for op, status, length in done:
            self.applied(op, status, length)
            if not self.alive:
                return

    def applied(self, op: int, status: Status, length: int = 0) -> None:
        """The store's word. After an I/O error nobody knows what it holds: the process starts anew."""
        self.step(replica.Applied(op, status, length))
        if status is Status.io_error and self.alive:
            self.restart_soon()

    def restart_soon(self) -> None:
        """A store that failed is of no use: what the replica knows of it may be wrong."""
        if not self.ending:
            self.ending = True
            self.later(0.02 * self.world.rng.random(), self.restart)

    def contents_of(
        self, chunk: ChunkId, version: int, *, as_is: bool
    ) -> tuple[Contents | None, Status]:
        """A chunk's whole contents as stored; `corrupt` where they fail their CRCs and are not wanted
        so."""
        assert self.store is not None
        status, _, _, _, data, crcs = self.store.read(chunk.inode, chunk.index, version)
        self.powered()
        if status:
            return None, Status(status)
        return Contents(data, crcs), Status.ok if as_is or good(data, crcs) else Status.corrupt

    # ---- the scrub

    def verify(self, chunk: ChunkId) -> bool:
        """Reads a chunk's bytes; tells the replica where they fail their CRC. Whether they are good."""
        found: list[Status] = []

        def check() -> None:
            assert self.store is not None
            found.append(Status(self.store.check(chunk.inode, chunk.index)))
            self.powered()

        if not self.guarded(check):
            return False
        if found[0] is not Status.ok and self.world.traced:
            self.note(f"finds {found[0].name} in chunk {chunk.index}")
        if found[0] is Status.corrupt:
            self.step(replica.Damaged(chunk))
        return found[0] in (Status.ok, Status.not_found)

    def scrub(self, after: tuple[int, int] | None, began: float, spoiled: bool) -> None:
        """One chunk now, the next one soon; a pass that found nothing is remembered by the machine."""
        assert self.store is not None
        rows = self.store.page(after, 1)
        if rows:
            inode, index = rows[0][:2]
            spoiled |= not self.verify(ChunkId(inode, index))
            if self.alive:
                self.later(
                    self.machine.cluster.scrub_pause / 20,
                    self.scrub,
                    (inode, index),
                    began,
                    spoiled,
                )
            return
        if not self.guarded(self.snapshot):
            return
        if not spoiled:
            self.machine.scrubbed = began
        self.later(self.machine.cluster.scrub_pause, self.scrub, None, self.world.now, False)

    def snapshot(self) -> None:
        """Writes the index anew: what a lying disk has done to the log is of no weight after it."""
        assert self.store is not None
        self.store.snapshot()
        self.powered()

    def pending(self) -> list[int]:
        """The chunks that have a pending version."""
        assert self.store is not None
        return [row[1] for row in self.store.page(None, 1000) if row[6]]

    def contents(self) -> dict[int, tuple[int, bytes | None]]:
        """All chunks: version and verified bytes, None where they fail their CRCs; for the end of a
        history."""
        assert self.store is not None
        found = {}
        for inode, index, version, *_ in self.store.page(None, 1000):
            whole, status = self.contents_of(ChunkId(inode, index), version, as_is=False)
            assert status in (Status.ok, Status.corrupt), f"{self.name}: {index}: {status}"
            found[index] = (version, whole.data if whole and status is Status.ok else None)
        return found
