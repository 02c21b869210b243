"""The report of a sharded model: its parts add up by a clock that only the test moves; bytes, exactly."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.haiscale.reporting.test_report import (
    BACKWARD,
    DATA,
    FORWARD,
    STEP,
    TELL,
    WIDTH,
    Clock,
    Net,
    SlowSGD,
    begin,
)
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fireflyer import haiscale, hfreduce
from fireflyer.haiscale.fsdp import FullyShardedDataParallel, hybrid_mesh
from fireflyer.haiscale.sharding import communication

STEPS = 4
GATHER, SCATTER = 0.25, 0.5


class Late(dist.Work):
    """Each wait for it lasts so long."""

    def __init__(self, work: dist.Work, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._work, self._clock, self._seconds = work, clock, seconds

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> bool:
        self._clock.now += self._seconds
        self._seconds = 0.0
        return self._work.wait()


def slow_waits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    def late(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        return lambda *args, **how: Late(call(*args, **how), clock, seconds)

    mine = types.SimpleNamespace(**{name: getattr(hfreduce, name) for name in hfreduce.__all__})
    mine.reduce_scatter = late(hfreduce.reduce_scatter, SCATTER)
    mine.allreduce = late(hfreduce.allreduce, TELL)
    mine.all_gather = late(hfreduce.all_gather, GATHER)
    monkeypatch.setattr(communication, "hfreduce", mine)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_is_split_without_rest(
    start_gang: Callable[..., Any],
    store_path: str,
    monkeypatch: pytest.MonkeyPatch,
    deferred: bool,
) -> None:
    """One unit, which is the outermost: gathered once, reduced once."""

    def body(rank: int, world: int) -> Any:
        begin(store_path, rank, world)
        clock = Clock()
        core = Net(clock)

        def make(parameters: Any) -> SlowSGD:
            return SlowSGD(parameters, clock)

        model = FullyShardedDataParallel(core, optimizer=make if deferred else None)
        optimizer = model.optimizer or make([*model.parameters()])
        slow_waits(monkeypatch, clock)
        model.times.clock = clock

        def step() -> None:
            clock.now += DATA
            model(torch.ones(2, WIDTH))["out"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the first step of an optimizer that is not torch's is not deferred
        recorder = haiscale.record(model)
        for _ in range(STEPS + 2):
            step()
        recorder.stop()
        return haiscale.report(model)

    for report in start_gang(body, 2).results():
        assert report.steps == STEPS
        assert report.compute_s == FORWARD + BACKWARD
        assert report.exposed_s == GATHER + SCATTER + TELL
        assert report.optimizer_s == STEP
        assert report.data_s == DATA
        away = GATHER + FORWARD + (DATA if deferred else 0.0) + SCATTER
        assert GATHER + SCATTER <= report.under_way_s <= away + BACKWARD
        if deferred:
            assert report.under_way_s >= DATA, "what is reduced is under way while data is read"


class Layer(nn.Linear):
    """A unit."""


def build() -> nn.Sequential:
    """The outermost unit has the first and the last; four ranks divide every first dimension."""
    layers = [Layer(64, 64, bias=False) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 64, bias=False), *layers, nn.Linear(64, 8, bias=False))


ELEMENTS, ROOT = 64 * (16 + 3 * 64 + 8), 64 * (16 + 8)
MODES: dict[str, tuple[dict[str, Any], int, float, float]] = {
    # options, ranks (on two hosts), elements that a host gathers and reduces in a step, bytes each
    "zero-2": ({"reshard_after_forward": False}, 2, 4.0 * ELEMENTS / 2, 4.0 * ELEMENTS / 2),
    "zero-3": ({}, 4, 4.0 * (2 * ELEMENTS - ROOT) / 2, 4.0 * ELEMENTS / 2),
    "bf16 both ways": (
        {"gather_dtype": torch.bfloat16, "wire": "bf16"},
        2,
        2.0 * (2 * ELEMENTS - ROOT) / 2,
        2.0 * ELEMENTS / 2,
    ),
    "hybrid": ({"hybrid": True}, 4, 0.0, 4.0 * ELEMENTS),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", MODES)
def test_bytes_and_memory(start_gang: Callable[..., Any], store_path: str, mode: str) -> None:
    given, world, gathered, reduced = MODES[mode]

    def body(rank: int, world: int) -> Any:
        begin(store_path, rank, world)
        others = dist.new_group(backend="gloo")
        options = dict(given)
        mesh = hybrid_mesh() if options.pop("hybrid", False) else None
        model = FullyShardedDataParallel(
            build(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=True),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            mesh=mesh,
            **options,
        )
        assert model.optimizer is not None
        optimizer = model.optimizer

        def step() -> int:
            """Bytes sent so far, by all ranks."""
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.settle()
            dist.barrier(group=others)
            sent = torch.tensor([model.facts().sent()])
            dist.all_reduce(sent, group=others)
            return int(sent)

        with haiscale.record(model):
            sent = [step() for _ in range(4)]
        return haiscale.report(model), model.facts().must_gather, (sent[-1] - sent[0]) / 3

    shards = world if mode != "hybrid" else 2
    for report, gathers, sent in start_gang(body, world, 2).results():
        assert gathers == gathered * 2 / world
        assert report.must_send == (gathered + reduced) * 2 / world
        assert 2 * (gathered + reduced) <= sent <= 1.02 * 2 * (gathered + reduced) + 1000
        assert report.sent > 0
        memory = report.memory
        assert memory.parameters == memory.gradients == ELEMENTS * 4 // shards
        assert memory.optimizer == 2 * memory.parameters + 5 * 4  # moments, and steps' numbers
