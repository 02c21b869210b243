"""The retry loop alone: what it does after each outcome, with a batch that fails as a script says."""

import random
from collections.abc import Sequence
from typing import cast

import pytest

from fireflyer._native.fs3.client import ANY_NODE, Outcome, Pieces
from fireflyer.errors import Corrupted, CorruptedFile, FileTimeout, NoSpace, StorageError
from fireflyer.fs3.client.retry import PAUSE_S, ROUNDS, Retry
from fireflyer.fs3.client.settings import Settings

CHAIN = 4


class Routes:
    """A routing that the test changes."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = list(nodes)
        self.damaged_at: set[int] = set()
        self.version = 1
        self.asked = 0
        self.waited: list[float] = []
        self.news_after = -1  # so many waits

    def wait(self, seen: int, seconds: float, *, ask: bool) -> None:
        assert seen == self.version
        assert seconds >= 0
        self.asked += ask
        self.waited.append(seconds)
        self.version += len(self.waited) == self.news_after

    def serving(self, chain: int) -> list[int]:
        assert chain == CHAIN
        return self.nodes


class Script:
    """A batch of one piece whose node answers as it is told: by its number, then in turn."""

    def __init__(self, outcomes: dict[int, list[Outcome]]) -> None:
        self.outcomes = outcomes
        self.node = 1
        self.outcome = Outcome.OPEN
        self.asked: list[int] = []

    def attempt(self, batch: Pieces, seconds: float) -> int:
        assert cast(object, batch) is self
        self.asked.append(self.node)
        left = self.outcomes[self.node]
        self.outcome = left.pop(0) if len(left) > 1 else left[0]
        return int(self.outcome != Outcome.OK)

    def failures(self) -> list[tuple[int, int, int, int]]:
        return [] if self.outcome == Outcome.OK else [(0, int(self.outcome), CHAIN, self.node)]

    def again(self, piece: int, node: int = ANY_NODE) -> None:
        assert piece == 0
        self.node = 1 if node == ANY_NODE else node


def run(
    routes: Routes, script: Script, *, writes: bool = False, deadline_s: float = 30.0
) -> list[int]:
    retry = Retry(routes, Settings(), "the test's call", writes=writes)
    retry.run(script.attempt, cast(Pieces, script), 100, deadline_s)
    return script.asked


@pytest.mark.parametrize(
    "outcome",
    [
        *(Outcome.MISMATCH, Outcome.CORRUPT, Outcome.IO_ERROR),
        *(Outcome.LOST, Outcome.LATE, Outcome.UNREACHABLE),
    ],
)
def test_a_read_goes_to_the_nodes_that_have_not_failed_it(outcome: Outcome) -> None:
    script = Script({1: [outcome], 2: [outcome], 3: [Outcome.OK]})
    routes = Routes([1, 2, 3])
    asked = run(routes, script)
    assert asked[0] == 1
    assert not any(routes.waited)
    assert asked[-1] == 3
    assert len(asked) == len(set(asked))


def test_routing_is_asked_for_where_it_may_have_changed() -> None:
    for outcome in Outcome:
        if outcome in (Outcome.OK, Outcome.INVALID, Outcome.DUPLICATE, Outcome.NO_SPACE):
            continue
        routes = Routes([1, 2])
        run(routes, Script({1: [outcome, Outcome.OK], 2: [Outcome.OK]}))
        outdated = {"STALE_ROUTING", "NO_ROUTE", "LOST", "LATE", "UNREACHABLE"}
        assert routes.asked == (outcome.name in outdated)


def test_a_write_is_sent_to_the_head_until_it_is_done() -> None:
    outcomes = [Outcome.LOST, Outcome.STALE_ROUTING, Outcome.LATE, Outcome.IO_ERROR, Outcome.OK]
    routes = Routes([1, 2])
    assert run(routes, Script({1: outcomes}), writes=True) == [1] * 5
    assert all(routes.waited)


def test_pauses_begin_anew_with_new_routing() -> None:
    """The new head may hear of it a little later than this client: that must not cost a long pause."""
    outcomes = [*[Outcome.UNREACHABLE] * 6, *[Outcome.STALE_ROUTING] * 2, Outcome.OK]
    routes = Routes([1, 2])
    routes.news_after = 6
    run(routes, Script({1: outcomes}), writes=True)
    assert routes.waited[5] > 10 * PAUSE_S
    assert routes.waited[6] <= PAUSE_S
    assert routes.waited[7] <= 2 * PAUSE_S


def test_bytes_that_no_replica_has_are_corrupted() -> None:
    script = Script({node: [Outcome.MISMATCH] for node in (1, 2, 3)})
    random.seed(1)
    with pytest.raises(Corrupted, match="the test's call"):
        run(Routes([1, 2, 3]), script)
    assert all(script.asked.count(node) >= ROUNDS for node in (1, 2, 3))


def test_each_replica_on_a_node_counts() -> None:
    script = Script({1: [Outcome.MISMATCH] * (2 * ROUNDS - 1) + [Outcome.OK]})
    assert run(Routes([1, 1]), script) == [1] * (2 * ROUNDS)


def test_damage_that_is_repaired_meanwhile_is_not_reported() -> None:
    script = Script({1: [Outcome.CORRUPT, Outcome.OK], 2: [Outcome.MISMATCH]})
    assert run(Routes([1, 2]), script) == [1, 2, 1]


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.NO_SPACE, NoSpace),
        (Outcome.INVALID, StorageError),
        (Outcome.DUPLICATE, StorageError),
        (Outcome.CORRUPT, CorruptedFile),
    ],
)
def test_what_cannot_get_better_is_raised_at_once(outcome: Outcome, error: type[Exception]) -> None:
    script = Script({1: [outcome]})
    with pytest.raises(error, match="the test's call"):
        run(Routes([1]), script, writes=True)
    assert script.asked == [1]


def test_the_deadline_ends_it_and_the_error_says_what_failed() -> None:
    with pytest.raises(FileTimeout, match="chain 4 at node 1: unreachable"):
        run(Routes([1]), Script({1: [Outcome.UNREACHABLE]}), deadline_s=0.05)
    with pytest.raises(Corrupted):
        run(Routes([1, 2]), Script({1: [Outcome.CORRUPT]}), deadline_s=0.0)
