"""Following a task: history on stderr, output of its ranks on stdout, live by long polling."""

import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from fireflyer.cli import printing
from fireflyer.errors import FireflyerError
from fireflyer.hai.client import Client
from fireflyer.hai.model import TERMINAL, Event, TaskState

WAIT_S = 20.0
HELD_S = 0.2
"""Seconds for which an incomplete line waits for its end, because `print` may write a line in
pieces."""
MOST_HELD = 1 << 16
"""Maximum size of a held incomplete line in bytes."""


class Tail:
    """Copier of ranks' output to a stream, attempt after attempt, with a thread per rank.

    Args:
        client: the platform.
        task: task id.
        ranks: ranks to copy.
        out: destination of the bytes.
        mark: put "rank| " before every line.
    """

    def __init__(
        self, client: Client, task: str, ranks: Sequence[int], out: BinaryIO, *, mark: bool
    ) -> None:
        self._client = client
        self._task = task
        self._ranks = ranks
        self._out = out
        self._mark = mark
        self._lock = threading.Lock()
        self._amid_line = False
        self._threads: list[threading.Thread] = []
        self._errors: list[Exception] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Reserves the output for a message on stderr.

        The message starts on a new line if stderr and the stream are the same file.
        """
        with self._lock:
            if self._amid_line and _same_file(self._out, sys.stderr):
                self._out.write(b"\n")
                self._out.flush()
                self._amid_line = False
            yield

    def start(self, attempt: int) -> None:
        """Starts to copy an attempt, after all output of the earlier attempt is written."""
        self.finish()
        for rank in self._ranks:
            thread = threading.Thread(target=self._copy, args=(rank, attempt), daemon=True)
            thread.start()
            self._threads.append(thread)

    def finish(self) -> None:
        """Waits until the attempt has ended and all its output is written.

        Raises:
            FireflyerError: the output of a rank could not be read.
            OSError: a write to the stream failed.
        """
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._errors:
            raise self._errors[0]

    def copy(self, attempt: int) -> None:
        """Copies an attempt's output until its end, in this thread; raises what `finish` raises."""
        for rank in self._ranks:
            self._copy(rank, attempt)
        self.finish()

    def _copy(self, rank: int, attempt: int) -> None:
        offset = 0
        held = b""
        try:
            while True:
                wait_s = HELD_S if held and not self._mark else WAIT_S
                chunk = self._client.read_log_chunk(self._task, rank, offset, attempt, wait_s)
                offset = chunk.next_offset
                data = held + chunk.data
                end = max(data.rfind(b"\n"), -1 if self._mark else data.rfind(b"\r")) + 1
                if chunk.end or (not self._mark and (not chunk.data or len(data) > MOST_HELD)):
                    end = len(data)
                held = data[end:]
                self._write(_marked(data[:end], rank) if self._mark else data[:end])
                if chunk.end:
                    return
        except (FireflyerError, OSError) as error:
            self._errors.append(error)

    def _write(self, data: bytes) -> None:
        if data:
            with self._lock:
                self._out.write(data)
                self._out.flush()
                self._amid_line = not data.endswith(b"\n")


def _marked(data: bytes, rank: int) -> bytes:
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    return b"".join(b"%d| %s\n" % (rank, line) for line in lines)


def _same_file(one: BinaryIO, other: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, io.UnsupportedOperation):
        return False


def follow(
    client: Client,
    task: str,
    tail: Tail,
    after: int,
    tell: Callable[[Event], None],
) -> TaskState:
    """Follows a task until it is over; returns its final state.

    Args:
        client: the platform.
        task: task id.
        tail: copies the output of every attempt that starts.
        after: sequence number of the last event that was already reported; 0: none.
        tell: called with every event.
    """
    while True:
        for event in client.events(task=task, after=after, wait_s=WAIT_S):
            if event.kind == "starting":
                tail.start(event.attempt)
            over = event.kind in TERMINAL
            if over:
                tail.finish()
            with tail.aside():
                tell(event)
            after = event.seq
            if over:
                return client.task(task).state


def print_log(
    home: Path | None, task: str, rank: int, attempt: int | None, *, follow: bool
) -> None:
    """Prints the output of a rank: `fireflyer logs`."""
    client = Client(home)
    out = sys.stdout.buffer
    wait_s = WAIT_S if follow else 0.0
    if follow and attempt is None:
        _follow_log(client, task, rank, out)
        return
    offset = 0
    while True:
        chunk = client.read_log_chunk(task, rank, offset, attempt, wait_s)
        attempt, offset = chunk.attempt, chunk.next_offset
        out.write(chunk.data)
        out.flush()
        if chunk.end or not (chunk.data or follow):
            return


def _follow_log(client: Client, task: str, rank: int, out: BinaryIO) -> None:
    """Copies attempt after attempt in this thread, so a closed pipe ends the copy at once."""
    tail = Tail(client, task, [rank], out, mark=False)
    view, seq = client.task_at(task)
    if view.attempt:
        tail.copy(view.attempt)
    over = view.state in TERMINAL
    while not over:
        for event in client.events(task=task, after=seq, wait_s=WAIT_S):
            seq = event.seq
            if event.kind == "starting":
                tail.copy(event.attempt)
            over = over or event.kind in TERMINAL


def print_events(
    home: Path | None, task: str | None, after: int, *, follow: bool, json: bool
) -> None:
    """Prints events: `fireflyer events`."""
    client = Client(home)
    found: list[Event] = []
    while more := client.events(task=task, after=after):
        after = more[-1].seq
        if follow:
            printing.show_lines(more, printing.event_line, json=json)
        else:
            found += more
    if not follow:
        printing.events(found, json=json)
        return
    while True:
        more = client.events(task=task, after=after, wait_s=WAIT_S)
        printing.show_lines(more, printing.event_line, json=json)
        after = more[-1].seq if more else after
