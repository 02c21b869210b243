"""Eight ranks of two nodes, 1,000 suspends at random moments: always one call number for all."""

import os
import random
import signal
import time

import pytest

from fireflyer._native.hai import SuspendPage
from fireflyer.hai.engines.gang import decide
from fireflyer.hai.supervisor.messages import Frozen

RANKS, PER_NODE = 8, 4
ROUNDS, PER_TEST = 1000, 100
"""Two pages a round: descriptors are few, so a test has some of the rounds."""
LIMIT_S = 400
"""Eight processes wake a thousand times a second: of a machine that others use they get few turns."""


def _rank(rank: int, rounds: list[list[SuspendPage]], go: int, result: int) -> None:
    """In a forked child: plays all rounds; reports the number of the call that was told."""
    pace = random.Random(rank)
    for number, pages in enumerate(rounds):
        page, slot = pages[rank // PER_NODE], rank % PER_NODE
        os.read(go, 1)  # all begin together: who is late has as many calls to make up for
        calls = 1
        while not page.call(slot):
            calls += 1
            time.sleep(pace.random() * 1e-3)  # stands for a step
        os.write(result, f"{number} {rank} {calls}\n".encode())


@pytest.mark.sample(2)
@pytest.mark.deadline(LIMIT_S)
@pytest.mark.parametrize("seed", range(ROUNDS // PER_TEST))
def test_every_rank_is_told_at_the_same_call(seed: int) -> None:
    chance = random.Random(seed)
    rounds = [[SuspendPage.create(PER_NODE) for _ in range(2)] for _ in range(PER_TEST)]
    result_read, result_write = os.pipe()
    gates = [os.pipe() for _ in range(RANKS)]
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(LIMIT_S)
                _rank(rank, rounds, gates[rank][0], result_write)
            finally:
                os._exit(0)
        children.append(pid)
    os.close(result_write)
    with open(result_read) as results:
        for number, pages in enumerate(rounds):
            for _, gate in gates:
                os.write(gate, b".")
            rank, least = chance.randrange(RANKS), chance.choice((0, 0, 1, 3, 30))
            while pages[rank // PER_NODE].count(rank % PER_NODE) < least:
                time.sleep(1e-5)
            answers = [
                Frozen(attempt=1, highest=max(page.freeze()), decision=0)
                for page in chance.sample(pages, 2)
            ]
            told = decide(answers)
            for page in chance.sample(pages, 2):
                assert page.decide(told) == told
            lines = [tuple(map(int, results.readline().split())) for _ in range(RANKS)]
            assert sorted(lines) == [(number, rank, told) for rank in range(RANKS)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * RANKS
    for ends in gates:
        for end in ends:
            os.close(end)
