"""A manager process of a simulated cluster: the real `Election`, `Core` and `Records` over the real engine
`memory`, and between them what `service.py` does, in virtual time."""

from collections.abc import Callable
from typing import Any

from tests.fs3.sim.world import Answering, Network, Process, World

from fireflyer.errors import FireflyerError, NotPrimary
from fireflyer.fs3.kv.memory import MemoryEngine
from fireflyer.fs3.kv.run import Job
from fireflyer.fs3.kv.transaction import Outcome, Transaction
from fireflyer.fs3.manager import service
from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.core import Beat, Change, Core, Registered
from fireflyer.fs3.manager.election import Election
from fireflyer.fs3.manager.leases import Times
from fireflyer.fs3.manager.routing import SLOTS, Node, Records, Routing


class BrokenInvariant(AssertionError):
    """Something that must hold after each step does not."""


def first_rows(names: list[str], chain: int) -> dict[bytes, bytes]:
    """The rows of a cluster of these nodes, one target each, and one chain of them that never served."""
    nodes = [Node(number, name, name, 1) for number, name in enumerate(names, 1)]
    targets = [node.id * SLOTS for node in nodes]
    return Records().rows([*nodes, Chain.new(chain, targets)], 1)


class Manager(Process):
    """One life of a manager process."""

    def __init__(
        self,
        world: World,
        network: Network,
        name: str,
        engine: MemoryEngine,
        times: Times,
        published: Callable[[Chain | None, Chain], None],
        *,
        alone: bool,
    ) -> None:
        """`published(before, after)` is called for each chain that was saved, or was found by a new term."""
        super().__init__(world, network, name)
        self.engine = engine
        self.times = times
        self.published = published
        self.election = Election(world.rng.getrandbits(63), name, times, alone=alone)
        self.core: Core | None = None
        self.saving = False
        self.asked = 0
        self.subscribers: dict[str, None] = {}
        self.waiting: list[tuple[Answering, Registered]] = []
        self.campaign()
        self.look()

    # ---- transactions

    def transact(self, body: Callable[[Transaction], Any], done: Callable[[Any], None]) -> None:
        """Runs a body as `kv.run` does, each step at its time; `done` gets its answer or error."""
        job = Job(body)
        rng = self.world.rng

        def soon() -> float:
            return self.world.now + (
                rng.expovariate(1.0 / 0.0003) if rng.random() < 0.97 else rng.random() * 0.05
            )

        def attempt() -> None:
            transaction = job.attempt(self.engine, self.engine.begin())
            if transaction is None:
                done(job.result)
            else:  # the store carries it out even if this process ends first
                self.world.at(soon(), None, commit, transaction)

        def commit(transaction: Transaction) -> None:
            (outcome,) = self.engine.commit_many([transaction])
            if outcome is Outcome.COMMITTED:
                self.world.at(soon(), self, done, job.result)
            else:
                self.world.at(soon(), self, attempt)

        self.world.at(soon(), self, attempt)

    # ---- election

    def campaign(self) -> None:
        begun = self.clock()
        self.transact(
            lambda transaction: service.vote(transaction, self.election, self.clock),
            lambda row: self.elected(row, begun),
        )

    def elected(self, row: Any, begun: float) -> None:
        if row is None or isinstance(row, FireflyerError):
            self.election.lost()
            self.end_term()
        else:
            new = row.epoch != self.election.epoch
            self.election.written(row, begun)
            if new:
                self.end_term()
                self.transact(service.entries, lambda rows: self.begin_term(row.epoch, rows))
                return
        self.later(self.times.heartbeat_s, self.campaign)

    def begin_term(self, epoch: int, rows: Any) -> None:
        self.core = Core(Records.load(rows), epoch, self.times, self.clock())
        self.note(f"is primary, epoch {epoch}")
        for chain in self.core.records.chains.values():
            self.published(None, chain)
        self.later(self.times.heartbeat_s, self.campaign)

    def end_term(self) -> None:
        self.core = None
        self.subscribers.clear()
        self.waiting.clear()

    def term(self) -> Core | None:
        """The core, while this process is primary."""
        return self.core if self.election.holds(self.clock()) else None

    # ---- changes

    def look(self) -> None:
        """Looks at the chains at times, and whenever something was heard: `act`."""
        self.act()
        self.later(self.times.lease_s / 10, self.look)

    def act(self) -> None:
        core, epoch = self.term(), self.election.epoch
        if core is None or self.saving:
            return
        change = core.tick(self.clock())
        if core.question != self.asked:
            self.asked, version = core.question, core.records.version
            for name in self.subscribers:
                self.tell(name, Routing(version, version, question=core.question))
        if change is not None:
            self.saving = True
            self.transact(
                lambda transaction: service.save(transaction, change, epoch),
                lambda error: self.saved(core, change, error),
            )

    def saved(self, core: Core, change: Change, error: Any) -> None:
        self.saving = False
        if isinstance(error, FireflyerError):
            if self.core is core:
                self.election.lost()
                self.end_term()
            return
        for entry in change.entries:
            if isinstance(entry, Chain):
                self.published(core.records.chains.get(entry.id), entry)
        part = core.saved()
        for name in self.subscribers:
            self.tell(name, part)
        if core.settled and self.core is core:
            waiting, self.waiting = self.waiting, []
            for answer, registered in waiting:
                answer(registered)
        self.later(self.times.tick_s, self.act)

    # ---- what others ask

    def received(self, message: Any, answer: Answering) -> None:
        core = self.term()
        if core is None:
            primary = self.election.primary
            answer(
                NotPrimary(f"{self.name} is not primary", "" if primary == self.name else primary)
            )
            return
        try:
            if isinstance(message, Beat):
                self.subscribers[answer.asker.name] = None
                answer(core.heartbeat(message, self.clock()))
            elif message[0] == "register":
                self.waiting.append((answer, core.register(message[1], f"{message[1]}:1", 1)))
                core.dirty = True
            else:
                assert message[0] == "routing"
                self.subscribers[answer.asker.name] = None
                answer(core.records.after(message[1]))
        except FireflyerError as error:
            answer(error)
        if core.settled:
            waiting, self.waiting = self.waiting, []
            for waits, registered in waiting:
                waits(registered)
        if core.dirty:
            self.act()


def describe(chain: Chain) -> str:
    """A chain in one line."""
    members = " ".join(
        f"{m.target // SLOTS}:{m.state.name}" + (f"#{m.incarnation:x}" if m.incarnation else "")
        for m in chain.members
    )
    return f"chain {chain.id} v{chain.version}: {members}"


def check_step(before: Chain, after: Chain) -> None:
    """The invariants of docs/internals/fs3-chain.md, after one published change."""
    states = [member.state for member in after.members]
    held = Public.SERVING in states
    recovering = states.count(Public.RECOVERING)
    problems = [
        (states.count(Public.SYNCING) > 1, "two members sync"),
        (recovering > 1, "two members recover"),
        (
            held and (recovering or Public.LASTSRV in states),
            "some serve while others hold the data",
        ),
        (Public.SYNCING in states and not held, "one syncs from nobody"),
        (not held and not recovering and Public.LASTSRV not in states, "nobody holds the data"),
        (states != sorted(states), "members are out of order"),
        (after.version != before.version + 1, "the version does not grow by one"),
        (sorted(before.targets()) != sorted(after.targets()), "members appear or vanish"),
    ]
    for wrong, what in problems:
        if wrong:
            raise BrokenInvariant(f"{what}: {describe(before)} -> {describe(after)}")


__all__ = ["BrokenInvariant", "Manager", "Routing", "check_step", "describe", "first_rows"]
