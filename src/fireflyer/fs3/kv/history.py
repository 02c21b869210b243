"""Keys and ranges that recent commits wrote, for conflict checks; and merged changes of commits.

The newest commits are kept, with at most about `KEPT_KEYS` keys and ranges. Thread contract: only
one thread at a time calls this module, the thread that commits for the engine. Invariant: a
transaction with a snapshot older than `floor` counts as a conflict, because it cannot be checked.
"""

from collections import deque
from collections.abc import Callable

from fireflyer.fs3.kv.transaction import Range, Transaction, counter, counter_value, within

KEPT_KEYS = 32_768
"""Number of written keys and cleared ranges beyond which the oldest commits are forgotten."""


class History:
    """Conflict checker: a transaction conflicts if a key that it read was written after its snapshot."""

    def __init__(self) -> None:
        self.floor = 0
        self._last: dict[bytes, int] = {}
        self._commits: deque[tuple[int, tuple[bytes, ...], tuple[Range, ...]]] = deque()
        self._cleared: deque[tuple[int, tuple[Range, ...]]] = deque()  # commits that cleared ranges
        self._kept = 0

    def conflicts(self, transaction: Transaction) -> bool:
        version = transaction.version
        if version < self.floor:
            return bool(transaction.reads or transaction.ranges)
        last = self._last
        for key in transaction.reads:
            if last.get(key, 0) > version:
                return True
        for cleared_at, cleared in reversed(self._cleared):
            if cleared_at <= version:
                break
            if any(within(key, cleared) for key in transaction.reads):
                return True
        return bool(transaction.ranges) and self._range_conflicts(transaction)

    def _range_conflicts(self, transaction: Transaction) -> bool:
        for version, keys, cleared in reversed(self._commits):
            if version <= transaction.version:
                return False
            for begin, end in transaction.ranges:
                if any(begin <= key < end for key in keys):
                    return True
                if any(low < end and begin < high for low, high in cleared):
                    return True
        return False

    def record(self, transaction: Transaction, version: int) -> None:
        """Records the transaction's writes as part of commit `version`."""
        keys = (*transaction.writes, *transaction.adds)
        ranges = tuple(transaction.cleared)
        for key in keys:
            self._last[key] = version
        self._commits.append((version, keys, ranges))
        if ranges:
            self._cleared.append((version, ranges))
        self._kept += len(keys) + len(ranges)
        while self._kept > KEPT_KEYS and self._commits[0][0] < version:
            self._forget()

    def _forget(self) -> None:
        version, keys, ranges = self._commits.popleft()
        for key in keys:
            if self._last.get(key) == version:
                del self._last[key]
        if ranges:
            self._cleared.popleft()
        self._kept -= len(keys) + len(ranges)
        self.floor = version


class Changes:
    """Merged changes of consecutive transactions: ranges to clear, then rows to write."""

    __slots__ = ("cleared", "rows")

    def __init__(self) -> None:
        self.cleared: list[Range] = []
        self.rows: dict[bytes, bytes | None] = {}

    def take(self, transaction: Transaction, stored: Callable[[bytes], bytes | None]) -> None:
        """Adds a transaction's changes; `stored` reads the newest committed value of a counter."""
        rows = self.rows
        for begin, end in transaction.cleared:
            for key in [key for key in rows if begin <= key < end]:
                del rows[key]
            self.cleared.append((begin, end))
        rows.update(transaction.writes)
        for key, delta in transaction.adds.items():
            if key not in rows:
                rows[key] = None if within(key, self.cleared) else stored(key)
            rows[key] = counter_value(counter(rows[key]) + delta)
