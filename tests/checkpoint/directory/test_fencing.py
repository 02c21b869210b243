"""Attempts: a zombie never commits into or over a newer attempt's checkpoints, wherever it was frozen."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError, ConfigError, Unavailable
from fireflyer.storage import DirectoryStorage, Storage

Differences = Callable[[Any, Any], list[str]]
Told = Callable[[Storage, Callable[[str, str], None]], Storage]
Start = Callable[..., CheckpointManager]


def state_of(who: str, step: int) -> dict[str, Any]:
    return {"w": torch.full((50,), float(step)), "who": who, "step": step}


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Constructs the manager of an attempt of a task; attempt None is a run outside the platform."""

    def start(
        number: int | None, task: str = "t1", place: Storage | None = None, **options: Any
    ) -> CheckpointManager:
        if number is None:
            monkeypatch.delenv("FIREFLYER_ATTEMPT", raising=False)
            monkeypatch.delenv("FIREFLYER_TASK", raising=False)
        else:
            monkeypatch.setenv("FIREFLYER_ATTEMPT", str(number))
            monkeypatch.setenv("FIREFLYER_TASK", task)
        return CheckpointManager(tmp_path if place is None else place, **options)

    return start


def test_a_newer_attempt_fences_at_construction(attempt: Start, differences: Differences) -> None:
    old = attempt(1)
    old.save(10, state_of("old", 10)).wait()
    new = attempt(2)
    handle = old.save(20, state_of("old", 20))
    with pytest.raises(
        CheckpointError,
        match=r"now belongs to attempt 2 of task t1, which took it over from this run \(attempt 1",
    ):
        handle.wait()
    assert new.steps() == [10]
    assert differences(new.load(), state_of("old", 10)) == []
    new.save(15, state_of("new", 15)).wait()
    assert new.steps() == [10, 15]


def test_a_zombie_frozen_anywhere_in_its_save(
    attempt: Start, ram: Path, told: Told, differences: Differences
) -> None:
    """For every storage call of attempt 1's save of step 20: attempt 1 freezes before it, attempt 2
    starts and saves steps 20 and 15, attempt 1 thaws and ends its save."""
    frozen_at, reached, acknowledged = 0, True, 0
    until_frozen: int | None = None
    place = DirectoryStorage(ram)

    def freeze(call: str, name: str) -> None:
        nonlocal until_frozen, reached
        if until_frozen == 0:
            until_frozen, reached = None, True
            new = attempt(2, place=place, keep=3)
            new.save(20, state_of("new", 20)).wait()
            new.save(15, state_of("new", 15)).wait()
        elif until_frozen is not None:
            until_frozen -= 1

    while reached:
        place = DirectoryStorage(ram / f"frozen-{frozen_at}")
        until_frozen, reached = None, False
        zombie = attempt(1, place=told(place, freeze), keep=1)
        zombie.save(10, state_of("old", 10)).wait()
        until_frozen = frozen_at
        handle = zombie.save(20, state_of("old", 20))
        try:
            handle.wait()
            acknowledged += 1
        except CheckpointError as error:
            assert "belongs to attempt 2" in str(error)  # noqa: PT017 - either outcome may be right
        until_frozen = None
        later = attempt(3, place=place)
        if reached:
            assert later.latest() == 15, f"frozen before call {frozen_at}"
            assert differences(later.load(), state_of("new", 15)) == []
            assert differences(later.load(20), state_of("new", 20)) == []
        assert not (place.root / "damaged").exists()
        frozen_at += 1
    assert frozen_at > 8
    # Only where it froze after its commit was decided, tidying up, or not at all.
    assert 1 < acknowledged < frozen_at - 3


def test_an_attempt_that_comes_too_late_is_refused(attempt: Start, tmp_path: Path) -> None:
    new = attempt(2)
    new.save(1, state_of("new", 1)).wait()
    zombie = attempt(1)
    with pytest.raises(CheckpointError, match="attempt 1 of task t1 is older"):
        zombie.save(5, state_of("zombie", 5))
    assert zombie.load()["who"] == "new"
    new.save(2, state_of("new", 2)).wait()
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "claims").iterdir())
    assert names == ["000001.json", "attempt"]


def test_another_task_may_read_without_fencing_and_take_over_by_saving(attempt: Start) -> None:
    first = attempt(3, task="t1")
    first.save(5, state_of("t1", 5)).wait()
    other = attempt(1, task="t2")
    assert other.load()["who"] == "t1"
    first.save(6, state_of("t1", 6)).wait()
    other.save(1, state_of("t2", 1)).wait()
    assert other.latest() == 1, "the newest is what was saved last, not the highest step"
    with pytest.raises(CheckpointError, match="now belongs to attempt 1 of task t2"):
        first.save(7, state_of("t1", 7)).wait()


def test_runs_outside_the_platform_take_over_by_saving(attempt: Start) -> None:
    attempt(4).save(1, state_of("task", 1)).wait()
    plain = attempt(None)
    plain.save(2, state_of("plain", 2)).wait()
    again = attempt(None)
    assert again.load()["step"] == 2
    plain.save(3, state_of("plain", 3)).wait()
    again.save(1, state_of("again", 1)).wait()
    with pytest.raises(
        CheckpointError, match="a run outside the platform, which took it over from this run"
    ):
        plain.save(4, state_of("plain", 4)).wait()
    assert again.load()["who"] == "again"


