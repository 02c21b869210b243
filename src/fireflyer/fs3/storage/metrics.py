"""Prometheus metrics of a storage node."""

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
"""Upper bound of the first bucket of `io.Node.timings`; each bound is twice the previous one."""

_COUNTERS = {
    "read_bytes": "bytes sent to readers",
    "written_bytes": "bytes received from writers",
    "reads": "pieces of chunks read",
    "writes": "writes to chunks",
    "messages": "messages from other targets",
    "refused": "frames that did not follow the protocol",
    "mismatched": "received frames whose bytes did not match their CRCs",
    "reported": "chunks that readers found damaged",
}
_GAUGES = {
    "connections": "open connections",
    "buffer_bytes": "memory of payloads in flight",
    "buffer_limit": "maximum of buffer_bytes",
    "jobs": "jobs that wait for a worker",
    "ready": "answers in memory that clients have not fetched yet",
    "index_bytes": "memory of the chunks' indexes",
}
_TARGET_COUNTERS = {
    "groups": "group commits of the log",
    "applied": "writes that group commits made durable",
    "checked": "chunks checked by the scrub, or after a reader found them damaged",
    "damaged": "checked chunks whose bytes did not match their CRCs",
    "mended": "damaged pieces of log and index restored from their copies when the store opened",
}
_TARGET_GAUGES = {
    "chunks": "chunks",
    "bytes": "bytes in chunks",
    "extent_bytes": "bytes of disk that chunks take",
    "log_bytes": "bytes of log since the last snapshot",
    "busy_chunks": "chunks with a pending write, repair or resynchronisation",
}
_TIMINGS = {
    "read": "of a frame of reads, from its arrival to its answer",
    "write": "of a frame of writes, from its arrival to its answer",
    "sync": "of a group commit",
}


class StorageCollector:
    """Collector that queries the node at each scrape."""

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
        what = "time of the last complete scrub, in s since 1970; 0: never"
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
        what = "targets by the state that they report"
        yield _gauge("targets_local", what, ["node", "state"], counted)

    def _node_itself(self) -> Iterator[Metric]:
        name, node = self._node.settings.name, self._node
        size, free = node.space()
        for key, what, value in (
            ("disk_bytes", "size of the disk of the targets", size),
            ("disk_free_bytes", "free space of the disk of the targets", free),
            ("disk_kept_bytes", "disk space that writes must leave free", node.settings.reserve),
            ("refuses_writes", "1: the disk is too full for a whole chunk", float(node.refuses)),
            ("faults", "targets that are closed or faulty", len(node.faults)),
            ("lease_seconds", "remaining time of the lease", node.lease_ends - time.monotonic()),
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
    """Converts buckets to Prometheus' form: (bound in s, cumulated count)."""
    rows, count = [], 0
    for at, here in enumerate(buckets):
        count += here
        bound = str(FIRST_NS * 2**at / 1e9) if at < len(buckets) - 1 else "+Inf"
        rows.append((bound, float(count)))
    return rows
