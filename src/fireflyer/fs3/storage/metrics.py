"""What a storage node counts, for Prometheus."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from fireflyer.fs3.manager.chains import LocalState, Public

if TYPE_CHECKING:
    from fireflyer.fs3.storage.node import StorageNode

PREFIX = "fireflyer_fs3_storage"
FIRST_NS = 1 << 13
"""Bound of the first bucket of `io.Node.timings`; each next one is twice as large."""

_COUNTERS = {
    "read_bytes": "bytes sent to readers",
    "written_bytes": "bytes that came from writers",
    "reads": "pieces of chunks read",
    "writes": "writes to chunks",
    "messages": "messages of other targets",
    "refused": "frames that were none of the protocol",
    "mismatched": "frames whose bytes did not fit their CRCs when they came",
    "reported": "chunks that readers found damaged",
}
_GAUGES = {
    "connections": "open connections",
    "buffer_bytes": "memory of payloads under way",
    "buffer_limit": "what buffer_bytes can be at most",
    "jobs": "jobs that wait for a worker",
    "ready": "answers in memory that clients did not ask for yet",
    "index_bytes": "memory of the chunks' indexes",
}
_TARGET_COUNTERS = {
    "groups": "group commits of the log",
    "applied": "writes that these made durable",
    "checked": "chunks read by the scrub, or because a reader found them damaged",
    "damaged": "chunks of those whose bytes did not fit their CRCs",
}
_TARGET_GAUGES = {
    "chunks": "chunks",
    "bytes": "bytes in chunks",
    "extent_bytes": "bytes of disk that chunks take",
    "log_bytes": "bytes of log since the last snapshot",
    "busy_chunks": "chunks with something under way: writes, repairs, resynchronisation",
}
_TIMINGS = {
    "read": "of a frame of reads, from its arrival to its answer",
    "write": "of a frame of writes, likewise",
    "sync": "of a group commit",
}


class StorageCollector:
    """Asks a node when it is asked."""

    def __init__(self, node: "StorageNode") -> None:
        self._node = node
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield from self._service()
        yield from self._targets()
        yield from self._node_itself()

    def _service(self) -> Iterator[Metric]:
        name = self._node.settings.name
        counts = self._node.statistics()
        for key, what in _COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}_{key}", what, labels=["node"])
            counter.add_metric([name], counts[key])
            yield counter
        for key, what in _GAUGES.items():
            yield _gauge(key, what, ["node"], [([name], counts[key])])
        for key, (buckets, total_ns) in self._node.timings().items():
            family = HistogramMetricFamily(
                f"{PREFIX}_{key}_seconds", f"time {_TIMINGS[key]}", labels=["node"]
            )
            family.add_metric([name], _cumulated(buckets), total_ns / 1e9)
            yield family

    def _targets(self) -> Iterator[Metric]:
        name = self._node.settings.name
        targets = self._node.targets()
        labels = ["node", "target", "chain"]
        for key, what in _TARGET_COUNTERS.items():
            counter = CounterMetricFamily(f"{PREFIX}_target_{key}", what, labels=labels)
            for target, its in targets.items():
                counter.add_metric([name, str(target), str(its["chain"])], its[key])
            yield counter
        for key, what in _TARGET_GAUGES.items():
            rows = [([name, str(t), str(its["chain"])], its[key]) for t, its in targets.items()]
            yield _gauge(f"target_{key}", what, labels, rows)
        rows = [([name, str(t), str(its["chain"])], its["scrubbed"]) for t, its in targets.items()]
        what = "when the last scrub of it was done, in s since 1970; 0: never"
        yield _gauge("target_scrubbed_timestamp_seconds", what, labels, rows)
        states = [
            (Public(int(its["role"])), LocalState(int(its["local"]))) for its in targets.values()
        ]
        counted = [
            ([name, public.name.lower()], float(sum(p == public for p, _ in states)))
            for public in Public
        ]
        yield _gauge(
            "targets", "targets by their state in their chains", ["node", "state"], counted
        )
        counted = [
            ([name, local.name.lower()], float(sum(at == local for _, at in states)))
            for local in LocalState
        ]
        what = "targets by what they say of themselves"
        yield _gauge("targets_local", what, ["node", "state"], counted)

    def _node_itself(self) -> Iterator[Metric]:
        name, node = self._node.settings.name, self._node
        size, free = node.space()
        for key, what, value in (
            ("disk_bytes", "size of the disk of the targets", size),
            ("disk_free_bytes", "free space of it", free),
            ("disk_kept_bytes", "of which writes leave so much free", node.settings.reserve),
            ("refuses_writes", "1: its disk is too full for a whole chunk", float(node.refuses)),
            ("faults", "targets that are not open or faulty", len(node.faults)),
            ("lease_seconds", "how long the lease still runs", node.lease_ends - time.monotonic()),
        ):
            yield _gauge(key, what, ["node"], [([name], value)])


def _gauge(
    key: str, what: str, labels: list[str], rows: list[tuple[list[str], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}_{key}", what, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _cumulated(buckets: list[int]) -> list[tuple[str, float]]:
    """As Prometheus has them: how many took at most so many seconds."""
    rows, count = [], 0
    for at, here in enumerate(buckets):
        count += here
        bound = str(FIRST_NS * 2**at / 1e9) if at < len(buckets) - 1 else "+Inf"
        rows.append((bound, float(count)))
    return rows
