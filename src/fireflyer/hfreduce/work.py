"""The handle of a collective under way."""

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fireflyer._native import hfreduce as native
from fireflyer.errors import CollectiveError, ConfigError, DeadlineExceeded
from fireflyer.hfreduce.uncompiled import uncompiled


class Settler(Protocol):
    """What a work needs of its process group."""

    def settle_later(self, work: "Work") -> None:
        """Completes the work's future from a thread of the group."""

    def failed(self, error: BaseException) -> None:
        """Hears of an operation that ended with an error."""

    def withdraw(self, number: int) -> None:
        """Asks that the operation of this number be cancelled on all ranks."""


class Promise:
    """A future that ends in an error for torch's C++ code, too.

    To C++ an exception set by `torch.futures.Future.set_exception` is a value: DDP's reducer takes it for
    tensors and crashes. What a callback raises is an error everywhere, a RuntimeError that names it.
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
"""The last works on a few numbers that were dropped before a wait for them. torch's C++ code may still hold
one (DDP's join does, of a count of ranks) and wait for it later: for ever, if its Python object has gone."""


def _keep_if_small(
    work: "Work", limit: int = _SMALL_BYTES, keep: Callable[["Work"], None] = _abandoned.append
) -> None:
    """Nothing global may be asked here: at the end of the process it has gone."""
    if sum(tensor.nbytes for tensor in work._result) <= limit:
        keep(work)


@uncompiled
class Work(dist.Work):
    """Operations of the engine and the tensors that they work on, which live until all of them are over.

    Args:
        settler: completes the future of a work that is not over when the future is asked for.
        operations: what was submitted, in order.
        result: what the future and `result()` give: the tensors of the call.
        held: whatever the engine has addresses of besides.
        finish: runs once, in whichever thread first sees the end: copies results to where they belong.
    """

    in_order = True
    """Whether it ends after all works of its group that began before it."""

    def __init__(
        self,
        settler: Settler,
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
        self._promise: Promise | None = None  # until the future is complete
        self._future_device: torch.device | None = None

    def __del__(self, keep: Callable[["Work"], None] = _keep_if_small) -> None:
        if not self._awaited:
            keep(self)

    def is_completed(self) -> bool:
        return all(operation.done() for operation in self._operations)

    def cancel(self) -> None:
        """Asks that the operation be cancelled, on all ranks; returns at once, any rank may ask.

        Rank 0 settles it: an operation whose turn has not come there ends as `Cancelled` everywhere, with its
        tensors untouched; one whose turn has come runs to its end. The group goes on.

        Raises:
            ConfigError: the operation has no priority: nothing else is settled by rank 0 before it runs.
        """
        if any(operation.priority == 0 for operation in self._operations):
            raise ConfigError("only an operation with a priority can be cancelled")
        for operation in self._operations:
            if not operation.done():
                self._settler.withdraw(operation.number)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        """The error of a work that is over, or None."""
        try:
            for operation in self._operations:
                if operation.done():
                    operation.rethrow()
        except Exception as error:  # noqa: BLE001  # this is what was asked for
            return error
        return None

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        """Blocks until the result is in the tensors.

        Raises:
            DeadlineExceeded: after `timeout` (0: none beyond the group's own).
            RankFailed, CollectiveError: see `hfreduce.allreduce`.
            Cancelled: see `cancel`.
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
            self._held = None  # memory of the call, which may be large
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
        """Adds to what runs once at the end, before any wait for it returns."""
        finish = self._finish

        def both() -> None:
            if finish is not None:
                finish()
            more()

        self._finish = both

    def _after_finish(self) -> None:
        """Whoever waits from now on waits for what `finish` has put into the current stream, too."""

    def result(self) -> list[torch.Tensor]:
        """The tensors of the call; waits for them."""
        self.wait()
        return self._result

    def _source_rank(self) -> int:
        """Of a receive that is over: who sent it. torch's name."""
        return self._operations[0].source

    def settle_silently(self) -> None:
        """Waits until it is over, however it ends."""
        for operation in self._operations:
            operation.wait()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the tensors, completed by the group's own thread.

        On a device that torch knows it is complete at once: whoever waits for it makes his stream wait.
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
        """Waits and completes the future, with the error if there is one."""
        assert self._promise is not None
        self.settle_silently()
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001  # handed to whoever waits for the future
            self._promise.fail(error)
        else:
            self._promise.complete(self._result)
        self._promise = None

    def _settled_on(self, device: torch.device) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(torch.cuda.Stream(device)):
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001  # handed to whoever waits for the future
                promise = Promise()
                promise.fail(error)
                return promise.future
            future.set_result(self._result)
        return future


@uncompiled
class Joined(Work):
    """Several works as one, and what to do at their end."""

    def __init__(
        self,
        settler: Settler,
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
    """An allreduce whose result lies once a host. `result()` has it; the tensor of the call stays."""

    def __init__(self, work: Work, like: torch.Tensor) -> None:
        super().__init__(work._settler, work._operations, [], work)
        work._awaited = True  # by this one
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
    """A send or receive. Whoever waits for it moves its bytes meanwhile."""

    in_order = False

    def __init__(
        self,
        settler: Settler,
        post: native.Post,
        operation: native.Operation,
        result: list[torch.Tensor],
        held: object,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(settler, [operation], result, held, finish)
        self._post = post

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        self._post.wait(self._operations[0], seconds if seconds > 0 else -1.0)
        return super().wait(timeout)


class _Nobody:
    def settle_later(self, work: Work) -> None:
        work.settle()

    def failed(self, error: BaseException) -> None:
        pass

    def withdraw(self, number: int) -> None:
        pass


OVER = Work(_Nobody(), [], [])
"""What a synchronous call gives back that was over before it returned."""
