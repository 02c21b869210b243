"""Runner of transactions: retries conflicts and resolves uncertain commits by records.

A record `R <client u64> <number u64>` holds the answer to a request. The request's own transaction
writes it, and each run reads it first. Therefore a retry of a request at any time and at any server
gets the first answer. Of two concurrent runs of a request only one can commit.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

from fireflyer.errors import FireflyerError, Unavailable
from fireflyer.fs3.kv.transaction import Engine, Outcome, Transaction

T = TypeVar("T")

RETRIES = 256


def record_key(client: int, number: int) -> bytes:
    return b"R" + client.to_bytes(8, "big") + number.to_bytes(8, "big")


class Job(Generic[T]):
    """Body of a transaction to run, and its result.

    Args:
        body: function that reads and writes one transaction and returns the answer; it may run
            several times. If it raises a FireflyerError, the error is the job's result and nothing
            is written.
        request: (client, number), the job's idempotency key; the body's answers must then be bytes.
            None: the body must be idempotent.
        keys: keys that the body is known to read; jobs that run together read them in one step.
        before: callback before each attempt, while no transaction is open.
        refusal: for a retried request: function that encodes a record of the body's error. Without
            the record, a delayed copy of the request could be executed after its client got the
            error.
    """

    __slots__ = ("_record", "_refusal", "before", "body", "keys", "result")

    def __init__(
        self,
        body: Callable[[Transaction], T],
        request: tuple[int, int] | None = None,
        refusal: Callable[[FireflyerError], bytes] | None = None,
        keys: Sequence[bytes] = (),
        before: Callable[[], None] | None = None,
    ) -> None:
        self.body = body
        self.before = before
        self._refusal = refusal
        self.result: T | FireflyerError | None = None
        self._record = record_key(*request) if request is not None else None
        self.keys = keys if self._record is None else (self._record, *keys)

    def attempt(self, engine: Engine, transaction: Transaction) -> Transaction | None:
        """Runs the body; returns the transaction to commit, or None if there is nothing to commit.

        The method ends the given transaction unless it returns that transaction. If the method
        raises, the caller must end the transaction.
        """
        try:
            if self._record is not None:
                done = transaction.get(self._record)
                if done is not None:
                    self.result = cast(T, done)
                    transaction.end()
                    return None
            self.result = self.body(transaction)
        except FireflyerError as error:
            transaction.end()
            self.result = error
            return self._refused(engine, error)
        if not transaction.changes:
            transaction.end()
            return None
        if self._record is not None:
            transaction.set(self._record, cast(bytes, self.result))
        return transaction

    def _refused(self, engine: Engine, error: FireflyerError) -> Transaction | None:
        """Returns the transaction that records the body's error, if a record is needed."""
        if self._record is None or self._refusal is None:
            return None
        transaction = engine.begin()
        done = transaction.get(self._record)
        if done is not None:
            self.result = cast(T, done)
            transaction.end()
            return None
        transaction.set(self._record, self._refusal(error))
        return transaction


def run_many(engine: Engine, jobs: Sequence[Job[T]], *, retries: int = RETRIES) -> None:
    """Runs all jobs and sets `Job.result`; jobs that are ready together share a group commit.

    A job that conflicts `retries` times in a row has Unavailable as its result.

    Raises:
        StorageError: the store failed.
    """
    waiting = list(jobs)
    for _ in range(retries):
        for job in waiting:
            if job.before is not None:
                job.before()
        ready: list[tuple[Job[T], Transaction]] = []
        begun = engine.begin_many(len(waiting), [key for job in waiting for key in job.keys])
        try:
            for job, own in zip(waiting, begun, strict=True):
                transaction = job.attempt(engine, own)
                if transaction is not None:
                    # The handler below ends this transaction if a later job raises.
                    ready.append((job, transaction))
        except BaseException:
            for transaction in (*begun, *(refused for _, refused in ready)):
                transaction.end()
            raise
        if not ready:
            return
        outcomes = engine.commit_many([transaction for _, transaction in ready])
        waiting = [
            job
            for (job, _), outcome in zip(ready, outcomes, strict=True)
            if outcome is not Outcome.COMMITTED
        ]
        if not waiting:
            return
    for job in waiting:
        job.result = Unavailable(
            f"the transaction conflicted with others {retries} times; try again later"
        )


def run(
    engine: Engine,
    body: Callable[[Transaction], T],
    *,
    request: tuple[int, int] | None = None,
    retries: int = RETRIES,
) -> T:
    """Runs one body (see Job); returns its answer, or raises its error."""
    job = Job(body, request)
    run_many(engine, (job,), retries=retries)
    if isinstance(job.result, FireflyerError):
        raise job.result
    return cast(T, job.result)
