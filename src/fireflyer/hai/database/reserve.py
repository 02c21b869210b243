"""Space held ready in a SQLite file, so that tasks end and stop on a disk without a free byte.

A write needs blocks in two files. The database keeps free pages inside its file, which later rows
take first. The write-ahead log keeps its size while the file is open: after a checkpoint, SQLite
writes it again from its beginning. One table of `PAGES` pages that is written and dropped makes both
spaces at once.
"""

import contextlib
import sqlite3

PAGES = 512
"""Free pages to make, of 4 KiB: about 1,500 transitions of tasks."""

CHECKPOINT_PAGES = PAGES // 4
"""Pages after which SQLite empties the log: one transaction still fits into its size then."""

NEW_TASK_BYTES = 1 << 20
"""Bytes that must be left on the disk for a new task to be accepted."""

LOOK_EVERY = 256
"""Writes between two looks at the free pages."""


def hold(database: sqlite3.Connection) -> bool:
    """Makes free pages and a log of their size; returns whether the disk had the space.

    REQUIRES: no transaction is open; the database is in WAL mode.
    """
    database.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
    size = database.execute("PRAGMA page_size").fetchone()[0]
    try:
        database.execute("DROP TABLE IF EXISTS reserve")  # of a server that was killed here
        database.execute("BEGIN")
        database.execute("CREATE TABLE reserve (filler BLOB)")
        database.execute("INSERT INTO reserve VALUES (zeroblob(?))", [PAGES * size])
        database.execute("COMMIT")
        database.execute("PRAGMA wal_checkpoint")  # the file gets its blocks now
        database.execute("DROP TABLE reserve")
    except sqlite3.OperationalError:  # the disk is full already
        with contextlib.suppress(sqlite3.OperationalError):
            database.execute("ROLLBACK")
        return False
    return True


def short(database: sqlite3.Connection) -> bool:
    """Returns whether more than half of the free pages are used."""
    return bool(database.execute("PRAGMA freelist_count").fetchone()[0] < PAGES // 2)
