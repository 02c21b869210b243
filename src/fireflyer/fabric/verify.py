"""Checks of forwarding tables: reachability of all pairs, credit loops, load of links.

A route is a chain of (switch, destination) states. The checks follow all routes together: array
operations advance the states of all S switches and E endpoints along the tables.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fireflyer.fabric.net import Ints, Net

Counts = NDArray[np.int64]


def _next(net: Net, tables: NDArray[np.uint8]) -> Ints:
    """Returns the next state of each (switch, destination): the index of the next switch, S (the
    number of switches) if delivered, or S + 1 if lost."""
    switches, width = net.peers.shape
    port = np.where(tables < width, tables, 0).astype(np.int32)
    rows = np.arange(switches, dtype=np.int32)[:, None] * width
    peer = net.peers.ravel()[rows + port]
    host = net.hosts.ravel()[rows + port]
    home = host == np.arange(tables.shape[1], dtype=np.int32)[None, :]
    after: Ints = np.where(home, switches, np.where(peer >= 0, peer, switches + 1)).astype(np.int32)
    return after


def _absorbed(following: Ints) -> Ints:
    """Returns the final state of each (switch, destination), as `_next` numbers states. For a route
    in a loop, this is the index of some switch."""
    switches, ends = following.shape
    column = np.arange(ends, dtype=np.int64)[None, :]
    final = np.tile(np.arange(switches + 2, dtype=np.int32)[:, None], (1, ends))
    final[:switches] = following
    steps = 1
    while steps <= switches and np.any(final[:switches] < switches):
        final = final.ravel()[final.astype(np.int64) * ends + column]
        steps *= 2
    return final[:switches]


def reaching(net: Net, tables: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Returns (S, E): True if packets at the switch arrive at the endpoint."""
    arrives: NDArray[np.bool_] = _absorbed(_next(net, tables)) == len(net.switches)
    return arrives


@dataclass(frozen=True)
class Loop:
    """Cycle of cables that can deadlock on one virtual lane: (switch, port) of each cable, in
    order."""

    lane: int
    channels: tuple[tuple[int, int], ...]


