"""The engine `sqlite`: one durable SQLite transaction for all commits that wait.

Thread contract: `begin` and `commit_many` from any thread. `_lock` guards snapshots and the version, `_gate`
(taken before it) lets nobody begin while the log is cut; the queue has its own lock;
 `_writer` and `_history` belong to the one caller that leads.
Invariants:
- who finds nobody leading leads: it takes what waits, checks each against the history, writes the group as
  one SQLite transaction (synchronous=FULL), answers, and hands the lead to one that came meanwhile;
- `_counters` holds the newest committed values of some counter rows;
- `_version` grows after a group is durable; a snapshot's label is read before the snapshot is taken, so it is
  never newer than the rows: what was acknowledged is seen, and a conflict is never missed;
- transactions that begin between two groups share one snapshot, and with it what was read of it;
- after an I/O error nothing is known of the file's end: the engine refuses all further commits.
"""

import sqlite3
import threading
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
from fireflyer.fs3.kv.transaction import Outcome, Row, Transaction

CACHED_READS = 8_192
CACHED_COUNTERS = 256
LOOKUPS = 64
LOG_PAGES = 8_192

_GET = "SELECT v FROM kv WHERE k = ?"
_GET_MANY = f"SELECT k, v FROM kv WHERE k IN ({','.join('?' * LOOKUPS)})"
_RANGE = "SELECT k, v FROM kv WHERE k >= ? AND k < ? ORDER BY k LIMIT ?"
_RANGE_DOWN = "SELECT k, v FROM kv WHERE k >= ? AND k < ? ORDER BY k DESC LIMIT ?"


class SqliteSnapshot:
    """A read transaction that all transactions begun at `version` share."""

    def __init__(self, engine: "SqliteEngine", link: sqlite3.Connection, version: int) -> None:
        self.version = version
        self.users = 0
        self.link = link
        self._engine = engine
        self._read: dict[bytes, bytes | None] = {}

    def get(self, key: bytes) -> bytes | None:
        read = self._read
        if key in read:
            return read[key]
        try:
            row = self.link.execute(_GET, (key,)).fetchone()
        except sqlite3.Error as error:
            raise typed(error, self._engine.path) from error
        value: bytes | None = row[0] if row is not None else None
        if len(read) < CACHED_READS:
            read[key] = value
        return value

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        with translated(self._engine.path):
            for at in range(0, len(keys), LOOKUPS):
                part = tuple(keys[at : at + LOOKUPS])
                part += (b"",) * (LOOKUPS - len(part))  # no key is empty
                found.update(self.link.execute(_GET_MANY, part))
        return found

    def rows(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Row]:
        with translated(self._engine.path):
            statement = _RANGE_DOWN if reverse else _RANGE
            return self.link.execute(statement, (begin, end, limit)).fetchall()

    def release(self) -> None:
        self._engine.release(self)


