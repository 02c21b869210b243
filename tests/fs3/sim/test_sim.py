"""Some seconds of what `make sim` does for hours: some histories of each kind and family of faults."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests import draws
from tests.fs3.sim.mutation.mutations import MUTANTS, Mutant
from tests.fs3.sim.profiles import FAMILIES, KINDS, Profile
from tests.fs3.sim.simulate import HISTORIES, Result, chunk_history, history, many

PROCESSES = 2


def passed(results: list[Result], count: int) -> None:
    assert len(results) == count
    for result in results:
        assert not result.error, f"make sim SEED={result.seed} ({result.family}): {result.error}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["chunks", "meta"])
def test_random_histories(kind: str) -> None:
    seeds = draws.seeds(kind, 150)
    passed(list(many(kind, seeds, PROCESSES)), len(seeds))


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_family_of_faults(family: str) -> None:
    results = list(many(family, range(1, 7), PROCESSES))
    passed(results, 6)
    assert {result.family for result in results} == {family}
    assert all(result.operations > 20 for result in results)


@pytest.mark.parametrize("fault", KINDS)
def test_one_kind_of_fault(fault: str) -> None:
    profile = replace(Profile(), kinds=(fault,), pause=0.3, managers=2)
    passed([chunk_history(seed, profile) for seed in range(2)], 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["chunks", "meta", "lies"])
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_rule_of_each_mutant_is_where_it_says(mutant: Mutant) -> None:
    """So that `make sim-mutants` finds it."""
    root = Path(__file__).parents[3]
    assert (root / mutant.file).read_text().count(mutant.old) == 1
