"""Simulated metadata: the real operations and transactions, several servers and clients, one store.

The store injects conflicts and commits of unknown outcome; servers crash at any point of a request, also
between its commit and its answer; requests are delayed, lost, doubled and sent to another server. What
clients were told must be linearizable, so each request is done once at most.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import msgspec
from tests.fs3.sim.fibers import Fiber, Killed
from tests.fs3.sim.history.linearize import UNKNOWN
from tests.fs3.sim.history.meta_history import READS, Failed, MetaOp, check_meta
from tests.fs3.sim.managing import BrokenInvariant
from tests.fs3.sim.world import Answering, Network, Process, Weather, World

from fireflyer.errors import FileError, FireflyerError
from fireflyer.fs3.kv.memory import MemoryEngine
from fireflyer.fs3.kv.transaction import Outcome, Transaction
from fireflyer.fs3.meta import messages, service
from fireflyer.fs3.meta.inode import DIRECTORY, ROOT

PATHS = ("/a", "/b", "/d", "/d/a", "/d/b", "/e", "/e/a", "/d/e")
USER = messages.User(0, 0)
KINDS = {
    "create": 5.0,
    "mkdir": 3.0,
    "unlink": 4.0,
    "rmdir": 2.0,
    "rename": 5.0,
    "link": 2.0,
    "truncate": 2.0,
    "stat": 3.0,
    "readdir": 3.0,
}


class SlowEngine:
    """The store as one server's requests see it: each begin and commit takes virtual time, in which
    others commit."""

    def __init__(self, engine: MemoryEngine, server: "MetaServer") -> None:
        self._engine = engine
        self._server = server

    def begin(self) -> Transaction:
        self._server.sleep()
        return self._engine.begin()

    def begin_many(self, count: int, keys: Sequence[bytes]) -> list[Transaction]:
        self._server.sleep()
        return self._engine.begin_many(count, keys)

    def commit_many(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        try:
            self._server.sleep()
        except Killed:
            for transaction in transactions:
                transaction.end()
            raise
        outcomes = self._engine.commit_many(transactions)
        self._server.sleep()
        return outcomes

    def close(self) -> None:
        pass


class MetaServer(Process):
    """One life of a meta server."""

    def __init__(self, world: World, network: Network, name: str, engine: MemoryEngine) -> None:
        super().__init__(world, network, name)
        self.fibers: list[Fiber] = []
        self.current: Fiber | None = None
        self.service = service.MetaService(
            SlowEngine(engine, self), now=lambda: int(self.clock() * 1e9)
        )
        self.service._numbers.take(
            1
        )  # takes inode numbers now: later it would hold a lock while others run

    def sleep(self) -> None:
        fiber = self.current
        if fiber is not None:
            fiber.sleep(self.world.rng.expovariate(1.0 / 0.001))
            self.current = fiber

    def received(self, message: messages.Request, answer: Answering) -> None:
        def body(fiber: Fiber) -> Any:
            self.current = fiber
            try:
                return self.service.execute(message)
            except FireflyerError as error:
                return error

        def done(result: Any) -> None:
            self.fibers.remove(fiber)
            answer(result)

        fiber = Fiber(self, body, done)
        self.fibers.append(fiber)
        fiber.start()

    def crash(self) -> None:
        super().crash()
        for fiber in self.fibers:
            fiber.kill()


@dataclass(frozen=True)
class MetaProfile:
    servers: int = 2
    clients: int = 3
    operations: int = 12
    conflicts: float = 0.1
    maybe: float = 0.1
    crash_pause: float = 0.15
    deadline: float = 0.6
    attempt: float = 0.08
    pause: float = 0.01
    weather: Weather = field(default_factory=Weather)


def draw_meta(rng: random.Random) -> MetaProfile:
    return MetaProfile(
        servers=rng.randrange(1, 4),
        clients=rng.randrange(2, 4),
        operations=rng.randrange(5, 20),
        conflicts=rng.choice((0.0, 0.1, 0.3)),
        maybe=rng.choice((0.0, 0.1, 0.3)),
        crash_pause=rng.choice((0.05, 0.2, 1e9)),
        weather=Weather(
            late_chance=rng.choice((0.0, 0.05, 0.25)),
            late=0.4,
            loss=rng.choice((0.0, 0.05)),
            twice=0.0,
        ),
    )


class MetaClient(Process):
    """One client process, with one request at a time; it sends a request again, with its number,
    until it is answered or its deadline has passed."""

    def __init__(self, cluster: "MetaCluster", number: int) -> None:
        super().__init__(cluster.world, cluster.network, f"cli{number}")
        self.cluster = cluster
        self.number = number
        self.left = cluster.profile.operations
        self.requests = 0
        self.acknowledged = 0
        self.unknown = False
        self.later(self.world.rng.random() * 0.02, self.next)

    def next(self) -> None:
        if not self.left:
            return
        self.left -= 1
        rng = self.world.rng
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        path = rng.choice(PATHS)
        arguments: tuple[Any, ...] = (path,)
        if kind == "readdir":
            arguments = (rng.choice(("/", "/d", "/e")),)
        elif kind == "rename":
            arguments = (path, rng.choice(PATHS), rng.choice(("", "", "noreplace", "exchange")))
        elif kind == "link":
            arguments = (path, rng.choice(PATHS))
        elif kind == "truncate":
            arguments = (path, rng.randrange(1, 1000))
        op = MetaOp(self.number, kind, arguments, self.world.now)
        self.cluster.history.append(op)
        number = 0
        if kind not in READS:
            self.requests += 1
            number = self.requests
        request = messages.Request(USER, self.number, call_of(op), number, self.acknowledged)
        self.send(op, request, self.clock() + self.cluster.profile.deadline)
        if self.world.traced:
            self.note(f"calls {op}")

    def send(self, op: MetaOp, request: messages.Request, until: float) -> None:
        if self.clock() > until:
            self.note(f"gives up {op}")
            self.unknown |= request.number > 0
            self.done()
            return

        def told(answer: Any) -> None:
            if answer is None or not (
                isinstance(answer, FileError) or not isinstance(answer, Exception)
            ):
                again = msgspec.structs.replace(request, again=True)
                self.later(self.world.rng.random() * 0.02, self.send, op, again, until)
                return
            op.end, op.answer = self.world.now, answer_of(op, answer)
            if request.number and not self.unknown:
                self.acknowledged = request.number
            if self.world.traced:
                self.note(f"learns {op}")
            self.done()

        server = f"meta{self.world.rng.randrange(self.cluster.profile.servers)}"
        self.ask(server, request, self.cluster.profile.attempt, told)

    def done(self) -> None:
        self.later(self.world.rng.random() * self.cluster.profile.pause, self.next)


def call_of(op: MetaOp) -> Any:
    """The request's body."""
    path = op.arguments[0].encode()
    second = op.arguments[1].encode() if op.kind in ("rename", "link") else b""
    if op.kind == "rename":
        flags = {"": 0, "noreplace": messages.NOREPLACE, "exchange": messages.EXCHANGE}[
            op.arguments[2]
        ]
        return messages.Rename(ROOT, path, ROOT, second, flags)
    if op.kind == "link":
        return messages.Link(ROOT, path, ROOT, second)
    if op.kind == "truncate":
        return messages.Truncate(ROOT, path, op.arguments[1])
    if op.kind == "create":
        return messages.Create(ROOT, path, exclusive=True)
    if op.kind == "stat":
        return messages.Stat(ROOT, path, follow=False)
    if op.kind == "readdir":
        return messages.ReadDirectory(ROOT, path)
    return {
        "mkdir": messages.MakeDirectory,
        "unlink": messages.Unlink,
        "rmdir": messages.RemoveDirectory,
    }[op.kind](ROOT, path)


