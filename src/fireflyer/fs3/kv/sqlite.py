"""Engine `sqlite`: one durable SQLite transaction for all commits that wait (group commit).

Thread contract: any thread may call `begin` and `commit_many`. `_lock` guards snapshots and the
version. `_gate`, which is taken before `_lock`, blocks new transactions during a reset of the log.
The queue has its own lock. `_writer`, `_history`, `_newest` and `_held` belong to the caller that
is the leader.

Invariants:
- A caller that finds no leader becomes the leader: it takes the queue and checks each transaction
  against the history. It writes the group as one SQLite transaction (synchronous=FULL), sets the
  outcomes, and makes a waiting caller the next leader.
- A caller that begins several transactions while there is no leader becomes the leader (`_held`).
  It reads on the writer's connection, whose cache survives commits.
- `_newest` is the leaders' cache of rows that they read, with the values as of the last commit.
- `_version` grows after a group is durable. A snapshot's version is read before the snapshot is
  taken, so the version is never newer than the snapshot's rows. Therefore acknowledged commits are
  seen, and no conflict is missed.
- Transactions that begin between two groups share one snapshot and the snapshot's cache of reads.
- After an I/O error the end of the file is unknown, so the engine rejects all further commits.
"""

import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fireflyer.errors import FireflyerError, StorageError
from fireflyer.fs3.kv.database import (
    READER_CACHE_KIB,
    Owner,
    connect,
    open_writer,
    translated,
    typed,
    write,
)
from fireflyer.fs3.kv.history import Changes, History
from fireflyer.fs3.kv.snapshots import CACHED_READS, View
from fireflyer.fs3.kv.transaction import Outcome, Transaction

LOG_PAGES = 8_192
"""Number of pages in the write-ahead log after which the log is reset."""


