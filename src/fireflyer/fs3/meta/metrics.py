"""Prometheus metrics of a metadata service.

Thread contract: any thread may call `done`. `done` runs for each request, so it only queues the
request. A scrape, or a `done` that finds many queued requests, counts them.
"""

import errno
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from fireflyer.errors import FileError, FireflyerError

PREFIX = "fireflyer_fs3_meta"
BOUNDS = [2.0**power for power in range(-15, 4)]
"""Bounds of the buckets, in s: 31 us to 8 s."""
NOTES = 1024
"""Number of queued requests at which `done` counts them."""


def name_of(error: FireflyerError) -> str:
    """Returns the errno name of a FileError (ENOENT, ...), else the error's class name."""
    if isinstance(error, FileError):
        return errno.errorcode.get(error.errno or 0, "FileError")
    return type(error).__name__


class Operations:
    """Metrics of requests by kind: durations and errors."""

    def __init__(
        self, store: Callable[[], Mapping[str, int]], unlinked: Callable[[], int | None]
    ) -> None:
        """Registers the metrics in a separate registry.

        Args:
            store: function that returns the counters of `SqliteEngine.statistics`.
            unlinked: function that returns the number of orphans; None: unknown.
        """
        self._store, self._unlinked = store, unlinked
        self._notes: deque[tuple[str, float, str]] = deque()
        self._lock = threading.Lock()  # guards the two attributes below
        self._times: dict[str, list[float]] = {}  # by kind: each bucket's count, then the sum
        self._errors: dict[tuple[str, str], int] = {}
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def done(self, kind: str, seconds: float, error: str = "") -> None:
        """Records an answered request; `error` is the name of its error."""
        self._notes.append((kind, seconds, error))
        if len(self._notes) >= NOTES and self._lock.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._lock.release()

    def _count(self) -> None:
        for _ in range(len(self._notes)):
            kind, seconds, error = self._notes.popleft()
            row = self._times.setdefault(kind, [0.0] * (len(BOUNDS) + 2))
            row[bisect_left(BOUNDS, seconds)] += 1
            row[-1] += seconds
            if error:
                self._errors[kind, error] = self._errors.get((kind, error), 0) + 1

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._count()
            times = {kind: list(row) for kind, row in self._times.items()}
            errors = dict(self._errors)
        family = HistogramMetricFamily(
            f"{PREFIX}_request_seconds", "time of requests by kind", labels=["kind"]
        )
        bounds = [*map(str, BOUNDS), "+Inf"]
        for kind, row in sorted(times.items()):
            counts = [sum(row[: at + 1]) for at in range(len(bounds))]
            family.add_metric([kind], list(zip(bounds, counts, strict=True)), row[-1])
        yield family
        refused = CounterMetricFamily(
            f"{PREFIX}_errors", "requests that raised, by kind and error", labels=["kind", "error"]
        )
        for (kind, error), count in sorted(errors.items()):
            refused.add_metric([kind, error], count)
        yield refused
        if (unlinked := self._unlinked()) is not None:
            what = "files without a name, still open or with chunks that are to be removed"
            yield GaugeMetricFamily(f"{PREFIX}_unlinked_files", what, value=unlinked)
        counted = self._store()
        for key, what in (
            ("groups", "group commits of the store"),
            ("commits", "transactions in them"),
            ("conflicts", "transactions that conflicted and were run again"),
        ):
            yield CounterMetricFamily(f"{PREFIX}_store_{key}", what, value=counted[key])
        what = "time of group commits"
        yield CounterMetricFamily(
            f"{PREFIX}_store_commit_seconds", what, value=counted["commit_ns"] / 1e9
        )
