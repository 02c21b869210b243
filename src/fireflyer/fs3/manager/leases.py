"""Leases: how long a node may serve, and when the manager may declare it dead.

See docs/internals/fs3-chain.md, "Leases". Times are seconds of the caller's monotonic clock. Clocks
may differ in their values, and by 1 % in their rates.
"""

from dataclasses import dataclass

from fireflyer.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Settings of docs/guide/fs3.md, "Time"."""

    lease_s: float = 3.0
    """Duration of a lease in seconds, from the sending of an answered heartbeat."""
    recovery_wait_s: float = 60.0
    """Seconds that a stopped chain waits until all targets that served last are alive."""

    def __post_init__(self) -> None:
        if self.lease_s <= 0 or self.recovery_wait_s < 0:
            raise ConfigError(f"invalid {self}: expected times above 0")

    @classmethod
    def for_failover(cls, failover_s: float) -> "Times":
        """Returns settings for a failover within `failover_s`, as clients observe it."""
        return cls(lease_s=0.75 * failover_s)

    @property
    def dead_s(self) -> float:
        """Seconds without a heartbeat after which a lease has expired by any clock."""
        return self.lease_s * 1.1 + 0.05

    @property
    def heartbeat_s(self) -> float:
        return self.lease_s / 6

    @property
    def tick_s(self) -> float:
        """Seconds between two evaluations of all chains."""
        return self.lease_s / 30


class NodeLease:
    """Lease on the node's side: it runs from the sending of an answered heartbeat."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._sent: dict[int, float] = {}
        self._last = 0
        self.ends = float("-inf")
        """Time until which the node may serve."""

    def send(self, now: float) -> int:
        """Records that a heartbeat is sent now; returns its number."""
        self._last += 1
        self._sent[self._last] = now
        return self._last

    def answered(self, number: int) -> None:
        """Extends the lease for an answered heartbeat; forgets older heartbeats."""
        sent = self._sent.get(number)
        if sent is None:
            return
        self._sent = {later: at for later, at in self._sent.items() if later > number}
        self.ends = max(self.ends, sent + self._lease_s)

    def runs(self, now: float) -> bool:
        return now < self.ends
