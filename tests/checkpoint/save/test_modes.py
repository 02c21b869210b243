"""overlap=True and incremental=True: less waiting and less writing, the same promises."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.conftest import SOAK
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardOn
from torch.distributed.tensor import distribute_tensor

from fireflyer.checkpoint import CheckpointManager
from fireflyer.checkpoint.handle import SaveHandle
from fireflyer.checkpoint.save.data_file import SERIES_SAVES
from fireflyer.checkpoint.save.staging import Staged, Stager
from fireflyer.errors import CheckpointError, NoSpace
from fireflyer.storage import DirectoryStorage, Storage

Told = Callable[[Storage, Callable[[str, str], None]], Storage]
Differences = Callable[[Any, Any], list[str]]
LARGE = 1 << 18  # floats: 1 MiB


def data_files(directory: Path) -> dict[str, int]:
    return {
        str(path.relative_to(directory)): path.stat().st_size
        for path in sorted(directory.rglob("data-*"))
    }


def test_overlap_saves_what_was_and_small_things_at_once(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, overlap=True)
    large, small, array = torch.ones(LARGE), torch.ones(100), np.ones(LARGE)
    strided = torch.ones(2, LARGE).t()
    for step in (1, 2, 3):
        state = {"large": large, "small": small, "array": array, "strided": strided}
        handle = manager.save(step, state)
        small += 1
        array += 1
        strided += 1
        manager.before_step()
        large += 1
        handle.wait()
        loaded = manager.load()
        for leaf in loaded.values():
            assert (leaf == step).all()


def test_nothing_is_written_before_the_copy_is_over(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    stage = Stager.stage

    def noting(*args: Any, **kwargs: Any) -> Staged:
        staged = stage(*args, **kwargs)
        copies[:] = [copy for copy, _ in staged._copies]
        return staged

    def before(call: str, name: str) -> None:
        if call == "write" and "data-" in name:
            done.append([copy.done for copy in copies])

    monkeypatch.setattr(Stager, "stage", noting)
    done: list[list[bool]] = []
    manager = CheckpointManager(told(DirectoryStorage(tmp_path), before), overlap=True)
    state = {"w": torch.ones(64 * LARGE), "b": torch.ones(10)}
    for step in range(5):
        manager.save(step, state).wait()
        state["w"] += 1
    assert done == [[True, True]] * 5


def test_a_change_before_before_step_is_found_and_named(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, overlap=True)
    state = {"a": torch.ones(LARGE), "m": {"b": torch.ones(LARGE)}}
    manager.save(1, state).wait()
    for wait in (manager.wait, lambda: manager.save(9, state), manager.before_step):
        handle = manager.save(2, state)
        state["m"]["b"].mul_(2)  # type: ignore[index]
        with contextlib.suppress(CheckpointError):
            wait()
        with pytest.raises(CheckpointError, match=r"m\.b changed while it was copied.*before_step"):
            handle.wait()
        with contextlib.suppress(CheckpointError):
            manager.wait()
        assert manager.steps() == [1]
    manager.save(3, state).wait()
    assert manager.steps() == [1, 3]


def test_a_change_that_the_trainer_never_tells_is_found(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, overlap=True)
    state = {"w": torch.nn.Parameter(torch.ones(LARGE))}
    handle = manager.save(1, state)
    with torch.no_grad():
        state["w"].mul_(2)
    while not handle.done:  # nobody waits or calls before_step
        threading.Event().wait(0.01)
    with pytest.raises(CheckpointError, match="w changed while it was copied"):
        handle.wait()


@pytest.mark.parametrize("fused", [False, True])
def test_the_step_of_any_torch_optimizer_waits_for_the_copy(tmp_path: Path, fused: bool) -> None:
    """Fused ones change parameters without a trace in their version counters."""
    manager = CheckpointManager(tmp_path, overlap=True)
    weight = torch.nn.Parameter(torch.zeros(32 * LARGE))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    released: list[bool] = []
    handles: list[SaveHandle] = []
    optimizer.register_step_pre_hook(  # comes after those of all optimizers
        lambda *_: released.append(handles[-1]._staged._still.is_set())
    )
    for step in range(3):
        handles.append(manager.save(step, {"w": weight}))
        optimizer.step()
        handles[-1].wait()
        assert (manager.load()["w"] == -step).all()
    assert released == [True] * 3


def test_a_forked_childs_optimizer_waits_for_no_copy_of_its_parent(
    tmp_path: Path, forked: Callable[..., list[int]]
) -> None:
    """No thread copies there."""

    def body() -> None:
        weight = torch.nn.Parameter(torch.zeros(10))
        weight.grad = torch.ones(10)
        torch.optim.SGD([weight], lr=1.0).step()
        assert (weight == -1).all()

    manager = CheckpointManager(tmp_path, overlap=True)
    for _ in range(3):
        handle = manager.save(1, {"w": torch.zeros(64 * LARGE)})
        assert forked(body) == [0]
        handle.wait()


def test_load_into_waits_for_the_copies_of_other_managers(tmp_path: Path) -> None:
    weight = torch.full((32 * LARGE,), 7.0)
    source = CheckpointManager(tmp_path / "source")
    source.save(1, {"w": weight}).wait()
    weight.fill_(1.0)
    manager = CheckpointManager(tmp_path / "other", overlap=True)
    handle = manager.save(1, {"w": weight})
    source.load(into={"w": weight})
    assert handle._staged._still.is_set()
    handle.wait()
    assert (weight == 7).all()
    assert (manager.load()["w"] == 1).all()


@pytest.mark.parametrize("how", ["data", "set"])
def test_other_memory_under_the_copy_is_found(
    tmp_path: Path, forked: Callable[..., list[int]], how: str
) -> None:
    """In a child: a copy from memory that was freed ends the process."""

    def body() -> None:
        manager = CheckpointManager(tmp_path, overlap=True)
        weight = torch.ones(16 * LARGE)
        manager.save(0, {"w": weight}).wait()
        for step in range(1, 4):
            handle = manager.save(step, {"w": weight})
            if how == "data":
                weight.data = torch.ones(16 * LARGE)
            else:
                weight.set_(torch.ones(16 * LARGE))  # type: ignore[call-overload]
            with pytest.raises(CheckpointError, match="w changed while it was copied"):
                handle.wait()
            assert manager.steps() == [0]

    assert forked(body) == [0]


def test_a_change_of_a_dtensor_is_found(tmp_path: Path, forked: Callable[..., list[int]]) -> None:
    def body() -> None:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        manager = CheckpointManager(tmp_path / "c", overlap=True)
        weight = distribute_tensor(torch.ones(LARGE), mesh, [ShardOn(0)])
        for change in (weight, weight.to_local()):
            handle = manager.save(1, {"w": weight})
            change.mul_(2)
            with pytest.raises(CheckpointError, match="w changed while it was copied"):
                handle.wait()
            manager.wait()

    assert forked(body) == [0]


@pytest.mark.parametrize("overlap", [False, True])
def test_only_what_changed_is_written_again(
    tmp_path: Path, differences: Differences, overlap: bool
) -> None:
    manager = CheckpointManager(tmp_path, incremental=True, overlap=overlap)
    frozen, strided = torch.randn(LARGE), torch.randn(2, 700).t()
    state = {"frozen": frozen, "strided": strided, "w": torch.zeros(LARGE), "n": 0}
    want: dict[int, Any] = {}
    sizes = []
    for step in range(1, 5):
        state["n"] = step
        state["w"][step] = step  # type: ignore[index]
        if step == 3:
            strided[3, 1] = 0
        manager.save(step, state, per_rank=[torch.full((5,), step // 4)]).wait()
        want[step] = {**state, "w": state["w"].clone(), "strided": strided.clone()}  # type: ignore[attr-defined]
        sizes.append(sum(data_files(tmp_path / f"step-{step:012d}").values()))
    mib = 1 << 20
    assert sizes[0] > 2 * mib
    assert mib == sizes[1] < sizes[2] < mib + 6000
    assert mib < sizes[3] < mib + 100
    for step, expected in want.items():
        assert differences(manager.load(step), expected) == []
        assert (manager.loaded_per_rank() or [None])[0].tolist() == [step // 4] * 5
    manager.save(5, state).wait()
    assert sum(data_files(tmp_path / "step-000000000005").values()) > 2 * mib, "after a load, all"


def test_an_unchanged_state_writes_no_data(tmp_path: Path, differences: Differences) -> None:
    manager = CheckpointManager(tmp_path, incremental=True)
    state = {"w": torch.ones(10), "e": torch.ones(0)}
    for step in (1, 2):
        manager.save(step, state).wait()
    assert len(data_files(tmp_path)) == 1
    assert differences(CheckpointManager(tmp_path).load(2), state) == []


def test_files_stay_while_a_checkpoint_names_them(tmp_path: Path, differences: Differences) -> None:
    manager = CheckpointManager(tmp_path, keep=1, incremental=True)
    state = {"frozen": torch.randn(1000), "slow": torch.zeros(1000), "w": torch.zeros(10)}
    for step in range(1, 6):
        if step in (2, 5):
            state["slow"] += 1
        state["w"] += 1
        manager.save(step, state).wait()
        assert manager.steps() == [step]
        assert differences(CheckpointManager(tmp_path).load(), state) == []
        assert (
            sorted({name.split("/")[0][-1] for name in data_files(tmp_path)})
            == {
                1: ["1"],
                2: ["1", "2"],
                3: ["1", "2", "3"],
                4: ["1", "2", "4"],
                5: ["1", "5"],
            }[step]
        )
    again = CheckpointManager(tmp_path, keep=1, incremental=True)
    again.save(6, state).wait()
    assert list(data_files(tmp_path)) == ["step-000000000006/data-000002-000001-00000.bin"]


@pytest.mark.parametrize("then", ["failure", "growth", "other shape", "per_rank"])
def test_what_the_arena_no_longer_holds_is_written(
    tmp_path: Path, told: Told, differences: Differences, then: str
) -> None:
    full = False

    def refuse(call: str, name: str) -> None:
        if full and call == "write" and "/manifest-" in name:
            raise NoSpace("full")

    manager = CheckpointManager(told(DirectoryStorage(tmp_path), refuse), incremental=True)
    state: dict[str, Any] = {"frozen": torch.randn(1000), "w": torch.zeros(10)}
    per_rank = None
    manager.save(1, state).wait()
    if then == "failure":
        full = True
        state["w"] += 1
        with pytest.raises(NoSpace):
            manager.save(2, state).wait()
        manager.wait()
        full = False
    elif then == "growth":
        state["new"] = torch.zeros(1 << 20)
    elif then == "other shape":
        state["w"] = torch.ones(9)
    else:
        per_rank = [torch.ones(3)]
    manager.save(3, state, per_rank=per_rank).wait()
    manager.save(4, state, per_rank=per_rank).wait()
    assert len(data_files(tmp_path / "step-000000000003")) == 1
    assert not data_files(tmp_path / "step-000000000004")
    shutil.rmtree(tmp_path / "step-000000000001")
    assert differences(CheckpointManager(tmp_path).load(), state) == []


def test_setting_one_aside_leaves_what_others_name(
    tmp_path: Path, differences: Differences
) -> None:
    manager = CheckpointManager(tmp_path, incremental=True)
    state = {"frozen": torch.randn(1000), "w": torch.zeros(100)}
    want = {}
    for step in (1, 2, 3):
        state["w"] += 1
        manager.save(step, state).wait()
        want[step] = {"frozen": state["frozen"], "w": state["w"].clone()}
    [third] = (tmp_path / "step-000000000003").glob("data-*")
    third.write_bytes(bytes(third.stat().st_size))
    reader = CheckpointManager(tmp_path)
    assert differences(reader.load(), want[2]) == []
    assert [
        path.name[0] for path in sorted((tmp_path / "damaged" / third.parent.name).iterdir())
    ] == [
        "d",
        "m",
    ]
    # The run that saves still counts on the frozen tensor's file, which is whole.
    state["w"] += 1
    with pytest.raises(CheckpointError, match=r"not saved: .*the next save writes everything"):
        manager.save(4, {**state, "w": want[3]["w"]}).wait()
    manager.wait()
    manager.save(5, state).wait()
    assert differences(reader.load(), {**state}) == []
    # The file that both older ones name goes with the last of them.
    [first] = (tmp_path / "step-000000000001").glob("data-*")
    first.write_bytes(bytes(first.stat().st_size))
    shutil.rmtree(tmp_path / "step-000000000005")
    with pytest.raises(CheckpointError, match="2 damaged"):
        reader.load()
    aside = sorted(
        str(path.relative_to(tmp_path / "damaged"))
        for path in (tmp_path / "damaged").rglob("*-*-*")
    )
    assert len([name for name in aside if "data-" in name]) == 3
    assert not data_files(tmp_path) or all(
        name.startswith("damaged/") for name in data_files(tmp_path)
    )


def test_a_checkpoint_that_cannot_be_read_keeps_its_files(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1, incremental=True)
    state = {"frozen": torch.randn(1000), "w": torch.zeros(100)}
    manager.save(1, state).wait()
    state["w"] += 1
    manager.save(2, state).wait()
    [manifest] = (tmp_path / "step-000000000002").glob("manifest-*")
    manifest.write_bytes(b"?")
    later = CheckpointManager(tmp_path, keep=1)
    later.save(3, state).wait()
    later.save(4, state).wait()
    assert [name.split("/")[0][-1] for name in data_files(tmp_path)] == ["1", "2", "4"]


def test_killed_at_any_point_of_an_incremental_save(
    ram: Path,
    differences: Differences,
    forked: Callable[..., list[int]],
    die_at: Callable[[int], None],
) -> None:
    def state_of(step: int) -> dict[str, Any]:
        return {"frozen": torch.arange(50), "w": torch.full((30,), float(step // 2)), "n": step}

    def victim(place: Path, call: int) -> None:
        acknowledged = os.open(ram / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        manager = CheckpointManager(place, keep=1, incremental=True)
        manager.save(1, state_of(1)).wait()
        write = os.write
        die_at(call)
        for step in (2, 3, 4):
            manager.save(step, state_of(step)).wait()
            write(acknowledged, b"%d" % step)

    call, status, seen = 0, -signal.SIGKILL, set()
    while status != 0:
        call += 1 if SOAK else 3
        place = ram / f"place-{call}"
        [status] = forked(lambda place=place, call=call: victim(place, call))
        assert status in (0, -signal.SIGKILL)
        text = (ram / "acknowledged").read_text()
        manager = CheckpointManager(place, keep=1)
        loaded = manager.load()
        seen.add(loaded["n"])
        assert loaded["n"] in (int(text[-1:] or 1), int(text[-1:] or 1) + 1)
        assert differences(loaded, state_of(loaded["n"])) == []
        assert not (place / "damaged").exists()
        manager.save(9, state_of(9)).wait()
        assert len(data_files(place)) == 1, f"killed at call {call}"
        shutil.rmtree(place)
    assert call > 60
    assert seen == {1, 2, 3, 4}


def test_a_series_writes_everything_now_and_then(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, incremental=True)
    state = {"fixed": torch.ones(1000), "n": torch.zeros(10)}
    sizes = []
    for step in range(2 * SERIES_SAVES + 1):
        state["n"].fill_(step)
        manager.save(step, state).wait()
        sizes.append(max(data_files(tmp_path / f"step-{step:012d}").values()))
    assert [step for step, size in enumerate(sizes) if size > 4000] == [
        0, SERIES_SAVES, 2 * SERIES_SAVES
    ]  # fmt: skip
    newest = next(tmp_path.glob("step-000000000000/data*"))
    newest.write_bytes(bytes(newest.stat().st_size))  # what the first series shares
    assert manager.load()["n"][0] == 2 * SERIES_SAVES
    assert manager.load(SERIES_SAVES)["fixed"].eq(1).all()


def test_one_unchanged_piece_does_not_keep_large_files(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, incremental=True, keep=1)
    count, size = 12, 10_000
    state = {f"t{index}": torch.zeros(size) for index in range(count)}
    for step in range(count):
        for index in range(step, count):
            state[f"t{index}"].fill_(step + 1)
        manager.save(step, state).wait()
        assert sum(data_files(tmp_path).values()) <= 3.1 * count * size * 4
    assert all(state[name].equal(tensor) for name, tensor in manager.load().items())
