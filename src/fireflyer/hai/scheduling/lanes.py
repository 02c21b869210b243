"""The queue: jobs by rank, and within a rank by kind, each in order of submission. Pure."""

import heapq
from bisect import bisect_left, insort

Shape = tuple[int, int, int]
"""Nodes, GPUs of each (0: whole nodes), memory of each in MiB."""

QuotaKey = tuple[str, int, str]
"""User, priority, group."""

Lane = tuple[Shape, QuotaKey | None]
"""Jobs that differ in nothing but their order and user (None: no quota limits them)."""

Rank = tuple[int, int]
"""(-priority, level): jobs of a smaller one come first. Level -1: overdue."""

Entry = tuple[int, str]
"""Order of submission, and id."""


class Lanes:
    """Where each queued job stands. Entering and leaving cost a search and a move within one lane."""

    __slots__ = ("_spots", "lanes", "ranks")

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        """Those that have jobs, in order."""
        self.lanes: dict[Rank, dict[Lane, list[Entry]]] = {}
        self._spots: dict[Entry, tuple[Rank, Lane]] = {}

    def __len__(self) -> int:
        return len(self._spots)

    def __contains__(self, entry: object) -> bool:
        return entry in self._spots

    def put(self, entry: Entry, rank: Rank, lane: Lane) -> None:
        """A job that does not stand anywhere yet."""
        lanes = self.lanes.get(rank)
        if lanes is None:
            lanes = self.lanes[rank] = {}
            insort(self.ranks, rank)
        insort(lanes.setdefault(lane, []), entry)
        self._spots[entry] = (rank, lane)

    def take(self, entry: Entry) -> None:
        """It leaves the queue."""
        rank, lane = self._spots.pop(entry)
        lanes = self.lanes[rank]
        line = lanes[lane]
        del line[bisect_left(line, entry)]
        if not line:
            del lanes[lane]
            if not lanes:
                del self.lanes[rank]
                del self.ranks[bisect_left(self.ranks, rank)]

    def ahead(self, entry: Entry) -> int:
        """How many come before one that stands here; costs a search in each lane of its rank."""
        rank, _ = self._spots[entry]
        before = self.ranks[: bisect_left(self.ranks, rank)]
        count = sum(len(line) for other in before for line in self.lanes[other].values())
        return count + sum(bisect_left(line, entry) for line in self.lanes[rank].values())

    def in_order(self) -> list[str]:
        """The ids, first come first."""
        return [task for rank in self.ranks for _, task in heapq.merge(*self.lanes[rank].values())]
