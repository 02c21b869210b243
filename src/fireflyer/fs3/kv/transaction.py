"""Transaction: reads from one snapshot, and writes that are buffered until the commit.

Thread contract: one thread at a time uses a transaction; any thread may use an engine. Invariants:
a read sees only the snapshot and the transaction's own writes. `reads` and `ranges` hold the keys
and the parts of ranges that were read. Ranges in `cleared` are applied before `writes`.
"""

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

Row = tuple[bytes, bytes]
Range = tuple[bytes, bytes]

COUNTER_BYTES = 8
PAGE_ROWS = 256


class Outcome(enum.Enum):
    """Result of a commit."""

    COMMITTED = "committed"
    CONFLICT = "conflict"
    """Nothing was written, because a key that the transaction read has changed since."""
    MAYBE_COMMITTED = "maybe committed"
    """The transaction was either committed or not; only a read of the store can tell."""


class Snapshot(Protocol):
    """State of the store at commit `version`."""

    version: int

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns the rows of these keys that exist."""
        ...

    def rows(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Row]:
        """Returns at most `limit` rows with begin <= key < end, in order or in reverse order."""
        ...

    def release(self) -> None:
        """Removes this user of the snapshot."""
        ...


class Engine(Protocol):
    """Transactional store. Any thread may call `begin` and `commit_many`."""

    def begin(self) -> "Transaction":
        """Returns a transaction that sees every commit acknowledged before this call.

        The first read takes the snapshot, if `begin` did not.
        """
        ...

    def begin_many(self, count: int, keys: Sequence[bytes]) -> list["Transaction"]:
        """Returns `count` transactions on one snapshot; reads `keys` in one step.

        The calling thread must end them or commit them together before it waits for another thread,
        because until then other threads' commits may wait.
        """
        ...

    def commit_many(self, transactions: Sequence["Transaction"]) -> list[Outcome]:
        """Commits the transactions durably, in this order, and ends them.

        Raises:
            StorageError: the store failed; the outcome of these transactions is unknown.
        """
        ...

    def close(self) -> None: ...


def counter(value: bytes | None) -> int:
    """Decodes a counter, which `Transaction.add` changes; 0 if there is no row."""
    return int.from_bytes(value, "big", signed=True) if value is not None else 0


def counter_value(number: int) -> bytes:
    return number.to_bytes(COUNTER_BYTES, "big", signed=True)


class Transaction:
    """Transaction from `Engine.begin` until `end` or `Engine.commit_many`; see the module's docstring."""

    __slots__ = ("_snapshot", "adds", "cleared", "ranges", "reads", "version", "writes")

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot: Snapshot | None = snapshot
        self.version = snapshot.version
        self.reads: set[bytes] = set()
        self.ranges: list[Range] = []
        self.writes: dict[bytes, bytes | None] = {}
        self.cleared: list[Range] = []
        self.adds: dict[bytes, int] = {}

    @property
    def changes(self) -> bool:
        """True if the transaction has writes."""
        return bool(self.writes or self.adds or self.cleared)

    # Reads.

    def get(self, key: bytes) -> bytes | None:
        """Returns the key's value, or None.

        The commit conflicts if another commit changes the key meanwhile.
        """
        if key in self.writes:
            return self.writes[key]
        self.reads.add(key)
        return self._read(key)

    def snapshot_get(self, key: bytes) -> bytes | None:
        """Returns a value like `get`, but causes no conflict."""
        if key in self.writes:
            return self.writes[key]
        return self._read(key)

    def get_many(self, keys: Sequence[bytes], *, conflict: bool = True) -> dict[bytes, bytes]:
        """Returns the values of these keys that exist; cheaper than one `get` per key."""
        if conflict:
            self.reads.update(keys)
        if not self.changes:
            return self._live.get_many(keys)
        found = ((key, self.snapshot_get(key)) for key in keys)
        return {key: value for key, value in found if value is not None}

    def get_range(
        self, begin: bytes, end: bytes, limit: int = 1 << 30, *, reverse: bool = False
    ) -> list[Row]:
        """Returns at most `limit` rows with begin <= key < end, in order.

        The commit conflicts with changes in the part that was read.
        """
        rows = self.snapshot_range(begin, end, limit, reverse=reverse)
        if len(rows) < limit:
            self.ranges.append((begin, end))
        elif rows:
            last = rows[-1][0]
            self.ranges.append((last, end) if reverse else (begin, last + b"\0"))
        return rows

    def snapshot_range(
        self, begin: bytes, end: bytes, limit: int = 1 << 30, *, reverse: bool = False
    ) -> list[Row]:
        """Returns rows like `get_range`, but causes no conflict."""
        if limit <= 0 or begin >= end:
            return []
        if not self.changes:
            return self._live.rows(begin, end, limit, reverse)
        rows: list[Row] = []
        for row in self._merged(begin, end, reverse):
            rows.append(row)
            if len(rows) == limit:
                break
        return rows

    def add_read_conflict(self, key: bytes) -> None:
        """Makes the commit conflict with other changes of the key, as a read does."""
        self.reads.add(key)

    # Writes.

    def set(self, key: bytes, value: bytes) -> None:
        self.writes[key] = value
        self.adds.pop(key, None)

    def clear(self, key: bytes) -> None:
        self.writes[key] = None
        self.adds.pop(key, None)

    def clear_range(self, begin: bytes, end: bytes) -> None:
        """Removes every key with begin <= key < end."""
        if begin >= end:
            return
        for written in [key for key in self.writes if begin <= key < end]:
            del self.writes[written]
        for added in [key for key in self.adds if begin <= key < end]:
            del self.adds[added]
        self.cleared.append((begin, end))

    def add(self, key: bytes, delta: int) -> None:
        """Adds to a counter row without a read, so that additions do not conflict."""
        if key in self.writes:
            self.writes[key] = counter_value(counter(self.writes[key]) + delta)
        else:
            self.adds[key] = self.adds.get(key, 0) + delta

    def end(self) -> None:
        """Releases the snapshot. Idempotent."""
        if self._snapshot is not None:
            self._snapshot.release()
            self._snapshot = None

    # Internals.

    @property
    def _live(self) -> Snapshot:
        if self._snapshot is None:
            raise ValueError("this transaction has ended")
        return self._snapshot

    def _read(self, key: bytes) -> bytes | None:
        value = None if self.cleared and within(key, self.cleared) else self._live.get(key)
        if self.adds and key in self.adds:
            return counter_value(counter(value) + self.adds[key])
        return value

    def _merged(self, begin: bytes, end: bytes, reverse: bool) -> Iterator[Row]:
        """Yields the rows of the snapshot and of this transaction, in order."""
        touched = {key for key in (*self.writes, *self.adds) if begin <= key < end}
        own = sorted(touched, reverse=reverse)
        at = 0
        for key, value in self._stored(begin, end, reverse):
            while at < len(own) and (own[at] > key if reverse else own[at] < key):
                yield from self._own(own[at])
                at += 1
            if key not in touched and not within(key, self.cleared):
                yield key, value
        for key in own[at:]:
            yield from self._own(key)

    def _own(self, key: bytes) -> Iterator[Row]:
        value = self.snapshot_get(key)
        if value is not None:
            yield key, value

    def _stored(self, begin: bytes, end: bytes, reverse: bool) -> Iterator[Row]:
        while begin < end:
            rows = self._live.rows(begin, end, PAGE_ROWS, reverse)
            yield from rows
            if len(rows) < PAGE_ROWS:
                return
            if reverse:
                end = rows[-1][0]
            else:
                begin = rows[-1][0] + b"\0"


def within(key: bytes, ranges: Iterable[Range]) -> bool:
    return any(begin <= key < end for begin, end in ranges)


def between(keys: Sequence[bytes], begin: bytes, end: bytes) -> Sequence[bytes]:
    """Returns the part of sorted `keys` with begin <= key < end."""
    return keys[bisect_left(keys, begin) : bisect_left(keys, end)]
