"""Where the time of a step goes, by a clock that only the test moves; memory and bytes, exactly."""

import contextlib
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fireflyer import haiscale, hfreduce
from fireflyer.errors import ConfigError
from fireflyer.haiscale.ddp import DistributedDataParallel
from fireflyer.haiscale.reporting.activations import Activations
from fireflyer.haiscale.reporting.advice import advise
from fireflyer.haiscale.reporting.facts import Facts
from fireflyer.haiscale.reporting.times import Times

FORWARD, BACKWARD, WAIT, STEP, DATA, TELL = 2.0, 4.0, 1.0, 3.0, 5.0, 0.0625
STEPS = 4
WIDTH = 256


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.now += FORWARD
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.clock.now += BACKWARD
        return grad.clone(), None


class Net(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("table", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        slow: Any = Slow.apply
        return {"out": slow(self.layer(x), self.clock)}


class SlowSGD(torch.optim.Optimizer):
    """The update of a parameter lasts STEP seconds."""

    separable = True

    def __init__(self, parameters: Any, clock: Clock) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.clock = clock

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.clock.now += STEP
                    parameter.add_(parameter.grad, alpha=-group["lr"])


def begin(store_path: str, rank: int, world: int) -> None:
    store = dist.FileStore(store_path, world)
    dist.init_process_group("hfreduce", store=store, rank=rank, world_size=world)


def slow_waits(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Each wait for a bucket lasts WAIT seconds, that for what was reached TELL."""
    allreduce = hfreduce.allreduce

    class Late:
        def __init__(self, work: Any, seconds: float) -> None:
            self.work, self.seconds = work, seconds

        def wait(self) -> None:
            clock.now += self.seconds
            self.work.wait()

    def late(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = allreduce(tensor, *args, **kwargs)
        return Late(work, WAIT if tensor.is_floating_point() else TELL)

    monkeypatch.setattr(hfreduce, "allreduce", late)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_is_split_without_rest(
    start_gang: Callable[..., Any],
    store_path: str,
    monkeypatch: pytest.MonkeyPatch,
    deferred: bool,
    micro: int,
) -> None:
    def body(rank: int, world: int) -> Any:
        begin(store_path, rank, world)
        clock = Clock()
        slow_waits(monkeypatch, clock)
        core = Net(clock)
        optimizer = SlowSGD(core.parameters(), clock)
        model = DistributedDataParallel(
            core, optimizer=optimizer if deferred else None, broadcast_buffers=False
        )
        model.facts().times.clock = clock

        def step() -> None:
            for number in range(micro):
                clock.now += DATA
                last = number == micro - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    model(torch.ones(2, WIDTH))["out"].sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the first step of an optimizer that is not torch's is not deferred
        recorder = haiscale.record(model)
        clock.now += 1000.0  # before the first forward nothing is recorded
        for _ in range(STEPS + 2):
            step()
        recorder.stop()
        clock.now += 1000.0
        return haiscale.report(model, tokens=64, flops=90.0, peak=3.0)

    for report in start_gang(body, 2).results():
        assert report.steps == STEPS
        assert report.compute_s == micro * (FORWARD + BACKWARD)
        assert report.exposed_s == WAIT + TELL
        assert report.optimizer_s == STEP
        assert report.data_s == micro * DATA
        assert report.step_s == micro * (FORWARD + BACKWARD + DATA) + WAIT + TELL + STEP
        assert report.tokens_per_s == 64 / report.step_s
        assert report.mfu == 90.0 / (report.step_s * 3.0 * 2)


def test_text_and_advice(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        begin(store_path, rank, world)
        clock = Clock()
        core = Net(clock)
        model = DistributedDataParallel(core)
        optimizer = torch.optim.AdamW(core.parameters())
        with pytest.raises(ConfigError, match="call haiscale"):
            haiscale.report(model)
        with haiscale.record(model):
            with pytest.raises(ConfigError, match="the second step has not yet ended"):
                haiscale.report(model)
            for _ in range(3):
                model(torch.ones(2, WIDTH))["out"].sum().backward()
                optimizer.step()
        report = haiscale.report(model)
        out = io.StringIO()
        haiscale.show(model, file=out)
        assert out.getvalue() == (report.text() + "\n" if rank == 0 else "")
        group: Any = dist.group.WORLD
        return report, group.hosts

    for report, hosts in start_gang(body, 4, nodes=2).results():
        assert hosts == ((0, 1), (2, 3))
        weights, table = WIDTH * WIDTH * 4, 16 * 4
        assert report.must_send == weights / 2  # 2S(H-1)/H a host, a half of it each rank's
        assert report.must_send <= report.sent <= 1.02 * report.must_send
        assert report.memory.parameters == report.memory.gradients == weights
        assert report.memory.optimizer == 2 * weights + 4  # both moments, and the step's number
        assert report.memory.buffers == table
        assert report.memory.activations is None
        assert "mean of 1" in report.text()
        assert "the least possible" in report.text()


ZERO_3 = {"sharded": True, "must_gather": 300.0, "gathered_bytes": 4.0}


def facts(**changed: Any) -> Facts:
    usual: dict[str, Any] = {
        "times": Times(), "sent": lambda: 0, "rank": 0, "world": 4, "hosts": ((0, 1), (2, 3)),
        "deferred": False, "sharded": False, "parameter_bytes": 1000, "gradient_bytes": 1000,
        "must_send": 500.0, "element_bytes": 4.0, "reductions": 30,
    }  # fmt: skip
    return Facts(**usual | changed)


def test_hidden_communication_needs_no_advice() -> None:
    assert advise(facts(), step_s=1.0, exposed_s=0.05, under_way_s=0.9) == []


def test_without_a_change_that_helps_no_heading_promises_one() -> None:
    small = facts(deferred=True, element_bytes=8.0)
    (line,) = advise(small, step_s=1.0, exposed_s=0.055, under_way_s=0.055)
    assert "55.0 ms of each step" in line
    assert "Settings that would hide it" not in line


def test_advice_names_what_each_change_can_gain() -> None:
    """Half of a step of 1 s is waited for, reductions are under way for 0.8 s."""
    warning, *lines = advise(facts(), step_s=1.0, exposed_s=0.5, under_way_s=0.8)
    assert "500.0 ms of each step (50%)" in warning
    found = {line.split(":")[0].strip(): line for line in lines}
    assert "(up to 20% of the step)" in found["optimizer="]  # the 0.8 s must still pass
    assert "(up to 40% of the step)" in found['wire="bf16"']  # 0.4 s less to wait for
    assert "(up to 50% of the step)" in found['wire="int8"']  # 0.6 s less, but 0.5 s are computed
    assert len(found) == 4
    gains = [int(line.split("up to ")[1].split("%")[0]) for line in lines]
    assert gains == sorted(gains, reverse=True)


def test_advice_for_sharded_models_knows_what_travels() -> None:
    """Three fifths of the 0.8 s under way are all-gathers, two fifths reductions."""
    sharded = facts(**ZERO_3)
    _, *lines = advise(sharded, step_s=1.0, exposed_s=0.5, under_way_s=0.8)
    found = {line.split(":")[0].strip(): line for line in lines}
    assert "(up to 24% of the step)" in found["gather_dtype=torch.bfloat16"]  # half of 0.48 s
    assert "(up to 16% of the step)" in found['wire="bf16"']  # half of 0.32 s
    assert "(up to 20% of the step)" in found["optimizer="]
    assert "(up to 50% of the step)" in found["HSDP"]


@pytest.mark.parametrize(
    ("changed", "there", "missing"),
    [
        ({"deferred": True, "element_bytes": 2.0}, "int8", "optimizer="),
        ({"element_bytes": 8.0}, "no_sync", "wire="),
        ({"must_send": 0.0, "hosts": ((0, 1),)}, "no_sync", "wire="),
        (ZERO_3, "HSDP", "bucket_bytes"),
        (ZERO_3 | {"gathered_bytes": 2.0}, "wire=", "gather_dtype"),
        (ZERO_3 | {"hosts": ((0,), (1,))}, "no_sync", "HSDP"),
        (ZERO_3 | {"must_gather": 0.0}, "wire=", "HSDP"),  # it is that already
        (ZERO_3 | {"reductions": 2}, "smaller units by auto_wrap_policy", "bucket_bytes"),
        ({"reductions": 1}, "smaller bucket_bytes", "larger"),
        ({"reductions": 1000}, "larger bucket_bytes", "smaller"),
    ],
)
def test_advice_fits_the_setting(changed: dict[str, Any], there: str, missing: str) -> None:
    text = "\n".join(advise(facts(**changed), step_s=1.0, exposed_s=0.5, under_way_s=0.8))
    assert there in text
    assert missing not in text


def test_only_what_haiscale_wrapped_can_be_recorded() -> None:
    with pytest.raises(ConfigError, match="cannot record a Linear"):
        haiscale.record(nn.Linear(2, 2))


def test_recording_ends_with_the_next_one(start_gang: Callable[..., Any], store_path: str) -> None:
    def body(rank: int, world: int) -> Any:
        begin(store_path, rank, world)
        model = DistributedDataParallel(nn.Linear(4, 4))
        first = haiscale.record(model)
        second = haiscale.record(model)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
        steps = first.sums.steps, second.sums.steps
        second.stop()
        model(torch.ones(1, 4)).sum().backward()
        model(torch.ones(1, 4)).sum().backward()
        return *steps, second.sums.steps

    assert start_gang(body, 1).results() == [(0, 1, 1)]


def test_a_backward_that_fails_does_not_stop_the_recording(
    start_gang: Callable[..., Any], store_path: str
) -> None:
    def body(rank: int, world: int) -> Any:
        begin(store_path, rank, world)
        model = DistributedDataParallel(nn.Linear(4, 4))
        recorder = haiscale.record(model)

        def fail(_: torch.Tensor) -> None:
            raise ValueError("in the loss")

        out = model(torch.ones(1, 4, requires_grad=True))
        out.register_hook(fail)
        with pytest.raises(ValueError, match="in the loss"):
            out.sum().backward()
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
        return recorder.sums.steps

    assert start_gang(body, 1).results() == [1]


def test_activations_are_counted_once_and_until_they_are_freed() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    activations = Activations(model)
    x = torch.ones(32, 8)
    with activations.watch():
        out = model(x)
    # The input; ReLU's result, which ReLU and the second layer share; no parameter.
    assert activations.now == activations.peak == 32 * (8 + 16) * 4
    out.sum().backward()
    del out
    gc.collect()
    assert (activations.now, activations.peak) == (0, 32 * (8 + 16) * 4)
    assert model[0].weight.grad is not None


def test_peak_flops_is_a_rate() -> None:
    assert 0 < haiscale.peak_flops(seconds=0.0, size=16) < float("inf")
