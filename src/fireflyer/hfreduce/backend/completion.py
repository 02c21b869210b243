"""Threads that complete a group's futures and run their callbacks."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from fireflyer.hfreduce.backend.work import Work

_THREADS = 1024
"""Maximum number of threads. A callback that waits for another future blocks its thread, so more
callbacks than this must never wait for one another.
"""


class CompletionThreads:
    """Waits for works to end and completes their futures.

    Collectives end in the order in which they were added, so one thread waits for all of them. When
    a collective ends, that thread passes the waiting on to another thread and then completes the
    future. This order matters, because completing the future runs callbacks, which may wait for
    other futures of the group. Messages end in any order, so each has its own waiting thread.

    The threads belong to an executor, which is joined before the interpreter ends. A thread that
    returns from the engine after that would crash the process.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Work] = deque()
        self._waiting = False  # a thread waits for the queue's first work, or is about to
        self._unsettled = 0
        self._threads: ThreadPoolExecutor | None = None

    def add(self, work: Work) -> None:
        """Schedules the completion of the future of `work`. Never blocks."""
        with self._changed:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "hfreduce-futures")
            self._unsettled += 1
            if not work.in_order:
                self._threads.submit(self._settle, work)
                return
            self._queue.append(work)
            self._hand_on()

    def shutdown(self) -> None:
        """Waits until the futures of all added works are complete, and ends the threads."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsettled == 0)
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def _hand_on(self) -> bool:
        """Makes a thread wait for the queued works; returns False if the caller must wait for them.

        REQUIRES: the lock.
        """
        if self._waiting or not self._queue:
            return True
        assert self._threads is not None
        self._waiting = True
        try:
            self._threads.submit(self._serve)
        except RuntimeError:  # the interpreter is shutting down: no new threads
            return False
        return True

    def _serve(self) -> None:
        handed_on = False
        while not handed_on:
            with self._changed:
                work = self._queue.popleft()
            work.settle_silently()
            with self._changed:
                self._waiting = False
                handed_on = self._hand_on()
            self._settle(work)

    def _settle(self, work: Work) -> None:
        work.settle()
        with self._changed:
            self._unsettled -= 1
            self._changed.notify_all()
