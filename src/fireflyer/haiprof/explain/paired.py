"""Steps that several ranks did together, compared within each step.

Noise of a shared machine changes from step to step by more than a rank is slow. It meets all ranks of one
step alike, or each rank in turn. So ranks are compared within a step, and then over the steps.
"""

from bisect import bisect
from collections.abc import Sequence
from statistics import median

from fireflyer.haiprof.explain.measures import RankMeasures
from fireflyer.haiprof.phases import Row

PARTS = 4
"""Parts of a session in each of which a rank must be late: a burst of other work ends sooner."""


def own_s(row: Row) -> float:
    """Returns the time of a step in which its rank did not wait for others."""
    return row.seconds - row.phases.get("communication", 0.0)


class PairedSteps:
    """Steps of `ranks`, at least one, matched by the time of their end."""

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
        if len(self.steps) < len(rows[0]) / 2:  # sessions at different times
            self.steps = list(zip(*rows, strict=False))

    def lateness(self, index: int) -> list[float]:
        """Returns by how much the own time of a rank exceeds the typical one of the others, by step."""
        return [
            own_s(step[index]) - median(own_s(row) for n, row in enumerate(step) if n != index)
            for step in self.steps
        ]

    def is_late(self, index: int, least: float) -> bool:
        """Returns whether a rank is late by `least` seconds in the typical step, by half of that in
        each part of the session, and the last one in most steps."""
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
        """Returns the communication of the rank that waits least in each step, in the typical step.

        That rank came last: it waits for the transfer alone, and not for another rank.
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
