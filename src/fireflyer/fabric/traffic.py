"""Kinds of traffic: senders, receivers and sizes of the flows of typical programs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fireflyer.errors import FabricError
from fireflyer.fabric.net import Floats, Ints, Net
from fireflyer.fabric.verify import zone_orders

READS = 12
"""Number of storage endpoints ("stores") that each compute endpoint ("client") uses in parallel."""

REPLICAS = 2
"""Number of copies of each chunk of a checkpoint; the paper mirrors its storage."""


@dataclass(frozen=True)
class Traffic:
    """Flows: sender, receiver and size of each.

    Attributes:
        senders: endpoint that sends each flow.
        receivers: endpoint that receives each flow.
        weights: bytes of each flow per byte that the user requests (see `KINDS`).
    """

    senders: Ints
    receivers: Ints
    weights: Floats


def traffic(net: Net, kind: str, nodes: int | None = None, seed: int = 0) -> Traffic:
    """Makes the flows of a kind of traffic.

    Args:
        net: the network.
        kind: a key of `KINDS`.
        nodes: number of compute endpoints that take part: the first ones in the order of zone, leaf
            and port; default: all.
        seed: seed of the kind "random".

    Raises:
        FabricError: the kind is unknown, or the network has fewer nodes or no storage nodes.
    """
    if kind not in KINDS:
        raise FabricError(f"invalid traffic {kind!r}: expected one of {', '.join(KINDS)}")
    zones = []
    left = nodes
    for order in zone_orders(net):
        stores = np.array([net.endpoints[end].startswith("store") for end in order], bool)
        compute = order[~stores]
        if left is not None:
            compute = compute[:left]
            left -= len(compute)
        zones.append(Zone(compute, order[stores]))
    count = sum(len(zone.compute) for zone in zones)
    if left or count < 2:
        raise FabricError(f"invalid number of nodes {nodes}: expected 2 to {count}")
    return KINDS[kind][1](zones, seed)


@dataclass(frozen=True)
class Zone:
    """Compute endpoints and storage endpoints of a zone, both in the order of leaves and ports."""

    compute: Ints
    stores: Ints


def _joined(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        np.concatenate([part.senders for part in parts]),
        np.concatenate([part.receivers for part in parts]),
        np.concatenate([part.weights for part in parts]),
    )


def _equal(senders: Ints, receivers: Ints, weight: float = 1.0) -> Traffic:
    return Traffic(senders, receivers, np.full(len(senders), weight))


def _assigned_stores(zones: Sequence[Zone]) -> list[tuple[Zone, Ints, Ints]]:
    """Assigns to each client `READS` stores of the client's zone.

    Returns:
        (zone, clients, stores) of each zone; element i of `clients` uses element i of `stores`.
    """
    found = []
    for zone in zones:
        if len(zone.compute) and not len(zone.stores):
            raise FabricError("the network has no storage nodes; use --preset fire-flyer2")
        if len(zone.compute):
            turn = np.arange(len(zone.compute) * READS) % len(zone.stores)
            found.append((zone, np.repeat(zone.compute, READS), zone.stores[turn]))
    return found


def _storage(zones: Sequence[Zone], _: int) -> Traffic:
    return _joined(
        [_equal(stores, clients, 1 / READS) for _, clients, stores in _assigned_stores(zones)]
    )


def _checkpoint(zones: Sequence[Zone], _: int) -> Traffic:
    """Returns flows to the first of the `REPLICAS` stores of a chunk, and from each store to the
    next."""
    parts = []
    for zone, clients, stores in _assigned_stores(zones):
        parts.append(_equal(clients, stores, 1 / READS))
        heads, uses = np.unique(stores, return_counts=True)
        following = dict(zip(zone.stores.tolist(), np.roll(zone.stores, -1).tolist(), strict=True))
        if len(zone.stores) < REPLICAS:
            continue
        for _copy in range(REPLICAS - 1):
            tails = np.array([following[head] for head in heads.tolist()], np.int32)
            parts.append(Traffic(heads, tails, uses / READS))
            heads = tails
    return _joined(parts)


def _ring(zones: Sequence[Zone], _: int) -> Traffic:
    orders = [np.concatenate([zone.stores, zone.compute]) for zone in zones]
    return _joined([_moving(order, np.roll(order, -1)) for order in orders])


def _random(zones: Sequence[Zone], seed: int) -> Traffic:
    random = np.random.default_rng(seed)
    orders = [np.concatenate([zone.stores, zone.compute]) for zone in zones]
    return _joined([_moving(order, random.permutation(order)) for order in orders])


def _moving(senders: Ints, receivers: Ints) -> Traffic:
    moving = senders != receivers
    return _equal(senders[moving], receivers[moving])


def _all_to_all(zones: Sequence[Zone], _: int) -> Traffic:
    compute = np.concatenate([zone.compute for zone in zones])
    count = len(compute)
    shifts = [_equal(compute, np.roll(compute, -k), 1 / count) for k in range(1, count)]
    return _joined(shifts)


def _tree(zones: Sequence[Zone], _: int) -> Traffic:
    """Returns flows in both directions of each edge of two trees; each tree has half of the data."""
    parts = []
    for second in (False, True):
        roots: list[int] = []
        for zone in zones:
            count = len(zone.compute)
            parents = tree_parents(count, second=second)
            children = np.flatnonzero(parents >= 0)
            lower, upper = zone.compute[children], zone.compute[parents[children]]
            parts += [_equal(lower, upper, 0.5), _equal(upper, lower, 0.5)]
            roots += zone.compute[parents < 0].tolist()
        for one, other in itertools.pairwise(roots):
            ends = np.array([one, other], np.int32)
            parts.append(_equal(ends, ends[::-1].copy(), 0.5))
    return _joined(parts)


def tree_parents(count: int, *, second: bool = False) -> Ints:
    """Returns the parent of each rank in one of two binary trees, or -1 for the root.

    The two trees form a double binary tree. In the first tree all odd ranks are leaves. The second
    tree is the first one with reversed ranks (even `count`) or with ranks shifted by one (odd
    `count`). A rank is therefore an inner node of at most one tree.

    Raises:
        ValueError: `count` is negative.
    """
    if count < 0:
        raise ValueError(f"invalid number of ranks {count}: expected at least 0")
    ranks = np.arange(count, dtype=np.int32)
    bit = ranks & -ranks
    without = ranks ^ bit
    parents = without | (bit << 1)
    parents = np.where(parents < count, parents, without).astype(np.int32)
    parents[:1] = -1
    if not second:
        return parents
    if count % 2 == 0:
        return np.where(parents >= 0, count - 1 - parents, -1)[::-1].astype(np.int32)
    shifted = np.roll(parents, 1)
    return np.where(shifted >= 0, (shifted + 1) % count, -1).astype(np.int32)


KINDS: dict[str, tuple[str, Callable[[Sequence[Zone], int], Traffic]]] = {
    "storage": ("each node reads the bytes, from 12 stores of its zone", _storage),
    "checkpoint": ("each node writes the bytes to 12 stores, which mirror them", _checkpoint),
    "ring": ("each endpoint of a zone sends the bytes to the next", _ring),
    "tree": ("the bytes are summed over all nodes by two trees, each with a root per zone", _tree),
    "all-to-all": ("each node sends the bytes in equal parts to all nodes", _all_to_all),
    "random": ("each endpoint of a zone sends the bytes to a random one", _random),
}
"""Kinds of traffic: the meaning of the user's bytes, and a function that makes the flows."""
