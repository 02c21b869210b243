"""Placement of expert replicas on devices, from the load of each expert. Pure: no communication.

The next replica always goes to the expert whose replicas carry the greatest load. Replicas go to
devices heaviest first, each to the least loaded device with space. Then swaps lower the load of the
device with the greatest load.
"""

import heapq
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray

from fireflyer.errors import ConfigError

Loads = NDArray[numpy.float64]
Indices = NDArray[numpy.int64]


class Placement(NamedTuple):
    """Experts on physical slots; slot `s` lies on device `s // (num_replicas // num_gpus)`.

    Attributes:
        phy2log: (layers, num_replicas) expert of each slot.
        log2phy: (layers, experts, most replicas) slots of each expert, ascending; -1 fills rows.
        logcnt: (layers, experts) number of replicas.
    """

    phy2log: torch.Tensor
    log2phy: torch.Tensor
    logcnt: torch.Tensor


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> Placement:
    """Places replicas of experts so that devices carry equal loads.

    The placement is hierarchical if `num_nodes` divides `num_groups`: whole groups of experts go to
    nodes, then replicas and devices are chosen inside each node. Otherwise the placement is global
    and ignores groups and nodes. Ranks that call this function with equal arguments get equal
    results.

    Args:
        weight: (layers, experts) loads, for example tokens per step; finite and not negative.
        num_replicas: number of physical slots of all devices, at least one per expert.
        num_groups: groups of experts, consecutive and of equal size.
        num_nodes: machines; device `d` lies on machine `d // (num_gpus // num_nodes)`.
        num_gpus: number of devices of all machines.

    Raises:
        ConfigError: `num_gpus` does not divide `num_replicas`, `num_nodes` does not divide
            `num_gpus`, `num_groups` does not divide the experts, or `weight` is not a matrix of
            loads.
    """
    loads = _checked(weight, num_replicas, num_groups, num_nodes, num_gpus)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    rows = [_place(row, num_replicas, num_groups, num_nodes, num_gpus) for row in loads]
    phy2log = numpy.stack(rows) if rows else numpy.zeros((0, num_replicas), numpy.int64)
    return placement_of(torch.from_numpy(phy2log), loads.shape[1])


def placement_of(phy2log: torch.Tensor, num_experts: int) -> Placement:
    """Completes a placement from the experts of the slots, (layers, slots)."""
    layers, slots = phy2log.shape
    logcnt = torch.zeros(layers, num_experts, dtype=torch.int64)
    logcnt.scatter_add_(1, phy2log, torch.ones_like(phy2log))
    most = int(logcnt.max()) if logcnt.numel() else 0
    log2phy = torch.full((layers, num_experts, most), -1)
    order = phy2log.argsort(dim=1, stable=True)
    first = logcnt.cumsum(1) - logcnt
    experts = phy2log.gather(1, order)
    places = torch.arange(slots).expand(layers, slots) - first.gather(1, experts)
    rows = torch.arange(layers)[:, None].expand(layers, slots)
    log2phy[rows, experts, places] = order
    return Placement(phy2log, log2phy, logcnt)


def _checked(weight: torch.Tensor, replicas: int, groups: int, nodes: int, gpus: int) -> Loads:
    if weight.ndim != 2 or weight.shape[1] == 0:
        raise ConfigError(
            f"invalid weight of shape {tuple(weight.shape)}: expected (layers, experts)"
        )
    loads = weight.detach().double().cpu().numpy()
    if not (numpy.isfinite(loads).all() and (loads >= 0).all()):
        raise ConfigError("invalid weight: expected finite loads of at least 0")
    experts = loads.shape[1]
    counts = {"num_groups": groups, "num_nodes": nodes, "num_gpus": gpus}
    for name, value in counts.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"invalid {name} {value!r}: expected an integer of at least 1")
    if not isinstance(replicas, int) or replicas < experts:
        raise ConfigError(
            f"invalid num_replicas {replicas!r}: expected at least one for each of {experts} experts"
        )
    for whole, parts in (
        (("num_replicas", replicas), ("num_gpus", gpus)),
        (("num_gpus", gpus), ("num_nodes", nodes)),
        (("the number of experts", experts), ("num_groups", groups)),
    ):
        if whole[1] % parts[1]:
            raise ConfigError(f"{parts[0]} {parts[1]} does not divide {whole[0]} {whole[1]}")
    return loads


def _place(loads: Loads, replicas: int, groups: int, nodes: int, gpus: int) -> Indices:
    """Returns the expert of each slot, (replicas,), for one layer."""
    of_group = loads.size // groups
    nodes_groups = _pack(loads.reshape(groups, of_group).sum(1), nodes)
    slots = []
    for chosen in nodes_groups:
        experts = (chosen[:, None] * of_group + numpy.arange(of_group)).ravel()
        copies = _replicate(loads[experts], replicas // nodes)
        shares = loads[experts] / numpy.bincount(copies, minlength=experts.size)
        slots += [experts[copies[device]] for device in _pack(shares[copies], gpus // nodes)]
    return numpy.concatenate(slots)


def _replicate(loads: Loads, slots: int) -> Indices:
    """Returns the expert of each slot such that the heaviest replica is as light as possible."""
    counts = numpy.ones(loads.size, numpy.int64)
    heap = [(-load, 1, expert) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for _ in range(slots - loads.size):
        _, count, expert = heap[0]
        counts[expert] = count + 1
        share = loads[expert] / (count + 1)
        heapq.heapreplace(heap, (-float(share), count + 1, expert))
    return numpy.repeat(numpy.arange(loads.size), counts)


def _pack(loads: Loads, bins: int) -> Indices:
    """Distributes items over bins, the same number to each bin. Returns the items of each bin:
    (bins, items per bin)."""
    room = loads.size // bins
    packed = numpy.zeros((bins, room), numpy.int64)
    if room == 1 or bins == 1:
        return numpy.arange(loads.size).reshape(bins, room)
    fill = [0] * bins
    heap = [(0.0, number) for number in range(bins)]
    for item in numpy.argsort(-loads, kind="stable").tolist():
        total, number = heapq.heappop(heap)
        packed[number, fill[number]] = item
        fill[number] += 1
        if fill[number] < room:
            heapq.heappush(heap, (total + float(loads[item]), number))
    _swap(loads, packed)
    return packed


def _swap(loads: Loads, packed: Indices) -> None:
    """Swaps items of the bin with the greatest load for lighter items of other bins, while that
    load falls."""
    items: Any = loads[packed]
    totals = items.sum(1)
    while True:
        fullest = int(totals.argmax())
        falls = items[fullest][:, None, None] - items[None]  # (item there, bin, item here)
        after = numpy.maximum(totals[fullest] - falls, totals[None, :, None] + falls)
        after[:, fullest] = numpy.inf
        mine, other, theirs = numpy.unravel_index(int(after.argmin()), after.shape)
        if after[mine, other, theirs] >= totals[fullest] * (1 - 1e-12):
            return
        here, there = (fullest, mine), (other, theirs)
        packed[here], packed[there] = packed[there], packed[here]
        items[here], items[there] = items[there], items[here]
        totals[[fullest, other]] = items[[fullest, other]].sum(1)
