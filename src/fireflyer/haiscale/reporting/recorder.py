"""Records how training steps spend their time, and the peak memory of activations.

The spans of a step follow each other. torch's hooks begin them:

    compute    from the beginning of a forward to the end of its backward
    data       from the end of compute, or of an optimizer step, until another span begins
    optimizer  the script's optimizer.step()

The wrapper itself counts two further times (`times.Times`): waits for reductions, and the
optimizer's steps on single buckets. They are subtracted from the span in which they happen, so the
parts of a step add up to its wall time. A step ends when the first forward after a synchronised
backward begins. The first step is not counted: it contains no work of a previous step, and the
buckets are laid out anew after it.
"""

import contextlib
import weakref
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fireflyer.haiscale.reporting.activations import Activations
from fireflyer.haiscale.reporting.facts import facts_of
from fireflyer.torch_internals.core import pytree, queue_callback

COMPUTE, DATA, OPTIMIZER = "compute_s", "data_s", "optimizer_s"


@dataclass
class Sums:
    """Sums over whole steps: seconds, and bytes that this rank has sent to other hosts."""

    compute_s: float = 0.0
    exposed_s: float = 0.0
    optimizer_s: float = 0.0
    data_s: float = 0.0
    under_way_s: float = 0.0
    sent: float = 0.0
    steps: int = 0

    def add(self, other: "Sums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass
class _Mark:
    """Values of the clock and counters at one moment."""

    at: float
    exposed_s: float
    optimizer_s: float
    under_way_s: float
    sent: int
    steps: int


class Recorder:
    """Records from the next forward until `stop`; also a context manager. See `record`."""

    def __init__(self, model: nn.Module, activations: bool) -> None:
        self.sums = Sums()
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.activations = Activations(model) if activations else None
        facts = facts_of(model)
        self._times, self._sent = facts.times, facts.sent
        self._model = weakref.ref(model)
        self._open = Sums()  # sums of the present step
        self._first = True  # True during the first step
        self._span: str | None = None
        self._mark: _Mark
        self._queued = False
        self._watching: contextlib.AbstractContextManager[object] | None = None
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            model.register_forward_hook(self._forward_ends, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        weakref.finalize(model, self.stop)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops recording; recorded sums remain. Idempotent."""
        for handle in self._handles:
            handle.remove()
        if self.activations is not None:
            self.activations.stop()
        self._handles.clear()

    # The clock

    def _now(self) -> _Mark:
        t = self._times
        return _Mark(t.clock(), t.exposed_s, t.optimizer_s, t.under_way_s, self._sent(), t.steps)

    def _enter(self, span: str) -> None:
        """Begins a span, and adds the time since the last call to the span that ends."""
        if self._span is None and span != COMPUTE:
            return  # the first forward has not yet begun
        now = self._now()
        if self._span is not None:
            past = [a - b for a, b in zip(astuple(now), astuple(self._mark), strict=True)]
            wall, exposed, stepped, under_way, sent, steps = past
            rest = wall - exposed - stepped
            self._open.add(Sums(0, exposed, stepped, 0, under_way, sent, int(steps)))
            self._open.add(Sums(**{self._span: rest}))
        self._span, self._mark = span, now

    # The hooks

    def _forward_begins(self, _module: nn.Module, _args: Any) -> None:
        self._enter(COMPUTE)
        if self._open.steps and torch.is_grad_enabled():
            if not self._first:
                self.sums.add(self._open)
            self._first, self._open = False, Sums()
        self._queued = False  # a failed backward leaves it True
        if self.activations is not None and torch.is_grad_enabled():
            self._watching = self.activations.watch()
            self._watching.__enter__()

    def _forward_ends(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._watching is not None:
            self._watching.__exit__(None, None, None)
            self._watching = None
        trained = [
            leaf
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        ]
        for leaf in trained:
            leaf.register_hook(self._backward_goes_on)
        if not trained:
            self._enter(DATA)

    def _backward_goes_on(self, _gradient: torch.Tensor) -> None:
        if not self._queued:
            self._queued = True
            queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        """Queues itself once more, so that it runs after the callbacks that backward queued. The
        reducer waits in one of those callbacks."""
        if self._queued:
            self._queued = False
            queue_callback(self._backward_ends)
        else:
            self._enter(DATA)

    def _step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_mine(optimizer):
            self._enter(OPTIMIZER)

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_mine(optimizer):
            self._enter(DATA)

    def _is_mine(self, optimizer: Optimizer) -> bool:
        if optimizer not in self.optimizers:
            model = self._model()
            known = {id(p) for p in model.parameters()} if model is not None else set()
            groups = optimizer.param_groups
            if not any(id(p) in known for group in groups for p in group["params"]):
                return False
            self.optimizers.add(optimizer)
        return True
