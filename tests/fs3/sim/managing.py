"""The manager of a simulated cluster: leases, the recovery wait and publication around the real
`next_chain`."""

from dataclasses import dataclass, field
from typing import Any

from tests.fs3.sim.world import Answering, Network, Process, World

from fireflyer.fs3.manager import chains
from fireflyer.fs3.manager.chains import Chain, Local, LocalState, Public


class BrokenInvariant(AssertionError):
    """Something that must hold after each step does not."""


@dataclass(frozen=True)
class Times:
    """Seconds: docs/fs3.md, "Time", for a failover well below a second."""

    lease: float = 0.6
    margin: float = 0.05
    recovery_wait: float = 4.0

    @property
    def heartbeat(self) -> float:
        return self.lease / 6

    @property
    def dead(self) -> float:
        """How long after the last heartbeat the manager calls a node dead."""
        return self.lease * 1.1 + self.margin


@dataclass
class Records:
    """What the manager keeps in the metadata store, which survives it; each change is one transaction."""

    chains: dict[int, Chain] = field(default_factory=dict)
    incarnations: int = 0
    stores: int = 0


@dataclass
class Heard:
    """The newest heartbeat of a node's process."""

    at: float
    incarnation: int
    number: int
    locals: dict[int, Local]


class Manager(Process):
    """One life of the manager."""

    def __init__(
        self,
        world: World,
        network: Network,
        records: Records,
        nodes: dict[int, str],
        times: Times,
        watchers: list[str],
    ) -> None:
        super().__init__(world, network, "mgr")
        self.records = records
        self.nodes = nodes
        self.times = times
        self.watchers = watchers
        self.heard: dict[str, Heard] = {}
        self.started = self.clock()
        self.suspected: dict[int, float] = {}
        self.idle_since: dict[int, float] = {}
        self.later(self.times.lease / 10, self.tick)

    def tick(self) -> None:
        for chain in self.records.chains:
            self.evaluate(chain)
        self.later(self.times.lease / 10, self.tick)

    def received(self, message: Any, answer: Answering) -> None:
        kind = message[0]
        if kind == "heartbeat":
            _, node, incarnation, number, locals_ = message
            last = self.heard.get(node)
            if last is not None and (incarnation, number) <= (last.incarnation, last.number):
                return
            self.heard[node] = Heard(self.clock(), incarnation, number, locals_)
            for chain in self.records.chains:
                self.evaluate(chain)
            answer(tuple(self.records.chains.values()))
        elif kind == "register":
            self.records.incarnations += 1
            answer(self.records.incarnations)
        elif kind == "new_store":
            self.records.stores += 1
            answer(self.records.stores)
        elif kind == "routing":
            answer(tuple(self.records.chains.values()))
        else:
            raise AssertionError(f"the manager does not know {kind}")

    def live_locals(self) -> dict[int, Local]:
        now, dead = self.clock(), self.times.dead
        return {
            target: local
            for heard in self.heard.values()
            if now - heard.at <= dead
            for target, local in heard.locals.items()
        }

    def evaluate(self, number: int) -> None:
        """Publishes what follows from what is known now, one version after the other."""
        now = self.clock()
        chain = self.records.chains[number]
        fresh = now - self.started <= self.times.dead
        if fresh and any(self.nodes[target] not in self.heard for target in chain.targets()):
            return  # a new primary calls nobody dead yet
        for _ in range(20):
            locals_ = self.live_locals()
            if not self.word(chain, locals_, now):
                return
            waited = 0.0
            if chain.targets(Public.SERVING):
                self.idle_since.pop(number, None)
            else:
                waited = now - self.idle_since.setdefault(number, now)
            after = chains.next_chain(chain, locals_, waited > self.times.recovery_wait)
            if after == chain:
                return
            check_step(chain, after)
            self.records.chains[number] = chain = after
            if self.world.traced:
                self.note(f"publishes {describe(chain)}")
            for name in self.watchers:
                self.tell(name, ("routing", (chain,)))
        raise BrokenInvariant(f"the chain does not come to rest: {describe(chain)}")

    def word(self, chain: Chain, locals_: dict[int, Local], now: float) -> bool:
        """Whether a serving target that seems to stay was heard after the others were missed."""
        staying = chains.needs_word_of(chain, locals_)
        if not staying:
            self.suspected.pop(chain.id, None)
            return True
        since = self.suspected.setdefault(chain.id, now)
        if not any(self.heard[self.nodes[target]].at > since for target in staying):
            return False
        del self.suspected[chain.id]
        return True


def describe(chain: Chain) -> str:
    """A chain in one line."""
    members = " ".join(
        f"{m.target}:{m.state.name}" + (f"#{m.incarnation}" if m.incarnation else "")
        for m in chain.members
    )
    return f"chain {chain.id} v{chain.version}: {members}"


def check_step(before: Chain, after: Chain) -> None:
    """The invariants of docs/fs3-chain.md, after one published change."""
    states = [member.state for member in after.members]
    held = Public.SERVING in states
    recovering = Public.LASTSRV in states or Public.RECOVERING in states
    problems = [
        (states.count(Public.SYNCING) > 1, "two members sync"),
        (held and recovering, "some serve while others wait to recover"),
        (not held and not recovering, "nobody is left who holds the data"),
        (states != sorted(states), "members are out of order"),
        (after.version != before.version + 1, "the version does not grow by one"),
        (sorted(before.targets()) != sorted(after.targets()), "members appear or vanish"),
    ]
    for wrong, what in problems:
        if wrong:
            raise BrokenInvariant(f"{what}: {describe(before)} -> {describe(after)}")


__all__ = [
    "BrokenInvariant",
    "Heard",
    "LocalState",
    "Manager",
    "Records",
    "Times",
    "check_step",
    "describe",
]
