"""Handles of collectives in flight."""

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, ConfigError, DeadlineExceeded
from fireflyer.hfreduce.backend.compiler_exclusion import uncompiled


class Completer(Protocol):
    """Methods of the process group that a work needs."""

    def settle_later(self, work: "Work") -> None:
        """Completes the work's future from a thread of the group."""

    def failed(self, error: BaseException) -> None:
        """Called when an operation has ended with an error."""

    def ended(self, work: "Work") -> None:
        """Releases the memory of a work after a wait."""

    def withdraw(self, number: int) -> None:
        """Requests cancellation of the operation with this number on all ranks."""


class Promise:
    """A future whose error is an error for torch's C++ code, too.

    C++ code mistakes an exception set by `torch.futures.Future.set_exception` for a value: DDP's
    reducer mistakes it for tensors and crashes. An exception raised in a callback is an error
    everywhere; C++ code gets a RuntimeError that names it.
    """

    def __init__(self) -> None:
        self._begun: torch.futures.Future[None] = torch.futures.Future()
        self._result: list[torch.Tensor] = []
        self._error: BaseException | None = None
        self.future = self._begun.then(self._end)

    def _end(self, begun: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._result

    def complete(self, result: list[torch.Tensor]) -> None:
        self._result = result
        self._begun.set_result(None)

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._begun.set_result(None)


_SMALL_BYTES = 1024

_abandoned: deque["Work"] = deque(maxlen=8)
"""Latest small works (`_is_small`) that were dropped before a wait.

torch's C++ code may still hold such a work and wait for it later: DDP's join does so with a count
of ranks. That wait would never return without the work's Python object.
"""


def _is_small(work: "Work", limit: int = _SMALL_BYTES) -> bool:
    # `nbytes` rejects sparse tensors.
    return sum(tensor.numel() * tensor.element_size() for tensor in work._result) <= limit


def _keep_if_small(
    work: "Work",
    is_small: Callable[["Work"], bool] = _is_small,
    keep: Callable[["Work"], None] = _abandoned.append,
) -> None:
    """Keeps a dropped work if it is small.

    Uses only its arguments, because globals are gone when the interpreter shuts down.
    """
    if is_small(work):
        keep(work)


@uncompiled
class Work(dist.Work):
    """Operations of the engine and their tensors, which stay alive until all operations are over.

    Args:
        settler: completes the future if the work is still in flight when the future is requested.
        operations: submitted operations, in order.
        result: tensors of the call; the future and `result()` return them.
        held: other objects whose addresses the engine holds.
        finish: copies results to their destination; runs once, in the first thread that sees the
            end.
    """

    in_order = True
    """True if this work ends after all works of its group that began earlier."""

    def __init__(
        self,
        settler: Completer,
        operations: list[native.Operation],
        result: list[torch.Tensor],
        held: object = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._settler = settler
        self._operations = operations
        self._result = result
        self._held = held
        self._finish = finish
        self._lock = threading.Lock()
        self._awaited = False
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None
        self._promise: Promise | None = None  # set until the future is complete
        self._future_device: torch.device | None = None

    def __del__(self, keep: Callable[["Work"], None] = _keep_if_small) -> None:
        if not self._awaited:
            keep(self)

    def is_completed(self) -> bool:
        return all(operation.done() for operation in self._operations)

    def cancel(self) -> None:
        """Requests cancellation on all ranks. Returns at once; any rank may call it.

        Rank 0 decides. An operation that is still queued on rank 0 ends as `Cancelled` on all
        ranks, with its tensors untouched. An operation that rank 0 has started runs to its end. The
        group stays usable.

        Raises:
            ConfigError: the operation has no priority; rank 0 orders only operations with a
                priority.
        """
        if any(operation.priority == 0 for operation in self._operations):
            raise ConfigError("only an operation with a priority can be cancelled")
        for operation in self._operations:
            if not operation.done():
                self._settler.withdraw(operation.number)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """Returns the error of a work that has ended, or None."""
        try:
            for operation in self._operations:
                if operation.done():
                    operation.rethrow()
        except Exception as error:  # noqa: BLE001  # the error is the return value
            return error
        return None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Blocks until the result is in the tensors.

        Raises:
            DeadlineExceeded: `timeout` has passed (0: no limit beyond the group's own).
            RankFailed, CollectiveError: see `hfreduce.allreduce`.
            Cancelled: the operation was cancelled; see `cancel`.
        """
        self._awaited = True
        self._await(timeout)
        if self._finish is not None:
            with self._lock:
                if self._finish is not None:
                    self._finish()
                    self._finish = None
                    self._after_finish()
        if self.is_completed():
            self._held = None  # releases memory of the call, which may be large
            if not _is_small(self):  # for small works see `_abandoned`
                self._settler.ended(self)
        return True

    def _await(self, timeout: datetime.timedelta) -> None:
        seconds = timeout.total_seconds() if timeout else 0.0
        for operation in self._operations:
            if not operation.wait(seconds if seconds > 0 else -1.0):
                raise DeadlineExceeded(f"the collective did not finish within {seconds:g} s")
            try:
                operation.rethrow()
            except CollectiveError as error:
                self._settler.failed(error)
                raise

    def finish_with(self, more: Callable[[], None]) -> None:
        """Adds a callback that runs once at the end, before any wait returns."""
        finish = self._finish

        def both() -> None:
            if finish is not None:
                finish()
            more()

        self._finish = both

    def _after_finish(self) -> None:
        """Makes later waits include operations that `finish` put into the current stream."""

    def result(self) -> list[torch.Tensor]:
        """Waits, then returns the tensors of the call."""
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        """Returns the sender's rank of a receive that has ended. The name is torch's."""
        return self._operations[0].source

    def settle_silently(self) -> None:
        """Waits until the work has ended; raises none of its errors."""
        for operation in self._operations:
            operation.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future of the tensors, which a thread of the group completes.

        If torch knows the streams of the tensors' device, the future is complete at once: a wait
        for it makes the waiter's current stream wait.
        """
        if self._future is None and self._future_device is not None:
            self._future = self._settled_on(self._future_device)
        elif self._future is None:
            self._promise = Promise()
            self._future = self._promise.future
            if self.is_completed():
                self.settle()
            else:
                self._settler.settle_later(self)
        return self._future

    def settle(self) -> None:
        """Waits, then completes the future with the result or the error."""
        assert self._promise is not None
        self.settle_silently()
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  # the future passes the error on
            self._promise.fail(error)
        else:
            self._promise.complete(self._result)
        self._promise = None

    def _settled_on(self, device: torch.device) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(torch.cuda.Stream(device)):
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001  # the future passes the error on
                promise = Promise()
                promise.fail(error)
                return promise.future
            future.set_result(self._result)
        return future


@uncompiled
class Joined(Work):
    """Several works combined into one, with a callback for their end."""

    def __init__(
        self,
        settler: Completer,
        works: list[Work],
        result: list[torch.Tensor],
        finish: Callable[[], None] | None = None,
    ) -> None:
        operations = [operation for work in works for operation in work._operations]
        super().__init__(settler, operations, result, works, finish)
        self._works = works
        self.in_order = all(work.in_order for work in works)
        self._future_device = works[0]._future_device if works else None

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _await(self, timeout: datetime.timedelta) -> None:
        for work in self._works:
            work.wait(timeout)

    def _after_finish(self) -> None:
        for work in self._works:
            work._after_finish()

    def settle_silently(self) -> None:
        for work in self._works:
            work.settle_silently()


@uncompiled
class SharedWork(Work):
    """An allreduce whose result is stored once per host.

    `result()` returns the shared tensor; the tensor of the call stays unchanged.
    """

    def __init__(self, work: Work, like: torch.Tensor) -> None:
        super().__init__(work._settler, work._operations, [], work)
        work._awaited = True  # this object waits for that work
        self._like = like

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        super().wait(timeout)
        with self._lock:
            if not self._result:
                block = torch.from_numpy(self._operations[0].shared())
                self._result = [block.view(self._like.dtype).view(self._like.shape)]
        return True


@uncompiled
class Message(Work):
    """A send or receive. A waiting thread moves the message's bytes itself."""

    in_order = False

    def __init__(
        self,
        settler: Completer,
        p2p: native.P2PEngine,
        operation: native.Operation,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(settler, [operation], result, held, finish)
        self._p2p = p2p

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        self._p2p.wait(self._operations[0], seconds if seconds > 0 else -1.0)
        return super().wait(timeout)


class _NoGroup:
    def settle_later(self, work: Work) -> None:
        work.settle()

    def failed(self, error: BaseException) -> None:
        pass

    def ended(self, work: Work) -> None:
        pass

    def withdraw(self, number: int) -> None:
        pass


OVER = Work(_NoGroup(), [], [])
"""Result of a synchronous call that ended before it returned."""
