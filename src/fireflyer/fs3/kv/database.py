"""Database file of the engine `sqlite`: open, lock, write of rows, translation of errors."""

import contextlib
import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fireflyer.errors import Corrupted, FireflyerError, NoSpace, StorageError, Unavailable
from fireflyer.fs3.kv.history import Changes

PAGE_BYTES = 4096
FORMAT = 1
FULL_BYTES = 64 << 10
"""Number of free bytes below which a disk counts as full; a change needs some pages of the log."""
APPLICATION = 0x46463353  # "FF3S"
WRITER_CACHE_KIB = 32 << 10
READER_CACHE_KIB = 4 << 10
BATCHES = (128, 32, 8, 7, 6, 5, 4, 3, 2, 1)
"""Numbers of rows for which there are SQL statements (`_UPSERT` and `_DELETE`)."""

_UPSERT = {n: "INSERT OR REPLACE INTO kv (k, v) VALUES " + ",".join(["(?,?)"] * n) for n in BATCHES}
_DELETE = {n: f"DELETE FROM kv WHERE k IN ({','.join('?' * n)})" for n in BATCHES}


def typed(error: sqlite3.Error, path: Path) -> FireflyerError:
    """Returns SQLite's error as a FireflyerError."""
    primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if primary == sqlite3.SQLITE_FULL:
        return NoSpace(f"{path}: no space for the metadata: {error}; free some and try again")
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupted(f"{path}: {error}; restore the metadata from a copy")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"{path}: another program holds a lock on it: {error}")
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN):
        return StorageError(f"{path}: cannot be written: {error}; check its owner and its mode")
    return StorageError(f"{path}: {error}")


def disk_fault(folder: Path) -> str:
    """Returns the fault of the disk of a store in that folder; "" if there is none."""
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return f"the metadata store in {folder} cannot be accessed: {error.strerror}"
    free = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    if free * disk.f_frsize >= FULL_BYTES:
        return ""
    return (
        f"the disk of the metadata store is full: {folder}: names cannot be changed, and no node can be "
        "started or replaced, until something else there is removed"
    )


@contextlib.contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Translates errors like `translated`, but to NoSpace if the disk is full.

    On a full disk SQLite cannot create files that it needs, and may report any error.
    """
    try:
        yield
    except sqlite3.Error as error:
        if disk_fault(path.parent):
            raise NoSpace(
                f"{path}: no space to open the metadata: {error}; free some and start again"
            ) from error
        raise typed(error, path) from error


@contextlib.contextmanager
def translated(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise typed(error, path) from error


class Owner:
    """Exclusive lock on a metadata file, because one process must see all transactions to detect
    conflicts.

    The lock file holds the process id of the owner, for the error that another process gets.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        """Takes the lock; with `wait`, waits without a limit. Raises Unavailable, StorageError."""
        name = path.with_name(path.name + ".lock")
        try:
            self._file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            kind = NoSpace if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            raise kind(f"{name}: cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException as error:
            holder = _holder(self._file)
            os.close(self._file)
            if not isinstance(error, OSError):
                raise  # raised by a signal handler
            raise Unavailable(
                f"{path}: {holder} uses this metadata; stop it, or connect to it"
            ) from error
        # On a full disk the file stays empty; another process's error then cannot name the owner.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)


def _holder(lock_file: int) -> str:
    """Names the process that holds a lock file."""
    with contextlib.suppress(OSError):
        text = os.pread(lock_file, 20, 0).decode("ascii", "replace").strip()
        if text.isdecimal():
            return f"process {text}"
    return "another process"


def connect(path: Path, cache_kib: int) -> sqlite3.Connection:
    """Opens a connection that any thread may use. It has no implicit transactions."""
    link = sqlite3.connect(
        path, timeout=5.0, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    try:
        link.execute(f"PRAGMA cache_size = -{cache_kib}")
    except BaseException:
        link.close()
        raise
    return link


def open_writer(path: Path) -> sqlite3.Connection:
    """Opens the file, or creates it, and checks that it has metadata of this format.

    Raises:
        StorageError: the file cannot be opened.
        Corrupted: the file is not metadata of this format.
        NoSpace: the disk is full.
    """
    with _opening(path):
        link = connect(path, WRITER_CACHE_KIB)
        try:
            link.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            if link.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
                raise StorageError(f"{path}: the file system there cannot hold a write-ahead log")
            link.execute("PRAGMA synchronous = FULL")
            # The engine itself checkpoints the log when no reader prevents it.
            link.execute("PRAGMA wal_autocheckpoint = 0")
            tables = link.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            (application,) = link.execute("PRAGMA application_id").fetchone()
            (form,) = link.execute("PRAGMA user_version").fetchone()
            if not tables and not application:
                create(link)
            elif (application, form) != (APPLICATION, FORMAT):
                raise Corrupted(f"{path}: not metadata of this version of fs3; name another file")
        except BaseException:
            link.close()
            raise
        return link


def create(link: sqlite3.Connection) -> None:
    link.execute("BEGIN IMMEDIATE")
    link.execute("CREATE TABLE kv (k BLOB PRIMARY KEY, v BLOB NOT NULL) WITHOUT ROWID")
    link.execute(f"PRAGMA application_id = {APPLICATION}")
    link.execute(f"PRAGMA user_version = {FORMAT}")
    link.execute("COMMIT")


def write(link: sqlite3.Connection, changes: Changes) -> int:
    """Applies the changes in the open SQLite transaction, many rows per statement, in key order.

    Returns:
        Maximum number of pages by which the log grows; cleared ranges are not included.
    """
    for bounds in changes.cleared:
        link.execute("DELETE FROM kv WHERE k >= ? AND k < ?", bounds)
    flat: list[bytes] = []
    gone: list[bytes] = []
    for key in sorted(changes.rows):
        value = changes.rows[key]
        if value is None:
            gone.append(key)
        else:
            flat += (key, value)
    _in_batches(link, _UPSERT, flat, 2)
    if gone:
        _in_batches(link, _DELETE, gone, 1)
    return len(changes.rows) + sum(map(len, flat)) // PAGE_BYTES


def _in_batches(
    link: sqlite3.Connection, statements: dict[int, str], values: list[bytes], width: int
) -> None:
    # A statement of many rows releases the GIL once; executemany does so for each row.
    at, left = 0, len(values) // width
    for size in BATCHES:
        while left >= size:
            end = at + size * width
            link.execute(statements[size], values[at:end])
            at, left = end, left - size
