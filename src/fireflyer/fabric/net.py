"""Networks as arrays: switches, endpoints, and the cable in every port.

Ports of a switch are numbered from 1, as in InfiniBand, so column 0 of a port table is empty. An
endpoint is one network port of a host. A host with two adapters has two endpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fireflyer.errors import FabricError

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

NOWHERE = -1
"""Index that means "none": peer of a port without a cable, zone of a switch between zones."""

HDR_BYTES_S = 25e9
"""Bytes per second of a 200 Gb/s cable, in each direction."""

MOST_PORTS = 254
"""Maximum ports of a switch: an entry of a forwarding table is a byte, and 255 means no route."""


@dataclass(frozen=True)
class Net:
    """Switches, endpoints and cables. P is the largest number of ports of a switch.

    Attributes:
        switches: name of each of the S switches.
        levels: int32 (S,), 0 for switches with endpoints, 1 above them, and so on.
        zones: int32 (S,), the zone of a switch, or NOWHERE for a switch that joins zones.
        endpoints: name of each of the E endpoints, "host/port".
        hosts: int32 (S, P + 1), the endpoint in a port, or NOWHERE.
        peers: int32 (S, P + 1), the switch at the other end of a port's cable, or NOWHERE.
        peer_ports: int32 (S, P + 1), the port at the other end of the cable, or 0.
        radix: int32 (S,), number of ports of each switch.
        rates: float64 (S, P + 1), bytes per second of the cable in a port, in each direction; 0 if
            the port never had a cable.
    """

    switches: tuple[str, ...]
    levels: Ints
    zones: Ints
    endpoints: tuple[str, ...]
    hosts: Ints
    peers: Ints
    peer_ports: Ints
    radix: Ints
    rates: Floats

    @cached_property
    def attached(self) -> tuple[Ints, Ints]:
        """Switch and port of each endpoint; NOWHERE and 0 if the endpoint has no cable."""
        at = np.full(len(self.endpoints), NOWHERE, np.int32)
        port = np.zeros(len(self.endpoints), np.int32)
        rows, columns = np.nonzero(self.hosts >= 0)
        found = self.hosts[rows, columns]
        at[found], port[found] = rows, columns
        return at, port

    @cached_property
    def endpoint_zones(self) -> Ints:
        """Zone of each endpoint, which is the zone of its switch."""
        at, _ = self.attached
        return np.where(at >= 0, self.zones[at], NOWHERE).astype(np.int32)

    @cached_property
    def endpoint_rates(self) -> Floats:
        """Bytes per second of each endpoint's cable; 0 if the cable is missing."""
        at, port = self.attached
        return np.where(at >= 0, self.rates[at, port], 0.0)

    @property
    def cables(self) -> int:
        """Number of cables between switches."""
        return int(np.count_nonzero(self.peers >= 0)) // 2

    def without(self, switches: Sequence[int] = (), links: Sequence[tuple[int, int]] = ()) -> "Net":
        """Returns the network after failures: without the failed cables, with the same indices and
        names.

        Args:
            switches: switches that failed; all their cables fail, too.
            links: cables that failed, each as (switch, port) of one end.
        """
        hosts, peers, ports = self.hosts.copy(), self.peers.copy(), self.peer_ports.copy()
        ends = [(one, port) for one in switches for port in range(1, peers.shape[1])]
        for one, port in [*ends, *links]:
            other, other_port = int(peers[one, port]), int(ports[one, port])
            hosts[one, port] = peers[one, port] = NOWHERE
            ports[one, port] = 0
            if other >= 0:
                peers[other, other_port], ports[other, other_port] = NOWHERE, 0
        return replace(self, hosts=hosts, peers=peers, peer_ports=ports)

    def components(self) -> Ints:
        """Returns a label of each switch; connected switches have equal labels."""
        labels = np.arange(len(self.switches), dtype=np.int32)
        rows, columns = np.nonzero(self.peers >= 0)
        others = self.peers[rows, columns]
        while True:
            lowest = labels.copy()
            np.minimum.at(lowest, rows, labels[others])
            lowest = lowest[lowest]
            if np.array_equal(lowest, labels):
                return labels
            labels = lowest


