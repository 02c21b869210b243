"""Tensors on a device: saved behind its stream, by one of ours; what the runtime is asked; failures."""

import ctypes
import gc
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hfreduce.devices.device_memory import FakeMemory, build_stub, named, stubbed

from fireflyer.checkpoint import CheckpointManager
from fireflyer.errors import CheckpointError, CollectiveError
from fireflyer.hfreduce.backend import devices

Forked = Callable[..., list[int]]
LARGE, SMALL = 10_000_000, 1000
"""Elements: 40 MB, which go in three blocks; 4 kB, which a step may change while the rest is copied."""


@pytest.fixture(scope="module")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_stub(tmp_path_factory.mktemp("cudart"))


def state_on(memory: FakeMemory, large: float, small: float) -> dict[str, Any]:
    """Two tensors on the device, one on the host."""
    return {
        "large": memory.hold(torch.full((LARGE,), large)),
        "small": memory.hold(torch.full((SMALL,), small)),
        "host": torch.full((SMALL,), large),
    }


def copied(memory: FakeMemory) -> list[str]:
    return [line.split()[2] for line in memory.device.history() if "to_host" in line]


def loaded(place: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = CheckpointManager(place).load(step)
    return state


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def test_a_save_waits_for_the_stream_and_for_its_own_copies(tmp_path: Path, forked: Forked) -> None:
    def body() -> None:
        memory = FakeMemory(delay_us=100)
        state = state_on(memory, 1.0, 1.0)
        new = torch.full((LARGE,), 2.0)
        memory.stop()
        memory.compute(state["large"], new)
        manager = CheckpointManager(tmp_path)
        saving = threading.Thread(target=lambda: manager.save(1, state))
        saving.start()
        memory.go_on()
        saving.join()
        ran = [line.split()[1] for line in memory.device.history()]
        assert ran.index("copy") < ran.index("to_host"), "the stream's work comes first"
        blocks = [16 << 20, 16 << 20, 4 * LARGE - (32 << 20), 4 * SMALL]  # the last two in one
        assert [int(size) for size in copied(memory)] == blocks
        state["large"].zero_()  # save has returned
        manager.wait()
        got = loaded(tmp_path, 1)
        assert all_are(got["large"], 2.0)
        assert all_are(got["small"], 1.0)
        assert all_are(got["host"], 1.0)

    assert forked(body) == [0]


def test_with_overlap_only_before_step_waits(tmp_path: Path, forked: Forked) -> None:
    def body() -> None:
        memory = FakeMemory()
        state = state_on(memory, 1.0, 1.0)
        new, later = torch.full((LARGE,), 2.0), torch.full((SMALL,), 3.0)
        manager = CheckpointManager(tmp_path, overlap=True)
        memory.stop()
        memory.compute(state["large"], new)
        handle = manager.save(1, state)  # would never return if it waited for the stream
        memory.compute(state["small"], later)  # the forward pass, which changes small buffers only
        assert copied(memory) == []
        assert not handle.done
        memory.go_on()
        manager.before_step()
        assert sum(map(int, copied(memory))) == 4 * (LARGE + SMALL)
        state["large"].zero_()
        handle.wait()
        memory.synchronize()
        assert all_are(state["small"], 3.0)
        got = loaded(tmp_path, 1)
        assert all_are(got["large"], 2.0)
        assert all_are(got["small"], 1.0), "the stream has waited for this copy"

    assert forked(body) == [0]


def test_a_change_before_the_copy_fails_the_save(tmp_path: Path, forked: Forked) -> None:
    def body() -> None:
        memory = FakeMemory()
        state = state_on(memory, 1.0, 1.0)
        manager = CheckpointManager(tmp_path, overlap=True)
        memory.stop()
        handle = manager.save(1, {"model": state})
        state["large"].add_(1)
        memory.go_on()
        with pytest.raises(CheckpointError, match=r"model\.large changed while it was copied"):
            handle.wait()

    assert forked(body) == [0]


def test_memory_is_pinned_once_until_the_manager_goes(tmp_path: Path, forked: Forked) -> None:
    def body() -> None:
        memory = FakeMemory()
        state = state_on(memory, 1.0, 1.0)
        manager = CheckpointManager(tmp_path)
        pinned, events = [], []
        for step in range(4):
            manager.save(step, state).wait()
            pinned.append(memory.device.pinned_bytes)
            events.append(memory.device.live_events)
        assert pinned[0] >= 4 * (LARGE + SMALL)
        assert pinned == pinned[:1] * 4
        assert events == events[:1] * 4
        state["more"] = memory.hold(torch.ones(LARGE))
        manager.save(4, state).wait()
        assert memory.device.pinned_bytes > pinned[0], "the larger arena, and not the old one too"
        assert memory.device.pinned_bytes < 2 * pinned[0] + (2 << 20)
        del manager
        gc.collect()
        assert memory.device.pinned_bytes == 0

    assert forked(body) == [0]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_incremental_save_finds_what_changed_on_the_device(
    tmp_path: Path, forked: Forked, overlap: bool
) -> None:
    def body() -> None:
        memory = FakeMemory()
        state = state_on(memory, 1.0, 1.0)
        state["other"] = memory.hold(torch.full((LARGE,), 5.0))
        manager = CheckpointManager(tmp_path, incremental=True, overlap=overlap)
        manager.save(1, state).wait()
        state["large"][-1] = 7.0
        state["small"][0] = 8.0
        manager.save(2, state).wait()
        (file,) = (tmp_path / "step-000000000002").glob("data-*")
        assert 4 * (LARGE + SMALL) <= file.stat().st_size < 4 * (LARGE + SMALL) + 4096
        got = loaded(tmp_path, 2)
        assert all(torch.equal(got[name], state[name]) for name in state)

    assert forked(body) == [0]


def test_what_does_not_lie_in_order_is_copied_by_torch(tmp_path: Path, forked: Forked) -> None:
    def body() -> None:
        memory = FakeMemory()
        columns = memory.hold(torch.arange(600.0).reshape(30, 20)).t()
        lazy = memory.hold(torch.tensor([1 + 2j, 3j])).conj()
        CheckpointManager(tmp_path).save(1, {"columns": columns, "lazy": lazy}).wait()
        assert copied(memory) == []
        got = loaded(tmp_path, 1)
        assert torch.equal(got["columns"], columns)
        assert torch.equal(got["lazy"], lazy.resolve_conj())

    assert forked(body) == [0]


def test_a_device_unknown_to_hfreduce_is_left_to_torch(
    tmp_path: Path, forked: Forked, caplog: pytest.LogCaptureFixture
) -> None:
    def finder(tensor: torch.Tensor) -> devices.DeviceContext | None:
        raise CollectiveError("no runtime")

    def body() -> None:
        devices.register("none", finder)
        manager = CheckpointManager(tmp_path)
        with caplog.at_level(logging.WARNING, "fireflyer.checkpoint"):
            for step in (1, 2):
                manager.save(step, {"a": torch.ones(5), "b": torch.ones(6)}).wait()
        assert [r.message for r in caplog.records] == [
            "torch copies the tensors on cpu and save() waits for it: no runtime"
        ]
        assert all_are(loaded(tmp_path, 2)["b"], 1.0)

    assert forked(body) == [0]


def test_calls_of_the_cuda_runtime(tmp_path: Path, forked: Forked, stub_path: str) -> None:
    def body() -> None:
        with stubbed(stub_path) as (stub, user):
            state = {"a": torch.ones(LARGE), "b": torch.ones(1000), "host": torch.ones(2, 2)}
            manager = CheckpointManager(tmp_path, overlap=True)
            for step in (1, 2):
                manager.save(step, state)
                manager.before_step()
            manager.wait()
            stub.synchronize(user)
            log = stub.log()
            (lane,) = (line.split()[0] for line in named(log, "cudaStreamCreateWithFlags")[1:])
            (registered,) = named(log, "cudaHostRegister")
            size, flags = registered.split(" ", 1)
            assert int(size) >= 4 * LARGE
            assert flags == "flags 3"
            early = [f"4000 kind 2 on {lane}"]
            late = [f"{n} kind 2 on {lane}" for n in (16 << 20, 16 << 20, 4 * LARGE - (32 << 20))]
            assert named(log, "cudaMemcpyAsync") == (early + late) * 2
            assert named(log, "cudaLaunchHostFunc") == [f"on {lane}"] * 8
            records = named(log, "cudaEventRecord")
            waits = named(log, "cudaStreamWaitEvent")
            # The lane waits for the user's stream, which waits for the early copy; then the lane again.
            assert [line.split()[-1] for line in records] == [str(user), lane, str(user)] * 2
            assert [line.split()[0] for line in waits] == [lane, str(user), lane] * 2
            for record, wait in zip(records, waits, strict=True):
                assert wait.split()[2] == record.split()[0], "for the event just recorded"
            puts = ("EventRecord", "StreamWaitEvent", "MemcpyAsync", "LaunchHostFunc")
            calls = [line.split()[0].removeprefix("cuda") for line in log]
            behind, copy = [puts[0], puts[1]], [puts[2], puts[3]]
            early_calls = [*behind, *copy, *behind]
            late_calls = [*behind, *copy * 3]
            assert [call for call in calls if call in puts] == (early_calls + late_calls) * 2
            del manager
            gc.collect()
            log = stub.log()
            assert len(named(log, "cudaHostUnregister")) == 1
            assert named(log, "cudaStreamDestroy") == [lane]
        assert all_are(loaded(tmp_path, 2)["a"], 1.0)

    assert forked(body) == [0]


def test_an_arena_that_cannot_be_pinned_is_told_once(
    tmp_path: Path, forked: Forked, stub_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        with stubbed(stub_path) as (stub, _), caplog.at_level(logging.WARNING):
            stub.fail("cudaHostRegister", 2)
            manager = CheckpointManager(tmp_path)
            for step in (1, 2):
                manager.save(step, {"a": torch.full((1000,), 1.0 * step)}).wait()
            del manager
            gc.collect()
            assert named(stub.log(), "cudaHostUnregister") == []
        (record,) = caplog.records
        assert "arena is not pinned" in record.message
        assert all_are(loaded(tmp_path, 2)["a"], 2.0)

    assert forked(body) == [0]


@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaLaunchHostFunc", "cudaEventRecord"])
def test_a_runtime_that_refuses_fails_the_save(
    tmp_path: Path, forked: Forked, stub_path: str, function: str
) -> None:
    def body() -> None:
        with stubbed(stub_path) as (stub, user):
            manager = CheckpointManager(tmp_path)
            manager.save(1, {"a": torch.ones(1000)}).wait()
            stub.fail(function, 801)
            with pytest.raises(CheckpointError, match=f"from their device: {function}.*801"):
                manager.save(2, {"a": torch.zeros(1000)})
            stub.fail(function, 0)
            manager.save(3, {"a": torch.full((1000,), 3.0)}).wait()
            stub.synchronize(user)
        assert CheckpointManager(tmp_path).steps() == [1, 3]
        assert all_are(loaded(tmp_path, 3)["a"], 3.0)

    assert forked(body) == [0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_device_that_fails_under_the_copy_fails_the_save(
    tmp_path: Path, forked: Forked, stub_path: str, overlap: bool
) -> None:
    """As after an illegal access by a kernel: the stream stands still, and the runtime says so when asked."""

    def body() -> None:
        with stubbed(stub_path) as (stub, user):
            manager = CheckpointManager(tmp_path, overlap=overlap)
            word = ctypes.c_uint32(0)
            stub.hold(user, word)
            stub.fail("cudaStreamQuery", 700)
            tensor = torch.ones(LARGE)
            handle = manager.save(1, {"a": tensor})
            manager.before_step()
            with pytest.raises(
                CheckpointError, match=r"cannot copy tensors from their device.*700"
            ):
                handle.wait()
            word.value = 1
            stub.synchronize(user)
        assert CheckpointManager(tmp_path).latest() is None

    assert forked(body) == [0]
