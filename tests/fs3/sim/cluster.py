"""A simulated cluster: machines with disks that outlive their processes, a manager, clients; and its
end."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.fs3.sim.clients import CHAIN, Attempt, Client
from tests.fs3.sim.faults import EIO, NO_FAULT, Nemesis
from tests.fs3.sim.history.chunk_history import ChunkOp, check_chunk, explain, unwritten
from tests.fs3.sim.history.linearize import UNKNOWN
from tests.fs3.sim.managing import (
    BrokenInvariant,
    Manager,
    check_step,
    describe,
    first_rows,
)
from tests.fs3.sim.profiles import Profile
from tests.fs3.sim.storage import StorageProcess
from tests.fs3.sim.world import Network, World

from fireflyer._native.fs3 import store
from fireflyer.fs3.kv.memory import MemoryEngine
from fireflyer.fs3.kv.run import run
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.manager.chains import Chain, LocalState, Public
from fireflyer.fs3.manager.routing import SLOTS, Records


class NotHealed(AssertionError):
    """Faults are over, yet the cluster does not serve all its data again."""


class NotLinearizable(AssertionError):
    """No order of the operations explains what clients were told."""


@dataclass
class Machine:
    """A node with one target: its disk, and its storage process while one runs."""

    cluster: "Cluster"
    target: int
    name: str
    disk: store.SimDisk
    process: StorageProcess | None = None
    store_number: int = 0
    cut_at: int = 0
    down: float = 0.0
    fails: bool = False
    """Calls of its disk fail, or are about to."""
    scrubbed: float = -1.0
    """When the last whole scrub began that found nothing, or mended what it found."""

    def start(self) -> None:
        """Starts the storage process, if the machine is there and none runs."""
        if self.process is None:
            self.cluster.world.note(self.name, "starts")
            self.process = StorageProcess(self.cluster.world, self.cluster.network, self)
            self.process.begin()

    def crash(self) -> None:
        """The process ends; the machine keeps what the process had written, synced or not."""
        if self.process is not None:
            self.process.crash()
            self.process = None
            self.disk.crash()
        self.cut_at = 0

    def power_cut(self) -> None:
        """The process ends, and unsynced writes are kept, torn or lost by chance."""
        self.crash()
        self.disk.power_cut(self.cluster.world.rng.getrandbits(32))

    def cut_soon(self, calls: int, down: float) -> None:
        """Power goes at the `calls`-th call of the disk from here, in the middle of it."""
        if self.process is not None:
            self.disk.fail(calls, EIO)
            self.cut_at = self.disk.calls() + calls
            self.down = down

    def power_gone(self) -> bool:
        """Whether the disk's calls have come to where power goes."""
        return self.cut_at > 0 and self.disk.calls() > self.cut_at

    def lose_power(self) -> None:
        """What `cut_soon` promised, in the name of the process that noticed."""
        self.cluster.world.note(self.name, "loses power in a call of its disk")
        self.power_cut()
        self.cluster.world.after(self.down, self.start)

    def fail_disk(self, calls: int, kind: int, times: int) -> None:
        """After so many calls of the disk so many fail."""
        self.fails = True
        self.disk.fail(calls, kind, times)

    def mend_disk(self) -> None:
        self.fails = False
        if not self.cut_at:
            self.disk.fail(0, NO_FAULT)

    def wipe(self) -> None:
        """An empty disk in place of this one."""
        self.crash()
        self.disk = store.SimDisk(self.cluster.world.rng.getrandbits(32))
        self.store_number = 0


