"""Parts of training loops whose phases take known times, on a clock that only they move; and hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fireflyer.haiprof.events import unpacked
from fireflyer.haiprof.inside import points
from fireflyer.haiprof.inside.buffer import EventBuffer
from fireflyer.haiprof.inside.modules import RootModules
from fireflyer.haiprof.phases import PhaseAccountant, Row

MS = 1_000_000


class Clock:
    """Time that passes only when a phase of the script says so."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def work(self, ms: int) -> None:
        self.now += ms * MS


class Working(torch.autograd.Function):
    """Takes known times in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock, there: int, back: int) -> torch.Tensor:
        ctx.clock, ctx.back = clock, back
        clock.work(there)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.work(ctx.back)
        return grads[0], None, None, None


class Model(nn.Module):
    def __init__(self, clock: Clock, there: int = 20, back: int = 40) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.times = (clock, there, back)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., torch.Tensor] = Working.apply
        result = apply(self.inner(x), *self.times)
        return result


class Slow(torch.optim.SGD):
    def __init__(self, model: nn.Module, clock: Clock, ms: int) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.work = (clock, ms)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if closure is not None:
            with torch.enable_grad():
                closure()
        clock, ms = self.work
        clock.work(ms)


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, clock: Clock, ms: int, length: int = 1000) -> None:
        self.work = (clock, ms)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        clock, ms = self.work
        clock.work(ms)
        return torch.ones(2)


class Hooks:
    """Hooks of one session."""

    def __init__(self) -> None:
        self.buffer = EventBuffer()
        self.buffer.active = True
        self.roots = RootModules(self.buffer)
        self.undo = [
            self.roots.undo,
            *(one.undo for one in points.PointHooks(self.buffer).search()),
            points.OptimizerHooks(self.buffer, self.roots.at_step).undo,
        ]

    def rows(self) -> list[Row]:
        events, labels = self.buffer.drain()
        return list(PhaseAccountant(labels.__getitem__).feed(unpacked(events)))

    def end(self) -> None:
        self.buffer.active = False
        for undo in reversed(self.undo):
            undo()


@contextmanager
def hooked() -> Iterator[Hooks]:
    hooks = Hooks()
    try:
        yield hooks
    finally:
        hooks.end()


def in_ms(row: Row) -> dict[str, int]:
    return {name: round(seconds * 1e3) for name, seconds in row.phases.items() if seconds}
