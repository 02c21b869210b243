"""Registry of the copies that overlap training.

The registry ends the copies before code changes tensors without advancing torch's version counters.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

# A set's add, discard and list() are each atomic under the interpreter's lock.
_under_way: "set[Releasable]" = set()
_hooked = False


class Releasable(Protocol):
    """Copy whose sources must not change until `release` returns; any thread may call `release`."""

    def release(self) -> None: ...


def hook_optimizers() -> None:
    """Makes every later step of any torch optimizer in this process start with `end_copies`.

    Fused optimizers do not advance the version counters of the tensors that they change. The hook
    is never removed, because a removal during another thread's step would break torch's loop over
    the hooks.
    """
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    end_copies()


def end_copies() -> None:
    """Waits until the sources of all copies of this process may change."""
    if _under_way:
        for copy in list(_under_way):
            copy.release()


def begun(copy: Releasable) -> None:
    """Registers a copy as in flight until `ended`."""
    _under_way.add(copy)


def ended(copy: Releasable) -> None:
    """Removes a copy whose sources may change or whose result will not be used."""
    _under_way.discard(copy)


@contextlib.contextmanager
def filled(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Lets code in the block fill the tensors without torch's knowledge.

    At the end the tensors' version counters advance, so that autograd and other users of the
    counters see a change.
    """
    end_copies()
    try:
        yield
    finally:
        torch.autograd.graph.increment_version(tensors)


os.register_at_fork(after_in_child=_under_way.clear)  # the copies continue in the parent
