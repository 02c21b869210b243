"""Atomic batches of operations."""

import time

from fireflyer.errors import KvError
from fireflyer.kv.core import frames
from fireflyer.kv.core.writer import Batch


def now_ms() -> int:
    """Returns the current time of the clock that expires values, in ms since 1970."""
    return time.time_ns() // 1_000_000


def expiry(ttl: float | None) -> int:
    """Converts a time to live to an expiry in ms since 1970; 0: never.

    Raises:
        KvError: the time to live is not positive.
    """
    if ttl is None:
        return 0
    if not 0 < ttl < 1e10:
        raise KvError(f"invalid ttl {ttl}: expected seconds above 0")
    return now_ms() + max(1, round(ttl * 1000))


class WriteBatch:
    """Puts and deletions that become durable and visible atomically, in their order.

    Only one thread at a time may use a batch.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._changes: dict[bytes, bytes | None] = {}
        self._bytes = 0

    def put(
        self, key: bytes, value: bytes | bytearray | memoryview, *, ttl: float | None = None
    ) -> None:
        """Adds a put; the value expires after `ttl` seconds.

        Raises:
            InvalidKey: the key is empty or longer than 64 KiB.
            KvError: the value exceeds 64 MiB, or the batch 128 MiB.
        """
        self._add(key, bytes(value), expiry(ttl))

    def delete(self, key: bytes) -> None:
        """Adds a deletion; a missing key is no error. Raises InvalidKey."""
        self._add(key, None, 0)

    def __len__(self) -> int:
        return len(self._parts)

    def _add(self, key: bytes, value: bytes | None, expires: int) -> None:
        part = frames.operation(key, value, expires)
        if self._bytes + len(part) > frames.MOST_BATCH:
            raise KvError(f"a batch exceeds {frames.MOST_BATCH} bytes: divide it")
        self._bytes += len(part)
        self._parts.append(part)
        self._changes[key] = value

    def encoded(self) -> Batch:
        """Returns the batch in the form of the log."""
        return Batch(list(self._parts), dict(self._changes))
