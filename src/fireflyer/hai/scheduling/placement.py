"""Placement: the nodes that a gang gets, and the order of its ranks on them. Pure.

Ranks are numbered in the order of the nodes, and ranks with adjacent numbers communicate most
(ring, tree, pipeline). A gang's nodes are therefore ordered by zone, then by leaf. A gang uses one
zone if possible, else two. With two zones, exactly one pair of adjacent ranks is in different zones
(Fire-Flyer paper, on scheduling). More than two zones are never used. Within a zone a gang
uses as few leaves as possible, and prefers the fullest leaves, so that other leaves keep room for
the next gang. Partly used nodes are filled first (best fit).
"""

from fireflyer.hai.scheduling.capacity import Capacity, members
from fireflyer.hai.scheduling.jobs import Job


class Topology:
    """Zones and leaves as sets of nodes."""

    __slots__ = ("_leaves", "_of", "_zones")

    def __init__(self) -> None:
        self._zones: dict[str, int] = {}
        self._leaves: dict[tuple[str, str], int] = {}
        """Nodes of each leaf, keyed and ordered by zone and leaf name."""
        self._of: dict[int, tuple[str, str]] = {}
        """Zone and leaf of each node, by place."""

    def put(self, place: int, zone: str, leaf: str) -> None:
        """Puts a node into a leaf of a zone, and removes the node from its previous leaf."""
        bit, before = 1 << place, self._of.get(place)
        if before is not None:
            self._zones[before[0]] &= ~bit
            self._leaves[before] &= ~bit
        self._of[place] = (zone, leaf)
        self._zones[zone] = self._zones.get(zone, 0) | bit
        if (zone, leaf) in self._leaves:
            self._leaves[zone, leaf] |= bit
        else:
            self._leaves = dict(sorted([*self._leaves.items(), ((zone, leaf), bit)]))

    @property
    def flat(self) -> bool:
        """True if all nodes are on one leaf of one zone."""
        return len(self._leaves) <= 1

    def leaves(self, zone: str, among: int) -> list[int]:
        """Returns the nodes of `among` in each leaf of a zone, by leaf name, without empty leaves."""
        among &= self._zones[zone]
        return [nodes & among for nodes in self._leaves.values() if nodes & among]

    def all_leaves(self, among: int) -> list[int]:
        """Returns the nodes of `among` in each leaf, by zone and leaf name, without empty leaves."""
        return [nodes & among for nodes in self._leaves.values() if nodes & among]

    def zones(self, among: int) -> list[tuple[str, int]]:
        """Returns each zone's name and its nodes of `among`, by zone name, without empty zones."""
        found = [(name, nodes & among) for name, nodes in self._zones.items()]
        return [(name, nodes) for name, nodes in sorted(found) if nodes]

    def enough(self, count: int, among: int) -> bool:
        """Returns whether `among` has enough nodes for a gang of `count` nodes in one zone or
        two."""
        if among.bit_count() < count:
            return False
        if len(self._zones) <= 2:
            return True
        sizes = sorted((nodes.bit_count() for _, nodes in self.zones(among)), reverse=True)
        return sum(sizes[:2]) >= count

    def within(self, count: int, places: list[int]) -> list[int]:
        """Returns `count` of these places in rank order. Prefers the first places; uses one zone if
        possible, else two."""
        of: dict[str, list[int]] = {}
        for place in places:
            of.setdefault(self._of[place][0], []).append(place)
        parts = sorted(of.values(), key=lambda part: (-len(part), places.index(part[0])))
        alone = [part for part in parts if len(part) >= count]
        if alone:
            chosen = min(alone, key=lambda part: places.index(part[count - 1]))[:count]
        else:
            chosen = (parts[0] + parts[1])[:count]
        return self.order(chosen)

    def order(self, places: list[int]) -> list[int]:
        """Sorts places by zone, then leaf, then place. The zone with more of the places comes
        first."""
        share: dict[str, int] = {}
        for place in places:
            zone = self._of[place][0]
            share[zone] = share.get(zone, 0) + 1

        def key(place: int) -> tuple[int, str, str, int]:
            zone, leaf = self._of[place]
            return (-share[zone], zone, leaf, place)

        return sorted(places, key=key)


def choose(
    job: Job, fitting: int, kept: list[int], capacity: Capacity, topology: Topology
) -> list[int]:
    """Chooses the nodes for a gang, in the order of its ranks.

    Args:
        job: the request.
        fitting: the nodes that can take a member (the gang's part on one node) now;
            `topology.enough` holds for them.
        kept: the nodes of `fitting` with warm processes of the job, in the order of its last
            attempt; preferred.
    """
    if len(kept) >= job.nodes:
        return kept[: job.nodes]
    if job.nodes == 1:
        return [_single(job, fitting, capacity, topology)]
    if topology.flat:
        return _tightest(job.nodes, job, fitting, kept, capacity)
    zones = topology.zones(fitting)
    inside = [(nodes.bit_count(), zone) for zone, nodes in zones if nodes.bit_count() >= job.nodes]
    if inside:
        parts = [(min(inside)[1], job.nodes)]
    else:
        largest = sorted((-nodes.bit_count(), zone) for zone, nodes in zones)
        (first, zone), (_, other) = largest[:2]
        parts = [(zone, -first), (other, job.nodes + first)]
    chosen: list[int] = []
    for zone, count in parts:
        chosen += _in_leaves(count, job, topology.leaves(zone, fitting), kept, capacity)
    return topology.order(chosen)


def _single(job: Job, fitting: int, capacity: Capacity, topology: Topology) -> int:
    tight = capacity.tightest(job.gpus, fitting) if job.gpus else fitting
    if not topology.flat:  # from the leaf with the fewest of these nodes
        tight = min(topology.all_leaves(tight), key=int.bit_count)
    return (tight & -tight).bit_length() - 1


def _in_leaves(
    count: int, job: Job, leaves: list[int], kept: list[int], capacity: Capacity
) -> list[int]:
    """Chooses nodes from the smallest leaf that is large enough, else from the largest leaves
    first."""
    chosen: list[int] = []
    left = list(leaves)
    while count:
        large = [nodes for nodes in left if nodes.bit_count() >= count]
        leaf = min(large, key=int.bit_count) if large else max(left, key=int.bit_count)
        taken = min(count, leaf.bit_count())
        chosen += _tightest(taken, job, leaf, kept, capacity)
        left.remove(leaf)
        count -= taken
    return chosen


def _tightest(count: int, job: Job, fitting: int, kept: list[int], capacity: Capacity) -> list[int]:
    """Chooses `count` nodes: first the kept nodes, then the nodes with the fewest free GPUs."""
    chosen = [place for place in kept if fitting >> place & 1][:count]
    for place in chosen:
        fitting ^= 1 << place
    while len(chosen) < count:
        tight = capacity.tightest(job.gpus, fitting) if job.gpus else fitting
        for place in members(tight):
            if len(chosen) == count:
                break
            chosen.append(place)
        fitting &= ~tight
    return chosen
