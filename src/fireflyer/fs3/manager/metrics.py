"""Prometheus metrics of a manager."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from fireflyer.fs3.manager.chains import Chain, Public
from fireflyer.fs3.manager.core import Core


def state_of(chain: Chain) -> str:
    """Returns "whole" if all members serve, "degraded" if some do, "stopped" if none does."""
    serving = len(chain.targets(Public.SERVING))
    return "whole" if serving == len(chain.members) else "degraded" if serving else "stopped"


class Metrics:
    """Metrics of one manager process, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, what: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"fireflyer_fs3_manager_{name}", what, labels, registry=self.registry)

        def counter(name: str, what: str) -> Counter:
            return Counter(f"fireflyer_fs3_manager_{name}", what, registry=self.registry)

        self._primary = gauge("primary", "1 on the primary manager")
        self._epoch = gauge("epoch", "number of primaries so far")
        self._version = gauge("routing_version", "version of the routing")
        self._nodes = gauge("nodes", "nodes by whether their leases run", ("state",))
        self._members = gauge("members", "members of chains by state", ("state",))
        self._chains = gauge("chains", "whole: all members serve; stopped: none does", ("state",))
        self._tables = gauge("tables", "versions of chain tables")
        self.lost = counter("leases_lost", "nodes that were alive and went silent")
        self._living: set[int] = set()
        self.heartbeats = counter("heartbeats", "heartbeats answered")
        self.changes = counter("changes", "versions of the routing published")

    def update(self, core: Core | None, epoch: int, now: float) -> None:
        """Updates the metrics from the core of a term; None: this process is not primary."""
        self._primary.set(core is not None)
        if core is None:
            self._living.clear()
            return
        records, living = core.records, set(core.alive(now))
        self.lost.inc(len(self._living - living))
        self._living = living
        self._epoch.set(epoch)
        self._version.set(records.version)
        self._nodes.labels("alive").set(len(living))
        self._nodes.labels("dead").set(len(records.nodes) - len(living))
        counts = dict.fromkeys(Public, 0)
        for chain in records.chains.values():
            for member in chain.members:
                counts[member.state] += 1
        for state, count in counts.items():
            self._members.labels(state.name.lower()).set(count)
        states = [state_of(chain) for chain in records.chains.values()]
        for name in ("whole", "degraded", "stopped"):
            self._chains.labels(name).set(states.count(name))
        self._tables.set(len(records.tables))

    def text(self) -> str:
        """Returns the metrics in the text format of Prometheus."""
        return generate_latest(self.registry).decode()
