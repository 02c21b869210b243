"""Elastic gangs without processes: who is asked to come, and the end, whatever is lost in whatever order."""

import random
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests import draws
from tests.hai.engine.test_gang import GANG as PLAIN

from fireflyer.hai.engines.gang import GangState, Now
from fireflyer.hai.model.engine import (
    EngineEvent,
    Gang,
    GangEnded,
    NodeObserved,
    RankExited,
    RankJoined,
    RankStarted,
)
from fireflyer.hai.supervisor.messages import Cause, Newcomer, PartEnded, Record

GANG = msgspec.structs.replace(
    PLAIN, nodes=("n0", "n1"), ranks_per_node=2, elastic=True, rejoins=2, directory=Path("/t1/1")
)
RankEvent = RankStarted | RankJoined | RankExited


class Clock:
    now = 0

    def tick(self) -> int:
        self.now += 1
        return self.now


class Node:
    """A supervisor and its journal. `sent` are records on their way to the engine."""

    def __init__(self, name: str, gang: Gang, clock: Clock) -> None:
        self.name, self._gang, self._clock = name, gang, clock
        first = gang.nodes.index(name) * gang.ranks_per_node
        self.ranks = range(first, first + gang.ranks_per_node)
        self.journal: list[Record] = []
        self.sent: deque[Record] = deque()
        self.asked: deque[tuple[Newcomer, ...]] = deque()
        self.running: dict[int, int] = {}
        self.members: set[int] = set()
        self.returned: set[int] = set()
        self.open = False
        self.alive = True

    def _write(self, event: RankEvent | PartEnded) -> None:
        record = Record(attempt=1, seq=len(self.journal) + 1, event=event)
        self.journal.append(record)
        self.sent.append(record)

    def _about(self, rank: int, incarnation: int) -> dict[str, Any]:
        about = {"task": "t1", "attempt": 1, "node": self.name, "wall": 0.0}
        return about | {
            "rank": rank,
            "incarnation": incarnation,
            "monotonic_ns": self._clock.tick(),
        }

    def start(self, rank: int, incarnation: int = 0) -> None:
        self.open = True
        self.running[rank] = incarnation
        if incarnation == 0:
            self.members.add(rank)
        self._write(RankStarted(**self._about(rank, incarnation), pid=1))

    def let_in(self, rank: int) -> None:
        if rank in self.running and rank not in self.members:
            self.members.add(rank)
            self._write(RankJoined(**self._about(rank, self.running[rank])))

    def _exited(self, rank: int, code: int | None) -> None:
        about = self._about(rank, self.running.pop(rank))
        joined = rank in self.members
        self.members.discard(rank)
        self._write(RankExited(**about, code=code, signal=None, suspended=False, joined=joined))

    def end(self, rank: int, code: int | None, *, then: Cause = "vacant") -> None:
        self._exited(rank, code)
        self.returned |= {rank} if code == 0 else set()
        if not self.running:
            cause: Cause = "finished" if self.returned == set(self.ranks) else then
            self._part_ended(cause)

    def _part_ended(self, cause: Cause) -> None:
        self.open = False
        ns = self._clock.tick()
        self._write(
            PartEnded(
                node=self.name,
                cause=cause,
                reason="",
                told=False,
                highest=0,
                failed_ns=0,
                monotonic_ns=ns,
                wall=0.0,
            )
        )

    def abort(self) -> None:
        for rank in list(self.running):
            self.end(rank, None, then="aborted")

    def take_asked(self) -> None:
        """Opens the part again where it was closed; a new supervisor first writes who was lost."""
        newcomers = self.asked.popleft()
        if not self.alive:
            self.alive = True
            for rank in list(self.running):
                self._exited(rank, None)
        for newcomer in newcomers:
            self.members.discard(newcomer.rank)
            self.start(newcomer.rank, newcomer.incarnation)


class World:
    def __init__(self, gang: Gang = GANG) -> None:
        self.clock = Clock()
        self.nodes = {name: Node(name, gang, self.clock) for name in gang.nodes}
        self.state = GangState(gang)
        self.told: list[EngineEvent] = []
        for node in self.nodes.values():
            self.state.opened(node.name)
            for rank in node.ranks:
                node.start(rank)
        self.state.sealed(self._now())

    def _now(self) -> Now:
        return Now(self.clock.tick(), 0.0)

    def node_of(self, rank: int) -> Node:
        return next(node for node in self.nodes.values() if rank in node.ranks)

    def deliver(self, node: Node) -> None:
        if node.sent and node.alive:
            self.state.record(node.sent.popleft(), node.name)
            self.follow()

    def kill(self, node: Node) -> None:
        """Supervisor and all: the engine sees it at once, and reads the journal."""
        node.alive = node.open = False
        for record in node.journal:
            self.state.record(record, node.name)
        node.sent.clear()
        node.asked.clear()
        self.state.lost(node.name, f"{node.name} died", self._now(), joinable=True)
        self.follow()

    def follow(self) -> None:
        self.told += self.state.take()
        for name, newcomers in self.state.newcomers().items():
            self.nodes[name].asked.append(newcomers)
            self.state.reopened(name)

    def settle(self) -> None:
        """All messages arrive; an abort is carried out."""
        while True:
            for node in self.nodes.values():
                while node.sent and node.alive:
                    self.deliver(node)
                while node.asked:
                    node.take_asked()
                if self.state.aborting and node.running and node.alive:
                    node.abort()
            if not any(node.asked or (node.sent and node.alive) for node in self.nodes.values()):
                break
        self.follow()

    def end(self) -> GangEnded:
        (ended,) = [event for event in self.told if isinstance(event, GangEnded)]
        return ended


