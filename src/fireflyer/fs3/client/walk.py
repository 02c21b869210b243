"""Which chunks of a file stand, from its end to its beginning, by few questions. Pure."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

LAST_INDEX = (1 << 32) - 1
"""That a chunk can have."""
ENOUGH = 4096
"""Chunks of a chain that wait for what the other chains say; such a chain is not asked for more."""
Asks = list[tuple[int, int]]
"""Questions: (which chain in the file's order, index up to which a chunk is looked for)."""
Answers = list[tuple[int, int, int]]
"""(index of the last chunk, chunks in a row from it downwards, bytes of that chunk); a row of 0: none."""


def walk(
    ask: Callable[[Asks], Answers], chains: int, stride: int, first: int, last: int
) -> Iterator[npt.NDArray[np.int64]]:
    """The chunks from index `first` to `last` that stand when they are asked for.

    Costs questions for rows of chunks, whatever lies between them: all chains are asked at a time, and again
    below what they said.

    Args:
        ask: answers all of the questions.
        chains: how many of the file's chains may hold chunks.
        stride: of the indexes of a chain: chain n holds those that are n modulo the stride.

    Yields:
        int64[k], k > 0, ascending; all of them are below those that came before.
    """
    unknown: dict[int, int] = {}  # of chains: below this index, and at it, nothing is known
    for chain in range(min(chains, last + 1)):
        top = last - (last - chain) % stride
        if top >= first:
            unknown[chain] = top
    held = np.empty(0, np.int64)  # found; other chains may have chunks above them
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
