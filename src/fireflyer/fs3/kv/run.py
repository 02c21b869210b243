"""Runs bodies as transactions: retries conflicts, resolves uncertain commits by idempotency records.

A record `R <client u64> <number u64>` holds the answer of a request and is written by the request's own
transaction. Each run reads it first, so a request that is sent again, at once or later, here or to another
server, gets the answer of the time that it was done; and of two runs of one request only one can commit.
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
    """One body to run.

    Args:
        body: reads and writes one transaction and returns the answer; it may be run several times. What it
            raises of FireflyerError is the job's result, and nothing is written.
        request: (client, number) that names this job for ever; the body's answers must then be bytes.
            Without one the body must be harmless when it takes effect twice.
        refusal: of a request that was sent before: what to record where the body raises. Without it a copy of
            the request that comes late would be done, though its client was told that it was refused.
    """

    __slots__ = ("_record", "_refusal", "body", "result")

    def __init__(
        self,
        body: Callable[[Transaction], T],
        request: tuple[int, int] | None = None,
        refusal: Callable[[FireflyerError], bytes] | None = None,
    ) -> None:
        self.body = body
        self._refusal = refusal
        self.result: T | FireflyerError | None = None
        self._record = record_key(*request) if request is not None else None

    def attempt(self, engine: Engine) -> Transaction | None:
        """Runs the body; the transaction to commit, or None if there is nothing to commit."""
        transaction = engine.begin()
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
        except BaseException:
            transaction.end()
            raise
        if not transaction.changes:
            transaction.end()
            return None
        if self._record is not None:
            transaction.set(self._record, cast(bytes, self.result))
        return transaction

    def _refused(self, engine: Engine, error: FireflyerError) -> Transaction | None:
        """The transaction that records a refusal, where one is wanted."""
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
    """Runs every job; those that are ready at once share one group commit. Results are in `Job.result`.

    Raises:
        Unavailable: a job conflicted `retries` times in a row.
        StorageError: the store failed.
    """
    waiting = list(jobs)
    for _ in range(retries):
        ready: list[tuple[Job[T], Transaction]] = []
        try:
            for job in waiting:
                transaction = job.attempt(engine)
                if transaction is not None:
                    ready.append((job, transaction))  # ended below if a later one raises
        except BaseException:
            for _, transaction in ready:
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
    raise Unavailable(f"a transaction conflicted with others {retries} times; try again later")


def run(
    engine: Engine,
    body: Callable[[Transaction], T],
    *,
    request: tuple[int, int] | None = None,
    retries: int = RETRIES,
) -> T:
    """Runs one body; see Job. Returns its answer, or raises what it raised."""
    job = Job(body, request)
    run_many(engine, (job,), retries=retries)
    if isinstance(job.result, FireflyerError):
        raise job.result
    return cast(T, job.result)
