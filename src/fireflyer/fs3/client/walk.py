"""Enumeration of a file's existing chunks, from its end to its start, with few queries."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

LAST_INDEX = (1 << 32) - 1
"""Largest index that a chunk can have."""
ENOUGH = 4096
"""Number of found chunks of a chain that may wait for answers of other chains. A chain with that many
waiting chunks is not queried."""
Asks = list[tuple[int, int]]
"""Queries: (position of the chain in the file's order, highest index to search)."""
Answers = list[tuple[int, int, int]]
"""Answers: (index of the chain's last chunk, number of consecutive chunks of the chain that end
there, bytes of the last chunk); the number is 0 if there is no chunk."""


def walk(
    ask: Callable[[Asks], Answers], chains: int, stride: int, first: int, last: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the indexes from `first` to `last` of chunks that exist at the time of the query.

    The cost is one query per run of consecutive chunks, regardless of the gaps between runs. Each
    round queries all chains in parallel, below their previous answers.

    Args:
        ask: function that executes the queries.
        chains: number of the file's chains that may hold chunks.
        stride: distance between a chain's indexes; chain n holds the indexes that are n modulo the
            stride.

    Yields:
        int64[k], k > 0, ascending; all values are below those of earlier arrays.
    """
    unknown: dict[int, int] = {}  # by chain: highest index that is not queried yet
    for chain in range(min(chains, last + 1)):
        top = last - (last - chain) % stride
        if top >= first:
            unknown[chain] = top
    held = np.empty(0, np.int64)  # found chunks that wait for chunks of higher index
    while unknown:
        waiting = np.bincount(held % stride, minlength=stride)
        asks = [(chain, top) for chain, top in unknown.items() if waiting[chain] < ENOUGH]
        rows = [held]
        for (chain, _), (index, row, _) in zip(asks, ask(asks), strict=True):
            del unknown[chain]
            if not row or index < first:
                continue
            low = index - min(row - 1, (index - first) // stride) * stride
            rows.append(np.arange(low, index + 1, stride, dtype=np.int64))
            if low - stride >= first:
                unknown[chain] = low - stride
        held = np.concatenate(rows)
        ready = held > max(unknown.values(), default=first - 1)
        if ready.any():
            yield np.sort(held[ready])
            held = held[~ready]
