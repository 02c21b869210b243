"""Bytes that a forward keeps for backward, and the peak of a training step.

Both are counted, not sampled, so the load of the machine does not change them.
"""

import copy

import torch
from torch import nn

from fireflyer.bench.harness.report import Row
from fireflyer.bench.nn.models import Gpt, cases, tokens_of
from fireflyer.nn import saved, set_replace_torch, to_hfai

MIB = float(1 << 20)
PEAK = (0.8, 0.65)
"""Required maximum ratio of a step's peak memory to eager's, and the aim."""
HEAD = 8.0
"""Required ratio of eager's peak memory to ours, for the last linear layer and its loss."""


def kept(scale: int) -> list[Row]:
    """Measures the bytes that a forward of each model keeps, before and after `to_hfai`."""
    rows = []
    for case in cases(scale):
        torch.manual_seed(0)
        model, inputs = case.make(), case.inputs()
        eager = saved(model, *inputs).bytes
        to_hfai(model)
        with set_replace_torch():
            ours = saved(model, *inputs).bytes
        goal, aim = (None, None) if case.most is None else case.most
        rows.append(
            Row.of_times(
                f"kept, {case.name}", "MiB", [ours / MIB], "eager", [eager / MIB], (),
                goal and 1 / goal, aim and 1 / aim,
            )
        )  # fmt: skip
    return rows


def peaks(scale: int) -> list[Row]:
    """Measures the largest total of tensors' bytes in a training step of a GPT with AdamW."""
    torch.manual_seed(0)
    vocabulary, time = 8192 // scale, 256 // min(scale, 4)
    model = Gpt(vocabulary, 384 // min(scale, 6), 6, time, 0.1)
    inputs = tokens_of(vocabulary, max(1, 8 // scale), time)()
    eager = _peak(copy.deepcopy(model), inputs)
    with set_replace_torch():
        ours = _peak(to_hfai(model), inputs)
    goal, aim = (1 / share for share in PEAK)
    return [Row.of_times("peak, GPT step", "MiB", [ours], "eager", [eager], (), goal, aim)]


def _peak(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    adam = torch.optim.AdamW(model.parameters())

    def step() -> None:
        adam.zero_grad()
        model(*inputs).backward()
        adam.step()

    step()  # creates the optimizer's state
    return peak_of(step) + _static(model, adam)


def _static(model: nn.Module, adam: torch.optim.Optimizer) -> float:
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for state in adam.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors) / MIB


def peak_of(step: object) -> float:
    """Returns the largest growth of torch's memory during a call, in MiB."""
    assert callable(step)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as run:
        step()
    events = run.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    total = most = 0
    for _, change in changes:
        total += change
        most = max(most, total)
    return most / MIB
