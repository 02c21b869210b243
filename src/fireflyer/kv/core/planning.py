"""Selection of the runs to merge. A run is a sorted sequence of tables that do not overlap."""

from collections.abc import Sequence

MERGE_FROM = 4
"""Minimum number of runs of similar size that are merged."""
MOST_RUNS = 10
"""Maximum number of runs, because a lookup may read each run. Beyond it, runs of any sizes are
merged."""
_RATIO = 2


def runs_to_merge(sizes: Sequence[int]) -> int:
    """Returns the number of runs to merge, from the newest on; 0 for none.

    A run is included if it is at most twice as large as all newer runs together. Each byte is then
    rewritten a logarithmic number of times.

    Args:
        sizes: sizes of the runs in bytes, newest first.
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
