"""The fuzzer's targets take their seeds and damaged ones; what is behind the checksums is reached."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, run, seeds, whole

from fireflyer.datasets import manifest
from fireflyer.errors import FireflyerError

SEEDS = [pytest.param(target, data, id=target.__name__) for target, data in seeds()]


@pytest.mark.parametrize(("target", "data"), SEEDS)
def test_a_seed_is_good(
    monkeypatch: pytest.MonkeyPatch, target: Callable[[bytes], None], data: bytes
) -> None:
    refused: list[FireflyerError] = []
    made = FireflyerError.__init__

    def init(self: FireflyerError, *args: Any) -> None:
        refused.append(self)
        made(self, *args)

    monkeypatch.setattr(FireflyerError, "__init__", init)
    target(data)
    # Of raw or packed samples not every face can show all: those two refusals are none of damage.
    assert [e for e in refused if "use read" not in str(e.args)] == []


@pytest.mark.parametrize(("target", "data"), SEEDS)
def test_a_damaged_seed_is_taken_or_refused(target: Callable[[bytes], None], data: bytes) -> None:
    chance = random.Random(len(data))
    for _ in range(100):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice((0, 1, 127, 128, 255))
        del damaged[chance.choice((len(data), chance.randrange(len(data)))) :]
        run(whole(target, bytes(damaged)))


def test_a_target_lets_a_finding_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("finding")

    for name in ("_load_tree", "FileReader", "RemoteFiles"):
        monkeypatch.setattr(targets, name, broken)
    monkeypatch.setattr(manifest, "decode", broken)
    for target in TARGETS:
        with pytest.raises(KeyError, match="finding"):
            target(b"")
