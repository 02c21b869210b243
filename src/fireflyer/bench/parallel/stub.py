"""Pipeline stage that computes by sleeping, as if on a device, also for torch's pipelining."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peers

from fireflyer.haiscale.pipeline import schedules

PEERS: dict[str, Any] = {
    schedules.GPIPE: peers.ScheduleGPipe,
    schedules.PIPEDREAM: peers.Schedule1F1B,
    schedules.INTERLEAVED: peers.ScheduleInterleaved1F1B,
}
"""torch's class for each schedule that torch also has."""


class _Slow(torch.autograd.Function):
    """Function that sleeps in forward and in backward and returns its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.seconds = backward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        time.sleep(ctx.seconds)
        return grads[0], None, None


class Stub(nn.Module):
    """Stage whose forward, input gradient and weight gradient take `seconds` each."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight, self.bias = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x + self.bias  # so the first stage also has an input gradient
        weight = _Slow.apply(self.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        slow = _Slow.apply(x, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        y: torch.Tensor = slow + weight
        return y


def criterion(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.mean()


def peer_step(
    kind: str,
    stages: Sequence[nn.Module],
    group: dist.ProcessGroup,
    x: torch.Tensor,
    chunks: int,
) -> Callable[[], object]:
    """Returns a step of torch's pipelining.

    Args:
        stages: this rank's stages, in order.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    total = size * len(stages)
    made: list[Any] = [
        PipelineStage(stage, rank + turn * size, total, torch.device("cpu"), group=group)
        for turn, stage in enumerate(stages)
    ]
    given = made if kind == schedules.INTERLEAVED else made[0]
    schedule = PEERS[kind](given, chunks, loss_fn=criterion)
    inputs = (x,) if rank == 0 else ()
    target = {"target": torch.zeros(len(x)), "losses": []} if rank == size - 1 else {}
    return lambda: schedule.step(*inputs, **target, return_outputs=False)
