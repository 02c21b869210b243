"""After a power cut at any moment: what is loaded was saved, whole, and not before what was acknowledged."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.conftest import untidy
from tests.checkpoint.power import Journal

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError
from fireflyer.storage import DirectoryStorage

Differences = Callable[[Any, Any], list[str]]
SCENARIOS = 100 if os.environ.get("FIREFLYER_SOAK") else 4
CUTS = 3
"""Disks made for each moment."""


def state_of(save: int) -> dict[str, Any]:
    """A part that changes with every save, one that does with every third, and the number of the save."""
    return {
        "moving": torch.randn(3000, generator=torch.Generator().manual_seed(save)),
        "slow": torch.randn(2000, generator=torch.Generator().manual_seed(save // 3)),
        "save": save,
    }


def run(place: Path, rng: random.Random) -> Journal:
    """Two or three runs one after the other, each with some saves; some go back to an older step."""
    journal = Journal(place)
    save = 0
    with journal.noting():
        for _ in range(rng.randint(2, 3)):
            keep, incremental = rng.choice((1, 2, None)), rng.random() < 0.5
            manager = CheckpointManager(place, keep=keep, incremental=incremental)
            for _ in range(rng.randint(1, 3)):
                save += 1
                handle = manager.save(rng.randint(1, 4), state_of(save))
                if rng.random() < 0.8:
                    handle.wait()
                    journal.ack(save)
            manager.wait()
            journal.ack(save)
    return journal


def check(place: Path, acknowledged: int, differences: Differences, tidy: bool) -> int:
    """Returns the number of the save that was found; 0 for none."""
    manager = CheckpointManager(place, keep=1)
    if manager.latest() is None:
        assert acknowledged == 0
        return 0
    loaded = manager.load()
    assert differences(loaded, state_of(loaded["save"])) == []
    assert loaded["save"] >= acknowledged
    assert not (place / "damaged").exists()
    if tidy:
        manager.save(9, state_of(99)).wait()
        assert untidy(place) == []
        assert manager.steps() == [9]
    return int(loaded["save"])


@pytest.fixture(autouse=True)
def _native_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files, too, are written past the page cache."""
    monkeypatch.setattr("fireflyer.storage.directory._LARGE_CHUNK", 8192)


def cuts(folder: Path, seed: int, differences: Differences) -> tuple[set[int], Journal]:
    """A run, and all its moments; which saves were found, and what was noted."""
    rng = random.Random(seed)
    journal = run(folder / "place", rng)
    found: set[int] = set()
    for moment in range(len(journal.events) + 1):
        for _ in range(CUTS):
            disk = folder / "disk"
            acknowledged = journal.cut(moment, rng, disk)
            found.add(check(disk, acknowledged, differences, tidy=rng.random() < 0.2))
            shutil.rmtree(disk)
    shutil.rmtree(folder / "place")
    return found, journal


@pytest.mark.timeout(60 + 20 * SCENARIOS)
def test_power_cuts_at_every_moment(tmp_path: Path, differences: Differences) -> None:
    for seed in range(SCENARIOS):
        found, journal = cuts(tmp_path, seed, differences)
        last = journal.events[-1].number
        assert found >= {0, last}
        assert len(journal.events) > 10 * last


class _OnlyDirectories:
    """`os`, whose fsync leaves files out."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.fsync(fd)


@contextmanager
def _forgetful(patch: pytest.MonkeyPatch, what: str) -> Iterator[None]:
    """A storage that does not sync its files, or its directories."""
    with patch.context() as context:
        if what == "directories":
            context.setattr(DirectoryStorage, "_sync_directory", staticmethod(lambda _: None))
        else:
            context.setattr("fireflyer.storage.directory.os", _OnlyDirectories())
        yield


@pytest.mark.parametrize("what", ["files", "directories"])
def test_a_storage_that_forgets_to_sync_is_found_out(
    tmp_path: Path, differences: Differences, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with _forgetful(monkeypatch, what), pytest.raises((AssertionError, CheckpointError)):
        cuts(tmp_path, 1, differences)
