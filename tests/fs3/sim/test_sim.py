"""Some seconds of what `make sim` does for hours; and seeds that once failed."""

import pytest
from tests.fs3.sim.faults import KINDS, Profile
from tests.fs3.sim.simulate import history

SHORT = 60


@pytest.mark.parametrize("part", range(4))
def test_random_histories(part: int) -> None:
    for seed in range(1 + part * SHORT, 1 + (part + 1) * SHORT):
        result = history(seed)
        assert not result.error, f"make sim SEED={seed}: {result.error}"


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_of_fault(kind: str) -> None:
    for seed in range(5):
        result = history(seed, profile=Profile(kinds=(kind,), pause=0.3))
        assert not result.error, f"seed {seed}: {result.error}"
        assert result.operations > 20


def test_a_seed_repeats_itself() -> None:
    one, two = history(11, traced=True), history(11, traced=True)
    assert one.transcript == two.transcript
    assert len(one.transcript) > 100
    assert one.events == history(11).events
