"""The tiers keep their budgets and lose no request, for any order of events and answers."""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.experts.events import (
    Action,
    Cool,
    Delete,
    Dropped,
    Evict,
    Evicted,
    EvictionFailed,
    Failed,
    FileChanged,
    Heat,
    Heated,
    Hinted,
    Known,
    Load,
    Loaded,
    Lost,
    Place,
    Reason,
    Refuse,
    Released,
    Seen,
    Serve,
    Wanted,
    Withdrawn,
)
from fireflyer.experts.tiers import IN_HOT, IN_WARM, Tiers

NAMES = "abcdef"
SIZES = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 9}
WARM, HOT = 8, 6


class World:
    """Answers the tiers in any order, and checks what they ask for."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        self.draw, self.now = draw, 0
        self.tiers = Tiers(WARM, HOT, ahead=3)
        self.jobs: list[Load | Heat] = []
        self.warm: dict[str, int] = {}
        self.hot: set[str] = set()
        self.held: dict[str, int] = {}
        self.waiting: dict[str, int] = {}
        self.outside: set[str] = set()
        for name in NAMES:
            self.step(Known(name, SIZES[name]))

    def step(self, event: object) -> None:
        for action in self.tiers.step(event):  # type: ignore[arg-type]
            self.act(action)
        self.check()

    def act(self, action: Action) -> None:
        name = action.name
        if isinstance(action, Load):
            assert name not in self.warm
            self.jobs.append(action)
        elif isinstance(action, Heat):
            assert name in self.warm
            self.jobs.append(action)
        elif isinstance(action, Cool):
            self.hot.remove(name)
        elif isinstance(action, Evict):
            assert name in self.warm
            assert name not in self.hot
            assert not self.held.get(name)
            assert not self.waiting.get(name)
            if name in self.outside:
                self.step(EvictionFailed(name))
            else:
                del self.warm[name]
                self.step(Evicted(name))
        elif isinstance(action, Serve):
            assert name in self.hot
            assert self.waiting.pop(name) == action.callers
            self.held[name] = self.held.get(name, 0) + action.callers
        elif isinstance(action, Refuse) and action.reason is not Reason.IN_USE:
            self.waiting.pop(name, None)
        elif isinstance(action, Delete):
            assert name not in self.warm
            self.step(Known(name, SIZES[name]))

    def check(self) -> None:
        entries = self.tiers.entries
        for places, budget in ((IN_WARM, WARM), (IN_HOT, HOT)):
            assert sum(e.bytes for e in entries.values() if e.place in places) <= budget
        for name, callers in self.held.items():
            assert not callers or entries[name].place is Place.HOT

    def answer(self) -> None:
        job = self.jobs.pop(self.draw(st.integers(0, len(self.jobs) - 1)))
        kind = self.draw(st.sampled_from(["good", "good", "good", "fails", "damaged", "again"]))
        if isinstance(job, Heat):
            if kind == "again" and job.name not in self.outside:
                del self.warm[job.name]
                self.step(Lost(job.name))
            else:
                self.hot.add(job.name)
                self.step(Heated(job.name))
        elif kind == "good":
            self.warm[job.name] = 0
            self.step(Loaded(job.name))
        elif kind == "again":
            self.step(FileChanged(job.name, SIZES[job.name]))
        else:
            self.step(Failed(job.name, kind == "damaged"))

    def move(self) -> None:
        self.now += 1
        name = self.draw(st.sampled_from(NAMES))
        kinds = ["want", "want", "hint", "release", "answer", "answer", "seen", "drop", "outside"]
        kind = self.draw(st.sampled_from([*kinds, "withdraw"]))
        if kind == "want":
            self.waiting[name] = self.waiting.get(name, 0) + 1
            self.step(Wanted(name, self.now))
        elif kind == "hint":
            self.step(Hinted(tuple(self.draw(st.lists(st.sampled_from(NAMES), max_size=5)))))
        elif kind == "release" and self.held.get(name):
            self.held[name] -= 1
            self.step(Released(name))
        elif kind == "answer" and self.jobs:
            self.answer()
        elif kind == "seen":
            self.step(Seen(dict(self.warm), 0))
        elif kind == "drop":
            self.step(Dropped(name))
        elif kind == "outside":
            self.outside ^= {name}
        elif kind == "withdraw" and self.waiting.get(name):
            self.waiting[name] -= 1
            self.step(Withdrawn(name))

    def settle(self) -> None:
        """Lets everything end: then no caller waits any more."""
        self.outside.clear()
        for name, callers in self.held.items():
            for _ in range(callers):
                self.held[name] -= 1
                self.step(Released(name))
        self.step(Seen(dict(self.warm), 0))
        for _ in range(100):
            while self.jobs:
                job = self.jobs.pop(0)
                if isinstance(job, Heat):
                    self.hot.add(job.name)
                    self.step(Heated(job.name))
                else:
                    self.warm[job.name] = 0
                    self.step(Loaded(job.name))
            for name, callers in list(self.held.items()):
                for _ in range(callers):
                    self.held[name] -= 1
                    self.step(Released(name))
        assert not any(self.waiting.values())
        assert not self.tiers.queue


@settings(max_examples=cases(600), deadline=None)
@given(st.data())
def test_budgets_hold_and_no_request_is_lost(data: st.DataObject) -> None:
    world = World(data.draw)
    for _ in range(data.draw(st.integers(1, 40))):
        world.move()
    world.settle()


def play(tiers: Tiers, event: object) -> list[Action]:
    """Answers each action at once; returns all actions."""
    queue, done = [event], []
    while queue:
        for action in tiers.step(queue.pop(0)):  # type: ignore[arg-type]
            done.append(action)
            if isinstance(action, Load):
                queue.append(Loaded(action.name))
            elif isinstance(action, Heat):
                queue.append(Heated(action.name))
            elif isinstance(action, Evict):
                queue.append(Evicted(action.name))
    return done


def served(tiers: Tiers, *names: str) -> None:
    for now, name in enumerate(names):
        assert Serve(name, 1) in play(tiers, Wanted(name, now))
        play(tiers, Released(name))


def three() -> Tiers:
    tiers = Tiers(2, 2)
    for name in "abc":
        play(tiers, Known(name, 1))
    return tiers


def test_the_least_recently_used_expert_leaves_first() -> None:
    tiers = three()
    served(tiers, "a", "b", "a")
    assert Evict("b") in play(tiers, Wanted("c", 9))


def test_an_expected_expert_stays_though_it_was_used_long_ago() -> None:
    tiers = three()
    served(tiers, "a", "b")
    play(tiers, Hinted(("a",)))
    assert Evict("b") in play(tiers, Wanted("c", 9))


def test_an_expected_expert_is_loaded_before_it_is_asked_for() -> None:
    tiers = three()
    assert [type(a) for a in play(tiers, Hinted(("c", "b", "a")))][:2] == [Load, Heat]
    assert [tiers.entries[name].place for name in "abc"] == [Place.COLD, Place.WARM, Place.HOT]
    assert tiers.counts.prefetches == 2
    served(tiers, "c")
    assert tiers.counts.hot_hits == 1
    assert tiers.entries["a"].place is not Place.COLD  # c left the hint and made room


def test_what_is_larger_than_a_tier_is_refused() -> None:
    tiers = Tiers(5, 2)
    play(tiers, Known("a", 3))
    assert play(tiers, Wanted("a", 1)) == [Refuse("a", Reason.TOO_LARGE)]


def test_a_damaged_expert_is_refused_until_it_is_known_anew() -> None:
    tiers = three()
    tiers.step(Wanted("a", 1))
    assert tiers.step(Failed("a", True)) == [Refuse("a", Reason.DAMAGED)]
    assert tiers.step(Wanted("a", 2)) == [Refuse("a", Reason.DAMAGED)]
    tiers.step(Known("a", 1))
    assert tiers.step(Wanted("a", 3)) == [Load("a", 1)]


def test_an_expert_in_use_is_not_removed() -> None:
    tiers = three()
    play(tiers, Wanted("a", 1))
    assert play(tiers, Dropped("a")) == [Refuse("a", Reason.IN_USE)]
    play(tiers, Released("a"))
    assert play(tiers, Dropped("a")) == [Cool("a"), Evict("a"), Delete("a")]
