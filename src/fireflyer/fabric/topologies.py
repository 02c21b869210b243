"""Builders of networks, and the networks of the paper by name.

The builders spread endpoints evenly over the leaves, separately for each kind of host. So the
traffic of each kind spreads over the links above the leaves.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from fireflyer.errors import FabricError
from fireflyer.fabric.net import HDR_BYTES_S, NOWHERE, Builder, Net

GATEWAYS = 2
"""Number of switches between the zones. The paper states this number, but not how they are cabled."""


@dataclass(frozen=True)
class Zones:
    """Port budget of a two-zone network.

    Attributes:
        host_ports: ports of one zone for endpoints and links to the other zone.
        endpoints: endpoints of one zone, including storage.
        cross: links from one zone to the gateway switches.
        spare: ports of one zone that remain free.
    """

    host_ports: int
    endpoints: int
    cross: int
    spare: int


@dataclass(frozen=True)
class Subtree:
    """Hosts that need less bandwidth, on separate leaves with fewer and slower links.

    Attributes:
        hosts: number of endpoints.
        up: links from each leaf to the spines; the other ports of the leaf are for hosts.
        rate: bytes per second of each cable.
    """

    hosts: int
    up: int
    rate: float


def zone_budget(nodes: int, storage: int, radix: int = 40, cross: int = 20) -> Zones:
    """Divides the ports of a two-zone network.

    Args:
        nodes: compute nodes, one endpoint each, half of them in each zone.
        storage: storage nodes, one endpoint in each zone.
        radix: ports of a switch.
        cross: links from each zone to the gateway switches.

    Raises:
        FabricError: the endpoints do not fit; the message has the possible sizes.
    """
    _check(radix, nodes)
    ports = radix * radix // 2
    per_zone = -(-nodes // 2) + storage
    if storage < 0 or cross < GATEWAYS or cross % GATEWAYS or cross > radix:
        raise FabricError(
            f"invalid cross links {cross} or storage {storage}: expected an even number of links, "
            f"2 to {radix}, and at least 0 storage nodes"
        )
    if per_zone > ports:
        most = 2 * (ports - storage)
        fits = (
            f"{most:,} nodes + {storage} storage nodes fit without any link between the zones, "
            f"{most - 2 * cross:,} with {cross} links a zone"
            if most > 2 * cross
            else f"at most {ports - cross - 1:,} storage nodes fit"
        )
        raise FabricError(
            f"{nodes:,} nodes + {storage} storage nodes need {-(-nodes // 2)} + {storage} = {per_zone} "
            f"ports in each of 2 zones of {ports} ports; {fits}"
        )
    if per_zone + cross > ports:
        raise FabricError(
            f"{nodes:,} nodes + {storage} storage nodes leave {ports - per_zone} of {ports} ports in "
            f"each zone; {cross} links between zones need {cross}; "
            f"{2 * (ports - storage - cross):,} nodes fit"
        )
    return Zones(ports, per_zone, cross, ports - per_zone - cross)


def two_zone(nodes: int, storage: int = 0, radix: int = 40, cross: int = 20) -> Net:
    """Builds two 2-layer fat-trees, whose leaves are connected by gateway switches.

    Each zone has `radix` leaves and `radix` / 2 spines. A leaf has at most one gateway link. The
    leaves that have one are spread evenly: by default every second leaf.

    Raises:
        FabricError: the endpoints do not fit (see `zone_budget`).
    """
    zone_budget(nodes, storage, radix, cross)
    builder, half = Builder(), radix // 2
    gateways: list[list[int]] = []
    for zone in range(2):
        leaves = [builder.switch(f"Z{zone}L{n}", radix, 0, zone) for n in range(radix)]
        spines = [builder.switch(f"Z{zone}S{n}", radix, 1, zone) for n in range(half)]
        entries = [leaves[(2 * n + 1) * radix // (2 * cross)] for n in range(cross)]
        gateways.append(entries)
        free = {leaf: half - entries.count(leaf) for leaf in leaves}
        compute = [f"z{zone}n{n}/1" for n in range((nodes + 1 - zone) // 2)]
        stores = [f"store{n}/{zone + 1}" for n in range(storage)]
        _spread(builder, leaves, free, [stores, compute])
        for leaf in leaves:
            for port, spine in enumerate(spines, half + 1):
                builder.link(leaf, spine, port)
    joins = [builder.switch(f"X{n}", radix, 1, NOWHERE) for n in range(GATEWAYS)]
    each = cross // GATEWAYS
    for zone_leaves in gateways:
        for n, leaf in enumerate(zone_leaves):
            builder.link(leaf, joins[n // each])
    return builder.build()


def fat_tree2(hosts: int, radix: int = 40, prefix: str = "", subtree: Subtree | None = None) -> Net:
    """Builds a full 2-layer fat-tree: `radix` leaves, `radix` / 2 spines.

    Each leaf of a subtree replaces a full leaf. All leaves of the subtree connect to the same
    spines, the first ones, because two leaves reach each other through a common spine.

    Args:
        hosts: endpoints, at most `radix`**2 / 2.
        radix: ports of a switch.
        prefix: first characters of each name.
        subtree: slower hosts on the same spines.

    Raises:
        FabricError: the hosts, or those of the subtree, do not fit.
    """
    _check(radix, hosts)
    half = radix // 2
    shares = [] if subtree is None else _narrow_leaves(subtree, radix)
    full = max(radix - len(shares), 0)
    _fits(hosts, full * half, f"a 2-layer fat-tree of {radix}-port switches")
    builder = Builder()
    leaves = [builder.switch(f"{prefix}L{n}", radix, 0, 0) for n in range(full)]
    spines = [builder.switch(f"{prefix}S{n}", radix, 1, 0) for n in range(half)]
    _spread(builder, leaves, dict.fromkeys(leaves, half), [_hosts(hosts, prefix)])
    for leaf in leaves:
        for port, spine in enumerate(spines, half + 1):
            builder.link(leaf, spine, port)
    if subtree is not None:
        _add_subtree(builder, subtree, shares, spines, prefix)
    return builder.build()


def _narrow_leaves(subtree: Subtree, radix: int) -> list[int]:
    """Returns the number of hosts of each leaf of a subtree."""
    if not 1 <= subtree.up <= radix // 2 or subtree.hosts < 1 or not subtree.rate > 0:
        raise FabricError(
            f"invalid subtree of {subtree.hosts} hosts, {subtree.up} links up and "
            f"{subtree.rate:g} bytes/s: expected at least 1 host, 1 to {radix // 2} links, a rate "
            "above 0"
        )
    leaves = -(-subtree.hosts // (radix - subtree.up))
    return [subtree.hosts * (n + 1) // leaves - subtree.hosts * n // leaves for n in range(leaves)]


def _add_subtree(
    builder: Builder, subtree: Subtree, shares: list[int], spines: list[int], prefix: str
) -> None:
    """Adds the leaves of a subtree."""
    radix = 2 * len(spines)
    names = iter(_hosts(subtree.hosts, f"{prefix}t"))
    for number, share in enumerate(shares):
        leaf = builder.switch(f"{prefix}T{number}", radix, 0, 0)
        for name in itertools.islice(names, share):
            builder.endpoint(name, leaf, rate=subtree.rate)
        for port, spine in enumerate(spines[: subtree.up], radix - subtree.up + 1):
            builder.link(leaf, spine, port, rate=subtree.rate)


def fat_tree3(hosts: int, radix: int = 40, cores: int | None = None) -> Net:
    """Builds a 3-layer fat-tree with the smallest sufficient number of pods.

    A pod has `radix` / 2 leaves and as many spines. The spines at the same position in all pods
    share a group of core switches. Each spine has `radix` / 2 links up, spread evenly over the
    cores of its group.

    Args:
        hosts: endpoints, at most `radix`**3 / 4.
        radix: ports of a switch.
        cores: number of core switches, a multiple of `radix` / 2; default: the smallest number with
            enough ports.

    Raises:
        FabricError: the hosts do not fit, or the cores have too few ports.
    """
    _check(radix, hosts)
    half = radix // 2
    _fits(hosts, radix * half * half, f"a 3-layer fat-tree of {radix}-port switches")
    pods = -(-hosts // (half * half))
    group = -(-pods * half // radix) if cores is None else cores // half
    if group * half != (cores if cores is not None else group * half) or group > half:
        raise FabricError(
            f"invalid cores {cores}: expected a multiple of {half}, at most {half * half}"
        )
    if group * radix < pods * half:
        least = -(-pods * half // radix) * half
        raise FabricError(f"{cores} cores have too few ports for {pods} pods; use at least {least}")
    builder = Builder()
    leaves = [[builder.switch(f"P{p}L{n}", radix, 0, 0) for n in range(half)] for p in range(pods)]
    spines = [[builder.switch(f"P{p}S{n}", radix, 1, 0) for n in range(half)] for p in range(pods)]
    tops = [[builder.switch(f"C{n}N{c}", radix, 2, 0) for c in range(group)] for n in range(half)]
    every = [leaf for pod in leaves for leaf in pod]
    _spread(builder, every, dict.fromkeys(every, half), [_hosts(hosts, "")])
    for pod in range(pods):
        for leaf in leaves[pod]:
            for port, spine in enumerate(spines[pod], half + 1):
                builder.link(leaf, spine, port)
        for place, spine in enumerate(spines[pod]):
            for up in range(half):
                builder.link(spine, tops[place][(pod * half + up) % group], half + up + 1)
    return builder.build()


def _hosts(count: int, prefix: str) -> list[str]:
    return [f"{prefix}n{n}/1" for n in range(count)]


def _spread(
    builder: Builder, leaves: list[int], free: dict[int, int], kinds: list[list[str]]
) -> None:
    """Distributes the endpoints of each kind evenly over the leaves that have free ports.

    Consecutive endpoints of a kind share a leaf, so that neighbours in a job's order are near.
    """
    left = dict(free)
    for number, kind in enumerate(kinds):
        last = number == len(kinds) - 1
        shares = dict.fromkeys(leaves, 0)
        rest = len(kind)
        while rest:
            # Leaves with the most free ports come first, so the free ports stay balanced.
            ready = sorted((leaf for leaf in leaves if left[leaf]), key=lambda leaf: -left[leaf])
            room = [leaf for leaf in ready if last or left[leaf] == left[ready[0]]]
            deal = min(rest, len(room))
            for place in range(deal):
                leaf = room[place * len(room) // deal]
                shares[leaf] += 1
                left[leaf] -= 1
            rest -= deal
        names = iter(kind)
        for leaf in leaves:
            for _ in range(shares[leaf]):
                builder.endpoint(next(names), leaf)


def _check(radix: int, hosts: int) -> None:
    if radix < 4 or radix % 2 or radix > 128:
        raise FabricError(f"invalid radix {radix}: expected an even number of ports, 4 to 128")
    if hosts < 1:
        raise FabricError(f"invalid number of hosts {hosts}: expected at least 1")


def _fits(hosts: int, ports: int, where: str) -> None:
    if hosts > ports:
        raise FabricError(f"{hosts:,} host ports do not fit {where}; at most {ports:,} fit")


PRESETS: dict[str, tuple[str, Callable[[], list[Net]]]] = {
    "fire-flyer2": ("the paper's two zones, 1,200 + 180 nodes", lambda: [two_zone(1200, 180)]),
    "fat-tree2": ("one zone of 800 ports", lambda: [fat_tree2(800)]),
    "fat-tree3": ("the paper's three layers for 1,600 ports", lambda: [fat_tree3(1600)]),
    "dgx-a100": ("the paper's 320 + 500 + 500 switches", lambda: [fat_tree3(10_000, cores=320)]),
    "mixed-speeds": (
        "one zone: 640 hosts at 200 Gb/s, and 224 at 100 Gb/s behind 8 links a leaf",
        lambda: [fat_tree2(640, subtree=Subtree(224, 8, HDR_BYTES_S / 2))],
    ),
    "multi-plane": (
        "four planes for 32,768 GPUs",
        lambda: [fat_tree2(8192, 128, f"plane{n}-") for n in range(4)],
    ),
}
"""Networks by name: a description, and a builder of the planes (no cable joins two planes)."""


def preset(name: str) -> list[Net]:
    """Returns the planes of a network of `PRESETS`.

    Raises:
        FabricError: no network has the name.
    """
    if name not in PRESETS:
        raise FabricError(f"invalid preset {name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[name][1]()
