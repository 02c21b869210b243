"""A metadata store of the tests': transactions one at a time, in memory."""

import threading
from collections.abc import Callable
from typing import TypeVar

from fireflyer.errors import NoSpace, Unavailable
from fireflyer.fs3.manager.service import Transaction

T = TypeVar("T")


class _Transaction:
    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self.rows = rows

    def get(self, key: bytes) -> bytes | None:
        return self.rows.get(key)

    def get_range(self, begin: bytes, end: bytes) -> list[tuple[bytes, bytes]]:
        return sorted(row for row in self.rows.items() if begin <= row[0] < end)

    def set(self, key: bytes, value: bytes) -> None:
        self.rows[key] = value


class Store:
    """Call it to run a body. `fails`: the next transactions raise; `full`: those that would change something.

    `calls` counts them, `changes` those that changed something.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.fails = self.full = False
        self.calls = self.changes = 0
        self._lock = threading.Lock()

    def __call__(self, body: Callable[[Transaction], T]) -> T:
        with self._lock:
            self.calls += 1
            if self.fails:
                raise Unavailable("the store does not answer")
            transaction = _Transaction(dict(self.rows))
            answer = body(transaction)
            if transaction.rows != self.rows and self.full:
                raise NoSpace("the store is full")
            self.changes += transaction.rows != self.rows
            self.rows = transaction.rows
            return answer
