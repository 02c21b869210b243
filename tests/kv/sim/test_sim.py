"""Simulated histories of the store's protocol: nothing acknowledged is lost, no zombie acknowledges."""

import pytest
from tests.draws import seeds
from tests.kv.sim.history import history
from tests.kv.sim.mutants import MUTANTS

GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_histories(group: int) -> None:
    done = 0
    for seed in seeds(f"kv histories {group}", 150):
        error, _, operations = history(seed)
        assert not error, f"seed {seed}: {error}"
        done += operations
    assert done > 100


def test_a_seed_gives_the_same_history() -> None:
    first, second = (history(7, traced=True) for _ in range(2))
    lines = [[line.split(" at 0x")[0] for line in run[1]] for run in (first, second)]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 500


def test_each_mutant_finds_its_place_in_the_sources() -> None:
    import importlib.util

    for mutant in MUTANTS:
        spec = importlib.util.find_spec(f"fireflyer.kv.core.{mutant.module}")
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin) as source:
            assert source.read().count(mutant.old) == 1, mutant.name