class Builder:
    """Builder of a network; checks switches, endpoints and cables, and assigns free ports."""

    def __init__(self) -> None:
        self._switches: dict[str, tuple[int, int, int]] = {}
        self._names: list[str] = []
        self._endpoints: dict[str, tuple[int, int]] = {}
        self._links: dict[tuple[int, int], tuple[int, int]] = {}
        self._rates: dict[tuple[int, int], float] = {}
        self._used: list[set[int]] = []
        self._next: list[int] = []

    def switch(self, name: str, radix: int, level: int, zone: int) -> int:
        """Adds a switch and returns its index.

        Raises:
            FabricError: the name is taken, or the number of ports is out of range.
        """
        if name in self._switches:
            raise FabricError(f"switch {name!r} appears twice; give each switch one name or GUID")
        if not 1 <= radix <= MOST_PORTS:
            raise FabricError(f"switch {name!r} has {radix} ports; expected 1 to {MOST_PORTS}")
        self._switches[name] = (radix, level, zone)
        self._names.append(name)
        self._used.append(set())
        self._next.append(1)
        return len(self._names) - 1

    def endpoint(
        self, name: str, switch: int, port: int | None = None, rate: float = HDR_BYTES_S
    ) -> None:
        """Connects an endpoint to a port of a switch.

        Args:
            name: "host/port".
            switch: index of the switch.
            port: port of the switch; default: the lowest free port.
            rate: bytes per second of the cable.

        Raises:
            FabricError: the endpoint already has a cable, or the port is not free.
        """
        if name in self._endpoints:
            raise FabricError(f"endpoint {name!r} appears twice; each port has one cable")
        self._endpoints[name] = place = (switch, self._take(switch, port))
        self._rates[place] = rate

    def link(
        self, one: int, other: int, port: int | None = None, other_port: int | None = None,
        rate: float = HDR_BYTES_S,
    ) -> None:  # fmt: skip
        """Connects two switches by a cable; `rate` is in bytes per second.

        Raises:
            FabricError: a port is taken, or does not exist.
        """
        near = (one, self._take(one, port))
        far = (other, self._take(other, other_port))
        self._links[near], self._links[far] = far, near
        self._rates[near] = self._rates[far] = rate

    def free(self, switch: int) -> int:
        """Returns the number of free ports of a switch."""
        return self._switches[self._names[switch]][0] - len(self._used[switch])

    def build(self) -> Net:
        """Returns the network.

        Raises:
            FabricError: the network has no switch.
        """
        if not self._names:
            raise FabricError("the network has no switch; expected at least one")
        kept = np.array([self._switches[name] for name in self._names], np.int32)
        shape = (len(kept), int(kept[:, 0].max()) + 1)
        hosts, peers = np.full(shape, NOWHERE, np.int32), np.full(shape, NOWHERE, np.int32)
        ports, rates = np.zeros(shape, np.int32), np.zeros(shape)
        for place, rate in self._rates.items():
            rates[place] = rate
        if self._endpoints:
            at = np.array(list(self._endpoints.values()))
            hosts[at[:, 0], at[:, 1]] = np.arange(len(at))
        if self._links:
            near, far = np.array(list(self._links)), np.array(list(self._links.values()))
            peers[near[:, 0], near[:, 1]] = far[:, 0]
            ports[near[:, 0], near[:, 1]] = far[:, 1]
        return Net(
            switches=tuple(self._names), radix=kept[:, 0], levels=kept[:, 1], zones=kept[:, 2],
            endpoints=tuple(self._endpoints), hosts=hosts, peers=peers, peer_ports=ports,
            rates=rates,
        )  # fmt: skip

    def _take(self, switch: int, port: int | None) -> int:
        used, name = self._used[switch], self._names[switch]
        radix = self._switches[name][0]
        if port is None:
            port = self._next[switch]
            while port in used:
                port += 1
            self._next[switch] = port + 1
            if port > radix:
                raise FabricError(f"switch {name!r} has no free port of {radix}; use more switches")
        if not 1 <= port <= radix:
            raise FabricError(f"switch {name!r} has no port {port}; expected 1 to {radix}")
        if port in used:
            raise FabricError(f"port {port} of switch {name!r} has two cables; expected one")
        used.add(port)
        return port
