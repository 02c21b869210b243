"""Parameters that wait for their gradients only when somebody looks at them.

While the bucket of a parameter is under way, the parameter's class is `Pending`. Whatever torch function then
gets it, in the next forward or in the script, first makes the bucket arrive; thus nothing reads a value that
an update is still to change, and what is needed last is waited for last. (ByteScheduler, SOSP 2019, crosses
the barrier between steps with hooks on modules; those miss a weight used outside its module's forward.)
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn


class Owner(Protocol):
    """Whoever can make a parameter arrive."""

    stepping: bool
    """Whether the script's `optimizer.step()` was already called: gradients are as good as used up."""

    def arrive(self) -> None:
        """Waits, and calls `restore` for its parameters."""


_owners: dict[int, Owner] = {}
"""By the id of each pending parameter, which the owner keeps alive."""


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
"""What reads neither value nor gradient."""
_DETACH = torch.Tensor.detach
_MAKE = nn.Parameter.__new__.__code__
_CALLER = 2
"""How many frames above `__torch_function__` its caller's is: one is of `torch.compiler.disable`."""


class Waits:
    """What the class of a pending parameter is made of, before its ordinary class."""

    __slots__ = ()

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would look for itself
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _SAFE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [_owners[id(p)] for p in _pending((args, kwargs))]
        used_up = len(found) == 1 and found[0].stepping
        if used_up and (func == _GET_GRAD or (func == _SET_GRAD and args[1] is None)):
            return None
        for owner in found or list(_owners.values()):
            owner.arrive()
        if func is _DETACH and _makes_parameter(sys._getframe(_CALLER)):
            return nn.Parameter(_DETACH(args[0]), requires_grad=False)
        if torch._C._get_tracing_state() is not None:
            return _in_place_of(sys._getframe(_CALLER))(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner_of(self).arrive()
        return copy.deepcopy(self, memo)


class Pending(Waits, nn.Parameter):
    """A pending `nn.Parameter`."""


CLASSES: dict[type, type[Any]] = {nn.Parameter: Pending}
"""The pending class of each ordinary class that has one."""


def _pending(value: Any) -> Iterator[Waits]:
    if isinstance(value, Waits):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _pending(item)
    elif isinstance(value, dict):
        yield from _pending(tuple(value.values()))


def _makes_parameter(caller: FrameType) -> bool:
    """`nn.Parameter(p)` asks for the class of p before p arrives, finds none that it knows, and wants a
    detached tensor of the class that p has by then."""
    return caller.f_code is _MAKE and caller.f_locals["cls"] is nn.Parameter


def _in_place_of(caller: FrameType) -> Callable[..., Any]:
    """A tracer notes who calls, and compares with a trace in which nothing is pending."""
    code = _call.__code__.replace(
        co_filename=caller.f_code.co_filename, co_firstlineno=caller.f_lineno - 1
    )
    return FunctionType(code, {})


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def can_be(parameter: nn.Parameter) -> bool:
    """Whether a parameter can be made pending: a class of its own stays."""
    return type(parameter) in CLASSES


def defer(parameters: Iterable[nn.Parameter], owner: Owner) -> None:
    """Makes them pending, until `restore`."""
    for parameter in parameters:
        _owners[id(parameter)] = owner
        parameter.__class__ = CLASSES[type(parameter)]


def restore(parameters: Iterable[nn.Parameter]) -> None:
    """They are ordinary again; those that were not pending stay as they are."""
    for parameter in parameters:
        if _owners.pop(id(parameter), None) is not None:
            parameter.__class__ = _ordinary(type(parameter))


def _ordinary(kind: type) -> type:
    return next(ordinary for ordinary, waiting in CLASSES.items() if waiting is kind)


def owner_of(parameter: Waits) -> Owner:
    """Whom a pending parameter waits for."""
    return _owners[id(parameter)]


def reads_behind_python(module: nn.Module) -> bool:
    """Compiled and scripted modules get at values of parameters without a call that could be seen."""
    compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    return compiled or isinstance(module, torch.jit.ScriptModule)
