"""Attempts that Slurm has not started yet: the requests that they get meanwhile, and how they may
end."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

from fireflyer.errors import PeerLost, TaskError
from fireflyer.hai.engines.membership import Outcome
from fireflyer.log import get_logger

T = TypeVar("T")

_log = get_logger("hai")


class Ended(Exception):
    """End of the attempt before its parts were started."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome
        self.reason = reason


class Pending:
    """Launch or recovery in progress, and the requests that the attempt got meanwhile."""

    def __init__(self) -> None:
        self.asked: Literal["stopped", "suspended"] | None = None
        self.grace_s = 0.0
        self.done = asyncio.Event()
        self._news = asyncio.Event()

    def ask(self, what: Literal["stopped", "suspended"], grace_s: float) -> None:
        if self.asked != "stopped":
            self.asked = what
            self.grace_s = grace_s
        else:
            self.grace_s = min(self.grace_s, grace_s)
        self._news.set()

    async def pause(self, seconds: float) -> None:
        """Waits until a request arrives, for at most `seconds`."""
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()


async def retry_while_unreachable(call: Callable[[], Awaitable[T]], pending: Pending) -> T:
    """Returns the call's result; retries while Slurm does not answer.

    Raises:
        Ended: Slurm rejects the call, or does not answer after the attempt was asked to end.
    """
    while True:
        try:
            return await call()
        except PeerLost as error:
            _log.warning("Slurm does not answer; retrying: %s", error)
        except TaskError as error:
            raise Ended("failed", f"cannot start: {error}") from error
        if pending.asked is not None:
            raise Ended(pending.asked, "Slurm did not answer")
        await pending.pause(1.0)


class Background:
    """Tasks that continue after their caller has returned. An error in a task sets `error`, then
    calls `on_error()`."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    async def cancel(self) -> None:
        """Cancels all tasks; returns when all have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.error = error
            self._on_error()
