"""Sizes of networks for any number of hosts, computed without building a network."""

from collections.abc import Callable
from dataclasses import dataclass

from fireflyer.errors import FabricError
from fireflyer.fabric.catalogue import Catalogue
from fireflyer.fabric.topologies import GATEWAYS

PLANES = 4
"""Number of planes of the next-generation network that the paper plans."""


@dataclass(frozen=True)
class Size:
    """Parts of a network without oversubscription.

    Attributes:
        topology: a key of `TOPOLOGIES`.
        switches: number of switches.
        host_ports: number of the leaves' ports that are for hosts.
        cables: number of cables by length class: "host" (host to leaf), "leaf" (leaf to spine),
            "core" (spine to core) and "zone" (between zones).
    """

    topology: str
    switches: int
    host_ports: int
    cables: dict[str, int]


def sized(topology: str, nodes: int, storage: int = 0, radix: int = 40, cross: int = 20) -> Size:
    """Returns the smallest network of a topology that holds the nodes.

    Args:
        topology: a key of `TOPOLOGIES`.
        nodes: compute nodes, one port each.
        storage: storage nodes, one port each; in a two-zone network, one port in each zone.
        radix: ports of a switch.
        cross: links from each zone of a two-zone network to the switches between the zones.

    Raises:
        FabricError: the topology is unknown, or the nodes do not fit.
    """
    if topology not in TOPOLOGIES:
        raise FabricError(f"invalid topology {topology!r}: expected one of {', '.join(TOPOLOGIES)}")
    if radix < 4 or radix % 2 or nodes < 1 or storage < 0:
        raise FabricError(
            f"invalid size: {nodes} nodes, {storage} storage nodes, radix {radix}; expected at "
            "least 1, at least 0, and an even number of ports from 4"
        )
    return TOPOLOGIES[topology](nodes, storage, radix, cross)


def _two_layers(hosts: int, radix: int, topology: str) -> Size:
    half = radix // 2
    if hosts > radix * half:
        raise FabricError(
            f"{hosts:,} ports do not fit {topology} of {radix}-port switches; at most "
            f"{radix * half:,} fit"
        )
    leaves = -(-hosts // half)
    if leaves == 1:
        return Size(topology, 1, radix, {"host": hosts})
    # Each leaf has equally many links to each spine, so the number of spines must divide `half`,
    # the number of a leaf's links to spines.
    spines = next(n for n in range(1, half + 1) if half % n == 0 and n * radix >= leaves * half)
    return Size(topology, leaves + spines, leaves * half, {"host": hosts, "leaf": leaves * half})


def _fat_tree2(nodes: int, storage: int, radix: int, _: int) -> Size:
    return _two_layers(nodes + storage, radix, "fat-tree2")


def _two_zone(nodes: int, storage: int, radix: int, cross: int) -> Size:
    zone = _two_layers(-(-nodes // 2) + storage + cross, radix, "a zone of two-zone")
    hosts = nodes + 2 * storage
    cables = {"host": hosts, "leaf": 2 * zone.cables.get("leaf", 0), "zone": 2 * cross}
    return Size("two-zone", 2 * zone.switches + GATEWAYS, 2 * zone.host_ports, cables)


def _fat_tree3(nodes: int, storage: int, radix: int, _: int) -> Size:
    half, hosts = radix // 2, nodes + storage
    if hosts > radix * half * half:
        raise FabricError(
            f"{hosts:,} ports do not fit fat-tree3 of {radix}-port switches; at most "
            f"{radix * half * half:,} fit"
        )
    leaves, pods = -(-hosts // half), -(-hosts // (half * half))
    links = pods * half * half if pods > 1 else 0
    cores = half * -(-pods * half // radix) if pods > 1 else 0
    switches = leaves + pods * half + cores
    cables = {"host": hosts, "leaf": leaves * half, "core": links}
    return Size("fat-tree3", switches, leaves * half, cables)


def _multi_plane(nodes: int, storage: int, radix: int, _: int) -> Size:
    plane = _two_layers(-(-(nodes + storage) // PLANES), radix, "a plane of multi-plane")
    cables = {"host": nodes + storage, "leaf": PLANES * plane.cables.get("leaf", 0)}
    return Size("multi-plane", PLANES * plane.switches, PLANES * plane.host_ports, cables)


TOPOLOGIES: dict[str, Callable[[int, int, int, int], Size]] = {
    "fat-tree2": _fat_tree2,
    "two-zone": _two_zone,
    "fat-tree3": _fat_tree3,
    "multi-plane": _multi_plane,
}

_PRICED_LIKE = {"fat-tree2": "fire-flyer2", "two-zone": "fire-flyer2", "fat-tree3": "fat-tree3"}
_SWITCHES = {"fire-flyer2": 122, "fat-tree3": 200}


def network_price(size: Size, catalogue: Catalogue) -> float | None:
    """Estimates the price of a network in the units of Table III.

    Table III prices three networks, whose prices per switch, cables included, differ by 5 %. The
    estimate uses the network with the same number of layers. Returns None if the table has no such
    network.
    """
    like = _PRICED_LIKE.get(size.topology)
    total = None if like is None else catalogue.value("cluster", like, "network_price").amount
    return None if like is None or total is None else size.switches * total / _SWITCHES[like]