@dataclass
class Cluster:
    """All that one history needs."""

    world: World
    profile: Profile
    network: Network = field(init=False)
    engine: MemoryEngine = field(init=False)
    chain: Chain = field(init=False)
    """The newest that any manager has saved and seen to be saved."""
    machines: list[Machine] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    history: list[ChunkOp] = field(default_factory=list)
    published_chains: dict[int, Chain] = field(default_factory=dict)
    running: dict[str, Manager] = field(default_factory=dict)
    unrepairable: list[tuple[str, int, int]] = field(default_factory=list)
    scrub_pause: float = 0.5
    """Seconds between two scrubs of a target."""
    honest: bool = True
    """No disk has lied yet."""

    def __post_init__(self) -> None:
        world, profile = self.world, self.profile
        self.network = Network(world, profile.weather)
        self.engine = MemoryEngine(world.rng.getrandbits(32), conflicts=0.05, maybe=0.05)
        numbers = range(1, profile.targets + 1)
        self.nodes = {number * SLOTS: f"sto{number}" for number in numbers}
        clients = [f"cli{number}" for number in range(1, profile.clients + 1)]
        self.managers = [f"mgr{number}" for number in range(1, profile.managers + 1)]
        self.names = [*self.managers, *self.nodes.values(), *clients]
        rows = first_rows(list(self.nodes.values()), CHAIN)
        run(self.engine, lambda transaction: put_all(transaction, rows))
        records = Records.load(list(rows.items()))
        self.chain = records.chains[CHAIN]
        for target, name in self.nodes.items():
            disk = store.SimDisk(world.rng.getrandbits(32))
            self.machines.append(Machine(self, target, name, disk))
        for name in self.managers:
            self.start_manager(name)
        for machine in self.machines:
            world.after(world.rng.random() * 0.05, machine.start)
        for number in range(1, profile.clients + 1):
            client = Client(
                world,
                self.network,
                number,
                self.managers,
                records.after(0),
                self.nodes,
                profile.habits,
                self.history,
            )
            self.clients.append(client)

    def serving(self) -> tuple[int, ...]:
        return self.chain.targets(Public.SERVING)

    def published(self, before: Chain | None, after: Chain) -> None:
        """A manager has saved a chain, or (before None) found it."""
        if before is not None:
            check_step(before, after)
        known = self.published_chains.setdefault(after.version, after)
        if known != after:
            raise BrokenInvariant(f"one version, two chains: {describe(known)}, {describe(after)}")
        if after.version > self.chain.version:
            self.chain = after
            if self.world.traced:
                self.world.note("chain", describe(after))

    def diverged(self, name: str) -> None:
        """A target says that its contents cannot follow the chain, which only a lie explains."""
        if self.honest:
            raise BrokenInvariant(f"{name} says that it has diverged, though no disk has lied")

    def start_manager(self, name: str) -> None:
        if name not in self.running:
            self.world.note(name, "starts")
            self.running[name] = Manager(
                self.world,
                self.network,
                name,
                self.engine,
                self.profile.times,
                self.published,
                alone=len(self.managers) == 1,
            )

    def crash_manager(self, name: str) -> None:
        if name in self.running:
            self.running.pop(name).crash()

    def primary(self) -> str:
        """The manager that is primary now, or ""."""
        return next((name for name, manager in self.running.items() if manager.term()), "")

    def calm(self) -> bool:
        """Everything runs, all serve, disks work and the network is whole."""
        return (
            not self.network.cut
            and self.primary() != ""
            and not any(machine.cut_at or machine.fails for machine in self.machines)
            and self.all_serve()
        )

    def all_serve(self) -> bool:
        """All targets are SERVING, in the incarnations that run: not by records that are behind."""
        named = {member.target: member.incarnation for member in self.chain.members}
        return len(self.serving()) == len(self.machines) and all(
            machine.process is not None
            and machine.process.me is not None
            and machine.process.me.session == named[machine.target]
            for machine in self.machines
        )

    def scrubbed_since(self, moment: float) -> bool:
        """All serve, and a scrub of each target that began after `moment` has left nothing wrong."""
        return self.all_serve() and all(machine.scrubbed > moment for machine in self.machines)

    def run(self) -> None:
        """The whole history, and what must be true at its end.

        Raises:
            BrokenInvariant, NotHealed, NotLinearizable: a failure of what is simulated.
        """
        self.world.run(0.4)
        nemesis = Nemesis(self)
        self.world.run(self.world.now + self.profile.duration)
        nemesis.end()
        self.finish()

    def finish(self) -> None:
        """No more faults: all must be well again, and have been all the time."""
        self.mend()
        self.heal()
        if self.profile.beyond:
            Aftermath(self).check()
        else:
            self.check_replicas()
            self.check_histories()

    def mend(self) -> None:
        """Everything that broke is whole again, and scrubs follow each other."""
        self.scrub_pause = 0.1
        self.network.mend()
        for process in self.network.processes.values():
            process.frozen_until = 0.0
        for machine in self.machines:
            machine.cut_at = 0
            machine.mend_disk()
            machine.start()
        for name in self.managers:
            self.start_manager(name)

    def heal(self) -> None:
        """Waits until all serve, the clients are done and the disks were read through."""
        world, mended, habits = self.world, self.world.now, self.profile.habits
        bound = mended + self.profile.times.recovery_wait_s + 30.0
        if self.profile.beyond:  # each operation on what is damaged everywhere may last that long
            bound += habits.operations * (habits.deadline + habits.pause)
        since, version = mended, 0
        while complaint := next(self.complaints(since), ""):
            if self.chain.version != version:
                since, version = world.now, self.chain.version
            if world.now > bound and self.nobody_whole():
                return
            if world.now > bound:
                waited = world.now - mended
                raise NotHealed(f"{complaint} after {waited:.1f} s: {describe(self.chain)}")
            world.run(world.now + 0.1)

    def nobody_whole(self) -> bool:
        """Beyond the budget: all that may have what was acknowledged have found that their logs are
        damaged. What they held is unknown, so none of it is served before an operator says so."""
        holders = self.chain.targets(Public.LASTSRV)
        return (
            self.profile.beyond
            and bool(holders)
            and all(
                machine.process is not None and machine.process.local[0] is LocalState.FAULTY
                for machine in self.machines
                if machine.target in holders
            )
        )

    def complaints(self, since: float) -> Iterator[str]:
        """What keeps the cluster from being at rest: scrubs must have begun after `since`."""
        if not self.all_serve():
            yield "not all serve"
        for client in self.clients:
            if client.left or not client.idle:
                yield f"{client.name} is not done"
        for machine in self.machines:
            if machine.scrubbed <= since and not self.profile.beyond:
                yield f"{machine.name} is not scrubbed"
            process = machine.process
            if process is None or process.store is None:
                yield f"{machine.name} has no store"
                continue
            for chunk in process.pending():
                yield f"{machine.name}: chunk {chunk} has a version pending"

    def contents(self) -> dict[int, tuple[int, bytes | None]]:
        """What every replica holds: they must hold the same."""
        found: dict[str, dict[int, tuple[int, bytes | None]]] = {}
        for machine in self.machines:
            assert machine.process is not None
            contents = machine.process.contents()
            for name, others in found.items():
                if contents != others:
                    what = f"{sketch(contents)} {sketch(others)}"
                    raise NotHealed(f"{machine.name} and {name} differ: {what}")
            found[machine.name] = contents
        return found[self.machines[0].name]

    def check_replicas(self) -> None:
        """All replicas hold the same, their bytes are good, and clients' last reads see them."""
        contents = self.contents()
        now = self.world.now
        for chunk in range(self.profile.habits.chunks):
            version, data = contents.get(chunk, (0, b""))
            if data is None:
                raise NotHealed(f"the bytes of chunk {chunk} fail their CRC everywhere")
            whole = len(data) if version else -1
            self.history.append(
                ChunkOp(0, "read", now, now, 0, 1 << 30, data, version, whole, chunk)
            )

    def check_histories(self) -> None:
        for chunk in range(self.profile.habits.chunks):
            verdict = check_chunk([op for op in self.history if op.chunk == chunk])
            if not verdict.ok:
                raise NotLinearizable(f"chunk {chunk}\n{explain(verdict)}")
        corrupted = [op for client in self.clients for op in client.corrupted]
        if corrupted:
            raise NotLinearizable(f"within the budget, yet Corrupted: {corrupted[0]}")


