"""Finds the existing chunks of a file, from its end to its beginning, with few queries. Pure."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

LAST_INDEX = (1 << 32) - 1
"""Largest index that a chunk can have."""
ENOUGH = 4096
"""Found chunks of a chain that may wait for other chains; at this number it is not queried."""
Asks = list[tuple[int, int]]
"""Queries: (position of the chain in the file's order, highest index to search)."""
Answers = list[tuple[int, int, int]]
"""(index of the last chunk, chunks in a row from it downwards, its bytes); a row of 0: none."""


def walk(
    ask: Callable[[Asks], Answers], chains: int, stride: int, first: int, last: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yields the indexes from `first` to `last` of chunks that exist when they are queried.

    Costs one query per row of chunks, regardless of the gaps between rows. All chains are queried
    at a time, and again below their answers.

    Args:
        ask: answers all of the queries.
        chains: number of the file's chains that may hold chunks.
        stride: distance between a chain's indexes: chain n holds those that are n modulo the
            stride.

    Yields:
        int64[k], k > 0, ascending; all of them are below those of earlier arrays.
    """
    unknown: dict[int, int] = {}  # by chain: nothing is known at and below this index
    for chain in range(min(chains, last + 1)):
        top = last - (last - chain) % stride
        if top >= first:
            unknown[chain] = top
    held = np.empty(0, np.int64)  # found; other chains may have chunks above these
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
