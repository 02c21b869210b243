"""Group commit: one thread writes the batches of all callers as log objects.

Callers queue batches and wait. The committer thread writes all queued batches as one log object.
Meanwhile further batches are queued, so the number of durable writes does not grow with the number
of callers.
"""

import threading
from collections.abc import Callable

from fireflyer.errors import FireflyerError, KvError, NoSpace
from fireflyer.kv.core.writer import Batch

_MOST_QUEUED = 64 << 20
"""Bytes of queued batches beyond which `submit` blocks."""
_MOST_GROUP = 32 << 20


class Ticket:
    """Entry of the queue: a batch and its outcome."""

    __slots__ = ("batch", "bytes", "done", "failure")

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.bytes = sum(map(len, batch.parts))
        self.failure: FireflyerError | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def wait(self) -> None:
        """Waits until the batch is durable; raises the error of its write."""
        self.done.acquire()
        self.done.release()
        if self.failure is not None:
            raise self.failure


class Committer:
    """Queue of batches, and the thread that writes them."""

    def __init__(
        self, append: Callable[[list[Batch]], None], failed: Callable[[FireflyerError], None]
    ) -> None:
        """Starts the thread.

        Args:
            append: function that makes batches durable and visible; only the committer's thread
                calls it.
            failed: callback for an error after which the writer must stop.
        """
        self._append = append
        self._failed = failed
        self._queue: list[Ticket] = []
        self._queued = 0
        self._changed = threading.Condition()
        self._closing = False
        self._failure: FireflyerError | None = None
        self._thread = threading.Thread(target=self._run, name="kv-committer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> Ticket:
        """Queues a batch. Raises the error that stopped the writer."""
        ticket = Ticket(batch)
        with self._changed:
            while self._queued > _MOST_QUEUED and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise KvError("the store is closed")
            self._queue.append(ticket)
            self._queued += ticket.bytes
            if len(self._queue) == 1:
                self._changed.notify_all()
        return ticket

    def fail(self, failure: FireflyerError) -> None:
        """Stops the writer: queued and later batches get this error."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def close(self) -> None:
        """Writes the queued batches and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while tickets := self._next():
            failure = self._failure
            if failure is None:
                try:
                    self._append([ticket.batch for ticket in tickets])
                except NoSpace as error:
                    failure = error
                except FireflyerError as error:
                    failure = error
                    self.fail(error)
                    self._failed(error)
            for ticket in tickets:
                ticket.failure = failure
                ticket.done.release()

    def _next(self) -> list[Ticket]:
        """Waits for batches and returns them; [] means that the thread must end."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            count = size = 0
            for ticket in self._queue:
                if count and size + ticket.bytes > _MOST_GROUP:
                    break
                count, size = count + 1, size + ticket.bytes
            taken, self._queue = self._queue[:count], self._queue[count:]
            self._queued -= size
            self._changed.notify_all()
            return taken

    def drain(self) -> None:
        """Waits until all queued batches are durable. Raises the error that stopped the writer."""
        self.submit(Batch([], {})).wait()
