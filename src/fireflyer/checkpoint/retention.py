"""Which checkpoints stay: a pure decision over what a directory holds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fireflyer.checkpoint.manifest import Generation
from fireflyer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep; a checkpoint stays if any of the rules wants it, and the newest always does.

    Raises:
        ConfigError: for numbers below 1, `best` without `metric` or the other way round, no name, or another
            mode.
    """

    last: int = 3
    """The newest ones, by the time of their save."""
    every: int | None = None
    """Those whose step is a multiple of it; of one step saved several times, the newest."""
    best: int | None = None
    """How many of those with the best `metric`."""
    metric: str | None = None
    """Its name among the `metrics` given to `save`."""
    mode: Literal["min", "max"] = "min"
    """Whether a smaller or a larger metric is better."""

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is None and name != "last":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"Keep({name}={value!r}): write a whole number of at least 1")
        if (self.best is None) != (self.metric is None):
            raise ConfigError(
                f'Keep(best={self.best}, metric={self.metric!r}): give both, e.g. best=2, metric="loss"'
            )
        if self.metric is not None and (not isinstance(self.metric, str) or not self.metric):
            raise ConfigError(f'Keep(metric={self.metric!r}): write its name, e.g. "loss"')
        if self.mode not in ("min", "max"):
            raise ConfigError(f'Keep(mode={self.mode!r}): write "min" or "max"')

    @classmethod
    def of(cls, keep: "int | Keep | None") -> "Keep | None":
        """`keep` as users write it: a number is the `last` so many, None keeps all.

        Raises:
            ConfigError: for a number below 1.
        """
        if keep is None or isinstance(keep, Keep):
            return keep
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ConfigError(
                f"keep={keep!r}: keep at least 1 checkpoint, a Keep(...), or None for all"
            )
        return cls(last=keep)


class Candidate(NamedTuple):
    """A whole checkpoint, as retention sees it."""

    generation: Generation
    step: int
    metrics: Mapping[str, float]


def retired(checkpoints: Sequence[Candidate], keep: Keep) -> list[Candidate]:
    """Those of the whole `checkpoints` (in any order) that no rule keeps, the oldest first."""
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
    """Those that have the metric, the best first, newer ones before older ones of the same value."""
    metric, sign = str(keep.metric), 1 if keep.mode == "min" else -1
    counted = [one for one in newest_first if not math.isnan(one.metrics.get(metric, math.nan))]
    return sorted(counted, key=lambda one: sign * one.metrics[metric])
