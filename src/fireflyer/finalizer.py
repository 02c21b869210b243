"""Finalizer callbacks of dropped objects, run in a dedicated thread.

The garbage collector runs at any allocation, in any thread, even in a thread that holds a lock. A
callback of `weakref.finalize` or a `__del__` that needs that lock would deadlock. Therefore this
module only queues the callback; a thread that holds no lock calls it.
"""

import atexit
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fireflyer.log import get_logger

_Call = tuple[Callable[..., object], tuple[Any, ...]]

_calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # `put` is reentrant
_thread: threading.Thread | None = None
_starting = threading.Lock()
_registered = False
_alive: "dict[Finalizer, None]" = {}  # in order of creation


class Finalizer:
    """Callback `callback(*args)` that runs once.

    The call happens soon after `holder` is dropped, at process exit, or when the finalizer itself
    is called. Neither `callback` nor `args` may refer to `holder`. A forked child calls nothing:
    finalizers that its parent created stay with the parent.
    """

    def __init__(self, holder: object, callback: Callable[..., object], *args: Any) -> None:
        start()
        self._call: _Call = callback, args
        self._holder = weakref.ref(holder, self._dropped)
        _alive[self] = None

    def __call__(self) -> None:
        """Runs the callback now, unless it ran before or was detached."""
        if self.detach():
            callback, args = self._call
            callback(*args)

    def detach(self) -> bool:
        """Cancels the callback; returns False if it ran before or was detached."""
        return _alive.pop(self, self) is None

    def _dropped(self, _: object) -> None:
        # After `_at_exit` the interpreter sets this module's names to None.
        if _alive is not None and self.detach():
            _calls.put(self._call)


def later(callback: Callable[..., object], *args: Any) -> None:
    """Queues a callback for the thread that `start` started. A `__del__` may call this function,
    because it takes no lock."""
    _calls.put((callback, args))


def start() -> None:
    """Starts the thread of this process if it does not run."""
    global _thread, _registered
    with _starting:
        if not _registered:  # not at import: a program without finalizers gets no handlers
            atexit.register(_at_exit)
            os.register_at_fork(after_in_child=_after_fork)
            _registered = True
        if _thread is None:
            _thread = threading.Thread(
                target=_work, args=(_calls,), name="fireflyer-finalizer", daemon=True
            )
            _thread.start()


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        _do(*call)
        del call


def _do(callback: Callable[..., object], args: tuple[Any, ...]) -> None:
    try:
        callback(*args)
    except Exception:  # noqa: BLE001  # the remaining callbacks must run, too
        get_logger("finalizer").exception("a finalizer failed")


def _at_exit() -> None:
    for finalizer in reversed(list(_alive)):
        _do(finalizer, ())
    if _thread is not None:
        _calls.put(None)
        _thread.join()


def _after_fork() -> None:
    global _calls, _thread, _starting
    _calls, _thread, _starting = queue.SimpleQueue(), None, threading.Lock()
    _alive.clear()