def put_all(transaction: Transaction, rows: dict[bytes, bytes]) -> None:
    for key, value in rows.items():
        transaction.set(key, value)


class Aftermath:
    """The end of a history in which disks lost more than the budget: bytes may be reported Corrupted, but
    what was read was written, and every chunk that is made anew is served."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def check(self) -> None:
        cluster, habits = self.cluster, self.cluster.profile.habits
        if cluster.serving():
            cluster.world.run(
                cluster.world.now + 3.0
            )  # damage is found and repaired, where it can be
            cluster.contents()
        for chunk in range(habits.chunks):
            read = unwritten([op for op in cluster.history if op.chunk == chunk])
            if read is not None:
                raise NotLinearizable(f"nobody wrote that: {read}")
            if cluster.serving():
                self.made_anew(chunk)

    def made_anew(self, chunk: int) -> None:
        """The chunk is removed, written and read."""
        data = bytes([chunk + 1]) * 5000
        self.do(ChunkOp(0, "remove", 0.0, chunk=chunk))
        self.do(ChunkOp(0, "write", 0.0, length=len(data), data=data, chunk=chunk))
        read = self.do(ChunkOp(0, "read", 0.0, length=1 << 16, chunk=chunk))
        if read.data != data:
            raise NotHealed(f"chunk {chunk} does not take a write: {read}")

    def do(self, op: ChunkOp) -> ChunkOp:
        op.call = self.cluster.world.now
        Attempt(self.cluster.clients[0], op)
        self.cluster.world.run(self.cluster.world.now + self.cluster.profile.habits.deadline)
        if op.end == UNKNOWN:
            raise NotHealed(f"no answer: {op}")
        return op


def sketch(contents: dict[int, tuple[int, bytes | None]]) -> str:
    held = (
        f"{chunk}: v{version} " + ("corrupt" if data is None else f"of {len(data)}")
        for chunk, (version, data) in contents.items()
    )
    return "{" + ", ".join(held) + "}"


__all__ = ["BrokenInvariant", "Cluster", "Machine", "NotHealed", "NotLinearizable"]
