"""Killed, flipped, full: what is loaded is always a state that was saved, whole."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.conftest import SOAK

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError, NoSpace

Differences = Callable[[Any, Any], list[str]]
Forked = Callable[..., list[int]]
DieAt = Callable[[int], None]


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "w": torch.randn(3, 4, generator=generator),
        "opt": {"state": {0: {"m": torch.randn(5, generator=generator)}}, "lr": 0.5 / step},
        "step": step,
    }


def copied(base: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(base, target)
    return target


def files_under(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_killed_at_any_point_of_a_save(
    ram: Path, differences: Differences, forked: Forked, die_at: DieAt
) -> None:
    base = ram / "base"
    first = CheckpointManager(base, keep=2)
    for step in (1, 2):
        first.save(step, state_of(step)).wait()

    def victim(place: Path, call: int) -> None:
        # Writes over step 2, which is committed, then step 3, which retires the oldest.
        acknowledged = os.open(ram / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        manager = CheckpointManager(place, keep=2)
        write = os.write
        die_at(call)
        for step in (2, 3):
            manager.save(step, state_of(10 * step)).wait()
            write(acknowledged, b"%d" % step)

    call, outcomes = 0, set()
    status = -signal.SIGKILL
    while status != 0:
        call += 1 if SOAK else 3
        place = copied(base, ram / "place")
        [status] = forked(lambda place=place, call=call: victim(place, call))
        assert status in (0, -signal.SIGKILL)
        acknowledged = (ram / "acknowledged").read_text()
        manager = CheckpointManager(place, keep=2)
        loaded = manager.load()
        outcomes.add((loaded["step"], acknowledged))
        possible = [state_of(2), state_of(20), state_of(30)]
        possible = possible[{"": 0, "2": 1, "23": 2}[acknowledged] :]
        assert any(differences(loaded, state) == [] for state in possible), (call, acknowledged)
        assert not (place / "damaged").exists()
        manager.save(4, state_of(4)).wait()
        manager.save(5, state_of(5)).wait()
        left = {name for name in files_under(place) if not name.startswith("claims/")}
        assert len(left) == 4, f"killed at call {call}: {sorted(left)}"
        assert all(name.startswith(("step-000000000004/", "step-000000000005/")) for name in left)
    assert call > 60, "the kill reached the calls of two whole saves"
    assert {step for step, _ in outcomes} == {2, 20, 30}


def test_killed_at_any_point_of_setting_a_damaged_one_aside(
    ram: Path, differences: Differences, forked: Forked, die_at: DieAt
) -> None:
    base = ram / "base"
    manager = CheckpointManager(base)
    for step in (1, 2):
        manager.save(step, state_of(step)).wait()
    [data] = (base / "step-000000000002").glob("data-*")
    data.write_bytes(data.read_bytes()[::-1])

    def victim(place: Path, call: int) -> None:
        manager = CheckpointManager(place)
        die_at(call)
        manager.load()

    call, status = 0, -signal.SIGKILL
    while status != 0:
        call += 1 if SOAK else 2
        place = copied(base, ram / "place")
        [status] = forked(lambda place=place, call=call: victim(place, call))
        assert differences(CheckpointManager(place).load(), state_of(1)) == []
        assert CheckpointManager(place).steps() == [1]
        kept = [
            path.read_bytes()
            for path in place.rglob("data-*")
            if "step-000000000001" not in str(path)
        ]
        assert kept == [data.read_bytes()], "the damaged bytes are kept for inspection"
        aside = list((place / "damaged" / "step-000000000002").iterdir())
        assert len(aside) == 2, "whoever looks next finishes what was begun"
    assert call > 10


def test_every_flipped_byte_is_found_and_the_older_one_used(
    ram: Path, differences: Differences, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(ram)
    old, new = (
        {"a": torch.arange(3), "n": 1},
        {"a": torch.arange(4), "b": [torch.ones(2, 2), "x"], "n": 2},
    )
    manager.save(1, old).wait()
    manager.save(2, new).wait()
    directory, aside = ram / "step-000000000002", ram / "damaged" / "step-000000000002"
    names = sorted(path.name for path in directory.iterdir())
    assert len(names) == 2
    flips = 0
    for name in names:
        content = (directory / name).read_bytes()
        for index in range(len(content)):
            flipped = bytearray(content)
            flipped[index] ^= 1 << index % 8
            (directory / name).write_bytes(flipped)
            caplog.clear()
            if name.startswith("data") and 32 <= index < 64:  # between the tensors
                assert differences(manager.load(), new) == []
                continue
            assert differences(manager.load(), old) == [], f"byte {index} of {name}"
            [record] = caplog.records
            assert name in record.getMessage()
            if name.startswith("data"):
                assert "tensor a" in record.getMessage() or "tensor b[0]" in record.getMessage()
            assert (aside / name).read_bytes() == flipped
            directory.mkdir(exist_ok=True)
            for moved in aside.iterdir():
                moved.rename(directory / moved.name)
            (directory / name).write_bytes(content)
            flips += 1
    assert flips > 500
    assert differences(manager.load(), new) == []


@pytest.mark.parametrize(
    "damage", ["truncated", "longer", "no data", "no manifest", "empty manifest"]
)
def test_files_of_the_wrong_size_do_not_count(
    tmp_path: Path, differences: Differences, damage: str
) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1)).wait()
    manager.save(2, state_of(2)).wait()
    [data] = (tmp_path / "step-000000000002").glob("data-*")
    [manifest] = (tmp_path / "step-000000000002").glob("manifest-*")
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif damage == "longer":
        data.write_bytes(data.read_bytes() + b"\0")
    elif damage == "no data":
        data.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(b"")
    assert manager.latest() == 1
    assert manager.steps() == [1]
    assert differences(manager.load(), state_of(1)) == []
    assert (tmp_path / "damaged").exists() == (damage != "no manifest")


def test_all_damaged_is_an_error_and_all_is_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        manager.save(step, state_of(step)).wait()
    for data in tmp_path.rglob("data-*"):
        data.write_bytes(bytes(len(data.read_bytes())))
    with pytest.raises(CheckpointError, match="2 damaged"):
        manager.load()
    assert len(files_under(tmp_path / "damaged")) == 4


def test_a_later_format_is_refused_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("fireflyer.checkpoint.save.committer.VERSION", 3)
        manager.save(1, state_of(1)).wait()
    with pytest.raises(CheckpointError, match="format version 3"):
        manager.load()
    assert not (tmp_path / "damaged").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_fails_the_save_and_nothing_else(
    small_disk: Path, differences: Differences
) -> None:
    def free() -> int:
        status = os.statvfs(small_disk)
        return status.f_bavail * status.f_bsize

    manager = CheckpointManager(small_disk, keep=1)
    manager.save(1, {"w": torch.ones(100_000)}).wait()
    before = free()
    manager.save(2, {"w": torch.ones(1_000_000)})
    with pytest.raises(NoSpace, match="free some space"):
        manager.wait()
    assert free() == before
    assert differences(manager.load(), {"w": torch.ones(100_000)}) == []
    manager.wait()
    manager.save(3, {"w": torch.zeros(100_000)}).wait()
    assert manager.steps() == [3]
    assert free() == before


def test_a_disk_without_room_for_a_manifest(small_disk: Path, differences: Differences) -> None:
    manager = CheckpointManager(small_disk)
    manager.save(1, state_of(1)).wait()
    with (small_disk / "ballast").open("wb", buffering=0) as ballast:
        status = os.statvfs(small_disk)
        ballast.write(bytes(status.f_bavail * status.f_bsize))
    with pytest.raises(NoSpace):
        manager.save(2, state_of(2)).wait()
    assert differences(manager.load(), state_of(1)) == []
    (small_disk / "ballast").unlink()
    manager.save(2, state_of(2)).wait()
    assert manager.latest() == 2
