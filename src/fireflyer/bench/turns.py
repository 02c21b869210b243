"""Candidates measured in turns, so that a machine that drifts drifts for all of them."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def interleaved(candidates: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each candidate gave, by round, in an order that turns; an unmeasured round comes first."""
    found: dict[str, list[T]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(-1, rounds):
        turn = max(number, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            value = candidates[name]()
            if number >= 0:
                found[name].append(value)
    return found