class Check:
    """Findings of one network and its tables. S, E and P are those of `Net`; Z is the number of
    zones.

    Args:
        net: the network.
        tables: (S, E) ports; a port that does not exist loses the packet.
        lanes: (Z, Z) virtual lane of the routes from one zone to another; None: one lane for all.
    """

    def __init__(self, net: Net, tables: NDArray[np.uint8], lanes: Ints | None = None) -> None:
        self.net, self.tables = net, tables
        self._following = _next(net, tables)
        at, _ = net.attached
        self._weights = np.bincount(at[at >= 0], minlength=len(net.switches))
        zones = max(int(net.zones.max()) + 1, 1)
        self._lanes = np.zeros((zones, zones), np.int32) if lanes is None else lanes

    @property
    def pairs(self) -> int:
        """Number of ordered pairs of endpoints."""
        count = len(self.net.endpoints)
        return count * (count - 1)

    @cached_property
    def unreachable(self) -> int:
        """Number of ordered pairs of endpoints without a working route."""
        loose = int(np.count_nonzero(self.net.attached[0] < 0))
        return int(self._missed.sum()) + loose * (len(self.net.endpoints) - 1)

    @cached_property
    def unreachable_though_connected(self) -> int:
        """Number of unreachable pairs whose switches are connected."""
        at, _ = self.net.attached
        labels = self.net.components()
        joined = (labels[:, None] == labels[at][None, :]) & (at >= 0)[None, :]
        return int(np.where(joined, self._missed, 0).sum())

    @cached_property
    def arrives(self) -> NDArray[np.bool_]:
        """(S, E): True if packets at the switch arrive at the endpoint."""
        arrives: NDArray[np.bool_] = _absorbed(self._following) == len(self.net.switches)
        return arrives

    @cached_property
    def _missed(self) -> Counts:
        """(S, E): number of endpoints at the switch that cannot reach the endpoint of the column."""
        net, arrives = self.net, self.arrives
        at, _ = net.attached
        missed = np.where(arrives, 0, self._weights[:, None]).astype(np.int64)
        cabled = np.flatnonzero(at >= 0)
        missed[at[cabled], cabled] -= ~arrives[at[cabled], cabled]
        return missed

    @cached_property
    def _steps(self) -> list[tuple[int, Counts, Counts]]:
        """Steps of all routes, hop by hop: lane, states (switch * E + endpoint), routes per state.

        A route is a pair of a switch with endpoints and an endpoint of another switch. Routes that
        arrive or get lost end; routes in a loop are followed for S hops.
        """
        net, ends = self.net, len(self.net.endpoints)
        switches = len(net.switches)
        sources = np.flatnonzero(self._weights)
        lanes = self._lanes[net.zones[sources][:, None], net.endpoint_zones[None, :]]
        following, found = self._following.ravel(), []
        for lane in np.unique(lanes).tolist():
            rows, columns = np.nonzero(lanes == lane)
            states = sources[rows].astype(np.int64) * ends + columns
            routes = np.ones(len(states), np.int64)
            for _ in range(switches + 1):
                peer = following[states]
                moving = peer < switches
                states, routes, peer = states[moving], routes[moving], peer[moving]
                if not len(states):
                    break
                found.append((lane, states, routes))
                after = peer.astype(np.int64) * ends + states % ends
                counted = np.bincount(after, weights=routes, minlength=0)
                states = np.flatnonzero(counted)
                routes = counted[states].astype(np.int64)
        return found

    @cached_property
    def routes_per_port(self) -> Counts:
        """(S, P + 1): number of routes through each cable to a switch."""
        width = self.net.peers.shape[1]
        total = np.zeros(self.net.peers.size, np.int64)
        for _, states, routes in self._steps:
            counted = np.bincount(self._channels(states), routes, minlength=total.size)
            total += counted.astype(np.int64)
        return total.reshape(-1, width)

    def _channels(self, states: Counts) -> Counts:
        """Returns the cable (switch * (P + 1) + port) of the next hop of each state."""
        width = self.net.peers.shape[1]
        channels: Counts = states // len(self.net.endpoints) * width + self.tables.ravel()[states]
        return channels

    @cached_property
    def credit_loops(self) -> list[Loop]:
        """Possible deadlocks: one cycle for each set of cables that can wait for each other."""
        ends, (switches, width) = len(self.net.endpoints), self.net.peers.shape
        found: list[Loop] = []
        for lane in sorted({lane for lane, _, _ in self._steps}):
            waits = np.zeros(switches * width * width, bool)
            for of, states, _ in self._steps:
                if of != lane:
                    continue
                peer = self._following.ravel()[states].astype(np.int64)
                after = peer * ends + states % ends
                goes_on = self._following.ravel()[after] < switches
                channel = self._channels(states[goes_on])
                waits[channel * width + self.tables.ravel()[after[goes_on]]] = True
            edges = np.flatnonzero(waits)
            first, port = edges // width, edges % width
            second = self.net.peers.ravel()[first].astype(np.int64) * width + port
            found += [
                Loop(lane, tuple((one // width, one % width) for one in cycle))
                for cycle in cycles(first, second, switches * width)
            ]
        return found

    def cross_spread(self) -> float | None:
        """Returns the ratio of the maximum to the mean number of routes on cables between zones.

        Returns None if there are no such cables.
        """
        net = self.net
        rows, columns = np.nonzero(net.peers >= 0)
        across = (net.zones[rows] < 0) | (net.zones[net.peers[rows, columns]] < 0)
        routes = self.routes_per_port[rows[across], columns[across]]
        return float(routes.max() / routes.mean()) if len(routes) and routes.sum() else None

    def gateway_spread(self) -> float | None:
        """Returns the same ratio as `cross_spread`, on cables between spines and gateway leaves."""
        net = self.net
        rows, columns = np.nonzero((net.peers >= 0) & (net.zones >= 0)[:, None])
        peers = net.peers[rows, columns]
        gates = np.unique(rows[net.zones[peers] < 0])
        inside = (net.zones[peers] >= 0) & (np.isin(rows, gates) | np.isin(peers, gates))
        routes = self.routes_per_port[rows[inside], columns[inside]]
        return float(routes.max() / routes.mean()) if len(routes) and routes.sum() else None

    @cached_property
    def _paths(self) -> Ints:
        """(hops, S, E): the cable of each hop of a route, or S * (P + 1) after the last hop."""
        switches, ends = self._following.shape
        beyond = self.net.peers.size
        state = np.tile(np.arange(switches, dtype=np.int32)[:, None], (1, ends))
        column = np.arange(ends, dtype=np.int64)[None, :]
        width, paths = self.net.peers.shape[1], []
        for _ in range(switches):
            live = state < switches
            index = np.where(live, state, 0).astype(np.int64) * ends + column
            after = np.where(live, self._following.ravel()[index], state)
            if not np.any(after < switches):
                break
            channel = np.where(live, state, 0) * width + self.tables.ravel()[index]
            paths.append(np.where(live & (after < switches), channel, beyond).astype(np.int32))
            state = after
        return np.array(paths, np.int32).reshape(-1, switches, ends)

    def cables(self, senders: Ints, receivers: Ints) -> Ints:
        """Returns (hops, flows): the cable of each hop of each flow.

        A cable is switch * (P + 1) + port; S * (P + 1) stands for no further hop.
        """
        return self._paths[:, self.net.attached[0][senders], receivers]

    def load(self, senders: Ints, receivers: Ints) -> int:
        """Returns the number of flows on the fullest cable between switches.

        Args:
            senders: endpoints that send.
            receivers: endpoint that receives from each sender.
        """
        used = self.cables(senders, receivers)
        return int(np.bincount(used.ravel(), minlength=2)[: self.net.peers.size].max(initial=0))


def zone_orders(net: Net) -> list[Ints]:
    """Returns the connected endpoints of each zone, in the order of switches and ports."""
    at, ports = net.attached
    order = np.lexsort((ports, at)).astype(np.int32)
    order = order[at[order] >= 0]
    zones = net.endpoint_zones[order]
    return [order[zones == zone] for zone in np.unique(zones)]


def shift_load(check: Check, most: int = 1000) -> tuple[int, int]:
    """Returns the highest load under shifts inside zones, and the number of tested shifts.

    In shift k, endpoint i of each zone sends to endpoint i + k of that zone. If a zone has more
    than `most` shifts, equally spaced shifts are tested.
    """
    orders = zone_orders(check.net)
    count = max((len(order) for order in orders), default=1) - 1
    tried = np.unique(np.linspace(1, count, min(count, most)).astype(int)).tolist() if count else []
    senders = np.concatenate(orders) if orders else np.zeros(0, np.int32)
    highest = 0
    for shift in tried:
        receivers = np.concatenate([np.roll(order, -(shift % len(order))) for order in orders])
        highest = max(highest, check.load(senders, receivers))
    return highest, len(tried)


def random_load(check: Check, seed: int = 0, draws: int = 20) -> float:
    """Returns the highest load under a random permutation inside zones, averaged over `draws`."""
    orders, random = zone_orders(check.net), np.random.default_rng(seed)
    senders = np.concatenate(orders) if orders else np.zeros(0, np.int32)
    loads = []
    for _ in range(draws):
        receivers = np.concatenate([random.permutation(order) for order in orders])
        loads.append(check.load(senders, receivers))
    return float(np.mean(loads))


def cycles(first: Counts, second: Counts, count: int) -> list[list[int]]:
    """Returns one cycle of each strongly connected component that has a cycle.

    Args:
        first: origin of each edge.
        second: target of each edge.
        count: number of vertices.
    """
    while len(first):
        enters, leaves = np.zeros(count, bool), np.zeros(count, bool)
        enters[second], leaves[first] = True, True
        kept = enters[first] & leaves[second]
        if kept.all():
            break
        first, second = first[kept], second[kept]
    graph: dict[int, list[int]] = {}
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        graph.setdefault(one, []).append(other)
    parts = _parts(graph)
    return [_cycle(graph, part) for part in parts]


def _parts(graph: dict[int, list[int]]) -> list[set[int]]:
    """Returns the strongly connected components with a cycle (Tarjan's algorithm, iterative)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    parts = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            one, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(graph.get(other, ()))))
                    break
                if other in on_stack:
                    low[one] = min(low[one], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[one])
                if low[one] == index[one]:
                    part = set()
                    while one not in part:
                        part.add(stack.pop())
                    on_stack -= part
                    if len(part) > 1 or one in graph.get(one, ()):
                        parts.append(part)
    return parts


def _cycle(graph: dict[int, list[int]], part: set[int]) -> list[int]:
    """Returns a cycle of a component: walks inside it until a vertex repeats."""
    walk, place = [min(part)], {min(part): 0}
    while True:
        following = next(other for other in graph[walk[-1]] if other in part)
        if following in place:
            return walk[place[following] :]
        place[following] = len(walk)
        walk.append(following)