def test_a_lost_rank_is_asked_for_once_and_up_to_the_budget() -> None:
    world = World()
    node = world.nodes["n1"]
    world.settle()
    for incarnation in range(3):
        assert node.running[3] == incarnation
        node.end(3, 1)
        world.settle()
    assert 3 not in node.running
    assert world.state.ended is None
    for rank in (0, 1, 2):
        world.node_of(rank).end(rank, 0)
    world.settle()
    assert (world.end().outcome, world.end().reason) == (
        "finished",
        "all remaining ranks returned 0 (3 of 4)",
    )


@pytest.mark.parametrize("why", ["leaving", "ending", "aborting"])
def test_nobody_is_asked_to_come_when_the_job_ends(why: str) -> None:
    world = World()
    world.settle()
    if why == "ending":
        world.nodes["n0"].end(0, 0)
        world.deliver(world.nodes["n0"])
    else:
        setattr(world.state, why, True)
    world.nodes["n1"].end(3, 1)
    world.deliver(world.nodes["n1"])
    assert world.state.newcomers() == {}


def test_a_lost_node_is_told_once_though_its_next_supervisor_tells_it_again() -> None:
    world = World()
    world.settle()
    world.kill(world.nodes["n1"])
    world.settle()
    exits = [e for e in world.told if isinstance(e, RankExited)]
    assert [(e.rank, e.incarnation, e.code, e.signal, e.joined) for e in exits] == [
        (2, 0, None, None, True), (3, 0, None, None, True),
    ]  # fmt: skip
    assert world.nodes["n1"].running == {2: 1, 3: 1}


def test_before_newcomers_can_join_a_lost_node_ends_the_gang() -> None:
    world = World()
    world.settle()
    world.state.lost("n1", "n1 died", Now(99, 0.0))
    assert world.state.aborting
    assert world.state.newcomers() == {}


def test_a_node_that_is_lost_before_its_ranks_began_ends_the_gang_though_newcomers_could_join() -> (
    None
):
    state = GangState(GANG)
    for node in GANG.nodes:
        state.opened(node)
    state.sealed(Now(1, 0.0))
    for seq, rank in ((1, 0), (2, 1)):
        about: dict[str, Any] = {"task": "t1", "attempt": 1, "node": "n0", "wall": 0.0}
        event = RankStarted(rank=rank, pid=1, monotonic_ns=seq, **about)
        state.record(Record(attempt=1, seq=seq, event=event), "n0")
    state.lost("n1", "n1 died", Now(9, 0.0), joinable=True)
    assert state.aborting
    assert state.newcomers() == {}


def test_newcomers_without_members_are_given_up() -> None:
    world = World()
    world.settle()
    world.nodes["n1"].end(3, 1)
    world.settle()
    assert world.nodes["n1"].running[3] == 1
    for rank in (0, 1, 2):
        world.node_of(rank).end(rank, 7)
        for node in world.nodes.values():
            while node.sent:
                world.state.record(node.sent.popleft(), node.name)
    assert world.state.aborting
    world.settle()
    assert (world.end().outcome, world.end().reason) == (
        "failed",
        "all ranks have ended, the last one: rank 2 on n1 exited with status 7",
    )


def outcome_allowed(world: World) -> None:
    ended = world.end()
    events = [event for event in world.told if not isinstance(event, GangEnded | NodeObserved)]
    keys = [(type(e).__name__, e.rank, e.incarnation) for e in events]
    assert len(keys) == len(set(keys)), "each is told once"
    assert max(incarnation for *_, incarnation in keys) <= GANG.rejoins
    exits = [e for e in events if isinstance(e, RankExited)]
    done = [e.monotonic_ns for e in exits if e.code == 0]
    late = [e for e in exits if e.code != 0 and e.joined and done and e.monotonic_ns > min(done)]
    assert (ended.outcome == "finished") == bool(done and not late)
    assert ended.outcome in ("finished", "failed", "lost")
    assert world.told[-1] is ended


@pytest.mark.parametrize("seed", draws.seeds("gangs", 400))
def test_any_history_ends_and_is_told_once(seed: int) -> None:
    dice = random.Random(seed)
    world = World()
    for _ in range(dice.randint(5, 80)):
        node = world.nodes[dice.choice(GANG.nodes)]
        what = dice.choices(
            ["deliver", "take", "fail", "in", "kill", "return"], [8, 4, 3, 3, 1, 1]
        )[0]
        rank = dice.choice(node.ranks)
        if what == "deliver":
            world.deliver(node)
        elif what == "take" and node.asked:
            node.take_asked()
        elif what == "in" and node.alive:
            node.let_in(rank)
        elif what == "kill" and node.alive and (node.open or node.asked) and not world.state.ended:
            world.kill(node)
        elif rank in node.running and node.alive and what in ("fail", "return"):
            node.end(rank, 0 if what == "return" and rank in node.members else 1)
    world.settle()
    for _ in range(20):  # the rest returns 0, newcomers have nobody to join
        for node in world.nodes.values():
            for rank in list(node.running) if node.alive else ():
                node.end(rank, 0 if rank in node.members else 1)
        world.settle()
    outcome_allowed(world)

    again = GangState(GANG)  # the next server reads the journals, one node after the other
    for node in world.nodes.values():
        again.opened(node.name)
    for node in world.nodes.values():
        for record in node.journal:
            again.record(record, node.name)
        if node.name in again.open:
            again.lost(node.name, "gone", Now(world.clock.tick(), 0.0), joinable=True)
    again.sealed(Now(world.clock.tick(), 0.0))
    assert again.ended is not None
    # When a node was lost that nobody launched on again is not written down: then it counts as late.
    same = again.ended.outcome == world.end().outcome
    assert same or "was lost with" in again.ended.reason
