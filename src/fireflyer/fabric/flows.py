"""Max-min fair rates of flows over static routes, and traffic to apply them to.

The model knows no queues: it is right where lanes isolate the kinds of traffic, and blind to
congestion that spreads from one kind to another.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fireflyer.errors import FabricError
from fireflyer.fabric.net import Ints, Net
from fireflyer.fabric.verify import Check, zone_orders

Floats = NDArray[np.float64]

PORT_BYTES_S = 25e9
"""Bytes a second of a cable of 200 Gb/s, in each direction."""

READS = 12
"""Stores that each client of the storage traffic reads from at once."""

TRAFFIC = ("storage", "ring", "random")


def fair_rates(
    flows: NDArray[np.int64], links: NDArray[np.int64], capacities: Floats, count: int
) -> Floats:
    """Computes the max-min fair rate of each flow.

    Args:
        flows: flow of each use of a link.
        links: link of each use.
        capacities: capacity of each link.
        count: number of flows; each must use a link.

    Returns:
        (count,) rates. No rate can grow without a smaller or equal one shrinking.

    Raises:
        ValueError: a flow uses no link, so its rate has no bound.
    """
    if count and len(np.unique(flows)) < count:
        raise ValueError("a flow uses no link; its rate has no bound")
    rates = np.zeros(count)
    left = capacities.astype(np.float64).copy()
    while len(flows):
        users = np.bincount(links, minlength=len(left))
        share = np.full(len(left), np.inf)
        np.divide(left, users, out=share, where=users > 0)
        lowest = float(share.min())
        full = share <= lowest * (1 + 1e-12)
        settled = np.zeros(count, bool)
        settled[flows[full[links]]] = True
        rates[settled] = lowest
        gone = settled[flows]
        left -= np.bincount(links[gone], minlength=len(left)) * lowest
        np.maximum(left, 0.0, out=left)
        flows, links = flows[~gone], links[~gone]
    return rates


@dataclass(frozen=True)
class Traffic:
    """Flows by their ends: endpoints that send, and the receiver of each."""

    senders: Ints
    receivers: Ints


def traffic(net: Net, kind: str, seed: int = 0) -> Traffic:
    """Makes the flows of a kind of traffic.

    "storage": each compute node reads from 12 stores of its zone, dealt out evenly.
    "ring": each endpoint of a zone sends to the next in the order of leaves and ports.
    "random": a random permutation inside each zone.

    Raises:
        FabricError: the kind is unknown, or the network has no storage nodes.
    """
    orders = zone_orders(net)
    if kind == "storage":
        senders, receivers = [], []
        for order in orders:
            stores = np.array([net.endpoints[end].startswith("store") for end in order], bool)
            sources, clients = order[stores], order[~stores]
            if not len(sources):
                raise FabricError("the network has no storage nodes; use --preset fire-flyer2")
            turn = np.arange(len(clients) * READS) % len(sources)
            senders.append(sources[turn])
            receivers.append(np.repeat(clients, READS))
        return Traffic(np.concatenate(senders), np.concatenate(receivers))
    if kind not in TRAFFIC:
        raise FabricError(f"invalid traffic {kind!r}: expected one of {', '.join(TRAFFIC)}")
    random = np.random.default_rng(seed)
    ends = [np.roll(one, -1) if kind == "ring" else random.permutation(one) for one in orders]
    senders, receivers = orders, ends
    moving = np.concatenate(senders) != np.concatenate(receivers)
    return Traffic(np.concatenate(senders)[moving], np.concatenate(receivers)[moving])


def flowing(check: Check, of: Traffic) -> dict[str, Any]:
    """Computes the rates of flows and sums them up.

    Returns:
        `flows`, `total_bytes_s`, `ceiling_bytes_s` (the ports of the senders, or of the receivers
        if they are fewer), `of_ceiling`, and the least and mean rate of a flow.
    """
    net = check.net
    cables = check.cables(of.senders, of.receivers)
    size, ends, count = net.peers.size, len(net.endpoints), len(of.senders)
    rows, flow = np.nonzero(cables < size)
    each = np.arange(count)
    flows = np.concatenate([flow, each, each])
    links = np.concatenate([cables[rows, flow], size + of.senders, size + ends + of.receivers])
    capacities = np.full(size + 2 * ends, PORT_BYTES_S)
    rates = fair_rates(flows.astype(np.int64), links.astype(np.int64), capacities, count)
    ceiling = min(len(np.unique(of.senders)), len(np.unique(of.receivers))) * PORT_BYTES_S
    return {
        "flows": count, "total_bytes_s": float(rates.sum()), "ceiling_bytes_s": ceiling,
        "of_ceiling": float(rates.sum() / ceiling), "least_bytes_s": float(rates.min()),
        "mean_bytes_s": float(rates.mean()),
    }  # fmt: skip
