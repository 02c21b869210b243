"""Which chunks of a file stand: against sets, and how many questions it takes."""

import bisect
import itertools
import random

import numpy as np
import pytest
from tests import draws

from fireflyer.fs3.client.walk import LAST_INDEX, Answers, Asks, walk

MOST_RUN = 4096


class Chains:
    """Answers as storage nodes do; counts questions and how often any were asked."""

    def __init__(self, stripe: int, indexes: set[int]) -> None:
        self.stripe, self.questions, self.rounds = stripe, 0, 0
        self.of = [sorted(i for i in indexes if i % stripe == chain) for chain in range(stripe)]

    def ask(self, asks: Asks) -> Answers:
        assert asks
        self.questions += len(asks)
        self.rounds += 1
        return [self._answer(chain, upto) for chain, upto in asks]

    def _answer(self, chain: int, upto: int) -> tuple[int, int, int]:
        its = self.of[chain]
        at = bisect.bisect_right(its, upto) - 1
        if at < 0:
            return 0, 0, 0
        row = 1
        while row < MOST_RUN and at >= row and its[at - row] == its[at] - row * self.stripe:
            row += 1
        return its[at], row, 1

    def found(self, first: int = 0, last: int = LAST_INDEX, chains: int = 0) -> list[int]:
        """All that a walk gives, which comes in order."""
        parts = list(walk(self.ask, chains or self.stripe, self.stripe, first, last))
        assert all(part.size and (np.diff(part) > 0).all() for part in parts)
        assert all(above[0] > below[-1] for above, below in itertools.pairwise(parts))
        return [index for part in reversed(parts) for index in part.tolist()]


@pytest.mark.parametrize("seed", draws.seeds("walks", 40))
def test_all_that_stands_is_found(seed: int) -> None:
    rng = random.Random(seed)
    stripe = rng.choice((1, 2, 3, 8, 31))
    top = rng.choice((1, 40, 30_000, LAST_INDEX))
    indexes = {rng.randint(0, top) for _ in range(rng.randrange(300))}
    for _ in range(rng.randrange(4)):
        begin = rng.randint(0, top)
        indexes.update(range(begin, min(begin + rng.choice((5, 9000)), top + 1)))
    chains = Chains(stripe, indexes)
    first, last = sorted((rng.randint(0, top), rng.randint(0, top)))
    assert chains.found() == sorted(indexes)
    assert chains.found(first, last) == sorted(i for i in indexes if first <= i <= last)
    assert chains.found(first) == sorted(i for i in indexes if i >= first)


def test_a_dense_file_costs_a_question_for_rows_of_thousands() -> None:
    chains = Chains(8, set(range(100_000)))
    assert chains.found() == list(range(100_000))
    rows = 8 * -(-12_500 // MOST_RUN)
    assert (chains.questions, chains.rounds) == (rows, rows // 8)


def test_a_sparse_file_costs_what_it_holds() -> None:
    chains = Chains(3, {0, 7, 1 << 31, LAST_INDEX})
    assert chains.found() == [0, 7, 1 << 31, LAST_INDEX]
    assert chains.questions <= 4 + 3
    assert chains.rounds <= 3
    assert Chains(3, set()).found() == []


def test_chains_that_are_behind_are_waited_for() -> None:
    """One has holes everywhere, the others none: what they have above it is kept, and never much."""
    highest = draws.cases(200_000)
    indexes = {i for i in range(highest) if i % 4 or i % 8 == 0}
    chains = Chains(4, indexes)
    assert chains.found() == sorted(indexes)
    assert chains.questions <= highest // 8 + 3 * (-(-highest // 4 // MOST_RUN) + 1)


def test_only_chains_that_may_hold_some_are_asked() -> None:
    chains = Chains(16, {0, 1, 2, 3})
    assert chains.found(chains=4) == [0, 1, 2, 3]
    assert chains.questions == 4
    assert chains.found(2, 2) == [2]
    assert chains.found(5, 2) == []
    assert chains.questions == 5
