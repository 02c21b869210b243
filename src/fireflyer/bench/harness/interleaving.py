"""Measurement in turns, so that a drift of the machine affects all candidates alike."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def interleaved(candidates: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Returns each candidate's values by round.

    The order rotates from round to round. The first round is not measured.
    """
    found: dict[str, list[T]] = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(-1, rounds):
        turn = max(number, 0) % len(names)
        for name in names[turn:] + names[:turn]:
            value = candidates[name]()
            if number >= 0:
                found[name].append(value)
    return found