class _Waiting:
    """Entry of the queue: the transactions of one caller."""

    __slots__ = ("error", "outcomes", "transactions", "wake")

    def __init__(self, transactions: Sequence[Transaction]) -> None:
        self.transactions = transactions
        self.outcomes: list[Outcome] | None = None
        self.error: FireflyerError | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class SqliteEngine:
    """Store in one SQLite file, owned by one process.

    Args:
        wait: True to wait until no other process owns the file.

    Raises:
        Unavailable: another process owns the file.
        Corrupted: the file has no metadata.
        NoSpace, StorageError: the file cannot be opened.
    """

    def __init__(self, path: Path | str, *, wait: bool = False) -> None:
        self.path = Path(path)
        self._owner = Owner(self.path, wait=wait)
        try:
            self._writer = open_writer(self.path)
        except BaseException:
            self._owner.release()
            raise
        self._gate = threading.Lock()
        self._lock = threading.Lock()
        self._version = 1
        self._current: View | None = None
        self._readers: list[sqlite3.Connection] = []
        self._history = History()
        self._newest: dict[bytes, bytes | None] = {}
        self._held: View | None = None
        self._queue_lock = threading.Lock()
        self._queue: list[_Waiting] = []
        self._leading = False
        self._log_pages = 0
        self._broken: FireflyerError | None = None
        self._closed = False
        self._groups = self._commits = self._conflicts = self._commit_ns = (
            0  # only the leader changes these counters
        )

    def statistics(self) -> dict[str, int]:
        """Returns counters since the start: group commits, transactions, conflicts, time in ns."""
        return {
            "groups": self._groups,
            "commits": self._commits,
            "conflicts": self._conflicts,
            "commit_ns": self._commit_ns,
        }

    @property
    def trouble(self) -> str:
        """Reason why the store rejects commits until it is reopened; "" if it accepts them.

        Thread-safe.
        """
        broken = self._broken
        return f"{broken}; restart this process to accept changes again" if broken else ""

    # Snapshots.

    def begin(self) -> Transaction:
        return Transaction(self._shared(1))

    def begin_many(self, count: int, keys: Sequence[bytes]) -> list[Transaction]:
        view = self._become_leader(count) or self._shared(count)
        try:
            view.fetch(keys)
        except BaseException:
            for _ in range(count):
                view.release()
            raise
        return [Transaction(view) for _ in range(count)]

    def _shared(self, users: int) -> View:
        with self._gate, self._lock:
            snapshot = self._current
            if snapshot is None:
                snapshot = self._current = self._snapshot()
            snapshot.users += users
            return snapshot

    def _become_leader(self, users: int) -> View | None:
        """Becomes the leader and returns its view; None if there is a leader."""
        with self._queue_lock:
            if self._leading or self._broken is not None:
                return None
            self._leading = True
        try:
            self._writer.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            self._hand_over()
            raise typed(error, self.path) from error
        if len(self._newest) >= CACHED_READS:
            self._newest.clear()
        held = View(self, self._writer, self._version, self._newest, users)
        held.thread = threading.get_ident()
        self._held = held
        return held

    def _snapshot(self) -> View:
        if self._closed:
            raise StorageError(f"{self.path}: closed")
        version = self._version
        with translated(self.path):
            if self._readers:
                link = self._readers.pop()
            else:
                link = connect(self.path, READER_CACHE_KIB)
                link.execute("PRAGMA query_only = 1")
            link.execute("BEGIN")  # the first read takes the snapshot
        return View(self, link, version, {})

    def release(self, view: View) -> None:
        """Removes one user of a view."""
        if view.link is self._writer:
            view.users -= 1
            if view.users == 0:
                self._resign()
            return
        with self._lock:
            view.users -= 1
            if view.users == 0 and view is not self._current:
                self._retire(view)

    def _resign(self) -> None:
        """Stops being the leader, without a commit."""
        self._held = None
        try:
            self._roll_back()
        finally:
            self._hand_over()

    def _retire(self, snapshot: View) -> None:
        if self._closed:
            snapshot.link.close()
            return
        snapshot.link.execute("ROLLBACK")
        self._readers.append(snapshot.link)

    def _drop_idle(self) -> None:
        """Ends the current snapshot if it is unused, because snapshots prevent a reset of the log."""
        with self._lock:
            if self._current is not None and self._current.users == 0:
                self._retire(self._current)
                self._current = None

    def _advance(self) -> None:
        """Makes new transactions see the newest commit."""
        with self._lock:
            self._version += 1
            old, self._current = self._current, None
            if old is not None and old.users == 0:
                self._retire(old)

    # Commits.

    def commit_many(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        changed = any(transaction.changes for transaction in transactions)
        held = self._held
        if held is not None and (held.thread != threading.get_ident() or not changed):
            held = None
        if held is not None:
            held.users += 1  # so this caller stays the leader when the last transaction ends
        for transaction in transactions:
            transaction.end()
        if not changed:
            return [Outcome.COMMITTED] * len(transactions)
        mine = _Waiting(transactions)
        if held is not None:
            assert held.users == 1, "a commit of only some transactions that were begun together"
            self._held = None
            self._commit_as_leader(mine, [mine])
        else:
            self._enqueue(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.outcomes is not None
        return mine.outcomes

    def _enqueue(self, mine: _Waiting) -> None:
        with self._queue_lock:
            self._queue.append(mine)
            lead = not self._leading
            self._leading = True
        if not lead:
            mine.wake.acquire()
        if mine.outcomes is None and mine.error is None:
            self._commit_as_leader(mine, [])

    def _commit_as_leader(self, mine: _Waiting, group: list[_Waiting]) -> None:
        with self._queue_lock:
            group += self._queue
            self._queue = []
        try:
            self._commit_group(group)
        except BaseException as error:
            self._broken = self._broken or StorageError(f"{self.path}: a commit failed: {error!r}")
            for waiting in group:
                waiting.outcomes, waiting.error = None, self._broken
            raise
        finally:
            self._hand_over()
            for waiting in group:
                if waiting is not mine:
                    waiting.wake.release()

    def _hand_over(self) -> None:
        with self._queue_lock:
            following = self._queue[0] if self._queue else None
            self._leading = following is not None
        if following is not None:
            following.wake.release()

    def _commit_group(self, group: Sequence[_Waiting]) -> None:
        """Commits the queued transactions; sets each caller's outcomes, or one error for all."""
        begun = time.perf_counter_ns()
        changes = Changes()
        version = self._version + 1
        if self._broken is None:
            for waiting in group:
                waiting.outcomes = [self._take(t, changes, version) for t in waiting.transactions]
            if changes.rows or changes.cleared:
                self._drop_idle()
                try:
                    self._write(changes)
                except sqlite3.Error as error:
                    self._fail(error)
                    for waiting in group:
                        waiting.outcomes, waiting.error = None, typed(error, self.path)
                self._advance()
                self._count(group, time.perf_counter_ns() - begun)
            else:
                self._roll_back()
            if self._log_pages > LOG_PAGES and self._broken is None:
                self._reset_log()
        else:
            for waiting in group:
                waiting.error = self._broken

    def _count(self, group: Sequence[_Waiting], took_ns: int) -> None:
        outcomes = [outcome for waiting in group for outcome in waiting.outcomes or ()]
        self._groups += 1
        self._commit_ns += took_ns
        self._commits += outcomes.count(Outcome.COMMITTED)
        self._conflicts += outcomes.count(Outcome.CONFLICT)

    def _take(self, transaction: Transaction, changes: Changes, version: int) -> Outcome:
        if not transaction.changes:
            return Outcome.COMMITTED
        if self._history.conflicts(transaction):
            return Outcome.CONFLICT
        changes.take(transaction, self._stored)
        self._history.record(transaction, version)
        return Outcome.COMMITTED

    def _stored(self, key: bytes) -> bytes | None:
        return View(self, self._writer, self._version, self._newest).get(key)

    def _write(self, changes: Changes) -> None:
        if not self._writer.in_transaction:
            self._writer.execute("BEGIN IMMEDIATE")
        self._log_pages += write(self._writer, changes)
        self._writer.execute("COMMIT")
        newest = self._newest
        if changes.cleared:
            newest.clear()
        for key, value in changes.rows.items():
            if key in newest:
                newest[key] = value

    def _roll_back(self) -> None:
        """Rolls back the writer's transaction, if any; a failure makes the store reject commits."""
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._broken = typed(error, self.path)

    def _fail(self, error: sqlite3.Error) -> None:
        """Rolls back a group; after a failure of the disk, the store rejects all further commits."""
        self._roll_back()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_CORRUPT,
        ):
            self._broken = typed(error, self.path)

    def _reset_log(self) -> None:
        """Checkpoints the log into the database and resets it, so its disk blocks are reused.

        No transaction can begin meanwhile. A long-running reader prevents the reset. The engine then
        tries again after half of `LOG_PAGES` more pages.
        """
        with self._gate:
            self._drop_idle()
            try:
                self._writer.execute("PRAGMA busy_timeout = 200")
                busy, _, _ = self._writer.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
                self._writer.execute("PRAGMA busy_timeout = 5000")
            except sqlite3.Error as error:
                self._fail(error)  # the rows are durable in the log
                return
        self._log_pages = LOG_PAGES // 2 if busy else 0

    def close(self) -> None:
        """Closes the store; raises ValueError while commits wait.

        Afterwards open transactions can only end.
        """
        with self._queue_lock:
            busy = self._leading or bool(self._queue)
        if busy:
            raise ValueError(f"{self.path}: closed while commits wait")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._current is not None and self._current.users == 0:
                self._current.link.close()
            self._current = None
            for link in self._readers:
                link.close()
        self._broken = StorageError(f"{self.path}: closed")
        with translated(self.path):
            self._writer.close()
        self._owner.release()
