"""What a rank saves and loads on a GPU: `python -m tests.checkpoint.gpu.cases CASE DIRECTORY`."""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fireflyer.checkpoint import CheckpointManager

SECOND = 2_000_000_000
"""Cycles of `torch.cuda._sleep` that take a second or so."""
LARGE = 50_000_000


def state_of(value: float) -> dict[str, Any]:
    made = torch.Generator(device="cuda").manual_seed(int(value))
    return {
        "large": torch.rand(LARGE, generator=made, device="cuda"),
        "half": torch.rand(3, 1001, device="cuda").to(torch.bfloat16),
        "columns": torch.arange(600.0, device="cuda").reshape(30, 20).t() + value,
        "lazy": torch.tensor([1 + 2j, 3j], device="cuda").conj() * value,
        "none": torch.empty(0, 3, device="cuda"),
        "one": torch.tensor(value, device="cuda"),
        "parameter": torch.nn.Parameter(torch.full((100, 100), value, device="cuda")),
        "host": torch.full((1000,), value),
    }


def differing(state: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    return [
        name
        for name in saved
        if not torch.equal(state[name].detach().cpu(), saved[name].detach().cpu())
    ]


def every_mode_is_bit_equal(place: Path) -> None:
    for number, overlap in enumerate((False, True)):
        for incremental in (False, True):
            at = place / f"{number}-{incremental}"
            manager = CheckpointManager(at, overlap=overlap, incremental=incremental)
            for step in (1, 2, 3):
                state = state_of(min(step, 2))
                manager.save(step, state)
                manager.before_step()
                manager.wait()
                assert differing(state, CheckpointManager(at).load()) == []
                target = state_of(9.0)
                CheckpointManager(at).load(into=target)
                assert differing(target, state) == []


def the_stream_orders_everything(place: Path) -> None:
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        at = place / str(stream.cuda_stream)
        state = {"large": torch.zeros(LARGE, device="cuda"), "small": torch.zeros(9, device="cuda")}
        manager = CheckpointManager(at, overlap=True)
        manager.save(1, state).wait()  # pins
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SECOND)
            for tensor in state.values():
                tensor.fill_(1.0)
            handle = manager.save(2, state)
            state["small"].fill_(2.0)
            assert not stream.query(), "the host has waited for the device"
            manager.before_step()
            state["large"].fill_(2.0)
        handle.wait()
        got = CheckpointManager(at).load(2)
        assert all(bool((tensor == 1.0).all()) for tensor in got.values())


def without_overlap_save_waits(place: Path) -> None:
    tensor = torch.zeros(LARGE, device="cuda")
    manager = CheckpointManager(place)
    for step in (1, 2, 3):
        torch.cuda._sleep(SECOND // 4)
        tensor.fill_(step)
        handle = manager.save(step, {"large": tensor})
        tensor.fill_(-1.0)
        handle.wait()
        assert bool((CheckpointManager(place).load(step)["large"] == step).all())


def dropped_tensors_are_not_reused(place: Path) -> None:
    manager = CheckpointManager(place, overlap=True)
    for step in range(5):
        manager.save(step, {"large": torch.full((LARGE,), 7.0, device="cuda")})
        gc.collect()
        torch.full((LARGE,), 1.0, device="cuda")
        manager.wait()
        assert bool((CheckpointManager(place).load(step)["large"] == 7.0).all())


def speed(place: Path) -> None:
    """Prints GB/s of the stall beside torch's copy to pinned memory; asserts nothing of them."""
    state = {f"{i}": torch.rand(64 << 20, device="cuda") for i in range(8)}
    total = sum(tensor.nbytes for tensor in state.values())
    pinned = torch.empty(64 << 20, pin_memory=True)
    manager = CheckpointManager(place, keep=1)
    for step in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tensor in state.values():
            pinned.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        by_torch = time.perf_counter() - start
        handle = manager.save(step, state)
        print(f"torch {total / by_torch / 1e9:.1f}, save {total / handle.stall_s / 1e9:.1f} GB/s")
        handle.wait()
    assert differing(state, manager.load()) == []


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case
    for case in (
        every_mode_is_bit_equal,
        the_stream_orders_everything,
        without_overlap_save_waits,
        dropped_tensors_are_not_reused,
        speed,
    )
}


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]))
