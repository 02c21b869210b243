"""Comparison of two profiles of the same training."""

from collections.abc import Sequence
from statistics import median

import msgspec

from fireflyer.haiprof.events import PHASES
from fireflyer.haiprof.explain.measures import RankMeasures
from fireflyer.haiprof.records import RankProfile


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One phase before and after."""

    phase: str
    before_s: float
    after_s: float
    noise_s: float
    """Largest difference that the scatter of the steps alone explains."""

    @property
    def clear(self) -> bool:
        """True if the difference is larger than the noise."""
        return abs(self.after_s - self.before_s) > self.noise_s


def compare(before: Sequence[RankProfile], after: Sequence[RankProfile]) -> list[Change]:
    """Returns the change of the whole step, then the changes of its phases, the largest first."""
    changes = [_change(name, before, after) for name in PHASES]
    changes.sort(key=lambda change: -abs(change.after_s - change.before_s))
    return [_change("step", before, after), *changes]


def _change(phase: str, before: Sequence[RankProfile], after: Sequence[RankProfile]) -> Change:
    first, second = _values(phase, before), _values(phase, after)
    noise = 2 * (_error(first) ** 2 + _error(second) ** 2) ** 0.5
    return Change(phase=phase, before_s=_median(first), after_s=_median(second), noise_s=noise)


def _values(phase: str, profiles: Sequence[RankProfile]) -> list[float]:
    return [
        row.seconds if phase == "step" else row.phases.get(phase, 0.0)
        for profile in profiles
        for row in RankMeasures(profile).profile.steps
    ]


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0


def _error(values: list[float]) -> float:
    """Returns the standard error of the median, from the median absolute deviation."""
    if not values:
        return 0.0
    centre = median(values)
    return float(1.858 * median(abs(v - centre) for v in values) / len(values) ** 0.5)
