"""Reserved space in a SQLite file, so that tasks can end and be stopped when the disk is full.

A write needs blocks in two files. The database keeps free pages inside its file, which later rows
use first. The write-ahead log keeps its size while the file is open: after a checkpoint, SQLite
overwrites the log from its beginning. Writing and dropping one table of `PAGES` pages reserves
space in both files.
"""

import contextlib
import sqlite3

PAGES = 512
"""Number of free pages of 4 KiB to reserve: enough for about 1,500 transitions of tasks."""

CHECKPOINT_PAGES = PAGES // 4
"""Pages after which SQLite checkpoints the log, so that the reserved log still has room for one
transaction."""

NEW_TASK_BYTES = 1 << 20
"""Bytes that must be left on the disk for a new task to be accepted."""

CHECK_EVERY = 256
"""Number of writes between two checks of the free pages."""


def hold(database: sqlite3.Connection) -> bool:
    """Reserves free pages and a log of their size; returns whether the disk had the space.

    REQUIRES: no transaction is open; the database is in WAL mode.
    """
    database.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
    size = database.execute("PRAGMA page_size").fetchone()[0]
    try:
        database.execute("DROP TABLE IF EXISTS reserve")  # left by a killed server
        database.execute("BEGIN")
        database.execute("CREATE TABLE reserve (filler BLOB)")
        database.execute("INSERT INTO reserve VALUES (zeroblob(?))", [PAGES * size])
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint")  # allocates the blocks of the database file
        database.execute("DROP TABLE reserve")
    except sqlite3.OperationalError:  # the disk is full already
        with contextlib.suppress(sqlite3.OperationalError):
            database.execute("ROLLBACK")
        return False
    return True


def short(database: sqlite3.Connection) -> bool:
    """Returns whether more than half of the free pages are used."""
    return bool(database.execute("PRAGMA freelist_count").fetchone()[0] < PAGES // 2)
