"""Detection of hung gangs and slow ranks. Pure: the caller passes the data and the time.

In synchronous training all ranks wait for the slowest rank, so a step takes the same wall time on
all ranks. A rank that reports `busy_s` shows the time of its own work, so a slow rank can be told
from ranks that wait.
"""

from collections.abc import Mapping
from statistics import median

from fireflyer.heartbeat import Heartbeat

FACTOR = 1.5
"""A rank is slow in a step if its time is at least this multiple of the median of all ranks."""

IN_A_ROW = 16
"""Number of consecutive slow steps after which a rank is a straggler."""

SHORTEST_S = 1e-3
"""A step is ignored if its median time over all ranks is shorter: such times are noise."""


class HangDetector:
    """Detector of a gang without activity. A hang is reported once, until the gang shows activity
    again."""

    def __init__(self, now: float) -> None:
        self._activity: object = None
        self._since = now
        self._reported = False

    def feed(self, activity: object, now: float, limit_s: float) -> float | None:
        """Returns the seconds without activity once they have reached the limit, else None.

        Args:
            activity: any value that compares unequal after activity, e.g. the sizes of the logs.
            now: seconds on a clock that only grows.
            limit_s: seconds without activity that count as a hang.
        """
        if activity != self._activity:
            self._activity, self._since, self._reported = activity, now, False
        quiet = now - self._since
        if quiet < limit_s or self._reported:
            return None
        self._reported = True
        return quiet


def behind(heartbeats: Mapping[int, Heartbeat], world: int) -> int | None:
    """Returns the rank that is at an earlier step than all others: the hung rank. None: several
    ranks are at the earliest step, or the steps are not known."""
    if len(heartbeats) < max(world, 2):
        return None
    steps = {rank: beat.step for rank, beat in heartbeats.items()}
    lowest = min(steps.values())
    last = [rank for rank, step in steps.items() if step == lowest]
    return last[0] if len(last) == 1 else None


class StragglerDetector:
    """Straggler detector of one attempt, from the steps that all its ranks have reported."""

    def __init__(self, factor: float = FACTOR, in_a_row: int = IN_A_ROW) -> None:
        self._factor = factor
        self.in_a_row = in_a_row
        self._compared = -1
        self._slow: dict[int, list[float]] = {}
        self._reported: set[int] = set()
        self.now: dict[int, float] = {}
        """Ranks that were slow in each of the last `in_a_row` steps, with their mean factor."""

    def feed(self, steps: Mapping[int, Mapping[int, float]]) -> list[tuple[int, float]]:
        """Returns new stragglers, with the factor by which they are slower.

        Args:
            steps: each rank's last steps and the seconds of each. Each step is compared once, in
                order, as soon as all ranks have reported it; missing steps are left out.
        """
        if len(steps) < 3:  # with two ranks, the slow one cannot be determined
            return []
        common = set.intersection(*(set(of_rank) for of_rank in steps.values()))
        for step in sorted(common):
            if step > self._compared:
                self._compared = step
                self._compare({rank: of_rank[step] for rank, of_rank in steps.items()})
        self.now = {
            rank: sum(factors[-self.in_a_row :]) / self.in_a_row
            for rank, factors in self._slow.items()
            if len(factors) >= self.in_a_row
        }
        fresh = [(rank, factor) for rank, factor in self.now.items() if rank not in self._reported]
        self._reported |= {rank for rank, _ in fresh}
        return fresh

    def _compare(self, took: Mapping[int, float]) -> None:
        middle = median(took.values())
        if middle < SHORTEST_S:
            return
        for rank, seconds in took.items():
            if seconds >= self._factor * middle:
                self._slow.setdefault(rank, []).append(seconds / middle)
                del self._slow[rank][: -self.in_a_row]
            else:
                self._slow.pop(rank, None)
                self._reported.discard(rank)
