"""SaveHandle: one save on its way, as whoever asked for it sees it."""

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from fireflyer.checkpoint.datafile import Written
from fireflyer.checkpoint.staging import Staged
from fireflyer.errors import CheckpointError

_LOOK_S = 0.25


class SaveHandle:
    """One save on its way."""

    def __init__(
        self,
        step: int,
        future: Future[Written],
        staged: Staged,
        in_memory: Future[bool],
        look: Callable[[], object],
    ) -> None:
        """`look` is called now and then while somebody waits; it may bring the end nearer."""
        self.step = step
        self.stall_s = 0.0
        """Seconds that `save` kept its caller: waiting for the save before, and the copy."""
        self._future = future
        self._staged = staged
        self._in_memory = in_memory
        self._look = look
        self._reported = False
        self._process = os.getpid()

    @property
    def done(self) -> bool:
        """Whether the save has been committed or has failed."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the checkpoint is durable and whole.

        Raises:
            CheckpointError, StorageError: why it is not.
            CheckpointError: in a forked child, which cannot know.
            TimeoutError: if `timeout_s` passes first; the save goes on.
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
        """Whether the nodes hold the whole save in memory, so that it outlives this job's processes."""
        return self._in_memory.done() and self._in_memory.result()

    def wait_in_memory(self, timeout_s: float | None = None) -> bool:
        """Returns `in_memory` once it is decided; False without a memory tier, or where it was skipped.

        Raises:
            CheckpointError: in a forked child, which cannot know.
            TimeoutError: if `timeout_s` passes first; the save goes on.
        """
        self._check_process()
        self._staged.release()
        return self._in_memory.result(timeout_s)

    def settle(self, look: Callable[[], object] | None = None) -> None:
        """Waits, without an error. `look`: instead of the handle's own."""
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
        """Why a save that is over has failed, if nobody has heard of it yet; None otherwise."""
        return None if self._reported else self._future.exception()

    def release(self) -> None:
        """Returns when the state may change."""
        self._staged.release()

    def is_of_this_process(self) -> bool:
        """False in a forked child: the save goes on in its parent."""
        return self._process == os.getpid()

    def _check_process(self) -> None:
        if not self.is_of_this_process():
            raise CheckpointError(
                f"the save of step {self.step} is that of process {self._process}, which this one was "
                "forked from: only there one can wait for it"
            )

    def written(self) -> Written | None:
        """What is where, after a save that has succeeded."""
        return self._future.result() if self._future.exception() is None else None

    def raise_unreported(self) -> None:
        """`wait`, unless an earlier `wait` has told how it ended."""
        if not self._reported:
            self.wait()