class _Waiting:
    """A caller's transactions in the queue."""

    __slots__ = ("error", "outcomes", "transactions", "wake")

    def __init__(self, transactions: Sequence[Transaction]) -> None:
        self.transactions = transactions
        self.outcomes: list[Outcome] | None = None
        self.error: FireflyerError | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class SqliteEngine:
    """A store in one SQLite file, owned by one process.

    Args:
        wait: until no other process owns it.

    Raises:
        Unavailable: another process owns it; Corrupted: not such a file; NoSpace, StorageError.
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
        self._current: SqliteSnapshot | None = None
        self._readers: list[sqlite3.Connection] = []
        self._history = History()
        self._counters: dict[bytes, bytes | None] = {}
        self._queue_lock = threading.Lock()
        self._queue: list[_Waiting] = []
        self._leading = False
        self._log_pages = 0
        self._broken: FireflyerError | None = None
        self._closed = False

    # Snapshots.

    def begin(self) -> Transaction:
        with self._gate, self._lock:
            snapshot = self._current
            if snapshot is None:
                snapshot = self._current = self._snapshot()
            snapshot.users += 1
        return Transaction(snapshot)

    def _snapshot(self) -> SqliteSnapshot:
        if self._closed:
            raise StorageError(f"{self.path}: closed")
        version = self._version
        with translated(self.path):
            if self._readers:
                link = self._readers.pop()
            else:
                link = connect(self.path, READER_CACHE_KIB)
                link.execute("PRAGMA query_only = 1")
            link.execute("BEGIN")  # its first read takes the snapshot
        return SqliteSnapshot(self, link, version)

    def release(self, snapshot: SqliteSnapshot) -> None:
        """One user of a snapshot has ended."""
        with self._lock:
            snapshot.users -= 1
            if snapshot.users == 0 and snapshot is not self._current:
                self._retire(snapshot)

    def _retire(self, snapshot: SqliteSnapshot) -> None:
        if self._closed:
            snapshot.link.close()
            return
        snapshot.link.execute("ROLLBACK")
        self._readers.append(snapshot.link)

    def _drop_idle(self) -> None:
        """Ends the current snapshot if nobody uses it: a snapshot keeps the log from starting over."""
        with self._lock:
            if self._current is not None and self._current.users == 0:
                self._retire(self._current)
                self._current = None

    def _advance(self) -> None:
        """From now on transactions see the newest commit."""
        with self._lock:
            self._version += 1
            old, self._current = self._current, None
            if old is not None and old.users == 0:
                self._retire(old)

    # Commits.

    def commit_many(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        mine = _Waiting(transactions)
        for transaction in transactions:
            transaction.end()
        if not any(transaction.changes for transaction in transactions):
            return [Outcome.COMMITTED] * len(transactions)
        with self._queue_lock:
            self._queue.append(mine)
            lead = not self._leading
            self._leading = True
        if not lead:
            mine.wake.acquire()
        if mine.outcomes is None and mine.error is None:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.outcomes is not None
        return mine.outcomes

    def _lead(self, mine: _Waiting) -> None:
        with self._queue_lock:
            group, self._queue = self._queue, []
        try:
            self._commit_group(group)
        except BaseException as error:
            self._broken = self._broken or StorageError(
                f"{self.path}: a commit broke off: {error!r}"
            )
            for waiting in group:
                waiting.outcomes, waiting.error = None, self._broken
            raise
        finally:
            with self._queue_lock:
                following = self._queue[0] if self._queue else None
                self._leading = following is not None
            if following is not None:
                following.wake.release()
            for waiting in group:
                if waiting is not mine:
                    waiting.wake.release()

    def _commit_group(self, group: Sequence[_Waiting]) -> None:
        """Sets each one's outcomes, or one error for all."""
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
            if self._log_pages > LOG_PAGES and self._broken is None:
                self._cut_log()
        else:
            for waiting in group:
                waiting.error = self._broken

    def _take(self, transaction: Transaction, changes: Changes, version: int) -> Outcome:
        if not transaction.changes:
            return Outcome.COMMITTED
        if self._history.conflicts(transaction):
            return Outcome.CONFLICT
        changes.take(transaction, self._stored)
        self._history.record(transaction, version)
        return Outcome.COMMITTED

    def _stored(self, key: bytes) -> bytes | None:
        if key in self._counters:
            return self._counters[key]
        with translated(self.path):
            row = self._writer.execute(_GET, (key,)).fetchone()
        value: bytes | None = row[0] if row is not None else None
        if len(self._counters) >= CACHED_COUNTERS:
            self._counters.clear()
        self._counters[key] = value
        return value

    def _write(self, changes: Changes) -> None:
        counters, self._counters = self._counters, {}
        self._writer.execute("BEGIN IMMEDIATE")
        self._log_pages += write(self._writer, changes)
        self._writer.execute("COMMIT")
        if not changes.cleared:
            for key in counters.keys() & changes.rows.keys():
                counters[key] = changes.rows[key]
            self._counters = counters

    def _fail(self, error: sqlite3.Error) -> None:
        """Undoes a group; where the disk itself failed, or that cannot be done, commits end here."""
        try:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
        except sqlite3.Error as second:
            self._broken = typed(second, self.path)
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_CORRUPT,
        ):
            self._broken = typed(error, self.path)

    def _cut_log(self) -> None:
        """Moves the log's rows to their places and starts it over in the same blocks of the disk.

        Nobody begins meanwhile; who reads for long makes it fail, for some thousand rows more.
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
        """Waits for commits under way, then closes. Transactions still open can end, nothing else."""
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
