"""Waits for pending steps before code reads or replaces `optimizer.state`. A step is pending if the
script has requested the step and the gradients have not arrived.

`state` is a plain attribute. Therefore the optimizer's class is replaced by a subclass with a
property as long as the optimizer's steps can be pending.
"""

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

_RECONSTRUCTOR: Any = copyreg._reconstructor  # type: ignore[attr-defined]
_SETTLE = "_fireflyer_settle"
"""Name of the optimizer's attribute with the function that waits for pending steps. As an
attribute, the function is freed with the optimizer."""


def watch(optimizer: Optimizer, settle: Callable[[], None]) -> None:
    """Calls `settle` before each access to `optimizer.state`, until `end`."""
    if not hasattr(type(optimizer), "state"):  # a property of the class computes the state itself
        vars(optimizer)[_SETTLE] = settle
        kind: Any = type(optimizer)
        optimizer.__class__ = _watched(kind)


def end(optimizer: Optimizer) -> None:
    """Restores the optimizer's class; does nothing for an optimizer that is not watched."""
    if vars(optimizer).pop(_SETTLE, None) is not None:
        optimizer.__class__ = type(optimizer).__mro__[1]


@functools.cache
def _watched(kind: Any) -> Any:
    def read(optimizer: Optimizer) -> Any:
        vars(optimizer)[_SETTLE]()
        return vars(optimizer)["state"]

    def replace(optimizer: Optimizer, value: Any) -> None:
        vars(optimizer)[_SETTLE]()
        vars(optimizer)["state"] = value

    def reduce(optimizer: Optimizer, protocol: Any) -> Any:
        _, _, state, *values = super(watched, optimizer).__reduce_ex__(protocol)
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != _SETTLE}
        return _RECONSTRUCTOR, (kind, object, None), state, *values  # an ordinary optimizer

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    watched: Any = type(
        kind.__name__,
        (kind,),
        {**names, "state": property(read, replace), "__reduce_ex__": reduce},
    )
    return watched
