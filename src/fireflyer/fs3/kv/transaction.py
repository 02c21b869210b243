"""Transaction: reads of one snapshot; writes are kept aside until the engine commits them.

Thread contract: a transaction belongs to one thread at a time; engines may be used by all.
Invariants: a read sees the snapshot and the transaction's own writes, nothing else. `reads` and
`ranges` hold the keys and ranges that were read, as far as they were read. Ranges in `cleared` are
applied before `writes`.
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
    """Nothing was written, because something that was read has changed since."""
    MAYBE_COMMITTED = "maybe committed"
    """All of it is written, or nothing; only the store's contents tell."""


class Snapshot(Protocol):
    """One state of the store, as of commit `version`."""

    version: int

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Returns the rows of these keys that exist."""
        ...

    def rows(self, begin: bytes, end: bytes, limit: int, reverse: bool) -> list[Row]:
        """Returns at most `limit` rows with begin <= key < end, in order or in reverse order."""
        ...

    def release(self) -> None:
        """Ends this user's use of the snapshot."""
        ...


class Engine(Protocol):
    """Store. `begin` and `commit_many` may be called from any thread."""

    def begin(self) -> "Transaction":
        """Returns a transaction that sees every commit acknowledged before this call.

        Its snapshot is taken by its first read at the latest.
        """
        ...

    def begin_many(self, count: int, keys: Sequence[bytes]) -> list["Transaction"]:
        """Returns `count` transactions of one snapshot; `keys` are read at once.

        The calling thread ends them, or commits them together, before it waits for any other: until
        then commits of other threads may have to wait.
        """
        ...

    def commit_many(self, transactions: Sequence["Transaction"]) -> list[Outcome]:
        """Commits each of them, in this order, and ends it; durable when it returns.

        Raises:
            StorageError: the store failed; none of them is acknowledged.
        """
        ...

    def close(self) -> None: ...


def counter(value: bytes | None) -> int:
    """Returns the number in a row kept by `Transaction.add`; 0 if there is no row."""
    return int.from_bytes(value, "big", signed=True) if value is not None else 0


def counter_value(number: int) -> bytes:
    return number.to_bytes(COUNTER_BYTES, "big", signed=True)


class Transaction:
    """Made by `Engine.begin`; ended by `end` or by `Engine.commit_many`. See the module."""

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
        """True if a commit would write anything."""
        return bool(self.writes or self.adds or self.cleared)

    # Reads.

    def get(self, key: bytes) -> bytes | None:
        """Returns the key's value, or None.

        The commit conflicts if another one changes the key before.
        """
        if key in self.writes:
            return self.writes[key]
        self.reads.add(key)
        return self._look(key)

    def snapshot_get(self, key: bytes) -> bytes | None:
        """Returns a value as `get`, without the conflict."""
        if key in self.writes:
            return self.writes[key]
        return self._look(key)

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

        Conflicts with changes in the part that was read.
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
        """Returns rows as `get_range`, without the conflict."""
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
        """Makes the commit conflict as if the key had been read."""
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
        """Adds to a counter row without reading it: additions of transactions do not conflict."""
        if key in self.writes:
            self.writes[key] = counter_value(counter(self.writes[key]) + delta)
        else:
            self.adds[key] = self.adds.get(key, 0) + delta

    def end(self) -> None:
        """Releases the snapshot; harmless if done before."""
        if self._snapshot is not None:
            self._snapshot.release()
            self._snapshot = None

    # Inside.

    @property
    def _live(self) -> Snapshot:
        if self._snapshot is None:
            raise ValueError("this transaction has ended")
        return self._snapshot

    def _look(self, key: bytes) -> bytes | None:
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
