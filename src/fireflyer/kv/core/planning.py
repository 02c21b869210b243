"""Choice of the runs to merge. Pure."""

from collections.abc import Sequence

MERGE_FROM = 4
"""Fewest runs that are merged because they are of similar size."""
MOST_RUNS = 10
"""More runs than this are merged whatever their sizes: a lookup may visit each."""
_RATIO = 2


def runs_to_merge(sizes: Sequence[int]) -> int:
    """Returns the number of runs, from the newest on, to merge into one; 0 for none.

    A run joins if it is at most twice as large as the newer ones together, so that each byte is
    written again a logarithmic number of times.

    Args:
        sizes: bytes of the runs, newest first.
    """
    total = count = 0
    for size in sizes:
        if count and size > _RATIO * total:
            break
        total += size
        count += 1
    if count >= MERGE_FROM:
        return count
    return max(count, len(sizes) - MOST_RUNS + 1) if len(sizes) > MOST_RUNS else 0
