"""Functions of torch and Fireflyer that hooks time, and the hooks.

A hook replaces an attribute of a module or class that is loaded already; hooks import nothing.
Setting an attribute is one atomic step, so calls in other threads see the old or the new function,
never a mixture. Dictionaries of torch that are iterated during a call are never changed: a changed
copy takes their place.
"""

import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fireflyer._native import haiprof
from fireflyer.haiprof.events import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    FRAMEWORK,
    OPTIMIZER,
    UPDATE,
)
from fireflyer.haiprof.inside.buffer import EventBuffer
from fireflyer.haiprof.inside.callbacks import callback_methods

_MISSING = object()

__all__ = ["POINTS", "OptimizerHooks", "Point", "PointHooks", "Replacement"]


class Point(NamedTuple):
    """A function to time."""

    phase: int
    module: str
    attribute: str


_COLLECTIVES = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor",
    "all_gather_object", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "batch_isend_irecv",
)  # fmt: skip

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
"""Package names of Lightning."""

_LOOPS = (
    (DATA, "loops.fetchers", "_DataFetcher.__next__"),
    (DATA, "loops.fetchers", "_PrefetchDataFetcher.__next__"),
    (FORWARD, "strategies.strategy", "Strategy.training_step"),
    (FRAMEWORK, "loops.training_epoch_loop", "_TrainingEpochLoop.on_run_start"),
    (FRAMEWORK, "loops.training_epoch_loop", "_TrainingEpochLoop.advance"),
    (FRAMEWORK, "loops.training_epoch_loop", "_TrainingEpochLoop.on_advance_end"),
    (FRAMEWORK, "loops.fit_loop", "_FitLoop.on_advance_start"),
    (FRAMEWORK, "loops.fit_loop", "_FitLoop.on_advance_end"),
)
"""Lightning's functions for one step and one epoch. Functions for several steps are not timed,
because the phases would depend on whether the session begins before or during such a call."""

POINTS = (
    Point(BACKWARD, "torch.autograd", "_engine_run_backward"),
    Point(DATA, "torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__"),
    Point(DATA, "torch.utils.data.dataloader", "DataLoader.__iter__"),
    Point(DATA, "fireflyer.ffrecord.prefetch", "Prefetcher.__next__"),
    Point(DATA, "fireflyer.datasets.loader", "DistributedLoader.__getitem__"),
    Point(OPTIMIZER, "torch.optim.optimizer", "Optimizer.zero_grad"),
    Point(OPTIMIZER, "torch.nn.modules.module", "Module.zero_grad"),
    Point(OPTIMIZER, "torch.optim.lr_scheduler", "LRScheduler.step"),
    Point(CHECKPOINT, "torch", "save"),
    Point(CHECKPOINT, "torch", "load"),
    Point(CHECKPOINT, "torch.serialization", "save"),
    Point(CHECKPOINT, "torch.serialization", "load"),
    Point(CHECKPOINT, "torch.distributed.checkpoint", "save"),
    Point(CHECKPOINT, "torch.distributed.checkpoint", "load"),
    Point(CHECKPOINT, "torch.distributed.checkpoint", "async_save"),
    Point(CHECKPOINT, "safetensors.torch", "save_file"),
    Point(CHECKPOINT, "fireflyer.checkpoint.manager", "CheckpointManager.should_save"),
    Point(CHECKPOINT, "fireflyer.checkpoint.manager", "CheckpointManager.save"),
    Point(CHECKPOINT, "fireflyer.checkpoint.manager", "CheckpointManager.load"),
    Point(CHECKPOINT, "fireflyer.checkpoint.manager", "CheckpointManager.wait"),
    Point(CHECKPOINT, "fireflyer.checkpoint.manager", "CheckpointManager.before_step"),
    Point(COMMUNICATION, "torch._C._distributed_c10d", "Work.wait"),
    Point(COMMUNICATION, "fireflyer.hfreduce.backend.work", "Work.wait"),
    Point(COMMUNICATION, "fireflyer.hfreduce.torch", "allreduce"),
    Point(COMMUNICATION, "fireflyer.hfreduce", "allreduce"),
    *(Point(COMMUNICATION, "torch.distributed.distributed_c10d", name) for name in _COLLECTIVES),
    *(Point(COMMUNICATION, "torch.distributed", name) for name in _COLLECTIVES),
    *(
        Point(phase, f"{package}.{module}", name)
        for package in _LIGHTNING
        for phase, module, name in _LOOPS
    ),
    Point(DATA, "accelerate.data_loader", "send_to_device"),
    Point(DATA, "transformers.trainer", "Trainer.get_batch_samples"),
    Point(FRAMEWORK, "transformers.trainer", "Trainer._maybe_log_save_evaluate"),
    Point(FRAMEWORK, "transformers.trainer_callback", "CallbackHandler.call_event"),
)


