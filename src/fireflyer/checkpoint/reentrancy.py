"""Guard of a manager's calls: at most one thread or signal handler at a time."""

import os
import threading

from fireflyer.errors import CheckpointError


class ReentrancyGuard:
    """Guard that rejects a second entry, even by the same thread. A forked child starts unlocked.

    A guard that waits would let the ranks' calls take different orders, and a signal handler could
    wait for the code that it interrupts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        """Enters the guard.

        Raises:
            CheckpointError: if a thread or signal handler is inside.
        """
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()
        if not self._lock.acquire(blocking=False):
            raise CheckpointError(
                "the checkpoint manager is used by two threads (or a signal handler) at once: call it from "
                "one thread; handles can be waited for from any thread"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
