"""Rank logs: read by byte offset, and followed while they grow."""

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec

from fireflyer.errors import TaskError
from fireflyer.hai.controller.inotify import DirectoryWatch, Growing
from fireflyer.hai.controller.log_quota import gap, read_at
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import count

MAX_WAIT_S = 60.0
"""Maximum seconds that one request waits for new data."""

BYTES_PER_ANSWER = 1 << 20
BYTES_PER_MESSAGE = 1 << 16
"""Maximum bytes of a log in one message of a stream."""

IDLE_S = 15.0
"""Interval in seconds of keep-alive messages on a stream without new data."""


class LogPiece(msgspec.Struct, frozen=True):
    """Some bytes of a rank's log."""

    attempt: int
    data: bytes
    next: int
    """Offset to continue from."""
    end: bool
    """True if the attempt is over and no byte follows."""


READINGS = 8
"""Maximum number of cached reads of a log before its cache is dropped."""


class _Readings:
    """Cached reads of a followed log since its last growth."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.found: dict[tuple[int, bool], tuple[str, int]] = {}
        """Decoded text and its length in bytes. The key is the offset and whether the text ends the
        log."""


class LogFile(msgspec.Struct, frozen=True):
    """Log file of a rank in one attempt."""

    task: str
    attempt: int
    path: Path


class Logs:
    """Logs of one home. All methods run on the event loop.

    Args:
        home: home of the tasks.
        store: store of the tasks.
        writing: returns whether processes of a task's attempt may still write.
    """

    def __init__(self, home: Home, store: Store, writing: Callable[[str, int], bool]) -> None:
        self._home = home
        self._store = store
        self._writing = writing
        self._watch = DirectoryWatch()
        self._readings: WeakKeyDictionary[Growing, _Readings] = WeakKeyDictionary()
        self._followers = 0
        self._ticks = 0
        """Number of IDLE_S periods that have passed while logs were followed."""
        self._ticking: asyncio.TimerHandle | None = None
        self._closing = False

    def find(self, name: str, rank: int, attempt: int | None) -> LogFile:
        """Returns the log of a rank in an attempt; None: the current or last attempt.

        Raises:
            TaskError: no such task, attempt or rank.
        """
        row = self._store.row(name)
        world = row.spec.nodes * row.spec.ranks_per_node
        number = row.attempt if attempt is None else attempt
        if not 0 <= rank < world:
            raise TaskError(f"task {name} has {count(world, 'rank')}; there is no rank {rank}")
        if number == 0:
            raise TaskError(f"task {name} has not started yet, so it has no log")
        if self._store.attempt(name, number) is None:
            raise TaskError(f"task {name} has no attempt {number}")
        return LogFile(name, number, self._home.tasks / name / str(number) / f"{rank}.log")

    async def read(self, file: LogFile, offset: int, wait_s: float) -> LogPiece:
        """Reads bytes from `offset` on. While the attempt runs, waits up to `wait_s` for the first
        byte."""
        deadline = time.monotonic() + min(wait_s, MAX_WAIT_S)
        over = not self._writing(file.task, file.attempt)
        data, behind = _read(file.path, offset, BYTES_PER_ANSWER)
        if data or over or wait_s <= 0:
            return LogPiece(file.attempt, data, behind, over and not data)
        file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._watch.watching(file.path) as growing:
            while True:
                seen = growing.times
                over = not self._writing(file.task, file.attempt)
                data, behind = _read(file.path, offset, BYTES_PER_ANSWER)
                left = deadline - time.monotonic()
                if data or over or left <= 0 or self._closing:
                    return LogPiece(file.attempt, data, behind, over and not data)
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await growing.wait(seen)

    async def follow(self, file: LogFile, offset: int) -> AsyncIterator[tuple[str, int] | None]:
        """Yields text from `offset` in complete characters, each piece with the offset after the
        piece. Ends when the attempt is over or the server shuts down. Yields None after every
        IDLE_S without new text. Invalid UTF-8 becomes U+FFFD.
        """
        file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._watch.watching(file.path) as growing, self._following():
            ticks = self._ticks
            while not self._closing:
                seen = growing.times
                over = not self._writing(file.task, file.attempt)
                text, used = self._text_at(growing, file.path, offset, last=over)
                if text:
                    offset += used
                    yield text, offset
                elif over:
                    return
                elif ticks != self._ticks:
                    ticks = self._ticks
                    yield None
                else:
                    await growing.wait(seen)

    def _text_at(self, growing: Growing, path: Path, offset: int, *, last: bool) -> tuple[str, int]:
        """Returns complete characters from `offset` and their length in bytes. Most followers of a
        log read at its end and wake together. The first follower reads and decodes; the others
        reuse the cached text until the log grows. A later event announces bytes that are written
        meanwhile, so no follower misses them."""
        readings = self._readings.get(growing)
        if readings is None or readings.times != growing.times or len(readings.found) > READINGS:
            readings = self._readings[growing] = _Readings(growing.times)
        found = readings.found.get((offset, last))
        if found is None:
            data, behind = _read(path, offset, BYTES_PER_MESSAGE)
            text, used = _whole(data, last=last)
            left = len(data) - used
            found = readings.found[offset, last] = (text, behind - left - offset)
        return found

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Counts a follower. While a log has followers, one timer wakes all followers every
        IDLE_S."""
        self._followers += 1
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_later(IDLE_S, self._tick)
        try:
            yield
        finally:
            self._followers -= 1
            if not self._followers and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    def _tick(self) -> None:
        self._ticks += 1
        self._watch.wake_all()
        self._ticking = asyncio.get_running_loop().call_later(IDLE_S, self._tick)

    def wake(self, name: str, attempt: int) -> None:
        """Wakes the followers of an attempt that is over."""
        self._watch.wake(self._home.tasks / name / str(attempt))

    def wake_all(self) -> None:
        """Wakes all followers, because writes by other machines cause no event in this kernel."""
        self._watch.wake_all()

    def end(self) -> None:
        """Wakes all followers so that they return, because the server shuts down."""
        self._closing = True
        self._watch.wake_all()

    def close(self) -> None:
        self._watch.close()


def _whole(data: bytes, *, last: bool) -> tuple[str, int]:
    """Decodes complete characters; returns the text and its length in bytes. `last`: no byte
    follows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=last and len(data) < BYTES_PER_MESSAGE)
    return text, len(data) - len(decoder.getstate()[0])


def _read(path: Path, offset: int, most: int) -> tuple[bytes, int]:
    """Returns bytes from `offset` and the offset after them; a line of text replaces a hole."""
    begin, data = read_at(path, offset, most)
    return (gap(begin - offset) if begin > offset else b"") + data, begin + len(data)
