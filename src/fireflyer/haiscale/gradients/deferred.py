"""Parameters that wait for their gradients only when they are first used.

While a parameter's bucket is in flight, the parameter's class is `DeferredParameter`. Any torch
function that receives the parameter, in the next forward or in the script, first waits for the
bucket. So no code reads a value before the value's update, and the bucket that is needed last is
waited for last. (ByteScheduler, SOSP 2019, crosses the barrier between steps with hooks on modules.
Such hooks miss a weight that is used outside its module's forward.)
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from fireflyer.haiscale.gradients.unseen_reads import UnseenReads
from fireflyer.torch_internals.core import DisableTorchFunctionSubclass, tracing_state


class GradientOwner(Protocol):
    """Object that can wait for a parameter's gradient."""

    stepping: bool
    """True if the script has already called `optimizer.step()`: gradients count as consumed."""

    def arrive(self) -> None:
        """Waits for the gradients, and calls `restore` for the owner's parameters."""


_owners: dict[int, GradientOwner] = {}
"""Owners by the id of each pending parameter; the owner keeps the parameter alive."""


def _getters(*names: str) -> Iterator[Any]:
    for name in names:
        yield getattr(torch.Tensor, name).__get__


_GRAD: Any = torch.Tensor.grad
_GET_GRAD, _SET_GRAD = _GRAD.__get__, _GRAD.__set__
_SAFE = {
    *_getters("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn"),
    *_getters("is_sparse", "is_cuda", "is_meta", "is_cpu", "nbytes", "itemsize"),
    *(torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.size, torch.Tensor.dim),
    *(torch.Tensor.stride, torch.Tensor.element_size, torch.Tensor.is_floating_point),
    *(torch.Tensor.is_contiguous, torch.Tensor.is_complex, torch.Tensor.storage_offset),
    *(torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
}
"""Functions that read neither value nor gradient."""
_CALLER = 2
"""Number of frames from `__torch_function__` to its caller, including a frame of
`torch.compiler.disable`."""


class DeferredMixin:
    """First base of a pending parameter's class, before its ordinary class."""

    __slots__ = ()

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would trace into it
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _SAFE:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [_owners[id(p)] for p in _pending((args, kwargs))]
        used_up = len(found) == 1 and found[0].stepping
        if used_up and (func == _GET_GRAD or (func == _SET_GRAD and args[1] is None)):
            return None
        for owner in found or list(_owners.values()):
            owner.arrive()
        if tracing_state() is not None:
            return _in_place_of(sys._getframe(_CALLER))(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner_of(self).arrive()
        return copy.deepcopy(self, memo)


class DeferredParameter(DeferredMixin, nn.Parameter):
    """A pending `nn.Parameter`."""


CLASSES: dict[type, type[Any]] = {nn.Parameter: DeferredParameter}
"""Pending class by ordinary class."""


def _pending(value: Any) -> Iterator[DeferredMixin]:
    if isinstance(value, DeferredMixin):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pending(item)
    elif isinstance(value, dict):
        yield from _pending(tuple(value.values()))


def _in_place_of(caller: FrameType) -> Callable[..., Any]:
    """Returns a function that makes calls as if from `caller`.

    A tracer records the call's location and compares it with a trace without pending parameters.
    """
    code = _call.__code__.replace(
        co_filename=caller.f_code.co_filename, co_firstlineno=caller.f_lineno - 1
    )
    return FunctionType(code, {})


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _arrive(arguments: Any) -> None:
    """Makes the pending parameters among these arguments arrive; None: all pending parameters."""
    found = [_owners[id(p)] for p in _pending(arguments) if id(p) in _owners]
    for owner in list(_owners.values()) if arguments is None else found:
        owner.arrive()


_unseen = UnseenReads(_arrive)


def can_be(parameter: nn.Parameter) -> bool:
    """Returns True if a parameter can be made pending; a parameter of a custom class cannot."""
    return type(parameter) in CLASSES


def defer(parameters: Iterable[nn.Parameter], owner: GradientOwner) -> None:
    """Makes parameters pending until `restore`."""
    for parameter in parameters:
        _owners[id(parameter)] = owner
        parameter.__class__ = CLASSES[type(parameter)]
    if _owners:
        _unseen.watch()


def restore(parameters: Iterable[nn.Parameter]) -> None:
    """Makes parameters ordinary again; does not change parameters that are not pending."""
    for parameter in parameters:
        if _owners.pop(id(parameter), None) is not None:
            parameter.__class__ = _ordinary(type(parameter))
    if not _owners:
        _unseen.end()


def _ordinary(kind: type) -> type:
    return next(ordinary for ordinary, waiting in CLASSES.items() if waiting is kind)


def owner_of(parameter: DeferredMixin) -> GradientOwner:
    """Returns the owner for which a pending parameter waits."""
    return _owners[id(parameter)]


def reads_behind_python(module: nn.Module) -> bool:
    """Returns True for a compiled or scripted module, which reads values without
    `__torch_function__`."""
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)
