"""Some seconds of what `make sim` does for hours; and seeds that once failed."""

import os
import random
from dataclasses import replace

import pytest
from tests.fs3.sim.faults import KINDS, Profile, draw
from tests.fs3.sim.simulate import HISTORIES, Result, history, many

PROCESSES = 2


def passed(results: list[Result], count: int) -> None:
    assert len(results) == count
    for result in results:
        assert not result.error, f"make sim SEED={result.seed}: {result.error}"


@pytest.mark.parametrize("kind", ["chunks", "meta"])
def test_random_histories(kind: str) -> None:
    passed(list(many(kind, range(1, 201), PROCESSES)), 200)


@pytest.mark.parametrize("fault", KINDS)
def test_one_kind_of_fault(fault: str) -> None:
    results = [history(seed, profile=Profile(kinds=(fault,), pause=0.3)) for seed in range(3)]
    passed(results, 3)
    assert all(result.operations > 20 for result in results)


def test_damage_in_a_chain_of_two() -> None:
    """Power cuts and a lie of a disk: one recovers while its own newest bytes may be damaged, and the
    other has them whole."""
    for seed in (1422, 1505, 2601, 3175, 3527, 3581, 3903, 3990):
        kinds = ("lie", "power_all", "crash", "power", "torn")
        profile = replace(draw(random.Random(seed)), targets=2, kinds=kinds, pause=0.2)
        passed([history(seed, profile=profile)], 1)


@pytest.mark.parametrize("kind", ["chunks", "meta"])
def test_a_seed_repeats_itself(kind: str) -> None:
    one, two = (HISTORIES[kind](11, traced=True) for _ in range(2))
    assert one.transcript == two.transcript
    assert len(one.transcript) > 20
    assert one.events == HISTORIES[kind](11).events


def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        HISTORIES, "chunks", lambda seed: os._exit(3) if seed == 4 else history(seed)
    )
    failed = [result for result in many("chunks", range(3, 6), PROCESSES) if result.error]
    assert [result.seed for result in failed] == [4]
