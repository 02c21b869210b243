"""The one thread, or signal handler, at a time that a manager serves."""

import os
import threading
from types import TracebackType

from fireflyer.errors import CheckpointError


class OneAtATime:
    """Refuses whoever comes while another is inside, also the same thread. A forked child is alone again.

    Waiting instead would let the ranks' calls take different orders, and a signal handler wait for
    the code that it interrupts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        """
        Raises:
            CheckpointError: if somebody is inside.
        """
        if self._process != os.getpid():
            self._lock, self._process = threading.Lock(), os.getpid()
        if not self._lock.acquire(blocking=False):
            raise CheckpointError(
                "the checkpoint manager is used by two threads (or a signal handler) at once: call it from "
                "one; handles may be waited for from any"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
