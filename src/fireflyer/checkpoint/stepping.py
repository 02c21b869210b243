"""Overlapped copies of this process, ended before what changes tensors unseen by version counters."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

# A set's add, discard and list() are each one step under the interpreter's lock.
_under_way: "set[Releasable]" = set()
_hooked = False


class Releasable(Protocol):
    """A copy whose sources must stand still until `release` returns; for any thread."""

    def release(self) -> None: ...


def hook_optimizers() -> None:
    """From now on every step of any torch optimizer in this process begins with `end_copies`.

    Fused optimizers do not move the version counters of what they change. The hook stays for good: to remove
    it while another thread steps would break the loop in which torch calls the hooks.
    """
    global _hooked
    if not _hooked:
        _hooked = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    end_copies()


def end_copies() -> None:
    """Returns when the sources of all copies of this process may change."""
    if _under_way:
        for copy in list(_under_way):
            copy.release()


def begun(copy: Releasable) -> None:
    """The copy is under way until `ended`."""
    _under_way.add(copy)


def ended(copy: Releasable) -> None:
    """Its sources may change, or it will not be used."""
    _under_way.discard(copy)


@contextlib.contextmanager
def filled(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, the tensors may be filled behind torch's back; autograd, and whoever else looks at version
    counters, sees at the end that they have changed."""
    end_copies()
    try:
        yield
    finally:
        torch.autograd.graph.increment_version(tensors)


os.register_at_fork(after_in_child=_under_way.clear)  # the copies go on in the parent
