"""Waits for pending steps before code reads or replaces `optimizer.state`.

`state` is a plain attribute, so the optimizer's class is replaced by a subclass with a property,
as long as its steps can be pending.
"""

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

_RECONSTRUCTOR: Any = copyreg._reconstructor  # type: ignore[attr-defined]
_settle: dict[int, Callable[[], None]] = {}
"""Functions that wait for pending steps, by the id of each watched optimizer."""


def watch(optimizer: Optimizer, settle: Callable[[], None]) -> None:
    """Calls `settle` before each access to `optimizer.state`, until `end`."""
    if not hasattr(type(optimizer), "state"):  # a property of the class computes the state itself
        _settle[id(optimizer)] = settle
        kind: Any = type(optimizer)
        optimizer.__class__ = _watched(kind)


def end(optimizer: Optimizer) -> None:
    """Restores the optimizer's class; does nothing for an optimizer that is not watched."""
    if _settle.pop(id(optimizer), None) is not None:
        optimizer.__class__ = type(optimizer).__mro__[1]


@functools.cache
def _watched(kind: Any) -> Any:
    def read(optimizer: Optimizer) -> Any:
        _settle[id(optimizer)]()
        return vars(optimizer)["state"]

    def replace(optimizer: Optimizer, value: Any) -> None:
        _settle[id(optimizer)]()
        vars(optimizer)["state"] = value

    def reduce(optimizer: Optimizer, protocol: Any) -> Any:
        _, _, *values = super(watched, optimizer).__reduce_ex__(protocol)
        return _RECONSTRUCTOR, (kind, object, None), *values  # an ordinary optimizer

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    watched: Any = type(
        kind.__name__,
        (kind,),
        {**names, "state": property(read, replace), "__reduce_ex__": reduce},
    )
    return watched
