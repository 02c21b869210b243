"""Report on the cost of training, as figures and as text."""

import sys
import time
import weakref
from dataclasses import dataclass
from typing import TextIO

import torch
from torch import nn

from fireflyer.errors import ConfigError
from fireflyer.haiscale.reporting.advice import advise
from fireflyer.haiscale.reporting.facts import Facts, facts_of
from fireflyer.haiscale.reporting.recorder import Recorder

_recorders: weakref.WeakKeyDictionary[nn.Module, Recorder] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Memory:
    """Memory of one rank in bytes.

    Attributes:
        optimizer: states of the optimizers that have stepped during the recording.
        activations: maximum memory that autograd held for backward; None unless
            `record(activations=True)`.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int | None


@dataclass(frozen=True)
class Report:
    """Means of one rank's steps, in seconds and bytes.

    `compute_s`, `exposed_s`, `optimizer_s` and `data_s` add up to `step_s`.

    Attributes:
        exposed_s: time spent waiting for reductions and all-gathers.
        data_s: time outside forward, backward and optimizer: reading data, and all other work of
            the script.
        under_way_s: time with some communication in flight, exposed or hidden.
        sent: bytes sent to other hosts.
        must_send: this rank's share of the smallest possible number of such bytes.
        tokens_per_s: tokens per second of all ranks.
        mfu: the model's floating-point operations per second, divided by the machine's peak.
        advice: proposals to shorten a step; empty if communication is hidden.
    """

    steps: int
    compute_s: float
    exposed_s: float
    optimizer_s: float
    data_s: float
    under_way_s: float
    sent: float
    must_send: float
    memory: Memory
    tokens_per_s: float | None
    mfu: float | None
    advice: tuple[str, ...]

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.optimizer_s + self.data_s

    def text(self) -> str:
        """Returns several lines of text for people."""
        parts = (
            ("compute", self.compute_s),
            ("exposed communication", self.exposed_s),
            ("optimizer", self.optimizer_s),
            ("data and the rest", self.data_s),
        )
        lines = [f"a step, mean of {self.steps}: {self.step_s * 1e3:,.1f} ms"]
        lines += [
            f"  {name:<22}{seconds * 1e3:>10,.1f} ms  {seconds / self.step_s:>4.0%}"
            for name, seconds in parts
        ]
        if self.must_send:
            over = self.sent / self.must_send
            lines.append(f"sent to other hosts: {_size(self.sent)}, {over:.3f}x the least possible")
        memory = [
            f"{name} {_size(size)}" for name, size in vars(self.memory).items() if size is not None
        ]
        lines.append("memory: " + ", ".join(memory))
        if self.tokens_per_s is not None:
            lines.append(f"tokens: {self.tokens_per_s:,.0f} a second")
        if self.mfu is not None:
            lines.append(f"model flops utilization: {self.mfu:.1%}")
        return "\n".join([*lines, *self.advice])


def record(model: nn.Module, *, activations: bool = False) -> Recorder:
    """Records how `model`'s steps spend their time, beginning with its next forward.

    The cost is microseconds per step.

    Args:
        model: a model wrapped by haiscale. An earlier recording of the model ends.
        activations: also count the memory that autograd holds for backward. This examines every
            saved tensor.

    Raises:
        ConfigError: the model is not wrapped.
    """
    facts_of(model)  # raises ConfigError if the model cannot be recorded
    if (before := _recorders.get(model)) is not None:
        before.stop()
    recorder = _recorders[model] = Recorder(model, activations)
    return recorder


def report(
    model: nn.Module,
    *,
    tokens: int | None = None,
    flops: float | None = None,
    peak: float | None = None,
) -> Report:
    """Returns means over the complete steps since `record(model)`, without the first. Not
    collective.

    Args:
        tokens: number of tokens of all ranks in one step.
        flops: floating-point operations of all ranks in one step; None: 6 per parameter and token.
        peak: peak floating-point operations per second of one rank: `peak_flops()`, or the vendor's
            figure.

    Raises:
        ConfigError: the model is not recorded, the second step has not yet ended, or a figure is
            not positive.
    """
    for name, figure in (("tokens", tokens), ("flops", flops), ("peak", peak)):
        if figure is not None and not figure > 0:
            raise ConfigError(f"report: {name}={figure} must be more than 0")
    recorder = _recorders.get(model)
    if recorder is None:
        raise ConfigError("nothing was recorded: call haiscale.record(model) before the first step")
    sums = recorder.sums
    if not sums.steps:
        raise ConfigError(
            "the second step has not yet ended: it ends when the first forward after its backward begins"
        )
    facts = facts_of(model)
    step_s = (sums.compute_s + sums.exposed_s + sums.optimizer_s + sums.data_s) / sums.steps
    exposed_s, under_way_s = sums.exposed_s / sums.steps, sums.under_way_s / sums.steps
    if flops is None and tokens is not None:
        flops = 6.0 * sum(p.numel() for p in model.parameters()) * tokens
    return Report(
        steps=sums.steps,
        compute_s=sums.compute_s / sums.steps,
        exposed_s=exposed_s,
        optimizer_s=sums.optimizer_s / sums.steps,
        data_s=sums.data_s / sums.steps,
        under_way_s=under_way_s,
        sent=sums.sent / sums.steps,
        must_send=facts.must_send,
        memory=_memory(model, facts, recorder),
        tokens_per_s=None if tokens is None else tokens / step_s,
        mfu=None if flops is None or peak is None else flops / (step_s * peak * facts.world),
        advice=tuple(advise(facts, step_s, exposed_s, under_way_s)),
    )


def show(
    model: nn.Module,
    *,
    tokens: int | None = None,
    flops: float | None = None,
    peak: float | None = None,
    file: TextIO | None = None,
) -> None:
    """Prints the report of the group's first rank, to standard output if `file` is None."""
    if facts_of(model).rank == 0:
        made = report(model, tokens=tokens, flops=flops, peak=peak)
        print(made.text(), file=file or sys.stdout)


def peak_flops(seconds: float = 0.2, size: int = 1024, dtype: torch.dtype = torch.float32) -> float:
    """Measures the peak floating-point operations per second of this process.

    The peak is that of the fastest matmul of [size, size] by [size, size], with torch's present
    threads. All ranks of a machine should measure at the same time.
    """
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    out = a @ b
    best, begun = float("inf"), time.monotonic()
    while best == float("inf") or time.monotonic() - begun < seconds:
        before = time.perf_counter()
        torch.matmul(a, b, out=out)
        best = min(best, time.perf_counter() - before)
    return 2.0 * size**3 / best


def _memory(model: nn.Module, facts: Facts, recorder: Recorder) -> Memory:
    states = [
        value
        for optimizer in recorder.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return Memory(
        parameters=facts.parameter_bytes,
        gradients=facts.gradient_bytes,
        optimizer=sum(map(_kept, states)),
        buffers=sum(map(_kept, model.buffers())),
        activations=recorder.activations.peak if recorder.activations is not None else None,
    )


def _kept(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor on this rank; for a sharded tensor, those of its local part."""
    return int(getattr(tensor, "_local_tensor", tensor).nbytes)


def _size(count: float) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"