def answer_of(op: MetaOp, answer: Any) -> Any:
    """The answer in the model's terms."""
    if isinstance(answer, FileError):
        return Failed(answer.errno or 0)
    if op.kind == "stat":
        is_directory = answer.kind == DIRECTORY
        return (
            is_directory,
            0 if is_directory else answer.length,
            0 if is_directory else answer.nlink,
        )
    if op.kind == "readdir":
        return tuple(name.decode() for name, _, _ in answer.entries)
    return None


class MetaCluster:
    """One metadata history."""

    def __init__(self, world: World, profile: MetaProfile) -> None:
        self.world = world
        self.profile = profile
        self.network = Network(world, profile.weather)
        self.engine = MemoryEngine(
            world.rng.getrandbits(32), conflicts=profile.conflicts, maybe=profile.maybe
        )
        self.history: list[MetaOp] = []
        self.servers = [
            MetaServer(world, self.network, f"meta{number}", self.engine)
            for number in range(profile.servers)
        ]
        self.clients = [MetaClient(self, number + 1) for number in range(profile.clients)]
        world.after(world.rng.expovariate(1.0 / profile.crash_pause), self.strike)

    def strike(self) -> None:
        """A server crashes, and is there again a little later."""
        rng = self.world.rng
        at = rng.randrange(len(self.servers))
        if self.servers[at].alive:
            self.world.note("faults", f"meta{at} crashes")
            self.servers[at].crash()
            self.world.after(rng.random() * 0.1, self.restart, at)
        self.world.after(rng.expovariate(1.0 / self.profile.crash_pause), self.strike)

    def restart(self, at: int) -> None:
        self.world.note(f"meta{at}", "starts")
        self.servers[at] = MetaServer(self.world, self.network, f"meta{at}", self.engine)

    def run(self) -> None:
        """The history, and the verdict on it; answers are forgotten early, for histories are short."""
        world = self.world
        with mock.patch.object(service, "RECORDS_KEPT", 2):
            while any(client.left for client in self.clients):
                world.run(world.now + 0.5)
            world.run(world.now + 2.0)
        verdict = check_meta(self.history)
        if not verdict.ok:
            lines = [
                "order found:",
                *map(str, verdict.order),
                "none can come next:",
                *map(str, verdict.stuck),
            ]
            raise BrokenInvariant("not linearizable\n" + "\n".join(lines))


__all__ = ["UNKNOWN", "MetaCluster", "MetaProfile", "draw_meta"]