class Replacement:
    """An attribute that a hook replaces for the time of a session."""

    def __init__(self, owner: Any, name: str, hook: Any) -> None:
        self._owner, self._name, self._hook = owner, name, hook
        self._own = vars(owner).get(name, _MISSING)
        setattr(owner, name, hook)

    def undo(self) -> None:
        """Puts the original back, unless other code has replaced the hook in the meantime."""
        if vars(self._owner).get(self._name, _MISSING) is not self._hook:
            return  # other code wrapped the hook, which still passes calls on
        if self._own is _MISSING:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


def owner_of(point: Point) -> tuple[Any, str] | None:
    """Returns the object that holds a point's function, and its name there; None if not loaded.

    A lazy attribute of a module counts as not loaded, because a profiler imports nothing into its
    target. A module counts as not loaded until its import ends, because it may still copy the
    function.
    """
    owner: Any = sys.modules.get(point.module)
    if getattr(getattr(owner, "__spec__", None), "_initializing", False):
        return None
    *path, name = point.attribute.split(".")
    for part in path:
        owner = inspect.getattr_static(owner, part, None)
    if owner is None or inspect.getattr_static(owner, name, None) is None:
        return None
    return owner, name


def timed(original: Callable[..., Any], buffer: EventBuffer, phase: int, name: str) -> Any:
    """Returns a function that calls `original` and records the time of each call."""
    noted = None
    if phase == COMMUNICATION and buffer.collectives is not None:
        from fireflyer.haiprof.inside.collectives import note

        noted = functools.partial(note, buffer, name)
    return haiprof.timed(buffer.log, original, phase, buffer.label((phase, name), name), noted)


def keep_from_compiler(function: Any) -> None:
    """Excludes a hook from torch.compile, but not the function that the hook calls."""
    compiler = sys.modules.get("torch._C._dynamo.eval_frame")
    if compiler is not None and hasattr(compiler, "set_code_exec_strategy"):
        only_itself = compiler._FrameExecStrategy(
            compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        )
        compiler.set_code_exec_strategy(function.__code__, only_itself)


class PointHooks:
    """Hooks on the points and callbacks that are loaded."""

    def __init__(self, buffer: EventBuffer) -> None:
        self._buffer = buffer
        self._hooks: dict[int, Any] = {}  # one hook for a function that has several names
        self._placed: set[tuple[int, str]] = set()

    def search(self) -> Iterator[Replacement]:
        """Installs a hook on each function that has none; yields the object that removes the
        hook."""
        found = [(point.phase, point.attribute, owner_of(point)) for point in POINTS]
        found += [(CALLBACKS, owner.__name__, (owner, name)) for owner, name in callback_methods()]
        for phase, label, place in found:
            if place is None or (id(place[0]), place[1]) in self._placed:
                continue
            owner, name = place
            original = getattr(owner, name)
            hook = self._hooks.get(id(original))
            if hook is None:
                hook = timed(original, self._buffer, phase, label)
                self._hooks[id(original)] = self._hooks[id(hook)] = hook
            self._placed.add((id(owner), name))
            if original is not hook:
                try:
                    yield Replacement(owner, name, hook)
                except (AttributeError, TypeError):  # an immutable type of another release
                    continue


class OptimizerHooks:
    """Hooks around the step of every optimizer.

    Args:
        at_step: called in the training thread after an optimizer's step, with the number of steps
            since the previous call of `at_step`; returns the number of steps until the next call.
    """

    def __init__(self, buffer: EventBuffer, at_step: Callable[[int], int]) -> None:
        self._module = sys.modules["torch.optim.optimizer"]
        self._id = -id(self)  # negative, because torch numbers hooks from 0

        def label_of(optimizer: object) -> int:
            return buffer.label(id(optimizer), type(optimizer).__name__)

        updates = haiprof.Updates(buffer.log, UPDATE, label_of, at_step)
        self._restore = [
            self._insert("_global_optimizer_pre_hooks", updates.before, first=True),
            self._insert("_global_optimizer_post_hooks", updates.after, first=False),
        ]

    def _insert(self, name: str, hook: Any, first: bool) -> Callable[[], None]:
        original = getattr(self._module, name)
        changed = OrderedDict(original)
        changed[self._id] = hook
        changed.move_to_end(self._id, last=not first)
        setattr(self._module, name, changed)

        def restore() -> None:
            current = getattr(self._module, name)
            if current is not changed:
                return
            for key, value in changed.items():  # hooks that other code added meanwhile
                if key != self._id and key not in original:
                    original[key] = value
            setattr(self._module, name, original)

        return restore

    def undo(self) -> None:
        """Removes the hooks."""
        for restore in self._restore:
            restore()
