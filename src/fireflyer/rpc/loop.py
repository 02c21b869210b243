"""Asyncio loop in a separate thread, for synchronous programs."""

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fireflyer.log import get_logger

T = TypeVar("T")
EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Errors of a system or process that has no descriptors or memory left."""
EVERY_S = 10.0
"""Seconds between log lines about connections that cannot be accepted."""


class LoopThread:
    """Loop that runs from construction to `close`; a context manager. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_AcceptErrorHandler())
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call_soon(self, act: Callable[..., object], *arguments: Any) -> None:
        """Calls a function on the loop without waiting."""
        self._loop.call_soon_threadsafe(act, *arguments)

    def close(self) -> None:
        """Cancels running tasks and ends the thread."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def __enter__(self) -> "LoopThread":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _AcceptErrorHandler:
    """Exception handler of the loop; limits the log lines about missing descriptors.

    If the process has no descriptor left, asyncio retries `accept` hundreds of times a second, and
    would log each attempt.
    """

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in EXHAUSTED):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + EVERY_S
            get_logger("rpc").warning("connections cannot be accepted: %s", error.strerror)
