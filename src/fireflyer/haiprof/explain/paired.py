"""Steps that several ranks did together, compared within each step.

On a shared machine, noise between steps can exceed the delay of a slow rank. But noise delays all
ranks of a step alike, or different ranks in different steps. So ranks are compared within each step
first, and then over the steps.
"""

from bisect import bisect
from collections.abc import Sequence
from statistics import median

from fireflyer.haiprof.explain.measures import RankMeasures
from fireflyer.haiprof.phases import Row

PARTS = 4
"""Number of parts of a session; a slow rank must be late in each part, because a burst of other
work on the machine is shorter than the session."""


def own_s(row: Row) -> float:
    """Returns the time of a step without its communication, in which the rank may wait for other
    ranks."""
    return row.seconds - row.phases.get("communication", 0.0)


class PairedSteps:
    """Steps of `ranks` (at least one rank), matched by the times at which they end."""

    def __init__(self, ranks: Sequence[RankMeasures]) -> None:
        one_clock = len({rank.profile.header.host for rank in ranks}) == 1
        ends = [_ends(rank, one_clock) for rank in ranks]
        rows = [rank.profile.steps for rank in ranks]
        self.steps: list[tuple[Row, ...]] = []
        for number, row in enumerate(rows[0]):
            nearest = [_nearest(times, ends[0][number]) for times in ends]
            apart = [
                abs(times[n] - ends[0][number]) for times, n in zip(ends, nearest, strict=True)
            ]
            if max(apart) < row.seconds * 1e9 / 2:
                self.steps.append(tuple(each[n] for each, n in zip(rows, nearest, strict=True)))
        if len(self.steps) < len(rows[0]) / 2:  # the ranks' sessions were at different times
            self.steps = list(zip(*rows, strict=False))

    def lateness(self, index: int) -> list[float]:
        """Returns, for each step, the own time of a rank minus the median own time of the
        others."""
        return [
            own_s(step[index]) - median(own_s(row) for n, row in enumerate(step) if n != index)
            for step in self.steps
        ]

    def is_late(self, index: int, least: float) -> bool:
        """Returns True if a rank is late in the whole session and the last rank in most steps.

        A late rank is late by `least` seconds in the median step, and by half of that in the median
        step of each part of the session.
        """
        late = self.lateness(index)
        last = sum(own_s(step[index]) >= max(own_s(row) for row in step) for step in self.steps)
        size = max(1, len(late) // PARTS)
        parts = [late[at : at + size] for at in range(0, size * min(PARTS, len(late)), size)]
        return (
            median(late) >= least
            and all(median(part) >= least / 2 for part in parts)
            and last > len(late) / 2
        )

    def waiting(self) -> float:
        """Returns the median, over the steps, of the shortest communication time of any rank. The
        rank with that time was the last to arrive, so it waited only for the transfer.
        """
        return median(
            min(row.phases.get("communication", 0.0) for row in step) for step in self.steps
        )


def _ends(rank: RankMeasures, one_clock: bool) -> list[int]:
    header = rank.profile.header
    shift = 0 if one_clock else header.wall_ns - header.monotonic_ns
    return [row.begin_ns + round(row.seconds * 1e9) + shift for row in rank.profile.steps]


def _nearest(times: Sequence[int], moment: int) -> int:
    at = bisect(times, moment)
    around = [n for n in (at - 1, at) if 0 <= n < len(times)]
    return min(around, key=lambda n: abs(times[n] - moment))
