"""Static routes as forwarding tables: shift-optimal in a zone, balanced between zones.

Inside a zone a route first climbs to higher levels and then descends, so no credit loop can form.
Destinations are numbered in the order of leaves and ports, and the upward port depends only on that
number. So neighbouring destinations use different spines, and any shift permutation loads each link
once.

A route to another zone leaves its zone through the gateway cable that `Routes.exits` assigns to the
destination. Routes to a zone of a higher number and routes inside a zone share virtual lane 0;
routes to a zone of a lower number use lane 1. On each lane all routes between zones go the same
way, so the lanes stay free of loops.

If failures leave connected pairs without such a route, `route` falls back to routes that climb to
one root and descend from it. They reach every pair that cables connect, on one lane.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fireflyer.errors import FabricError
from fireflyer.fabric.net import NOWHERE, Ints, Net
from fireflyer.fabric.verify import reaching

Table = NDArray[np.uint8]

NO_PORT = 255
"""Entry of a table for a destination without a route, as opensm writes it."""

FAR = 30_000
"""Distance that stands for an unreachable switch; `FAR` + 1 still fits int16."""


@dataclass(frozen=True)
class Routes:
    """Forwarding tables and virtual lanes of S switches, E endpoints and Z zones (P: see `Net`).

    Attributes:
        tables: uint8 (S, E), the port that leads to an endpoint, or NO_PORT.
        lanes: int32 (Z, Z), lane of the routes from one zone to another.
        exits: int32 (Z, E), switch * (P + 1) + port of the cable through which a zone sends to an
            endpoint of another zone, or NOWHERE.
        fallback: True if all routes use one root.
    """

    tables: Table
    lanes: Ints
    exits: Ints
    fallback: bool


def route(net: Net, previous: Routes | None = None) -> Routes:
    """Computes the tables of a network.

    Args:
        net: the network, perhaps after failures.
        previous: tables from before the failures. Entries that still lead to their destination are
            kept, so only failed entries change.

    Raises:
        FabricError: the previous tables belong to another network.
    """
    shape = (len(net.switches), len(net.endpoints))
    if previous is not None and previous.tables.shape != shape:
        raise FabricError(
            f"the previous tables have shape {previous.tables.shape}, the network {shape}; "
            "give the tables of the same switches and endpoints"
        )
    zones = int(net.zones.max()) + 1
    lanes = np.zeros((max(zones, 1), max(zones, 1)), np.int32)
    lanes[np.tril_indices(zones, -1)] = 1
    old = None if previous is None else previous.tables
    tables = np.full(shape, NO_PORT, np.uint8)
    ranks = _ranks(net)
    exits = _exits(net, zones, ranks, None if previous is None else previous.exits)
    at, ports = net.attached
    for zone in range(zones):
        members = _where(net.zones == zone)
        own = _where((net.endpoint_zones == zone) & (at >= 0))
        away = _where(exits[zone] >= 0)
        width = net.peers.shape[1]
        ends = np.concatenate([own, away])
        leaves = np.concatenate([at[own], exits[zone, away] // width])
        last = np.concatenate([ports[own], exits[zone, away] % width])
        _climb(net, net.levels, members, (ends, leaves, last, ranks[ends]), tables, old)
    _joins(net, zones, ranks, tables, old)
    if _complete(net, tables):
        return Routes(tables, lanes, exits, fallback=False)
    tables = _from_one_root(net, ranks, old)
    return Routes(tables, np.zeros_like(lanes), np.full_like(exits, NOWHERE), fallback=True)


def on_one_lane(tables: Table) -> Routes:
    """Wraps tables that another program made; all their routes use lane 0, as inside one zone."""
    exits = np.full((1, tables.shape[1]), NOWHERE, np.int32)
    return Routes(tables, np.zeros((1, 1), np.int32), exits, fallback=False)


def _where(mask: NDArray[np.bool_]) -> Ints:
    """Returns the indices of the true elements."""
    return np.flatnonzero(mask).astype(np.int32)


def _ranks(net: Net) -> Ints:
    """Returns the number of each endpoint in its zone, in the order of switches and ports."""
    at, ports = net.attached
    order = np.lexsort((ports, at, net.endpoint_zones))
    ranks = np.empty(len(order), np.int32)
    ranks[order] = np.arange(len(order))
    zones = net.endpoint_zones
    for zone in np.unique(zones):
        ranks[zones == zone] -= ranks[zones == zone].min()
    return ranks


def _climb(
    net: Net, levels: Ints, members: Ints, targets: tuple[Ints, Ints, Ints, Ints], tables: Table,
    old: Table | None,
) -> None:  # fmt: skip
    """Fills the entries of `members` with routes that first climb and then descend.

    Args:
        net: the network.
        levels: (S,) level of each switch, which determines whether a cable leads up or down; cables
            inside a level are unused.
        members: switches that may be used.
        targets: four arrays with an element per destination: the endpoint, the last switch of
            `members` on the way to it, the port there, and the endpoint's number in its zone.
        tables: the tables to fill.
        old: tables whose entries stay if they still lead to the destination.
    """
    ends, leaves, last, numbers = targets
    distinct, inverse = np.unique(leaves, return_inverse=True)
    column = inverse.astype(np.int32)
    inside = np.zeros(len(net.switches), bool)
    inside[members] = True
    ups = {int(one): _ways(net, levels, inside, one, up=True) for one in members}
    downs = {int(one): _ways(net, levels, inside, one, up=False) for one in members}
    down = np.full((len(net.switches), len(distinct)), FAR, np.int16)
    down[distinct, np.arange(len(distinct))] = 0
    rising = members[np.argsort(levels[members], kind="stable")]
    for one in rising.tolist():
        if len(downs[one]):
            below = down[np.unique(net.peers[one, downs[one]])].min(axis=0) + 1
            down[one] = np.minimum(down[one], below)
    total = down.copy()
    for one in rising[::-1].tolist():
        if len(ups[one]):
            above = total[np.unique(net.peers[one, ups[one]])].min(axis=0) + 1
            total[one] = np.where(down[one] < FAR, down[one], np.minimum(above, FAR))
    divisors, fan = _digits(levels, members, ups)
    for one in members.tolist():
        level = int(levels[one])
        entries = np.full(len(ends), NO_PORT, np.uint8)
        descends = down[one, column] < FAR
        for going_up, ways in ((True, ups[one]), (False, downs[one])):
            chosen = _where(descends != going_up)
            if not len(ways) or not len(chosen):
                continue
            cost = (total if going_up else down)[net.peers[one, ways]]
            if going_up:
                digits: Ints = numbers[chosen] // divisors[level]
            else:
                under = int(levels[net.peers[one, ways[0]]])
                digits = numbers[chosen] // divisors[under] % fan[under]
            entries[chosen] = _choose(
                ways, cost, column[chosen], digits, 0 if going_up else fan[under],
                None if old is None else old[one, ends[chosen]],
            )  # fmt: skip
        here = leaves == one
        entries[here] = last[here]
        tables[one, ends] = entries


def _choose(
    ways: Ints, cost: NDArray[np.int16], column: Ints, digits: Ints, fan: int, old: Table | None
) -> Table:
    """Picks a port for each destination among the ports of lowest cost, by a digit of the
    destination's number.

    Args:
        ways: (n,) ports.
        cost: (n, leaves) distance from each port to each leaf.
        column: index of each destination's leaf in `cost`.
        digits: digit of each destination.
        fan: number of different digits, which are divided evenly among the ports; 0: the digit
            modulo the number of ports selects the port.
        old: previous port of each destination, which is kept if it leads to the destination.
    """
    least = cost.min(axis=0)
    ready = (cost == least) & (least < FAR)
    order = np.argsort(~ready, axis=0, kind="stable")
    count = ready.sum(axis=0)[column]
    some = np.maximum(count, 1)
    place = digits * some // fan if fan else digits % some
    picked = np.where(count > 0, ways[order[place, column]], NO_PORT).astype(np.uint8)
    if old is not None:
        index = np.full(256, NOWHERE)
        index[ways] = np.arange(len(ways))
        where = index[old]
        stays = (where >= 0) & (cost[where, column] < FAR)
        picked[stays] = old[stays]
    return picked


def _ways(net: Net, levels: Ints, inside: NDArray[np.bool_], one: int, *, up: bool) -> Ints:
    """Returns the ports of a switch whose cables lead up, or down, to switches in `inside`."""
    ports = _where(net.peers[one] >= 0)
    peers = net.peers[one, ports]
    right = levels[peers] > levels[one] if up else levels[peers] < levels[one]
    kept: Ints = ports[inside[peers] & right]
    return kept


def _digits(
    levels: Ints, members: Ints, ups: dict[int, Ints]
) -> tuple[dict[int, int], dict[int, int]]:
    """Returns two values of each level: a divisor and a number of ports.

    A destination's number divided by the divisor gives the digit that chooses a port at this level.
    The number of ports is the largest number of upward ports that a switch of the level has.
    """
    fan = {int(level): 1 for level in np.unique(levels[members])}
    for one in members.tolist():
        fan[int(levels[one])] = max(fan[int(levels[one])], len(ups[one]))
    divisors, product = {}, 1
    for level in sorted(fan):
        divisors[level] = product
        product = min(product * fan[level], 1 << 30)
    return divisors, fan


def _links_between(net: Net, join: int, zone: int) -> Ints:
    """Returns the ports of a switch between zones whose cables lead into a zone."""
    ports = _where(net.peers[join] >= 0)
    kept: Ints = ports[net.zones[net.peers[join, ports]] == zone]
    return kept


def _exits(net: Net, zones: int, ranks: Ints, old: Ints | None) -> Ints:
    """Chooses the cable through which each zone sends to each endpoint of another zone.

    The destinations of a zone are divided into one block of consecutive numbers for each cable from
    a gateway switch into the zone. Routes to a block leave the sender's zone by a cable to the
    gateway switch that has the block's cable.
    """
    width = net.peers.shape[1]
    exits = np.full((max(zones, 1), len(net.endpoints)), NOWHERE, np.int32)
    joins = _where(net.zones == NOWHERE)
    for there in range(zones):
        ends = _where((net.endpoint_zones == there) & (net.attached[0] >= 0))
        ends = ends[np.argsort(ranks[ends], kind="stable")]
        for here in range(zones):
            if here == there or not len(ends):
                continue
            gateways: list[int] = []
            usable: list[int] = []
            for join in joins.tolist():
                into = len(_links_between(net, join, there))
                out = _links_between(net, join, here)
                cables = net.peers[join, out] * width + net.peer_ports[join, out]
                gateways += [
                    int(cables[n * len(cables) // into]) for n in range(into) if len(cables)
                ]
                usable += cables.tolist() if into else []
            if not gateways:
                continue
            blocks = np.arange(len(ends)) * len(gateways) // len(ends)
            exits[here, ends] = np.array(gateways)[blocks]
            if old is not None:
                stays = np.isin(old[here, ends], usable)
                exits[here, ends[stays]] = old[here, ends[stays]]
    return exits


def _joins(net: Net, zones: int, ranks: Ints, tables: Table, old: Table | None) -> None:
    """Fills the entries of the switches between zones."""
    at, _ = net.attached
    joins = _where(net.zones == NOWHERE).tolist()
    for zone in range(zones):
        ends = _where((net.endpoint_zones == zone) & (at >= 0))
        ends = ends[np.argsort(ranks[ends], kind="stable")]
        into = {join: _links_between(net, join, zone) for join in joins}
        ports = np.concatenate([into[join] for join in joins]) if joins else np.zeros(0, np.int32)
        if not len(ports) or not len(ends):
            continue
        block = np.arange(len(ends)) * len(ports) // len(ends)
        first = 0
        for join in joins:
            ways = into[join]
            if not len(ways):
                continue
            # Blocks that belong to another gateway's cables are spread over this gateway's cables
            # in turn.
            entries = ways[(block - first) % len(ways)].astype(np.uint8)
            if old is not None:
                stays = np.isin(old[join, ends], ways)
                entries[stays] = old[join, ends[stays]]
            tables[join, ends] = entries
            first += len(ways)


def _complete(net: Net, tables: Table) -> bool:
    """Returns whether the tables reach each endpoint from every connected switch with endpoints."""
    at, _ = net.attached
    labels = net.components()
    sources = np.unique(at[at >= 0])
    reached = reaching(net, tables)[sources]
    wanted = (labels[sources][:, None] == labels[at][None, :]) & (at >= 0)[None, :]
    return not bool(np.any(wanted & ~reached))


def _from_one_root(net: Net, ranks: Ints, old: Table | None) -> Table:
    """Routes all pairs by levels that descend from one root in each component."""
    tables = np.full((len(net.switches), len(net.endpoints)), NO_PORT, np.uint8)
    levels = np.full(len(net.switches), NOWHERE, np.int32)
    degree = np.count_nonzero(net.peers >= 0, axis=1)
    labels, height = net.components(), len(net.switches)
    at, ports = net.attached
    for label in np.unique(labels):
        members = _where(labels == label)
        queue = [int(members[np.argmax(degree[members] + 1000 * net.levels[members])])]
        levels[queue[0]] = height
        for place, one in enumerate(queue, 1):
            levels[one] = height - place
            near = np.unique(net.peers[one][net.peers[one] >= 0])
            fresh = near[levels[near] == NOWHERE]
            levels[fresh] = 0
            queue += fresh.tolist()
        ends = _where((at >= 0) & (labels[at] == label))
        if len(ends):
            _climb(net, levels, members, (ends, at[ends], ports[ends], ranks[ends]), tables, old)
    return tables
