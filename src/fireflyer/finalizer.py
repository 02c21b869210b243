"""What is done when an object is dropped, in a thread of its own.

The garbage collector runs wherever something is allocated, in any thread, also in one that holds a lock. A
callback of `weakref.finalize` or a `__del__` that needs that lock would wait for ever. So here it is only put
into a queue, and called by a thread that holds nothing.
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

_calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()  # `put` may interrupt itself
_thread: threading.Thread | None = None
_starting = threading.Lock()
_alive: "dict[Finalizer, None]" = {}  # in order of age


class Finalizer:
    """Calls `callback(*args)` once: soon after `holder` is dropped, at the end of the process, or when it is
    called itself. Neither callback nor arguments may refer to `holder`.

    A forked child leaves what its parent made to its parent: there it calls nothing.
    """

    def __init__(self, holder: object, callback: Callable[..., object], *args: Any) -> None:
        start()
        self._call: _Call = callback, args
        self._holder = weakref.ref(holder, self._dropped)
        _alive[self] = None

    def __call__(self) -> None:
        """Calls back now, unless that was done."""
        if self.detach():
            callback, args = self._call
            callback(*args)

    def detach(self) -> bool:
        """There is nothing to call any more; False if there was not before."""
        return _alive.pop(self, self) is None

    def _dropped(self, _: object) -> None:
        if self.detach():
            _calls.put(self._call)


def later(callback: Callable[..., object], *args: Any) -> None:
    """Calls back in the thread, which `start` has started; for a `__del__`. Takes no lock."""
    _calls.put((callback, args))


def start() -> None:
    """Starts the thread of this process if need be."""
    global _thread
    with _starting:
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
    except Exception:  # noqa: BLE001  # the others are to be called, too
        get_logger("finalizer").exception("what was dropped did not end as it should")


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


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
