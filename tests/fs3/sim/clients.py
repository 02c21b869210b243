"""A client: writes, reads and removes chunks through the chain as the real one does, and records what
it was told.

A write keeps its tag over all retries until its deadline; then its outcome is unknown. A read is
verified against the CRCs that came with it and asked elsewhere when they do not match; wrong bytes
that match their CRCs are for the checker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fs3.sim.calling import Caller
from tests.fs3.sim.history.chunk_history import ChunkOp
from tests.fs3.sim.messages import BLOCK, Read, Report, Write, good
from tests.fs3.sim.world import Network, World

from fireflyer._native.fs3 import Status
from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.routing import Routing

CHAIN = 1
"""The only one."""


@dataclass(frozen=True)
class Habits:
    """What a client does: chances of kinds of operations, seconds."""

    operations: int = 40
    pause: float = 0.03
    deadline: float = 1.5
    attempt: float = 0.25
    chunks: int = 2
    chunk_size: int = 65536
    reads: float = 0.45
    removes: float = 0.06
    resizes: float = 0.08
    new_channel: float = 0.5  # after a write of unknown outcome


class Client(Caller):
    """One client process: one operation at a time, `operations` of them."""

    def __init__(
        self,
        world: World,
        network: Network,
        number: int,
        managers: Sequence[str],
        routing: Routing,
        nodes: dict[int, str],
        habits: Habits,
        history: list[ChunkOp],
    ) -> None:
        super().__init__(world, network, f"cli{number}", managers, habits.attempt)
        self.number = number
        self.view.take(routing)
        self.nodes = nodes
        self.habits = habits
        self.history = history
        self.left = habits.operations
        self.channel = 1
        self.seq = 0
        self.corrupted: list[ChunkOp] = []
        self.idle = True
        self.later(world.rng.random() * habits.pause, self.next)

    @property
    def chain(self) -> Chain:
        """As this client knows it."""
        return self.view.chains[CHAIN]

    def next(self) -> None:
        """Begins the next operation."""
        if not self.left:
            return
        self.left -= 1
        self.idle = False
        op = self.choose()
        op.call = self.world.now
        Attempt(self, op)

    def finished(self) -> None:
        self.idle = True
        rng, pause = self.world.rng, self.habits.pause
        self.later(rng.expovariate(1.0 / pause) if rng.random() < 0.8 else 0.0, self.next)

    def choose(self) -> ChunkOp:
        """A random operation; its `client` field also carries the chunk's index in `chunk`."""
        rng, habits = self.world.rng, self.habits
        op = ChunkOp(self.number, "read", 0.0, chunk=rng.randrange(habits.chunks))
        chance = rng.random()
        if chance < habits.reads:
            if rng.random() < 0.3:
                op.offset, op.length = rng.randrange(300), rng.randrange(1, 5000)
            else:
                op.length = habits.chunk_size
            return op
        chance -= habits.reads
        if chance < habits.removes:
            op.kind = "remove"
        elif chance < habits.removes + habits.resizes:
            op.kind = rng.choice(("truncate", "extend"))
            op.length = rng.choice((0, rng.randrange(200), rng.randrange(10000)))
        else:
            op.kind = "write"
            op.offset, op.length = self.extent()
            pattern = bytes([self.number, self.left & 255, rng.randrange(256)])
            op.data = (pattern * (op.length // 3 + 1))[: op.length]
        return op

    def extent(self) -> tuple[int, int]:
        """Where a write goes: mostly a few bytes near the start, often over the edge of a block."""
        rng, size = self.world.rng, self.habits.chunk_size
        chance = rng.random()
        if chance < 0.5:
            return rng.randrange(150), rng.randrange(1, 60)
        if chance < 0.75:
            return rng.choice((1, 2)) * BLOCK - rng.randrange(1, 30), rng.randrange(1, 60)
        if chance < 0.85:
            return 0, rng.choice((BLOCK, 2 * BLOCK, BLOCK + 1))
        offset = rng.randrange(0, 3 * BLOCK)
        return offset, rng.randrange(1, min(3 * BLOCK, size - offset))


class Attempt:
    """One operation from its call until an answer or its deadline."""

    def __init__(self, client: Client, op: ChunkOp) -> None:
        self.client = client
        self.op = op
        self.until = client.clock() + client.habits.deadline
        self.over = False
        self.avoid: set[int] = set()  # whose bytes failed their CRC
        self.tag = (0, 0, 0)
        if op.kind != "read":
            client.seq += 1
            self.tag = (client.number, client.channel, client.seq)
        client.history.append(op)
        if client.world.traced:
            client.note(f"calls {op}")
        client.later(client.habits.deadline, self.give_up)
        self.send()

    def send(self) -> None:
        if self.over:
            return
        client, op, chain = self.client, self.op, self.client.chain
        serving = chain.targets(Public.SERVING)
        if not serving:
            self.again(refresh=True)
            return
        if op.kind == "read":
            willing = [target for target in serving if target not in self.avoid] or list(serving)
            target = client.world.rng.choice(willing)
            message: Any = Read(chain.id, chain.version, op.chunk, op.offset, op.length)
        else:
            target = serving[0]
            message = Write(
                chain.id, chain.version, self.tag, op.kind, op.chunk, op.offset, op.length, op.data
            )
        client.ask(
            client.nodes[target],
            message,
            client.habits.attempt,
            lambda answer: self.told(target, answer),
        )

    def told(self, target: int, answer: Any) -> None:
        if self.over:
            return
        if answer is None or answer.status is not Status.ok:
            if answer is not None and self.op.kind == "read" and answer.status is Status.not_found:
                self.end()
            elif answer is not None and self.op.kind == "read" and answer.status is Status.corrupt:
                self.avoid.add(target)
                if self.avoid >= set(self.client.chain.targets(Public.SERVING)):
                    self.corrupt()
                else:
                    self.again(refresh=False)
            elif answer is not None and answer.status is Status.duplicate:
                self.give_up()
            else:
                self.again(refresh=True)
        elif self.op.kind != "read":
            self.op.version = answer.version
            self.end()
        elif good(answer.data, answer.crcs):
            skip = self.op.offset - answer.offset
            self.op.data = answer.data[skip : skip + self.op.length]
            self.op.version, self.op.whole = answer.version, answer.length
            self.end()
        else:
            self.avoid.add(target)
            self.client.tell(self.client.nodes[target], Report(self.client.chain.id, self.op.chunk))
            self.again(refresh=False)

    def again(self, *, refresh: bool) -> None:
        """Tries once more after a pause, with fresh routing where it may be stale."""
        client = self.client
        pause = client.world.rng.uniform(0.005, 0.05)

        def learned(routing: Routing | None) -> None:
            if routing is not None:
                client.learn(routing)
            client.later(pause, self.send)

        if refresh:
            client.ask_manager(("routing", client.view.version), learned)
        else:
            client.later(pause, self.send)

    def end(self) -> None:
        self.op.end = self.client.world.now
        if self.client.world.traced:
            self.client.note(f"learns {self.op}")
        self.over = True
        self.client.finished()

    def corrupt(self) -> None:
        """No replica has the bytes: an answer, but one about no bytes."""
        self.client.corrupted.append(self.op)
        self.give_up()

    def give_up(self) -> None:
        if self.over:
            return
        self.over = True
        client = self.client
        if client.world.traced:
            client.note(f"gives up {self.op}")
        if self.op.kind != "read" and client.world.rng.random() < client.habits.new_channel:
            client.channel += 1
            client.seq = 0
        client.finished()
