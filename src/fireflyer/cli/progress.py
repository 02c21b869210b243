"""Progress on stderr: a bar on a terminal, elsewhere a line every 10 s."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fireflyer.program import plain

EVERY_S = 10.0
"""Time between two lines."""

BYTES = "bytes"


@contextmanager
def progress(title: str, total: int | None, unit: str = BYTES) -> Iterator[Callable[[int], None]]:
    """Shows how much of the work is done.

    Any thread may call the yielded function with a number of further bytes, samples, ...

    Args:
        total: amount of work; None: unknown.
        unit: plural name of the counted things, e.g. "samples".
    """
    title = plain(title)
    if not sys.stderr.isatty():
        yield Lines(title, total, unit).add
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counted = (
        (DownloadColumn(), TransferSpeedColumn()) if unit == BYTES else (MofNCompleteColumn(),)
    )
    columns = (TextColumn("{task.description}"), BarColumn(), *counted, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda count: bar.advance(task, count)


class Lines:
    """Progress as lines of text, one every `EVERY_S`; work that ends earlier prints no line."""

    def __init__(
        self, title: str, total: int | None, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._clock = clock
        self._done = 0
        self._next_s = clock() + EVERY_S
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Counts further things; writes a line if one is due."""
        with self._lock:
            self._done += count
            now = self._clock()
            if now < self._next_s:
                return
            self._next_s = now + EVERY_S
            done = self._done
        whole = f" of {self._total:,}" if self._total is not None else ""
        share = f" ({done / self._total:.0%})" if self._total else ""
        sys.stderr.write(f"{self._title}: {done:,}{whole} {self._unit}{share}\n")
