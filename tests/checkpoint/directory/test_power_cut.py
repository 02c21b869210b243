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
from tests.checkpoint.conftest import SOAK, untidy
from tests.checkpoint.directory.power import History, Journal
from tests.draws import full

from fireflyer.checkpoint import CheckpointManager, Shard
from fireflyer.errors import CheckpointError
from fireflyer.storage import DirectoryStorage

Differences = Callable[[Any, Any], list[str]]
Job = Callable[[int, Callable[[int], None]], None]
SCENARIOS = 100 if SOAK else 4 if full() else 2
CUTS = 3
"""Disks made for each moment."""


def state_of(save: int) -> dict[str, Any]:
    """A part that changes with every save, one that does with every third, and the number of the save."""
    return {
        "moving": torch.randn(3000, generator=torch.Generator().manual_seed(save)),
        "slow": torch.randn(2000, generator=torch.Generator().manual_seed(save // 3)),
        "save": save,
    }


def run(place: Path, rng: random.Random) -> History:
    """Two or three runs one after the other, each with some saves; some go back to an older step."""
    journal = Journal(place)
    runs(place, rng, journal, 0, 1)
    return journal.history()


def run_of_two(place: Path, rng: random.Random, job: Job) -> History:
    """The same by two ranks, in processes of their own."""
    journal = Journal(place)
    job(2, lambda rank: runs(place, rng, journal, rank, 2))
    return journal.history()


def runs(place: Path, rng: random.Random, journal: Journal, rank: int, world: int) -> None:
    save = 0
    with journal.noting(random.Random(rank) if world > 1 else None):
        for _ in range(rng.randint(2, 3)):
            keep, incremental = rng.choice((1, 2, None)), rng.random() < 0.5
            manager = CheckpointManager(place, keep=keep, incremental=incremental)
            for _ in range(rng.randint(1, 3)):
                save += 1
                handle = manager.save(rng.randint(1, 4), share_of(save, rank, world))
                if rng.random() < 0.8:
                    handle.wait()
                    journal.ack(save)
            manager.wait()
            journal.ack(save)


def share_of(save: int, rank: int, world: int) -> dict[str, Any]:
    """A rank's part of the state: its rows of the tensors."""
    state = state_of(save)
    if world > 1:
        for name in ("moving", "slow"):
            whole = state[name]
            rows = len(whole) // world
            state[name] = Shard(
                whole[rank * rows : (rank + 1) * rows], tuple(whole.shape), (rank * rows,)
            )
    return state


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


def cuts(folder: Path, history: History, rng: random.Random, differences: Differences) -> set[int]:
    """All moments of a run; which saves were found."""
    found: set[int] = set()
    for moment in range(len(history.events) + 1):
        for _ in range(CUTS):
            disk = folder / "disk"
            acknowledged = history.cut(moment, rng, disk)
            found.add(check(disk, acknowledged, differences, tidy=rng.random() < 0.2))
            shutil.rmtree(disk)
    return found


@pytest.mark.deadline(480 + 20 * SCENARIOS)
def test_power_cuts_at_every_moment(ram: Path, differences: Differences) -> None:
    for seed in range(SCENARIOS):
        rng = random.Random(seed)
        history = run(ram / f"place-{seed}", rng)
        last = history.events[-1].number
        assert cuts(ram, history, rng, differences) >= {0, last}
        assert len(history.events) > 10 * last


@pytest.mark.deadline(480 + 20 * SCENARIOS)
def test_power_cuts_under_two_ranks(ram: Path, differences: Differences, job: Job) -> None:
    for seed in range(SCENARIOS // 2):
        rng = random.Random(100 + seed)
        history = run_of_two(ram / f"place-{seed}", rng, job)
        last = history.events[-1].number
        assert cuts(ram, history, rng, differences) >= {0, last}
        assert len(history.events) > 20 * last


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
    ram: Path, differences: Differences, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rng = random.Random(1)
    with _forgetful(monkeypatch, what), pytest.raises((AssertionError, CheckpointError)):
        cuts(ram, run(ram / "place", rng), rng, differences)