def test_saves_of_one_step_replace_one_another(attempt: Start, differences: Differences) -> None:
    manager = attempt(None, keep=2)
    for value in (1, 2, 3):
        manager.save(7, state_of(str(value), 7)).wait()
    assert manager.steps() == [7]
    assert differences(manager.load(), state_of("3", 7)) == []


def make_bad(claim: Path, how: str) -> None:
    if how == "unreadable":  # EISDIR, for root too
        claim.unlink()
        claim.mkdir()
    else:
        data = claim.read_bytes()
        claim.write_bytes(data.replace(b'"attempt":', b'"attempt":9') if how == "crc" else b"?")


@pytest.mark.parametrize("how", ["crc", "no JSON", "unreadable"])
def test_a_bad_claim_is_named_and_does_not_bar_the_way(
    attempt: Start, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = attempt(1)
    first.save(1, state_of("a", 1)).wait()
    claim = tmp_path / "claims" / "000001.json"
    make_bad(claim, how)
    first.save(2, state_of("a", 2)).wait()  # its own claim, by its name
    assert not caplog.records
    second = attempt(2, keep=2)
    [record] = caplog.records
    assert "cannot read a claim; its name still counts" in record.getMessage()
    assert str(claim) in record.getMessage()
    assert second.load()["who"] == "a"
    second.save(3, state_of("b", 3)).wait()
    with pytest.raises(CheckpointError, match="now belongs to attempt 2 of task t1"):
        first.save(4, state_of("a", 4)).wait()
    assert attempt(3).steps() == [2, 3]


@pytest.mark.parametrize("how", ["crc", "no JSON", "unreadable"])
def test_a_zombie_gets_no_claim_over_one_that_cannot_be_read(
    attempt: Start, tmp_path: Path, how: str
) -> None:
    zombie = attempt(1)
    new = attempt(2)
    new.save(1, state_of("new", 1)).wait()
    late = attempt(1)  # comes up when the newer one has claimed
    for claim in (tmp_path / "claims").iterdir():
        make_bad(claim, how)
    with pytest.raises(CheckpointError, match="attempt 1 of task t1 is older"):
        late.save(9, state_of("zombie", 9))
    with pytest.raises(CheckpointError, match="now belongs to a run whose claim cannot be read"):
        zombie.save(9, state_of("zombie", 9)).wait()
    new.save(2, state_of("new", 2)).wait()
    assert attempt(3).load()["who"] == "new"


@pytest.mark.parametrize("how", ["", "unreadable"])
def test_a_zombie_frozen_anywhere_in_its_first_save(
    attempt: Start, ram: Path, told: Told, how: str
) -> None:
    """Like the one frozen in a later save, but it has not claimed yet; the newer one's claim may go bad."""
    frozen_at, reached = 0, True
    until_frozen: int | None = None
    place = DirectoryStorage(ram)

    def freeze(call: str, name: str) -> None:
        nonlocal until_frozen, reached
        if until_frozen == 0:
            until_frozen, reached = None, True
            new = attempt(2, place=place)
            new.save(20, state_of("new", 20)).wait()
            claim = max(place.root.glob("claims/0*.json"))
            if how:
                make_bad(claim, how)
        elif until_frozen is not None:
            until_frozen -= 1

    while reached:
        place = DirectoryStorage(ram / f"frozen-{frozen_at}")
        attempt(None, place=place).save(5, state_of("other", 5)).wait()
        until_frozen, reached = None, False
        zombie = attempt(1, place=told(place, freeze))
        until_frozen = frozen_at
        try:
            zombie.save(30, state_of("zombie", 30)).wait()
            saved = True
        except CheckpointError:
            saved = False
        until_frozen = None
        later = attempt(3, place=place)
        if reached:
            assert later.load()["who"] == "new", f"frozen before call {frozen_at}"
        else:
            assert saved
        frozen_at += 1
    assert frozen_at > 10


def test_a_storage_that_does_not_answer_is_no_bad_claim(
    attempt: Start, tmp_path: Path, told: Told
) -> None:
    attempt(1).save(1, state_of("a", 1)).wait()

    def silent(call: str, name: str) -> None:
        if call == "read" and name.startswith("claims/"):
            raise Unavailable("no answer")

    with pytest.raises(Unavailable):
        attempt(2, place=told(DirectoryStorage(tmp_path), silent))


@pytest.mark.parametrize("value", ["", "x", "-1"])
def test_a_malformed_attempt_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("FIREFLYER_ATTEMPT", value)
    with pytest.raises(ConfigError, match="expected a whole number"):
        CheckpointManager(tmp_path)


@pytest.mark.parametrize("kept", ["", "damaged"])
def test_where_the_claims_are_lost_new_saves_are_still_the_newest(
    attempt: Start, tmp_path: Path, kept: str
) -> None:
    for number in (1, 2):
        attempt(number).save(50 + number, state_of("old", 50 + number)).wait()
    shutil.rmtree(tmp_path / "claims")
    if kept:
        (tmp_path / kept).mkdir()
        (tmp_path / "step-000000000052").rename(tmp_path / kept / "step-000000000052")
    new = attempt(3, keep=1)
    new.save(10, state_of("new", 10)).wait()
    assert new.steps() == [10]
    assert new.load()["who"] == "new"
    [manifest] = (tmp_path / "step-000000000010").glob("manifest-*")
    assert manifest.name == "manifest-000003-000001.json"
