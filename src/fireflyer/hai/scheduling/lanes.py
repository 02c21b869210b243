"""The queue: jobs by queue rank (`QueueKey`), and within a rank by lane (`Lane`), each in order of
submission. Pure."""

import heapq
from bisect import bisect_left, insort

Shape = tuple[int, int, int]
"""Number of nodes, GPUs per node (0: whole nodes), memory per node in MiB."""

QuotaKey = tuple[str, int, str]
"""User, priority, group."""

Lane = tuple[Shape, str, QuotaKey | None]
"""Shape, type of GPUs and quota of jobs that differ only in their order and user. An empty type
means any type; None means no quota."""

QueueKey = tuple[int, int]
"""Queue rank of a job: (-priority, level of the job's account). Jobs of a smaller rank come first.
Level -1: the job is overdue. Not related to the ranks of a gang."""

Entry = tuple[int, str]
"""Order of submission, and id."""


class Lanes:
    """Positions of the queued jobs. Adding or removing a job costs one search and one move within
    its lane."""

    __slots__ = ("_sizes", "_spots", "lanes", "ranks")

    def __init__(self) -> None:
        self.ranks: list[QueueKey] = []
        """Ranks that have jobs, in order."""
        self.lanes: dict[QueueKey, dict[Lane, list[Entry]]] = {}
        self._sizes: dict[QueueKey, int] = {}
        """Number of jobs of each rank."""
        self._spots: dict[Entry, tuple[QueueKey, Lane]] = {}

    def __len__(self) -> int:
        return len(self._spots)

    def __contains__(self, entry: object) -> bool:
        return entry in self._spots

    def put(self, entry: Entry, rank: QueueKey, lane: Lane) -> None:
        """Adds a job that is not in the queue yet."""
        lanes = self.lanes.get(rank)
        if lanes is None:
            lanes = self.lanes[rank] = {}
            self._sizes[rank] = 0
            insort(self.ranks, rank)
        insort(lanes.setdefault(lane, []), entry)
        self._spots[entry] = (rank, lane)
        self._sizes[rank] += 1

    def take(self, entry: Entry) -> None:
        """Removes a job from the queue."""
        rank, lane = self._spots.pop(entry)
        lanes = self.lanes[rank]
        line = lanes[lane]
        del line[bisect_left(line, entry)]
        self._sizes[rank] -= 1
        if not line:
            del lanes[lane]
            if not lanes:
                del self.lanes[rank], self._sizes[rank]
                del self.ranks[bisect_left(self.ranks, rank)]

    def shift(self, entry: Entry, rank: QueueKey) -> None:
        """Moves a queued job to the same lane of another rank."""
        lane = self._spots[entry][1]
        self.take(entry)
        self.put(entry, rank, lane)

    def ahead(self, entry: Entry) -> int:
        """Returns the number of jobs ahead of a queued job; costs a search in each lane of its
        rank."""
        rank, _ = self._spots[entry]
        before = self.ranks[: bisect_left(self.ranks, rank)]
        count = sum(self._sizes[other] for other in before)
        return count + sum(bisect_left(line, entry) for line in self.lanes[rank].values())

    def in_order(self) -> list[str]:
        """Returns the ids in queue order."""
        return [task for rank in self.ranks for _, task in heapq.merge(*self.lanes[rank].values())]
