"""Synchronous code in virtual time: a thread that runs only while the scheduler waits for it."""

import threading
from collections.abc import Callable
from typing import Any

from tests.fs3.sim.world import Process


class Killed(BaseException):
    """Unwinds a fiber whose process has crashed."""


class Fiber:
    """Runs `body(fiber)` for a process; `done(result)` is called in the scheduler when it returns.

    Thread contract: exactly one of the scheduler and the fibers runs at a time, and control passes by
    `_go` and `_back` only; so a history stays a function of its seed.
    """

    def __init__(
        self, process: Process, body: Callable[["Fiber"], Any], done: Callable[[Any], None]
    ) -> None:
        self.process = process
        self._body = body
        self._done = done
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._killed = False
        self._over = False
        self._result: Any = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        self.resume()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._killed:
                self._result = self._body(self)
        except Killed:
            pass
        except BaseException as failure:  # noqa: BLE001  # raised again in the scheduler
            self._failure = failure
        self._over = True
        self._back.release()

    def resume(self) -> None:
        """From the scheduler: lets the fiber run until it sleeps or ends."""
        self._go.release()
        self._back.acquire()
        if not self._over:
            return
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        if not self._killed:
            self._done(self._result)

    def sleep(self, delay: float) -> None:
        """From inside: comes back after `delay` seconds, or never."""
        self.process.later(delay, self.resume)
        self._back.release()
        self._go.acquire()
        if self._killed:
            raise Killed

    def kill(self) -> None:
        """From the scheduler: the fiber ends where it sleeps."""
        if not self._over:
            self._killed = True
            self.resume()
