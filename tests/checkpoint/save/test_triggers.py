"""should_save: the schedule "auto" and the signal to leave, agreed among the ranks."""

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.directory.claims import Claims
from fireflyer.checkpoint.directory.manifest import Claim
from fireflyer.checkpoint.schedule import LONGEST_S, SHORTEST_S, Run, SaveCost
from fireflyer.clock import ManualClock
from fireflyer.errors import CheckpointError, ConfigError, StorageError
from fireflyer.storage import DirectoryStorage, Storage

Told = Callable[[Storage, Callable[[str, str], None]], Storage]
Job = Callable[[Callable[[int], None]], None]
WORLD = 3


@pytest.fixture
def job(tmp_path: Path, forked: Callable[..., list[int]]) -> Job:
    """Runs `body(rank)` on every rank; all must return."""

    def rank_body(rank: int, body: Callable[[int], None]) -> None:
        os.environ["RANK"] = str(rank)
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=WORLD
        )
        body(rank)
        dist.barrier()
        dist.destroy_process_group()

    def run(body: Callable[[int], None]) -> None:
        ranks = [lambda rank=rank: rank_body(rank, body) for rank in range(WORLD)]
        assert forked(*ranks) == [0] * WORLD

    return run


def test_one_rank_is_asked_to_leave_and_all_agree(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        clock = ManualClock()
        asked: list[int] = []

        def should_suspend() -> bool:
            asked.append(step)
            return rank == 1 and step >= 500

        manager = CheckpointManager(tmp_path / "c", should_suspend=should_suspend, clock=clock)
        answers = []
        for step in range(1, 701):
            clock.advance(0.01)
            answers.append(manager.should_save(step))
            assert manager.suspending == answers[-1]
        first = answers.index(True) + 1
        assert 500 <= first <= 600, "1 s is 100 steps"
        assert all(answers[first - 1 :]), "nobody takes it back"
        assert len(asked) < 12, "between the looks no rank talks"
        steps = [None] * WORLD
        dist.all_gather_object(steps, (first, asked))
        assert steps[0] == steps[1] == steps[2]

    job(body)


def test_a_rank_that_cannot_tell_fails_all(job: Job, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        def should_suspend() -> bool:
            if rank == 2:
                raise RuntimeError("no page")
            return False

        manager = CheckpointManager(tmp_path / "c", every=100, should_suspend=should_suspend)
        kind, match = (
            (RuntimeError, "no page")
            if rank == 2
            else (CheckpointError, "rank 2 failed in should_suspend")
        )
        with pytest.raises(kind, match=match):
            manager.should_save(1)

    job(body)


def test_every_in_steps_with_a_signal(tmp_path: Path) -> None:
    clock, leave = ManualClock(), False
    manager = CheckpointManager(tmp_path, every=10, should_suspend=lambda: leave, clock=clock)
    answers, suspending = [], []
    for step in range(100):
        clock.advance(0.05)
        leave = step >= 55
        answers.append(manager.should_save(step))
        suspending.append(manager.suspending)
    noticed = suspending.index(True)
    assert 55 <= noticed <= 75, "1 s is 20 steps"
    yes = [step for step, answer in enumerate(answers) if answer]
    assert yes == [*range(10, noticed, 10), *range(noticed, 100)]


def test_the_first_look_is_at_the_first_step(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, should_suspend=lambda: True)
    assert not manager.suspending
    assert manager.should_save(0)
    assert manager.suspending


def test_auto_measures_and_spreads_the_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves that cost next to nothing: the shortest interval. Stalls are of the wall clock, so not theirs."""
    began = SaveCost.began
    monkeypatch.setattr(SaveCost, "began", lambda cost, _stall_s: began(cost, 0.001))
    clock = ManualClock()
    manager = CheckpointManager(tmp_path, every="auto", clock=clock)
    saved = []
    for step in range(1, 400):
        clock.advance(1.0)
        if manager.should_save(step):
            manager.save(step, {"step": step}).wait()
            saved.append(clock.monotonic())
    gaps = [b - a for a, b in zip([0.0, *saved], saved, strict=False)]
    assert len(gaps) >= 4
    assert all(SHORTEST_S <= gap <= SHORTEST_S + 2 for gap in gaps)


def test_auto_saves_seldom_where_saves_are_dear(tmp_path: Path) -> None:
    clock = ManualClock()
    manager = CheckpointManager(tmp_path, every="auto", clock=clock)
    saved = []
    for step in range(1, 3000):
        clock.advance(5.0)
        if manager.should_save(step):
            handle = manager.save(step, {"step": step})
            handle.wait()
            saved.append(clock.monotonic())
            manager._when._cost.began(200.0)  # type: ignore[union-attr]
            clock.advance(200.0)
    assert saved[0] <= SHORTEST_S + 5
    assert all(b - a >= LONGEST_S for a, b in itertools.pairwise(saved[1:]))


def test_history_counts_attempts_that_did_not_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, now = DirectoryStorage(tmp_path), 1000.0

    def attempt(number: int | None, task: str = "t1") -> Claims:
        return Claims(storage, Claim(task=task, attempt=number), lambda: now)

    attempt(1).take()
    now = 1100.0
    second = attempt(2)
    assert second.history() == [Run(1000.0, None), Run(1100.0, None)], "itself, not yet claimed"
    second.take()
    now = 1250.0
    second.leave()
    attempt(7, task="another").take()
    now = 2000.0
    third = attempt(3)
    third.take()
    assert third.history() == [Run(1000.0, None), Run(1100.0, 1250.0), Run(2000.0, None)]
    (tmp_path / "claims" / "000001.json").write_bytes(b"{}")
    assert third.history() == [Run(1100.0, 1250.0), Run(2000.0, None)], "a damaged one is unknown"
    (tmp_path / "claims" / "000002.left.json").write_bytes(b"{}")
    assert third.history() == [Run(1100.0, 1100.0), Run(2000.0, None)], "it left, who knows when"


def test_leaving_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREFLYER_TASK", "t1")
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "1")
    manager = CheckpointManager(tmp_path, should_suspend=lambda: True)
    assert manager.should_save(1)
    manager.save(1, {"a": 1}).wait()
    names = sorted(path.name for path in (tmp_path / "claims").iterdir())
    assert names[:2] == ["000001.json", "000001.left.json"]
    assert [name[:14] for name in names[2:]] == ["attempt-000001"]
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "2")
    again = CheckpointManager(tmp_path)
    again.save(2, {"a": 2}).wait()
    assert again.steps() == [1, 2]
    [first, second] = again._claims.history()
    assert first.left is not None
    assert second.left is None


def test_ranks_that_have_agreed_elsewhere_leave_without_an_exchange(
    job: Job, tmp_path: Path
) -> None:
    def body(rank: int) -> None:
        manager = CheckpointManager(tmp_path / "c", every=100)
        manager.save(1, {"a": 1}).wait()
        assert not manager.should_save(1)
        for _ in range(1 + rank):  # an exchange would wait for the others
            assert manager.should_save(2, leave=True)
        before = manager.suspending
        assert manager.should_save(3)
        manager.fence(1)
        assert (before, manager.suspending) == (True, False)
        assert not manager.should_save(4)

    job(body)
    assert (tmp_path / "c" / "claims" / "000001.left.json").exists()


def test_a_note_that_cannot_be_written_does_not_stop_the_save(
    tmp_path: Path, told: Told, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREFLYER_ATTEMPT", "1")

    def refuse(call: str, name: str) -> None:
        if call == "write" and "left" in name:
            raise StorageError("no room")

    place = told(DirectoryStorage(tmp_path), refuse)
    assert CheckpointManager(place, should_suspend=lambda: True).should_save(1)
    assert "will count as a failure: no room" in caplog.text


@pytest.mark.parametrize("every", ["Auto", "auto 5min"])
def test_a_bad_auto_is_refused(tmp_path: Path, every: str) -> None:
    with pytest.raises(ConfigError, match='expected "auto"'):
        CheckpointManager(tmp_path, every=every)
