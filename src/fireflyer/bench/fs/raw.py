"""Baselines of the file-system benchmark: the same work without a file system."""

import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fireflyer.bench.harness.command_process import TimedProcess
from fireflyer.bench.peers import compiling
from fireflyer.errors import FireflyerError
from fireflyer.fs3.kv import MemoryEngine
from fireflyer.fs3.kv.history import Changes
from fireflyer.fs3.kv.transaction import Outcome, Transaction, counter_value
from fireflyer.fs3.meta import MetaService
from fireflyer.fs3.meta.inode import ROOT
from fireflyer.fs3.meta.messages import Create, Request, User

SOURCE = Path(__file__).parents[1] / "peers" / "raw_reads.cpp"
_FLAGS = ("-std=c++20", "-O2")

Rows = list[tuple[bytes, bytes]]


def compiled() -> Path:
    """Returns the program of `peers/raw_reads.cpp`, compiled on first use.

    Raises:
        ConfigError: there is no C++ compiler, or the compilation fails.
    """
    return compiling.compiled(SOURCE, _FLAGS)


class RawReads(TimedProcess):
    """Reads of a file by another process.

    Args:
        way: "ring" or "sendfile"; see `peers/raw_reads.cpp`.

    Raises:
        ConfigError: as for `compiled`.
    """

    def __init__(self, way: str, file: Path, block: int, depth: int) -> None:
        super().__init__("reads raw files", [compiled(), way, file, str(block), str(depth)])

    def __call__(self, count: int, seed: int) -> float:
        """Reads `count` blocks and returns the seconds; raises PeerLost if the process ended."""
        return self.seconds(f"{count} {seed}")


class _Recording(MemoryEngine):
    """In-memory engine that records the rows that each transaction writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Rows] = []

    def commit_many(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        for transaction in transactions:
            changes = Changes()
            changes.take(transaction, lambda key: counter_value(0))
            rows = [(key, value) for key, value in changes.rows.items() if value is not None]
            self.written.append(sorted(rows))
        return super().commit_many(transactions)


def rows_of_creates(count: int, prefix: str) -> list[Rows]:
    """Returns the metadata rows of `count` new files in the root, by file."""
    engine = _Recording()
    service = MetaService(engine)
    user = User(os.getuid(), os.getgid())

    def create(number: int) -> Rows:
        call = Create(ROOT, f"/{prefix}-{number}".encode(), 0o644, True)
        answer = service.execute_many([Request(user, 1, call, number, number - 1)])[0]
        if isinstance(answer, FireflyerError):
            raise answer
        return engine.written[-1]

    return [create(number) for number in range(1, count + 1)]


class BareSqlite:
    """Commits of rows to an SQLite file, each durable before the next; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._remove()
        self._link = sqlite3.connect(self._path, isolation_level=None)
        self._link.execute("PRAGMA journal_mode = WAL")
        self._link.execute("PRAGMA synchronous = FULL")
        self._link.execute("CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID")
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._remove()

    def __call__(self, commits: Sequence[Rows]) -> float:
        """Commits every list of rows; returns the total time in seconds."""
        execute, many = self._link.execute, self._link.executemany
        began = time.perf_counter()
        for rows in commits:
            execute("BEGIN")
            many("INSERT OR REPLACE INTO kv VALUES (?, ?)", rows)
            execute("COMMIT")
        return time.perf_counter() - began

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
