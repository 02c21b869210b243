"""Isolation from torch's thread-local state: code runs as at the top level of a script.

A deferred step runs at the first use of a parameter. That use may be in a forward under autocast or
in inference mode, inside `torch.func`, a compiler or tracer, or in the modes of activation
checkpointing. None of these may affect the optimizer, so `isolated_torch_state` suspends them. The
dispatcher's keys are set to those of a new thread, so other states are suspended, too.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C
_NOTHING = contextlib.nullcontext()


def isolated_torch_state() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which no mode, transformation or tracer sees the operations.

    Inside, gradients are enabled and new tensors are ordinary tensors. Only the device of
    `torch.set_default_device` stays. The context takes 2 us if nothing is active.
    """
    return _NOTHING if _is_isolated() else _suspended()


def _is_isolated() -> bool:
    include, exclude = _keys()
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not _C._len_torch_function_stack()
        and not torch.compiler.is_compiling()
        and _C._dispatch_tls_local_include_set() == include
        and _C._dispatch_tls_local_exclude_set() == exclude
    )


@functools.cache
def _keys() -> tuple[Any, Any]:
    """Returns the dispatch keys that a new thread includes and excludes."""
    found = []

    def look() -> None:
        found.append((_C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


@contextlib.contextmanager
def _suspended() -> Iterator[None]:
    with (
        _C._InferenceMode(False),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        _no_tracing(),
        _no_compiling(),
        _no_function_modes(),
        _C._ForceDispatchKeyGuard(*_keys()),
    ):
        yield


@contextlib.contextmanager
def _no_tracing() -> Iterator[None]:
    before = _C._get_tracing_state()
    if before is None:
        yield
        return
    _C._set_tracing_state(None)
    try:
        yield
    finally:
        _C._set_tracing_state(before)


@contextlib.contextmanager
def _no_compiling() -> Iterator[None]:
    """Hides compilation: otherwise compilers read parameters, and optimizers compute
    differently."""
    flags: Any = torch.compiler
    before = flags._is_compiling_flag, flags._is_exporting_flag
    flags._is_compiling_flag = flags._is_exporting_flag = False
    try:
        yield
    finally:
        flags._is_compiling_flag, flags._is_exporting_flag = before


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    modes = [_pop_mode() for _ in range(_C._len_torch_function_stack())]
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if default is not None:
        _push_mode(default)
    try:
        yield
    finally:
        if default is not None:
            _pop_mode()
        for mode in reversed(modes):
            _push_mode(mode)
