"""Metrics for `/metrics`: counters and histograms of transitions, gauges of the current state.

Each controller has its own registry: two servers in one process, as in tests, share no metrics.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fireflyer.hai.lifecycle import Note, Task

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAITS = (0.1, 1, 10, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_SUSPENDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
_PLANS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5)
_REQUESTS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


USED = (
    ("units_held", "held", "GPUs that tasks hold (a node without GPUs counts 1)"),
    ("units_usable", "capacity", "GPUs of usable nodes (a node without GPUs counts 1)"),
    (
        "working_ratio",
        "useful",
        "Share of held GPUs whose task is running, not starting or suspending",
    ),
    ("cpu_cores_used", "cpu", "CPU cores that ranks used in the last minute"),
    ("memory_bytes", "memory", "Resident memory of ranks, mean of the last minute"),
    ("read_bytes_per_second", "read", "Bytes that ranks read from storage"),
    ("written_bytes_per_second", "written", "Bytes that ranks wrote to storage"),
    ("gpu_load_ratio", "gpu", "Load of the GPUs that tasks hold, where the load is sampled"),
    ("gpu_memory_bytes", "gpu_memory", "Memory used on the GPUs that tasks hold"),
)
"""Gauges of the last minute: name, metric in `sampling/series.py`, help text."""


class Gauges:
    """Current counts. The callback `Metrics.gauges` returns new ones at each scrape."""

    def __init__(self) -> None:
        self.queued: dict[str, int] = {}
        """Queued tasks by priority."""
        self.tasks: dict[str, int] = {}
        """Unfinished tasks by state."""
        self.nodes: dict[str, int] = {}
        """Nodes by state: busy, free, or the health of a node that accepts no task."""


class Metrics:
    """The metrics of one controller."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        put: Any = {"registry": self._registry, "namespace": "fireflyer", "subsystem": "hai"}
        self._notes = Counter("events", "Events written", ["kind"], **put)
        self._wait_s = Histogram(
            "wait_seconds", "Time from queued to starting", buckets=_WAITS, **put
        )
        self._suspend_s = Histogram(
            "suspend_seconds",
            "Time from the suspend request until the nodes are free",
            buckets=_SUSPENDS,
            **put,
        )
        self._restarts = Counter("restarts", "Attempts started again", ["cause"], **put)
        self.plan_s = Histogram("plan_seconds", "Time of one plan", buckets=_PLANS, **put)
        self.request_s = Histogram(
            "request_seconds",
            "Time to the start of a response",
            ["route", "status"],
            buckets=_REQUESTS,
            **put,
        )
        self.followers = {"log": 0, "events": 0, "changes": 0}
        """Open streams by kind."""
        self._queued_at: dict[str, float] = {}
        self._suspended_at: dict[str, float] = {}
        self._ended = ""
        self.gauges: Callable[[], Gauges] = Gauges
        """Callback that the controller sets."""
        self.latest: Callable[[], dict[str, float]] = dict
        """Callback that returns the cluster's values of the last minute; the controller sets the
        callback."""
        self._registry.register(_Now(self))

    def step(self, task: Task, notes: Sequence[Note], wall: float) -> None:
        """Counts a transition."""
        for note in notes:
            self._notes.labels(note.kind).inc()
            match note.kind:
                case "queued":
                    self._queued_at[task.id] = wall
                case "starting":
                    if (since := self._queued_at.pop(task.id, None)) is not None:
                        self._wait_s.observe(max(wall - since, 0.0))
                case "suspending":
                    self._suspended_at[task.id] = wall
                case "suspended":
                    if (since := self._suspended_at.pop(task.id, None)) is not None:
                        self._suspend_s.observe(max(wall - since, 0.0))
                case "gang_ended":
                    self._ended = str(note.detail["outcome"])
                case "restarting":
                    self._restarts.labels(self._ended).inc()
                case "stopped" | "finished" | "failed":
                    self._queued_at.pop(task.id, None)
                    self._suspended_at.pop(task.id, None)

    def text(self) -> bytes:
        """Returns the metrics in the Prometheus format."""
        return generate_latest(self._registry)


class _Now(Collector):
    def __init__(self, meters: Metrics) -> None:
        self._meters = meters

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        gauges = self._meters.gauges()
        nodes = gauges.nodes
        families: list[tuple[str, str, str, dict[str, int]]] = [
            ("queue_length", "Queued tasks", "priority", gauges.queued),
            ("tasks", "Tasks that are not over", "state", gauges.tasks),
            ("nodes", "Nodes", "state", nodes),
            ("followers", "Open streams", "kind", self._meters.followers),
        ]
        for name, text, label, values in families:
            family = GaugeMetricFamily(f"fireflyer_hai_{name}", text, labels=[label])
            for value, number in sorted(values.items()):
                family.add_metric([value], number)
            yield family
        used = self._meters.latest()
        for name, metric, text in USED:
            if metric in used:
                yield GaugeMetricFamily(f"fireflyer_hai_{name}", text, value=used[metric])
        there = nodes.get("busy", 0) + nodes.get("free", 0)
        share = nodes.get("busy", 0) / there if there else 0.0
        yield GaugeMetricFamily(
            "fireflyer_hai_occupancy", "Share of the usable nodes that hold a task", value=share
        )
