"""Retention: pure functions that decide which checkpoints of a directory to keep."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keep:
    """Retention rules: a checkpoint stays if any rule keeps it; the newest one always stays.

    Raises:
        ConfigError: if a number is below 1, only one of `best` and `metric` is given, the metric
            has no name, or the mode is unknown.
    """

    last: int = 3
    """Number of newest checkpoints to keep, by the time of their save."""
    every: int | None = None
    """Keep checkpoints at multiples of this step; of several saves of one step, keep the newest."""
    best: int | None = None
    """Number of checkpoints with the best `metric` to keep."""
    metric: str | None = None
    """Name of the metric among the `metrics` passed to `save`."""
    mode: Literal["min", "max"] = "min"
    """Direction of the metric: "min" if smaller is better, "max" if larger is."""

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is None and name != "last":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"invalid Keep {name} {value!r}: expected a whole number of at least 1"
                )
        if self.metric is None and self.best is not None:
            raise ConfigError(
                f"Keep(best={self.best}) lacks the name of the metric that decides: add "
                "metric='loss', or the name that you give to save(metrics=...)"
            )
        if self.best is None and self.metric is not None:
            raise ConfigError(
                f"Keep(metric={self.metric!r}) lacks the number of checkpoints to keep: add best=2"
            )
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError(f'invalid Keep metric {self.metric!r}: expected a name, e.g. "loss"')
        if self.mode not in ("min", "max"):
            raise ConfigError(f'invalid Keep mode {self.mode!r}: expected "min" or "max"')

    @classmethod
    def of(cls, keep: "int | Keep | None") -> "Keep | None":
        """Converts the user's `keep` option to rules: a number means `last`, None keeps all.

        Raises:
            ConfigError: if the number is below 1.
        """
        if keep is None or isinstance(keep, Keep):
            return keep
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ConfigError(
                f"invalid keep {keep!r}: expected a number of at least 1, a Keep(...), or None for all"
            )
        return cls(last=keep)


class Candidate(NamedTuple):
    """Complete checkpoint, with the data that retention needs."""

    generation: Generation
    step: int
    metrics: Mapping[str, float]


def retired(checkpoints: Sequence[Candidate], keep: Keep) -> list[Candidate]:
    """Returns the complete `checkpoints` (in any order) that no rule keeps, oldest first."""
    newest_first = sorted(checkpoints, key=lambda one: one.generation, reverse=True)
    kept = {one.generation for one in newest_first[: keep.last]}
    if keep.every is not None:
        seen: set[int] = set()
        for one in newest_first:
            if one.step % keep.every == 0 and one.step not in seen:
                kept.add(one.generation)
            seen.add(one.step)
    if keep.best is not None and keep.metric is not None:
        kept.update(one.generation for one in _best_first(newest_first, keep)[: keep.best])
    return [one for one in reversed(newest_first) if one.generation not in kept]


def _best_first(newest_first: Sequence[Candidate], keep: Keep) -> list[Candidate]:
    """Returns the checkpoints with the metric, best first; of equal values, the newer first."""
    metric, sign = str(keep.metric), 1 if keep.mode == "min" else -1
    counted = [one for one in newest_first if not math.isnan(one.metrics.get(metric, math.nan))]
    return sorted(counted, key=lambda one: sign * one.metrics[metric])
