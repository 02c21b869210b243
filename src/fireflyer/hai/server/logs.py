"""Logs of ranks: read by byte offset, and followed while they grow."""

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakKeyDictionary

import msgspec

from fireflyer.errors import TaskError
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.inotify import DirectoryWatch, Growing
from fireflyer.hai.lifecycle import count
from fireflyer.hai.server.logroom import gap, read_at

MAX_WAIT_S = 60.0
"""The longest that one request may wait for news."""

BYTES_PER_ANSWER = 1 << 20
BYTES_PER_MESSAGE = 1 << 16
"""Of a stream."""

IDLE_S = 15.0
"""A stream without news says this often that it is alive."""


class LogPiece(msgspec.Struct, frozen=True):
    """Some bytes of a rank's log."""

    attempt: int
    data: bytes
    next: int
    """Offset to go on from."""
    end: bool
    """The attempt is over and nothing follows."""


READINGS = 8
"""So many are remembered of a log until it grows."""


class _Readings:
    """What was read of a log that is followed since it has last grown."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.found: dict[tuple[int, bool], tuple[str, int]] = {}
        """By offset and whether no byte follows: whole characters, and how many bytes they are."""


class LogFile(msgspec.Struct, frozen=True):
    """Where a rank writes in one attempt."""

    task: str
    attempt: int
    path: Path


class Logs:
    """The logs of one home. All methods run on the event loop.

    Args:
        home: whose.
        store: knows the tasks.
        writing: whether processes of a task's attempt may still write.
    """

    def __init__(self, home: Home, store: Store, writing: Callable[[str, int], bool]) -> None:
        self._home = home
        self._store = store
        self._writing = writing
        self._watch = DirectoryWatch()
        self._readings: WeakKeyDictionary[Growing, _Readings] = WeakKeyDictionary()
        self._followers = 0
        self._ticks = 0
        """How often IDLE_S has passed since somebody follows."""
        self._ticking: asyncio.TimerHandle | None = None
        self._closing = False

    def find(self, name: str, rank: int, attempt: int | None) -> LogFile:
        """The log of a rank in an attempt, or in the current or last one.

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
        """Bytes from `offset`; waits up to `wait_s` for the first while the attempt runs."""
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
        """Text from `offset` on, whole characters, each with the offset behind it, until the attempt is over
        or the server ends; None after every IDLE_S without news. What is no UTF-8 becomes U+FFFD."""
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
        """Whole characters from `offset`, and their bytes. Most of those who follow a log are at its end, and
        are woken together: it is read and decoded for the first of them, and not again before it has grown.
        What is written meanwhile will be announced, so nobody who gets less than there is misses it."""
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
        """While somebody follows, everybody is woken every IDLE_S, with one timer for all."""
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
        """Those who follow this attempt look again: it is over."""
        self._watch.wake(self._home.tasks / name / str(attempt))

    def wake_all(self) -> None:
        """Everybody looks again: other machines write without a word to this one's kernel."""
        self._watch.wake_all()

    def end(self) -> None:
        """Everybody who follows gets an answer and leaves."""
        self._closing = True
        self._watch.wake_all()

    def close(self) -> None:
        self._watch.close()


def _whole(data: bytes, *, last: bool) -> tuple[str, int]:
    """The text of whole characters, and how many bytes they are; `last`: no byte follows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data, final=last and len(data) < BYTES_PER_MESSAGE)
    return text, len(data) - len(decoder.getstate()[0])


def _read(path: Path, offset: int, most: int) -> tuple[bytes, int]:
    """Bytes from `offset` on and the offset behind them; a hole is a line that says so."""
    begin, data = read_at(path, offset, most)
    return (gap(begin - offset) if begin > offset else b"") + data, begin + len(data)
