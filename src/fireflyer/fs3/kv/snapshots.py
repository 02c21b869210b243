"""Views from which `sqlite` transactions read: a shared snapshot, or the leader's view
(sqlite.py)."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from fireflyer.fs3.kv.database import translated, typed
from fireflyer.fs3.kv.transaction import Row

CACHED_READS = 8_192
CACHED_BYTES = 1_024

FEW, MOST = 4, 64  # keys per statement
_GET = "SELECT v FROM kv WHERE k = ?"
_GET_MANY = {n: f"SELECT k, v FROM kv WHERE k IN ({','.join('?' * n)})" for n in (FEW, MOST)}
_RANGE = "SELECT k, v FROM kv WHERE k >= ? AND k < ? ORDER BY k LIMIT ?"
_RANGE_DOWN = "SELECT k, v FROM kv WHERE k >= ? AND k < ? ORDER BY k DESC LIMIT ?"


class Owner(Protocol):
    """Methods of the engine that a view needs."""

    path: Path

    def release(self, view: "View") -> None: ...


class View:
    """State of the store as one connection sees it, with a cache of the values that were read.

    The cache `_read` must not contain values of other states. The users of a view are counted.
    """

    def __init__(
        self,
        engine: Owner,
        link: sqlite3.Connection,
        version: int,
        read: dict[bytes, bytes | None],
        users: int = 0,
    ) -> None:
        self.version = version
        self.users = users
        self.thread = 0  # the leader's thread if this is the leader's view; otherwise 0
        self.link = link
        self._engine = engine
        self._read = read

    def get(self, key: bytes) -> bytes | None:
        if key in self._read:
            return self._read[key]
        try:
            row = self.link.execute(_GET, (key,)).fetchone()
        except sqlite3.Error as error:
            raise typed(error, self._engine.path) from error
        value: bytes | None = row[0] if row is not None else None
        self._keep(key, value)
        return value

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        try:
            for at in range(0, len(keys), MOST):
                part = keys[at : at + MOST]
                size = FEW if len(part) <= FEW else MOST
                # Pads with the empty key, which never exists.
                padded = (*part, *(b"",) * (size - len(part)))
                found.update(self.link.execute(_GET_MANY[size], padded))
        except sqlite3.Error as error:
            raise typed(error, self._engine.path) from error
        return found

    def fetch(self, keys: Sequence[bytes]) -> None:
        """Reads these keys into the cache in one step, for `get` calls that follow."""
        unread = [key for key in dict.fromkeys(keys) if key not in self._read]
        if unread:
            found = self.get_many(unread)
            for key in unread:
                self._keep(key, found.get(key))

    def rows(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Row]:
        with translated(self._engine.path):
            statement = _RANGE_DOWN if reverse else _RANGE
            return self.link.execute(statement, (begin, end, limit)).fetchall()

    def release(self) -> None:
        self._engine.release(self)

    def _keep(self, key: bytes, value: bytes | None) -> None:
        if len(self._read) < CACHED_READS and (value is None or len(value) <= CACHED_BYTES):
            self._read[key] = value
