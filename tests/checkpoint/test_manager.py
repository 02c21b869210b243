"""The manager of one process: asynchronous saves, back-pressure, errors, retention, schedule."""

import ctypes
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.waiting import LIMIT_S

import fireflyer.checkpoint
from fireflyer.checkpoint import CheckpointManager, InMemory
from fireflyer.clock import ManualClock
from fireflyer.errors import CheckpointError, ConfigError, NoSpace, StorageError
from fireflyer.storage import DirectoryStorage, Storage

Told = Callable[[Storage, Callable[[str, str], None]], Storage]
Forked = Callable[..., list[int]]
DEADLINE_S = LIMIT_S


class Gate:
    """Holds every write of a data file until opened; knows the names of those that came."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.arrived = threading.Event()
        self.names: list[str] = []

    def __call__(self, call: str, name: str) -> None:
        if call == "write" and "/data-" in name:
            self.names.append(name)
            self.arrived.set()
            assert self.open.wait(DEADLINE_S)


def test_save_returns_before_it_writes_and_saves_what_was(tmp_path: Path, told: Told) -> None:
    gate = Gate()
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), gate))
    weight = torch.ones(1000)
    state = {"w": weight, "list": [1], "view": weight[::2]}
    handle = manager.save(1, state)
    assert gate.arrived.wait(DEADLINE_S)
    assert [handle.done, manager.latest()] == [False, None]
    weight.zero_()
    state["list"].append(2)  # type: ignore[attr-defined]
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    gate.open.set()
    handle.wait(DEADLINE_S)
    assert [handle.done, handle.step] == [True, 1]
    assert handle.stall_s > 0
    loaded = manager.load()
    assert torch.equal(loaded["w"], torch.ones(1000))
    assert torch.equal(loaded["view"], torch.ones(500))
    assert loaded["list"] == [1]


def test_orbaxs_names(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(3, {"n": 4})
    manager.wait_until_finished()
    assert (manager.latest_step(), manager.all_steps()) == (3, [3])
    assert manager.restore()["n"] == 4


def test_the_next_save_waits_for_the_last(tmp_path: Path, told: Told) -> None:
    gate = Gate()
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), gate))
    manager.save(1, {"w": torch.full((10,), 1.0)})
    assert gate.arrived.wait(DEADLINE_S)
    stalls: list[float] = []
    second = threading.Thread(
        target=lambda: stalls.append(manager.save(2, {"w": torch.zeros(20)}).stall_s)
    )
    second.start()
    second.join(0.1)
    assert second.is_alive(), "the arena still holds the first state"
    assert len(gate.names) == 1
    gate.open.set()
    second.join(DEADLINE_S)
    manager.wait()
    assert stalls[0] >= 0.1
    assert manager.steps() == [1, 2]
    assert torch.equal(manager.load(1)["w"], torch.full((10,), 1.0))


def test_only_one_thread_at_a_time(tmp_path: Path, told: Told) -> None:
    gate = Gate()
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), gate))
    first = manager.save(1, {"w": torch.ones(10)})
    assert gate.arrived.wait(DEADLINE_S)
    waiting = threading.Thread(target=manager.wait)
    waiting.start()
    while not manager._alone._lock.locked():
        threading.Event().wait(0.001)
    calls: list[Callable[[], object]] = [
        *(lambda: manager.save(2, {}), manager.load, manager.wait, manager.before_step),
        lambda: manager.should_save(1),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="two threads"):
            call()
    gate.open.set()
    first.wait(DEADLINE_S)
    waiting.join(DEADLINE_S)
    manager.save(2, {"w": torch.zeros(10)}).wait()
    assert manager.steps() == [1, 2]


class Full:
    """Refuses to write data files while `on`."""

    def __init__(self) -> None:
        self.on = True

    def __call__(self, call: str, name: str) -> None:
        if self.on and call == "write" and "/data-" in name:
            raise NoSpace("the disk is full")


@pytest.mark.parametrize("by", ["save", "wait", "handle"])
def test_a_failure_in_the_background_is_raised_once(tmp_path: Path, told: Told, by: str) -> None:
    full = Full()
    full.on = False
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), full))
    manager.save(1, {"w": torch.ones(3)}).wait()
    full.on = True
    handle = manager.save(2, {"w": torch.ones(3)})
    if by == "save":
        with pytest.raises(NoSpace):
            manager.save(3, {"w": torch.ones(3)})
    elif by == "wait":
        with pytest.raises(NoSpace):
            manager.wait()
    else:
        with pytest.raises(NoSpace):
            handle.wait()
    with pytest.raises(NoSpace):
        handle.wait()
    manager.wait()
    assert manager.steps() == [1]
    full.on = False
    manager.save(4, {"w": torch.ones(3)}).wait()
    assert manager.steps() == [1, 4]


def test_load_after_a_failed_save_gives_the_older_one(tmp_path: Path, told: Told) -> None:
    full = Full()
    full.on = False
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), full))
    manager.save(1, {"w": torch.ones(3)}).wait()
    full.on = True
    manager.save(2, {"w": torch.zeros(3)})
    assert torch.equal(manager.load()["w"], torch.ones(3))
    with pytest.raises(NoSpace):
        manager.wait()


def _address(manager: CheckpointManager) -> int:
    view = manager._stager._arena.memory(1)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_the_arena_is_kept_from_save_to_save(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(1 << 20)}).wait()
    first = _address(manager)
    manager.save(2, {"w": torch.ones(1 << 20)}).wait()
    assert _address(manager) == first
    handle = manager.save(3, {"w": torch.ones(5 << 20)})
    handle.wait()
    assert len(handle._staged.data) == 0, "a handle does not keep an arena alive"
    assert torch.equal(manager.load()["w"], torch.ones(5 << 20))


@pytest.mark.parametrize("keep", [1, 3])
def test_keep_leaves_the_last_ones(tmp_path: Path, keep: int) -> None:
    manager = CheckpointManager(tmp_path, keep=keep)
    for step in range(1, 7):
        manager.save(step, {"w": torch.full((3,), float(step))}).wait()
        assert manager.steps() == list(range(max(1, step - keep + 1), step + 1))
    directories = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("step-"))
    assert directories == [f"step-{step:012d}" for step in range(7 - keep, 7)]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("state", [{"a": 1}, {"w": torch.ones(3), "step": 0}])
def test_nothing_is_left_of_what_is_retired(
    tmp_path: Path, state: dict[str, Any], incremental: bool
) -> None:
    """Also where it had no data file of its own."""
    (tmp_path / "step-000000000042").mkdir()  # as a kill between two removals leaves it
    manager = CheckpointManager(tmp_path, keep=1, incremental=incremental)
    for step in range(20):
        manager.save(step, state)
    manager.wait()
    assert manager.steps() == [19]
    named = {file for _, one in manager._catalog.whole() for file in one.files}
    expected = {"step-000000000019", *(file.split("/")[0] for file in named)}
    assert {path.name for path in tmp_path.glob("step-*")} == expected


def test_keep_does_not_count_what_is_not_whole(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(3)}).wait()
    [data] = (tmp_path / "step-000000000002").glob("data-*")
    data.write_bytes(b"short")
    manager.save(3, {"w": torch.ones(3)}).wait()
    assert manager.steps() == [1, 3]
    assert data.exists(), "what is damaged is never deleted"


def test_the_newest_is_what_was_saved_last(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (100, 200, 110):
        manager.save(step, {"step": step}).wait()
    assert manager.latest() == 110, "a run that went back goes on from where it went back to"
    assert manager.load()["step"] == 110
    assert manager.steps() == [100, 110, 200]


@pytest.mark.parametrize("call", ["read", "read_checked"])
def test_a_reader_goes_on_with_what_a_saving_run_keeps(
    tmp_path: Path, told: Told, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    writer = CheckpointManager(tmp_path, keep=1)
    writer.save(1, {"step": 1, "w": torch.ones(2)}).wait()

    def retire(called: str, name: str) -> None:
        if called == call and "step-000000000001" in name:
            writer.save(2, {"step": 2, "w": torch.ones(2)}).wait()

    reader = CheckpointManager(told(DirectoryStorage(tmp_path), retire))
    assert reader.load()["step"] == 2
    assert not caplog.records
    assert not (tmp_path / "damaged").exists()


def test_a_manager_that_has_not_saved_works_on_in_forked_children(
    tmp_path: Path, forked: Forked
) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2):
        assert forked(lambda step=step: manager.save(step, {"a": step}).wait(DEADLINE_S)) == [0]
        assert manager.latest() == step
    names = {path.name for path in tmp_path.rglob("manifest-*")}
    assert names == {"manifest-000001-000001.json", "manifest-000002-000001.json"}


def test_a_forked_child_does_not_wait_for_its_parents_save(
    tmp_path: Path, told: Told, forked: Forked
) -> None:
    gate = Gate()
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), gate))
    handle = manager.save(1, {"a": torch.ones(3)})
    assert gate.arrived.wait(DEADLINE_S)

    def child() -> None:
        for wait in (handle.wait, handle.wait_in_memory):
            with pytest.raises(CheckpointError, match=r"step 1 belongs to the parent, process \d+"):
                wait()
        manager.wait()
        manager.before_step()

    assert forked(child) == [0]
    gate.open.set()
    handle.wait(DEADLINE_S)


def test_a_forked_child_does_not_save_as_its_parent(tmp_path: Path, forked: Forked) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1}).wait()

    def child() -> None:
        with pytest.raises(CheckpointError, match="create another manager in the child"):
            manager.save(2, {"a": "child"})
        assert manager.load() == {"a": 1}

    assert forked(child) == [0]
    manager.save(2, {"a": "parent"}).wait()
    assert manager.load(2) == {"a": "parent"}
    assert forked(lambda: CheckpointManager(tmp_path).save(3, {"a": 3}).wait(DEADLINE_S)) == [0]
    assert manager.latest() == 3


def test_every_in_steps(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every=3)
    assert [step for step in range(10) if manager.should_save(step)] == [3, 6, 9]
    assert not any(CheckpointManager(tmp_path).should_save(step) for step in range(10))


def test_every_in_time_follows_the_pace(tmp_path: Path) -> None:
    clock = ManualClock()
    manager = CheckpointManager(tmp_path, every="10s", clock=clock)
    saved = []
    for step in range(1000):
        clock.advance(0.1 if step < 500 else 0.5)
        if manager.should_save(step):
            saved.append(clock.monotonic())
    gaps = [round(b - a, 6) for a, b in zip([0.0, *saved], saved, strict=False)]
    assert 28 <= len(gaps) <= 30
    assert all(10 <= gap <= 11 for gap in gaps[:4])
    # Where the pace drops to a fifth between two looks, that one save comes late, and only that.
    assert sum(gap > 11 for gap in gaps) <= 1
    assert max(gaps) < 25


@pytest.mark.parametrize(
    "every",
    ["", "5", "5 minutes", "min", "0s", "-1s", "1e3s", "5min30s", 0, -3, 1.5, True, b"5min", [5]],
)
def test_a_bad_every_is_refused(tmp_path: Path, every: Any) -> None:
    with pytest.raises(ConfigError, match="invalid every"):
        CheckpointManager(tmp_path, every=every)


@pytest.mark.parametrize(
    ("directory", "error"),
    [
        (None, TypeError),
        (5, TypeError),
        (b"x", TypeError),
        (str, TypeError),
        ("", ConfigError),
        ("a\0b", ConfigError),
    ],
)
def test_a_bad_directory_is_refused(directory: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="invalid directory"):
        CheckpointManager(directory)


def test_a_link_to_nothing_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    for place in (tmp_path / "link", tmp_path / "link" / "c"):
        with pytest.raises(StorageError, match="link is a link to nothing"):
            CheckpointManager(place)


def test_no_pattern_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="needs a name or a pattern"):
        CheckpointManager(tmp_path).load_tensors([])


def test_the_package_lists_its_names() -> None:
    assert set(fireflyer.checkpoint.__all__) <= set(dir(fireflyer.checkpoint))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("memory", value) for value in ("x", 1, None, InMemory)),
        *((flag, value) for flag in ("overlap", "incremental") for value in ("yes", 2, None)),
        *(("commit_deadline_s", v) for v in (0, -1, math.inf, math.nan, 1e9, "1", None, True)),
        *(("should_suspend", value) for value in (3, "no")),
    ],
)
def test_a_bad_option_is_refused(tmp_path: Path, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"invalid {option} "):
        CheckpointManager(tmp_path / "c", **{option: value})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("limit_bytes", value) for value in (-1, 0, "1", 1.5, True)),
        *(("linger_s", value) for value in (-1, math.inf, "1", None)),
        *(("deadline_s", value) for value in (0, -1, math.nan, math.inf, "x", None)),
    ],
)
def test_a_bad_memory_tier_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"invalid InMemory {option} "):
        InMemory(**{option: value})


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ([1], TypeError, "expected a dict of numbers by name"),
        ([], TypeError, "expected a dict of numbers by name"),
        ({"a": 10**400}, ValueError, "the metric a is too large"),
        ({"a": 10**9999}, ValueError, "the metric a is too large"),
        ({"a": "b"}, TypeError, "invalid metric a 'b'"),
        ({"\ud800": 1.0}, ValueError, r"'\\ud800'"),
        ({1: 2}, TypeError, "invalid metrics key 1"),
    ],
)
def test_bad_metrics_are_refused(
    tmp_path: Path, metrics: Any, error: type[Exception], message: str
) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(error, match=message):
        manager.save(1, {"a": 1}, metrics=metrics)
    manager.save(2, {"a": 2}).wait()
    assert manager.steps() == [2]


@pytest.mark.parametrize("keep", [0, -1])
def test_a_bad_keep_is_refused(tmp_path: Path, keep: int) -> None:
    with pytest.raises(ConfigError, match="invalid keep"):
        CheckpointManager(tmp_path, keep=keep)


def test_a_negative_step_is_a_programming_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="below 0"):
        CheckpointManager(tmp_path).save(-1, {})


@pytest.mark.parametrize("step", [True, 1.5, "1", None, torch.tensor([1, 2])])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager(tmp_path)
    calls: list[Any] = [manager.should_save, lambda step: manager.save(step, {})]
    for call in calls if step is None else [*calls, manager.load]:
        with pytest.raises(TypeError, match="expected a whole number"):
            call(step)
    with pytest.raises(ValueError, match="beyond 63 bits"):
        manager.save(1 << 63, {})
    assert manager.steps() == []


@pytest.mark.parametrize("step", [np.int64(4), np.uint8(4), torch.tensor(4)])
def test_any_whole_number_is_a_step(tmp_path: Path, step: Any) -> None:
    manager = CheckpointManager(tmp_path, every=4)
    assert manager.should_save(step)
    handle = manager.save(step, {"a": 1})
    handle.wait()
    assert [type(handle.step), manager.steps()] == [int, [4]]
    assert manager.load(step) == {"a": 1}


def test_per_rank_state_without_ranks(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(2)}, per_rank={"rng": torch.arange(4)}).wait()
    manager.save(2, {"w": torch.ones(2)}).wait()
    assert manager.loaded_per_rank() is None
    manager.load(1)
    loaded = manager.loaded_per_rank()
    assert loaded is not None
    assert loaded["rng"].tolist() == [0, 1, 2, 3]
    manager.load()
    assert manager.loaded_per_rank() is None


def test_metrics_are_in_the_manifest(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {}, metrics={"loss": 0.5, "peak": float("inf"), "grad": float("nan")}).wait()
    [(_, manifest)] = manager._catalog.whole()
    assert repr(manifest.measured()) == "{'loss': 0.5, 'peak': inf, 'grad': nan}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to lose it")
def test_a_read_only_directory(public_path: Path, forked: Forked) -> None:
    """Loading falls back without being able to move the damaged one; saving fails with the reason."""
    manager = CheckpointManager(public_path)
    for step in (1, 2):
        manager.save(step, {"step": step, "w": torch.ones(2)}).wait()
    [data] = (public_path / "step-000000000002").glob("data-*")
    data.write_bytes(bytes(8))
    for path in (public_path, *public_path.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    def reader() -> None:
        os.setuid(65534)
        os.chdir(public_path)
        mine = CheckpointManager(".")
        assert mine.load()["step"] == 1
        assert mine.load()["step"] == 1
        with pytest.raises(StorageError, match="cannot create"):
            mine.save(3, {})

    assert forked(reader) == [0]
    assert data.exists()


def test_many_threads_are_not_needed(tmp_path: Path) -> None:
    before = {thread.name for thread in threading.enumerate()}
    manager = CheckpointManager(tmp_path)
    assert {thread.name for thread in threading.enumerate()} == before, (
        "construction starts no thread"
    )
    for step in range(3):
        manager.save(step, {"a": step})
    manager.wait()
    started = [thread.name for thread in threading.enumerate() if thread.name not in before]
    assert len(started) <= 1


def test_what_cannot_be_read_is_an_error_and_not_set_aside(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"a": 1}).wait()
    [manifest] = tmp_path.rglob("manifest-*")
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*manifest"):
        manager.load()
    assert not (tmp_path / "damaged").exists()
