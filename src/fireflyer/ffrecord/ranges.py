"""Batched reads of byte ranges of stored files: neighbours are joined, transient errors retried."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fireflyer.errors import ConfigError, Corrupted, StorageError, Unavailable
from fireflyer.ffrecord.integers import checked_integer
from fireflyer.storage import Range, Storage

A = TypeVar("A")

_GAP = 64 << 10
"""Maximum number of bytes between two ranges that are read as one."""
_JOINED = 8 << 20
"""Maximum size in bytes of joined ranges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Number of attempts for a range, and the pauses between them."""

    attempts: int = 5
    backoff_s: float = 0.1
    """Pause in seconds before the second attempt. Each further pause doubles; jitter reduces each
    pause by up to a half."""

    def __post_init__(self) -> None:
        if checked_integer("attempts", self.attempts) < 1 or self.backoff_s < 0:
            raise ConfigError(
                f"invalid attempts {self.attempts} or backoff_s {self.backoff_s}: "
                "expected at least 1 attempt and a pause of at least 0 s"
            )

    def pause(self, failed: int) -> None:
        """Waits after the `failed`-th attempt."""
        time.sleep(self.backoff_s * 2 ** (failed - 1) * random.uniform(0.5, 1.0))

    def run(self, call: Callable[[], A]) -> A:
        """Returns the result of `call`; retries on Unavailable while attempts are left."""
        for failed in range(1, self.attempts):
            try:
                return call()
            except Unavailable:
                self.pause(failed)
        return call()


def read_ranges(storage: Storage, ranges: Sequence[Range], retry: Retry) -> list[memoryview]:
    """Returns the bytes of each range, which must lie inside its file.

    Raises:
        Unavailable: all attempts failed with transient errors.
        StorageError: a file is missing or not readable, or the server ignores ranges.
        Corrupted: a file ends inside a range, in every attempt.
    """
    joined, homes = _join(ranges)
    blocks: list[memoryview | None] = [None] * len(joined)
    missing = list(range(len(joined)))
    failed = 0
    while missing:
        answers = storage.read_many([joined[index] for index in missing])
        wrong: list[tuple[int, StorageError]] = []
        for index, answer in zip(missing, answers, strict=True):
            if isinstance(answer, StorageError):
                wrong.append((index, answer))
            elif len(answer) != joined[index][2] - joined[index][1]:
                wrong.append((index, _wrong_length(storage, joined[index], len(answer))))
            else:
                blocks[index] = memoryview(answer)
        missing = [index for index, _ in wrong]
        failed += 1
        for _, error in wrong:
            if failed >= retry.attempts or not isinstance(error, Unavailable | Corrupted):
                raise error
        if missing:
            retry.pause(failed)
    pieces = []
    for (home, offset), (_, start, end) in zip(homes, ranges, strict=True):
        block = blocks[home] if home >= 0 else None
        pieces.append(memoryview(b"") if block is None else block[offset : offset + end - start])
    return pieces


def _join(ranges: Sequence[Range]) -> tuple[list[Range], list[tuple[int, int]]]:
    """Joins neighbouring ranges.

    Returns:
        The joined ranges; and for each range the index of the joined range that contains it (-1 if
        the range is empty), and the range's offset in that joined range.
    """
    joined: list[Range] = []
    homes = [(-1, 0)] * len(ranges)
    for place in sorted(range(len(ranges)), key=ranges.__getitem__):
        name, start, end = ranges[place]
        if start == end:
            continue
        if joined:
            last, first, stop = joined[-1]
            if name == last and start <= stop + _GAP and max(end, stop) - first <= _JOINED:
                joined[-1] = (name, first, max(end, stop))
                homes[place] = (len(joined) - 1, start - first)
                continue
        joined.append((name, start, end))
        homes[place] = (len(joined) - 1, 0)
    return joined, homes


def _wrong_length(storage: Storage, wanted: Range, length: int) -> StorageError:
    name, start, end = wanted
    if length > end - start:
        return StorageError(
            f"{storage}/{name} returned {length} bytes instead of {end - start} from byte {start}: its "
            "server ignores ranges; use a server that supports range requests"
        )
    return Corrupted(
        f"{storage}/{name} returned {length} of the {end - start} bytes from byte {start}: "
        "the file is shorter than when it was opened"
    )
