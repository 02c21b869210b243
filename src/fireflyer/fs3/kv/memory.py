"""Engine `memory`: a multi-version dictionary that can inject commit failures from a seed.

Thread contract: one lock guards all state. Invariants: `_rows[key]` lists (version, value) in
ascending order; the next write of the key drops versions that no open snapshot can see. `_keys` has
the keys of `_rows`; `_ordered` sorts them.
"""

import random
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from fireflyer.fs3.kv.history import Changes, History
from fireflyer.fs3.kv.transaction import Outcome, Row, Transaction, between


class MemorySnapshot:
    """Rows as of one version."""

    def __init__(self, engine: "MemoryEngine", version: int) -> None:
        self.version = version
        self._engine = engine

    def get(self, key: bytes) -> bytes | None:
        return self._engine.at(key, self.version)

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        found = ((key, self._engine.at(key, self.version)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def rows(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Row]:
        return self._engine.rows_at(begin, end, limit, reverse, self.version)

    def release(self) -> None:
        self._engine.forget(self.version)


class MemoryEngine:
    """Engine that keeps all data in memory; the data is lost with the process.

    Args:
        seed: seed of the injected failures.
        conflicts: share of commits that fail with CONFLICT without a real conflict.
        maybe: share of commits that return MAYBE_COMMITTED; half of these commit.
    """

    def __init__(self, seed: int = 0, *, conflicts: float = 0.0, maybe: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._conflicts = conflicts
        self._maybe = maybe
        self._lock = threading.RLock()
        self._rows: dict[bytes, list[tuple[int, bytes | None]]] = {}
        self._keys: list[bytes] = []
        self._in_order = True
        self._open: Counter[int] = Counter()
        self._version = 0
        self._history = History()

    def begin(self) -> Transaction:
        with self._lock:
            self._open[self._version] += 1
            return Transaction(MemorySnapshot(self, self._version))

    def begin_many(self, count: int, keys: Sequence[bytes]) -> list[Transaction]:
        return [self.begin() for _ in range(count)]

    def commit_many(self, transactions: Sequence[Transaction]) -> list[Outcome]:
        with self._lock:
            return [self._commit(transaction) for transaction in transactions]

    def close(self) -> None:
        """Does nothing, because the engine holds no resources."""

    def _commit(self, transaction: Transaction) -> Outcome:
        transaction.end()
        if not transaction.changes:
            return Outcome.COMMITTED
        if self._history.conflicts(transaction) or self._random.random() < self._conflicts:
            return Outcome.CONFLICT
        uncertain = self._random.random() < self._maybe
        if not uncertain or self._random.random() < 0.5:
            self._apply(transaction)
        return Outcome.MAYBE_COMMITTED if uncertain else Outcome.COMMITTED

    def _apply(self, transaction: Transaction) -> None:
        changes = Changes()
        changes.take(transaction, lambda key: self.at(key, self._version))
        self._version += 1
        self._history.record(transaction, self._version)
        oldest = min(self._open, default=self._version)
        for begin, end in changes.cleared:
            for key in list(between(self._ordered(), begin, end)):
                self._put(key, None, oldest)
        for key, value in changes.rows.items():
            self._put(key, value, oldest)

    def _put(self, key: bytes, value: bytes | None, oldest: int) -> None:
        versions = self._rows.get(key)
        if versions is None:
            if value is None:
                return
            versions = self._rows[key] = []
            self._keys.append(key)
            self._in_order = False
        if versions and versions[-1][0] == self._version:
            versions.pop()
        versions.append((self._version, value))
        while len(versions) > 1 and versions[1][0] <= oldest:
            del versions[0]
        if len(versions) == 1 and value is None:
            del self._rows[key]
            keys = self._ordered()
            del keys[bisect_left(keys, key)]

    def _ordered(self) -> list[bytes]:
        if not self._in_order:
            self._keys.sort()
            self._in_order = True
        return self._keys

    # Snapshots call these methods.

    def at(self, key: bytes, version: int) -> bytes | None:
        """Returns the key's value as of a version."""
        with self._lock:
            for written, value in reversed(self._rows.get(key, ())):
                if written <= version:
                    return value
            return None

    def rows_at(
        self, begin: bytes, end: bytes, limit: int, reverse: bool, version: int
    ) -> list[Row]:
        with self._lock:
            keys = between(self._ordered(), begin, end)
            rows: list[Row] = []
            for key in reversed(keys) if reverse else keys:
                value = self.at(key, version)
                if value is not None:
                    rows.append((key, value))
                    if len(rows) == limit:
                        break
            return rows

    def forget(self, version: int) -> None:
        """Releases one snapshot of this version."""
        with self._lock:
            self._open[version] -= 1
            if not self._open[version]:
                del self._open[version]
