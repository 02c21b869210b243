"""The agreement on the next view, in seeded schedules of delays, losses and crashes."""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from tests import draws

from fireflyer.hfreduce.reform.membership import (
    Accept,
    Arrived,
    Ask,
    Decided,
    Elapsed,
    Event,
    Fence,
    Here,
    Install,
    Lost,
    Member,
    Membership,
    Message,
    Outdated,
    Propose,
    Received,
    Send,
    Start,
    View,
    Vote,
    Wait,
    has_quorum,
)
from fireflyer.hfreduce.topology import RankInfo

SCHEDULES = int(os.environ.get("FIREFLYER_SCHEDULES") or draws.cases(2000))
EPOCHS = 3


def info(number: int) -> RankInfo:
    return RankInfo("m", "h", f"u{number}", "127.0.0.1", number)


@dataclass
class Epoch:
    """All that belongs to the agreement on one view."""

    members: list[int]
    """Process numbers, by rank."""
    machines: dict[int, Membership] = field(default_factory=dict)
    flying: list[tuple[int, int, Message]] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    outcomes: dict[int, View] = field(default_factory=dict)


class World:
    """Processes, some of which die, and a network that delays, reorders and loses."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.next_process = self.random.randint(2, 7)
        self.epochs = [Epoch(list(range(self.next_process)))]
        self.dead: set[int] = set()
        self.loss = self.random.choice([0.0, 0.05, 0.3])
        self.haste = self.random.choice([0.05, 0.2, 0.4])
        self.crash = self.random.choice([0.0, 0.005, 0.03])
        self.slander = self.random.choice([0.0, 0.01, 0.05])

    def start(self, epoch: Epoch, process: int) -> None:
        machine = Membership(
            epoch.members.index(process), [info(p) for p in epoch.members], len(self.epochs)
        )
        epoch.machines[process] = machine
        ranks = range(len(epoch.members))
        suspects = {
            r
            for r in ranks
            if self.random.random() < (0.5 if epoch.members[r] in self.dead else self.slander)
        }
        self.apply(epoch, process, Start(frozenset(suspects)))

    def apply(self, epoch: Epoch, process: int, event: Event) -> None:
        """Steps a machine; the process may die before any of its actions."""
        machine = epoch.machines[process]
        for action in machine.step(event):
            if process in self.dead:
                return
            if self.random.random() < self.crash:
                self.dead.add(process)
                return
            match action:
                case Send(rank, message):
                    epoch.flying.append((machine.rank, rank, message))
                case Wait():
                    epoch.waiting.add(process)
                case Install(view):
                    assert view.rank_of(machine.rank) is not None
                    epoch.outcomes[process] = view
                case Fence(view):
                    assert view.rank_of(machine.rank) is None
                    epoch.outcomes[process] = view

    def deliver(self, epoch: Epoch) -> None:
        sender, rank, message = epoch.flying.pop(self.random.randrange(len(epoch.flying)))
        process = epoch.members[rank]
        if process in self.dead:
            return
        if process in epoch.machines:
            self.apply(epoch, process, Received(sender, message))
        else:
            epoch.flying.append((sender, rank, message))  # lies in its socket until it looks

    def storm(self, epoch: Epoch) -> None:
        """Anything may happen in any order."""
        late = set(epoch.members)
        for _ in range(self.random.randint(0, 200)):
            alive = [p for p in epoch.members if p not in self.dead]
            if not alive:
                return
            process = self.random.choice(alive)
            dice = self.random.random()
            if process in late:
                if dice < 0.3:
                    late.discard(process)
                    self.start(epoch, process)
            elif dice < self.haste and process in epoch.waiting:
                epoch.waiting.discard(process)
                self.apply(epoch, process, Elapsed())
            elif 0.4 < dice < 0.44:
                victims = [
                    r
                    for r, p in enumerate(epoch.members)
                    if p in self.dead or self.random.random() < self.slander
                ]
                for rank in victims:
                    self.apply(epoch, process, Lost(rank))
            elif 0.44 < dice < 0.45:
                self.apply(epoch, process, Arrived(info(self.next_process)))
                self.next_process += 1
            elif epoch.flying:
                if self.random.random() < self.loss:
                    epoch.flying.pop(self.random.randrange(len(epoch.flying)))
                else:
                    self.deliver(epoch)
        self.starting(epoch, late)

    def starting(self, epoch: Epoch, late: set[int]) -> None:
        for process in sorted(late - self.dead):
            self.start(epoch, process)

    def calm(self, epoch: Epoch) -> None:
        """Nothing is lost and nobody dies any more: who is alive must come to an end."""
        self.crash = 0.0
        dead = [r for r, p in enumerate(epoch.members) if p in self.dead]
        for _ in range(60):
            alive = [p for p in epoch.members if p not in self.dead]
            for process in alive:
                for rank in dead:
                    self.apply(epoch, process, Lost(rank))
            while epoch.flying:
                self.deliver(epoch)
            if all(p in epoch.outcomes for p in alive):
                return
            process = self.random.choice([p for p in alive if p not in epoch.outcomes])
            if process in epoch.waiting:
                epoch.waiting.discard(process)
                self.apply(epoch, process, Elapsed())


def check_view(epoch: Epoch, view: View, number: int) -> None:
    survivors = [m.previous for m in view.members if m.previous >= 0]
    newcomers = [m for m in view.members if m.previous < 0]
    assert view.epoch == number
    assert has_quorum(survivors, len(epoch.members))
    assert survivors == sorted(set(survivors)), "in the order of their old ranks"
    assert list(view.members[len(survivors) :]) == newcomers, "newcomers come last"
    assert all(view.members[i].info == info(epoch.members[r]) for i, r in enumerate(survivors))
    assert len({m.info for m in view.members}) == len(view.members)


def run(seed: int) -> int:
    """One schedule over several epochs; how many views were decided."""
    world = World(seed)
    for number in range(1, EPOCHS + 1):
        epoch = world.epochs[-1]
        crash = world.crash
        world.storm(epoch)
        world.calm(epoch)
        world.crash = crash
        alive = [p for p in epoch.members if p not in world.dead]
        views = set(epoch.outcomes.values())
        assert len(views) <= 1, f"seed {seed}: two views of epoch {number}"
        if not has_quorum([epoch.members.index(p) for p in alive], len(epoch.members)):
            return number - 1
        assert all(p in epoch.outcomes for p in alive), f"seed {seed}: no progress"
        view = views.pop()
        check_view(epoch, view, number)
        world.epochs.append(Epoch([member.info.port for member in view.members]))
        if all(member.info.port in world.dead for member in view.members):
            return number
    return EPOCHS


def test_at_most_one_view_an_epoch_and_progress_where_a_quorum_survives() -> None:
    decided = [run(seed) for seed in draws.drawn("schedules").sample(range(1 << 31), SCHEDULES)]
    assert decided.count(EPOCHS) > SCHEDULES // 4, "most worlds should live on"
    assert decided.count(0) > SCHEDULES // 100, "and some should not"


@pytest.mark.parametrize("world", range(1, 9))
def test_any_two_quorums_share_a_rank(world: int) -> None:
    sets = [{r for r in range(world) if bits >> r & 1} for bits in range(1 << world)]
    quorums = [ranks for ranks in sets if has_quorum(ranks, world)]
    assert all(one & other for one in quorums for other in quorums)
    others = [ranks for ranks in sets if set(range(world)) - ranks not in quorums]
    assert others == quorums, "of two parts of a cut network exactly one goes on"


@pytest.mark.parametrize(("half", "goes_on"), [((0, 1), True), ((0, 3), True), ((2, 3), False)])
def test_half_goes_on_where_it_has_the_lowest_rank(half: tuple[int, int], goes_on: bool) -> None:
    infos = [info(i) for i in range(4)]
    lost = frozenset(range(4)) - set(half)
    low, high = (Membership(rank, infos, 1) for rank in half)
    low.step(Start(lost))
    high.step(Start(lost))
    proposed = low.step(Received(half[1], Vote((1, half[0]), None, None, ())))
    view = View(1, tuple(Member(infos[r], r) for r in half))
    assert (Send(half[1], Propose((1, half[0]), view)) in proposed) == goes_on
    if goes_on:
        assert outcome(low.step(Received(half[1], Accept((1, half[0]))))) == Install(view)
    else:
        assert outcome([*low.step(Elapsed()), *high.step(Elapsed())]) is None


def two() -> tuple[Membership, Membership]:
    infos = [info(0), info(1)]
    return Membership(0, infos, 1, quorum=1), Membership(1, infos, 1, quorum=1)


def outcome(actions: Sequence[object]) -> object:
    return next((a for a in actions if isinstance(a, Install | Fence)), None)


def test_one_of_two_carries_on_only_with_a_relaxed_quorum() -> None:
    strict = Membership(1, [info(0), info(1)], 1)
    assert outcome([*strict.step(Start(frozenset({0}))), *strict.step(Elapsed())]) is None
    assert strict.voters == 1
    relaxed = two()[1]
    alone = View(1, (Member(info(1), 1),))
    assert outcome([*relaxed.step(Start(frozenset({0})))]) == Install(alone)


def test_a_relaxed_quorum_lets_both_sides_of_a_cut_go_on() -> None:
    """What its documentation warns of."""
    left, right = two()
    views = {
        outcome([*left.step(Start(frozenset({1})))]),
        outcome([*right.step(Start(frozenset({0})))]),
    }
    assert len(views) == 2
    assert None not in views


@pytest.mark.parametrize("quorum", [0, 4])
def test_a_quorum_is_a_number_of_members(quorum: int) -> None:
    with pytest.raises(ValueError, match="quorum"):
        Membership(0, [info(0), info(1), info(2)], 1, quorum)


def test_a_rank_believed_dead_is_told_by_whoever_knows() -> None:
    infos = [info(i) for i in range(3)]
    coordinator = Membership(0, infos, 1)
    coordinator.step(Start(frozenset({2})))
    coordinator.step(Received(1, Vote((1, 0), None, None, ())))
    done = coordinator.step(Received(1, Accept((1, 0))))
    view = coordinator.decided
    assert view is not None
    assert Send(2, Decided(view)) in done
    late = Membership(2, infos, 1)
    assert late.step(Start()) == [Send(0, Here()), Wait(leading=False)]
    assert coordinator.step(Received(2, Here())) == [Send(2, Decided(view))]
    assert coordinator.step(Received(2, Ask((9, 2)))) == [Send(2, Decided(view))]
    assert late.step(Received(0, Decided(view))) == [Fence(view)]
    assert late.step(Elapsed()) == []


def test_a_later_coordinator_proposes_what_may_have_been_decided() -> None:
    infos = [info(i) for i in range(3)]
    member = Membership(1, infos, 1)
    old = View(1, tuple(Member(infos[r], r) for r in range(3)))
    member.step(Received(0, Propose((1, 0), old)))
    member.step(Start(frozenset({0})))
    actions = member.step(Received(2, Vote((2, 1), None, None, (info(9),))))
    assert Send(2, Propose((2, 1), old)) in actions


def test_of_two_accepted_views_the_later_counts() -> None:
    infos = [info(i) for i in range(5)]
    member = Membership(1, infos, 1)
    first, second = (View(1, tuple(Member(infos[r], r) for r in range(size))) for size in (3, 4))
    member.step(Start(frozenset({0, 4})))
    member.step(Received(2, Vote((1, 1), (4, 0), second, ())))
    actions = member.step(Received(3, Vote((1, 1), (3, 2), first, ())))
    assert Send(2, Propose((1, 1), second)) in actions


@pytest.mark.parametrize(
    "message",
    [
        Here(),
        Ask((1, 2)),
        Vote((1, 2), (1, 1), View(3, (Member(info(1), -1),)), (info(2),)),
        Propose((1, 2), View(3, ())),
        Accept((1, 2)),
        Outdated((1, 2), (3, 4)),
        Decided(View(1, (Member(info(0), 0),))),
    ],
)
def test_messages_cross_the_wire(message: Message) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message


def test_a_late_member_is_asked_again() -> None:
    infos = [info(i) for i in range(3)]
    coordinator = Membership(0, infos, 1)
    coordinator.step(Start(frozenset({1, 2})))
    assert coordinator.step(Received(2, Here())) == [Send(2, Ask((1, 0)))]
    assert coordinator.step(Lost(2)) == []


def test_an_outdated_coordinator_gives_up_its_ballot() -> None:
    infos = [info(i) for i in range(3)]
    first = Membership(0, infos, 1)
    first.step(Start())
    assert first.step(Received(1, Outdated((1, 0), (7, 1)))) == [Wait(leading=False)]
    again = first.step(Elapsed())
    assert Send(1, Ask((8, 0))) in again
    assert first.step(Received(1, Ask((3, 1)))) == [Send(1, Outdated((3, 1), (8, 0)))]
