"""Isolation from torch's thread-local state: code runs as at the top level of a script.

A deferred step runs at the first use of a parameter. That use may be in a forward under autocast or
in inference mode, inside `torch.func`, a compiler or tracer, or in the modes of activation
checkpointing. None of these may affect the optimizer, so `isolated_torch_state` suspends them. It
also sets the dispatch keys to those of a new thread, which suspends any other state that torch
keeps in dispatch keys.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from fireflyer.torch_internals import core

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
        and not core.function_modes()
        and not torch.compiler.is_compiling()
        and core.dispatch_includes() == include
        and core.dispatch_excludes() == exclude
    )


@functools.cache
def _keys() -> tuple[Any, Any]:
    """Returns the dispatch keys that a new thread includes and excludes."""
    found = []

    def look() -> None:
        found.append((core.dispatch_includes(), core.dispatch_excludes()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


@contextlib.contextmanager
def _suspended() -> Iterator[None]:
    with (
        core.InferenceMode(False),
        core.disable_current_modes(),
        core.temporarily_clear_interpreter_stack(),
        _no_tracing(),
        core.not_compiling(),
        _no_function_modes(),
        core.ForceDispatchKeyGuard(*_keys()),
    ):
        yield


@contextlib.contextmanager
def _no_tracing() -> Iterator[None]:
    before = core.tracing_state()
    if before is None:
        yield
        return
    core.set_tracing_state(None)
    try:
        yield
    finally:
        core.set_tracing_state(before)


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    modes = [core.pop_function_mode() for _ in range(core.function_modes())]
    default = getattr(core.default_device, "device_context", None)
    if default is not None:
        core.push_function_mode(default)
    try:
        yield
    finally:
        if default is not None:
            core.pop_function_mode()
        for mode in reversed(modes):
            core.push_function_mode(mode)
