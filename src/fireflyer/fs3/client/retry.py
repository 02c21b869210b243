"""Retry loop for the pieces of a batch: with a new routing, at another node, or unchanged."""

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Protocol

from fireflyer._native.fs3.client import ANY_NODE, Outcome, Pieces
from fireflyer.errors import (
    CorruptedFile,
    FileTimeout,
    FireflyerError,
    NoSpace,
    StorageError,
    Unavailable,
)
from fireflyer.fs3.client.settings import Settings

PAUSE_S = 0.01
"""First pause between attempts, in seconds; further pauses double."""
LONGEST_PAUSE_S = 0.5
"""Longest pause between attempts, in seconds."""
ROUNDS = 2
"""Number of damaged answers of each replica after which the bytes count as lost. There is more than
one, because a repair may succeed between two answers."""

DAMAGED = {Outcome.CORRUPT, Outcome.MISMATCH}
ELSEWHERE = {
    *(*DAMAGED, Outcome.IO_ERROR, Outcome.LOST, Outcome.LATE, Outcome.UNREACHABLE),
}
"""Outcomes after which a read uses another node."""
OUTDATED = {
    *(Outcome.STALE_ROUTING, Outcome.NO_ROUTE, Outcome.LOST, Outcome.LATE, Outcome.UNREACHABLE),
}
"""Outcomes after which the routing may have changed."""


class Routes(Protocol):
    """Methods of the cluster that the retry loop needs."""

    damaged_at: set[int]
    """Nodes that sent damaged bytes."""

    @property
    def version(self) -> int: ...

    def wait(self, seen: int, seconds: float, *, ask: bool) -> None: ...

    def serving(self, chain: int) -> list[int]:
        """Returns the nodes of the serving targets, the head's node first."""
        ...


class Failure(NamedTuple):
    """Piece whose last attempt failed: its number in the batch, the outcome, the chain of its
    chunk, and the node that was asked."""

    piece: int
    outcome: Outcome
    chain: int
    node: int


class Retry:
    """Retry state of one batch; decides after each attempt which pieces to retry, and where.

    Not thread-safe.

    Args:
        what: name of the call in errors.
    """

    def __init__(self, routes: Routes, settings: Settings, what: str, *, writes: bool) -> None:
        self._routes = routes
        self._settings = settings
        self._what = what
        self._writes = writes
        self._damaged_answers: dict[int, Counter[int]] = {}  # damaged answers by piece and node
        self._failed: dict[int, set[int]] = {}  # nodes that failed, by piece

    def run(
        self,
        attempt: Callable[[Pieces, float], int],
        batch: Pieces,
        size: int,
        deadline_s: float | None,
    ) -> None:
        """Retries until all pieces have succeeded.

        Args:
            attempt: function that tries the pending pieces within a timeout and returns the number
                of failures.
            size: bytes of the batch.
            deadline_s: deadline in seconds; None: the deadline of the settings.

        Raises:
            FileTimeout: the deadline passed; writes may or may not have been executed.
            Unavailable: the deadline passed, and the chain of a piece is stopped.
            CorruptedFile: no replica has the bytes intact.
            NoSpace, StorageError: a storage node reported the error.
            FireflyerError: `before_retry` of the settings raised it.
        """
        settings = self._settings
        limit_s = settings.deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit_s
        one_s = settings.attempt_s + size / settings.slowest
        pause_s = PAUSE_S
        while True:
            seen = self._routes.version
            if not attempt(batch, max(min(one_s, end - time.monotonic()), 0.0)):
                return
            failures = [Failure(n, Outcome(o), c, a) for n, o, c, a in batch.failures()]
            for failure in failures:
                self._check(failure)
            moved = [self._requeue(batch, failure) for failure in failures]
            left = end - time.monotonic()
            if left <= 0:
                self._give_up(failures[0], limit_s)
            ask = any(failure.outcome in OUTDATED for failure in failures)
            pause = 0.0 if all(moved) else pause_s * random.uniform(0.5, 1.0)
            self._routes.wait(seen, min(pause, left), ask=ask)
            if settings.before_retry:
                settings.before_retry()
            # A new routing may reach the nodes a little later than this client. Therefore a new
            # routing restarts the backoff with the shortest pause.
            news = self._routes.version > seen
            pause_s = PAUSE_S if news else min(2 * pause_s, LONGEST_PAUSE_S)

    def _check(self, failure: Failure) -> None:
        """Counts damaged answers; raises errors that are not retryable."""
        if failure.outcome == Outcome.NO_SPACE:
            nodes = ", ".join(map(str, self._routes.serving(failure.chain)))
            raise NoSpace(
                f"{self._what}: a disk of chain {failure.chain} (nodes {nodes}) is full: "
                "`fireflyer fs status` shows which"
            )
        if failure.outcome in (Outcome.INVALID, Outcome.DUPLICATE):
            raise StorageError(f"{self._what}: refused as {failure.outcome.name.lower()}")
        if failure.outcome not in DAMAGED:
            return
        if self._writes:  # the head has already asked all other replicas
            raise self._corrupted(failure)
        bad = self._damaged_answers.setdefault(failure.piece, Counter())
        bad[failure.node] += 1
        self._routes.damaged_at.add(failure.node)
        serving = self._routes.serving(failure.chain)
        if serving and all(bad[node] >= ROUNDS * serving.count(node) for node in serving):
            raise self._corrupted(failure)

    def _requeue(self, batch: Pieces, failure: Failure) -> bool:
        """Requeues a piece; returns True if the piece goes to a node that has not failed for this
        piece."""
        if self._writes or failure.outcome not in ELSEWHERE:
            batch.again(failure.piece)
            return False
        failed = self._failed.setdefault(failure.piece, set())
        failed.add(failure.node)
        others = [node for node in self._routes.serving(failure.chain) if node not in failed]
        if not others:
            failed.clear()
            failed.add(failure.node)
            rest = [node for node in self._routes.serving(failure.chain) if node != failure.node]
            batch.again(failure.piece, random.choice(rest) if rest else ANY_NODE)
            return False
        batch.again(failure.piece, random.choice(others))
        return True

    def _corrupted(self, failure: Failure) -> CorruptedFile:
        return CorruptedFile(
            f"{self._what}: every replica on chain {failure.chain} is damaged; write those bytes again"
        )

    def _give_up(self, failure: Failure, limit_s: float) -> NoReturn:
        where = "" if failure.node == ANY_NODE else f" at node {failure.node}"
        outcome = failure.outcome.name.lower().replace("_", " ")
        error: FireflyerError
        if failure.outcome in DAMAGED:
            error = self._corrupted(failure)
        elif not self._routes.serving(failure.chain):
            error = Unavailable(
                f"{self._what}: chain {failure.chain} is stopped: no target of it served "
                f"within {limit_s:g} s"
            )
        else:
            error = FileTimeout(
                f"{self._what}: not done within {limit_s:g} s (chain {failure.chain}{where}: {outcome})"
            )
        raise error
