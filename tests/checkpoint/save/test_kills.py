"""kill -9 at random times of loads, saves, commits and prunes, native writes too, of one rank or all."""

import contextlib
import os
import random
import select
import shutil
import signal
import struct
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.checkpoint.conftest import SOAK, Machine, untidy
from tests.conftest import fork_child
from tests.waiting import LIMIT_S

from fireflyer.checkpoint import CheckpointManager

KILLS = 2000 if SOAK else 24
KILLS_A_DIRECTORY = 10 if SOAK else 6
LARGEST_BYTES = (64 if SOAK else 16) << 20
SMALLEST_BYTES = 8 << 20
READY, ACKNOWLEDGED, CHECKED = range(3)
MESSAGE = struct.Struct("qqq")

BASE = torch.empty(0, dtype=torch.int32)
"""What the forked children make their states from."""


class Series(NamedTuple):
    """One directory and how it is used."""

    place: Path
    elements: int
    world: int
    keep: int
    overlap: bool
    incremental: bool
    memory: bool

    def manager(self) -> CheckpointManager:
        return CheckpointManager(
            self.place,
            keep=self.keep,
            overlap=self.overlap,
            incremental=self.incremental,
            memory=self.memory,
        )

    def state(self, step: int) -> dict[str, Any]:
        return {"w": BASE[: self.elements] + step, "still": BASE[:500_000], "step": step}

    def check(self, state: dict[str, Any]) -> int:
        step = int(state["step"])
        assert torch.equal(state["w"], BASE[: self.elements] + step)
        assert torch.equal(state["still"], BASE[:500_000])
        return step


class Pipe:
    """What children tell: kind, step, rank."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def tell(self, kind: int, step: int, rank: int = 0) -> None:
        os.write(self._write, MESSAGE.pack(kind, step, rank))

    def hear(self, timeout_s: float = LIMIT_S) -> tuple[int, int, int] | None:
        """The next message; None if there is none within the time."""
        if not select.select([self._read], [], [], timeout_s)[0]:
            return None
        return MESSAGE.unpack(os.read(self._read, MESSAGE.size))

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def train(series: Series, pipe: Pipe, rank: int, store: str) -> None:
    """Goes on from the newest checkpoint and saves for ever."""
    if series.world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=series.world
        )
    pipe.tell(READY, 0, rank)
    manager = series.manager()
    step = 0 if manager.latest() is None else series.check(manager.load())
    while True:
        step += 1
        handle = manager.save(step, series.state(step), per_rank={"rank": rank, "step": step})
        handle.wait()
        pipe.tell(ACKNOWLEDGED, step, rank)


def look(series: Series, pipe: Pipe) -> None:
    """Loads, then saves once more and looks for what is left over."""
    manager = series.manager()
    step = 0
    if manager.latest() is not None:
        step = series.check(manager.load())
        own = manager.loaded_per_rank()
        assert own == {"rank": 0, "step": step}
    pipe.tell(CHECKED, step)
    assert not (series.place / "damaged").exists()
    manager.save(step + 1, series.state(step + 1), per_rank={"rank": 0, "step": step + 1}).wait()
    assert untidy(series.place) == []
    steps = manager.steps()
    assert steps[-1] == step + 1
    assert len(steps) <= series.keep
    pipe.tell(ACKNOWLEDGED, step + 1)


def kill_once(
    series: Series, rng: random.Random, acknowledged: int, folder: Path
) -> tuple[int, bool]:
    """Returns the step that is acknowledged at the end, and whether a data file was being written."""
    pipe = Pipe()
    (folder / "store").unlink(missing_ok=True)
    children = [
        fork_child(lambda rank=rank: train(series, pipe, rank, str(folder / "store")))  # type: ignore[misc]
        for rank in range(series.world)
    ]
    try:
        acknowledged = _watch(series, rng, pipe, acknowledged)
        victims = rng.sample(children, rng.choice((1, len(children))))
        _kill(victims)
        # The others are stopped a little later, as a platform does it.
        select.select([], [], [], rng.uniform(0, 0.1) if len(victims) < len(children) else 0)
    finally:
        _kill(children)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    # A rank that has lost another one may fail before it is killed itself.
    assert -signal.SIGKILL in codes
    cut_off = any(series.place.glob("step-*/data-*.tmp"))
    while (message := pipe.hear(0)) is not None:
        if message[0] == ACKNOWLEDGED:
            acknowledged = max(acknowledged, message[1])
    looking = fork_child(lambda: look(series, pipe))
    assert os.waitpid(looking, 0)[1] == 0
    kind, found, _ = pipe.hear() or (-1, 0, 0)
    assert kind == CHECKED
    assert found >= acknowledged
    kind, acknowledged, _ = pipe.hear() or (-1, 0, 0)
    assert kind == ACKNOWLEDGED
    pipe.close()
    return acknowledged, cut_off


def _watch(series: Series, rng: random.Random, pipe: Pipe, acknowledged: int) -> int:
    """Until a random moment: of the load and the first save, or of a later one."""
    begun = time.monotonic()
    for _ in range(series.world):
        assert pipe.hear() is not None, "a rank has not come up"
    took = time.monotonic() - begun
    for _ in range(rng.choice((0, 0, 1, 2)) * series.world):
        begun = time.monotonic()
        message = pipe.hear()
        assert message is not None, "a save does not end"
        acknowledged = max(acknowledged, message[1])
        took = max(took, time.monotonic() - begun)
    end = time.monotonic() + rng.uniform(0, 1.5 * max(took, 0.03))
    while (left := end - time.monotonic()) > 0:
        message = pipe.hear(left)
        if message is not None:
            acknowledged = max(acknowledged, message[1])
    return acknowledged


def _kill(children: list[int]) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def base() -> None:
    global BASE
    BASE = torch.arange(LARGEST_BYTES // 4, dtype=torch.int32)


@pytest.mark.deadline(480 + 3 * KILLS)
def test_kills_at_any_time(base: None, machine: Machine, tmp_path: Path) -> None:
    rng = random.Random(5)
    furthest = writes = 0
    for number in range(KILLS // KILLS_A_DIRECTORY):
        series = Series(
            place=tmp_path / "c",
            elements=rng.randint(SMALLEST_BYTES, LARGEST_BYTES) // 4,
            world=1 + number % 2,
            keep=rng.choice((1, 2)),
            overlap=rng.random() < 0.3,
            incremental=rng.random() < 0.3,
            memory=number % 4 >= 2,
        )
        acknowledged = 0
        for _ in range(KILLS_A_DIRECTORY):
            acknowledged, cut_off = kill_once(series, rng, acknowledged, tmp_path)
            writes += cut_off
        furthest = max(furthest, acknowledged)
        shutil.rmtree(series.place)
        while keepers := machine.keepers():
            machine.kill_keeper(next(iter(keepers)))
    assert furthest > KILLS_A_DIRECTORY, "some of the killed had come to save"
    if SOAK:  # some kills hit the writing of large files; of two dozen perhaps none
        assert writes > KILLS // 100
