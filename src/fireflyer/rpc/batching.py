"""Batches of requests: the next free thread takes all requests that arrived meanwhile.

Thread contract: one thread calls `add` and `close`; the batcher's threads call the handler.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
MOST = 256
"""Maximum number of requests that are handled together."""


class Batcher(Generic[T]):
    """Queue with its own threads, which start when they are first needed."""

    def __init__(self, handle: Callable[[Sequence[T]], None], threads: int, name: str) -> None:
        """Makes an empty queue. `handle` gets the queued items, in order, and must not raise."""
        self._handle, self._threads, self._name = handle, threads, name
        self._lock = threading.Lock()  # guards the attributes below
        self._waiting: list[T] = []
        self._idle: list[threading.Lock] = []
        self._started = 0
        self._closed = False

    def add(self, item: T) -> None:
        with self._lock:
            self._waiting.append(item)
            idle = self._idle.pop() if self._idle else None
            start = idle is None and self._started < self._threads
            self._started += start
        if idle is not None:
            idle.release()
        elif start:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def close(self) -> None:
        """Drops queued items; handlers in flight end by themselves."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            idle, self._idle = self._idle, []
        for each in idle:
            each.release()

    def _work(self) -> None:
        wake = threading.Lock()
        wake.acquire()
        while True:
            with self._lock:
                if self._closed:
                    return
                taken, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
                if not taken:
                    self._idle.append(wake)
            if taken:
                self._handle(taken)
            else:
                wake.acquire()
