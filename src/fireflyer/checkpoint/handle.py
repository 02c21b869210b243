"""SaveHandle: handle of a save in flight, for the caller of `save`."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from fireflyer.checkpoint.save.data_file import Written
from fireflyer.checkpoint.save.staging import Staged
from fireflyer.errors import CheckpointError

_LOOK_S = 0.25


class SaveHandle:
    """Handle of a save in flight."""

    def __init__(
        self,
        step: int,
        future: Future[Written],
        staged: Staged,
        in_memory: Future[bool],
        look: Callable[[], object],
    ) -> None:
        """`look` is called periodically during a wait; it may end the save early."""
        self.step = step
        self.stall_s = 0.0
        """Seconds that `save` blocked its caller: the wait for the previous save, and the copy."""
        self._future = future
        self._staged = staged
        self._in_memory = in_memory
        self._look = look
        self._reported = False
        self._process = os.getpid()

    @property
    def done(self) -> bool:
        """True if the save has been committed or has failed."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the checkpoint is durable and complete.

        Raises:
            CheckpointError, StorageError: if the save failed.
            CheckpointError: in a forked child, which cannot know the outcome.
            TimeoutError: if `timeout_s` passes first; the save continues.
        """
        self._check_process()
        try:
            self._staged.release()
            self._await_end(timeout_s, self._look)
            self._future.result()
        finally:
            self._reported = self._future.done()

    @property
    def in_memory(self) -> bool:
        """True if the nodes hold the complete save in memory, so it outlives this job's
        processes."""
        return self._in_memory.done() and self._in_memory.result()

    def wait_in_memory(self, timeout_s: float | None = None) -> bool:
        """Waits until `in_memory` is decided, and returns it.

        Returns False if there is no memory tier or the tier was skipped.

        Raises:
            CheckpointError: in a forked child, which cannot know the outcome.
            TimeoutError: if `timeout_s` passes first; the save continues.
        """
        self._check_process()
        self._staged.release()
        return self._in_memory.result(timeout_s)

    def settle(self, look: Callable[[], object] | None = None) -> None:
        """Waits for the end of the save; raises no error. `look` replaces the handle's own
        `look`."""
        self._staged.release()
        self._await_end(None, look or self._look)

    def _await_end(self, timeout_s: float | None, look: Callable[[], object]) -> None:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._future.done():
            look()
            left = max(0.0, end - time.monotonic())
            done, _ = wait([self._future], min(_LOOK_S, left))
            if not done and left == 0.0:
                raise TimeoutError

    def failure(self) -> BaseException | None:
        """Returns a finished save's error that no `wait` has raised yet; None otherwise."""
        return None if self._reported else self._future.exception()

    def release(self) -> None:
        """Waits until the caller may change the state."""
        self._staged.release()

    def is_of_this_process(self) -> bool:
        """Returns False in a forked child, because the save continues in its parent."""
        return self._process == os.getpid()

    def _check_process(self) -> None:
        if not self.is_of_this_process():
            raise CheckpointError(
                f"the save of step {self.step} belongs to the parent, process {self._process}: wait for "
                "it there"
            )

    def written(self) -> Written | None:
        """Returns the places of the pieces after a successful save; None otherwise."""
        return self._future.result() if self._future.exception() is None else None

    def raise_unreported(self) -> None:
        """Calls `wait`, unless an earlier `wait` already reported the outcome."""
        if not self._reported:
            self.wait()
