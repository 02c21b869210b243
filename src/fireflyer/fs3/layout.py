"""Placement of a file's chunks: docs/guide/fs3.md, "Where the bytes of a file are"."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

SMALLEST_CHUNK = 4 << 10
LARGEST_CHUNK = 64 << 20
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = 4


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Distribution of a file over chains, fixed when the file is made.

    Attributes:
        table, table_version: id and version of the chain table, which is an immutable list of
            chains.
        chunk_size: bytes of a chunk, a power of two from 4 KiB to 64 MiB.
        stripe: number of the table's chains that the file uses.
        seed: seed of the order of the file's chains, 64 bits.
    """

    table: int
    table_version: int
    chunk_size: int
    stripe: int
    seed: int = 0

    def __post_init__(self) -> None:
        size = self.chunk_size
        if not SMALLEST_CHUNK <= size <= LARGEST_CHUNK or size & (size - 1):
            raise ValueError(f"invalid chunk size {size}: expected a power of two, 4 KiB to 64 MiB")
        if self.stripe < 1:
            raise ValueError(f"invalid stripe {self.stripe}: expected at least 1 chain")
        if not 0 <= self.seed <= MASK:
            raise ValueError(f"invalid seed {self.seed}: expected 64 bits")


def chunk_id(inode: int, index: int) -> bytes:
    """Returns the id of a chunk, 16 bytes, as used in messages and stores."""
    return inode.to_bytes(8, "big") + index.to_bytes(4, "big") + bytes(4)


def permute(seed: int, n: int, x: int) -> int:
    """Computes P(x) of docs/guide/fs3.md: a permutation of 0..n-1 for each seed.

    Raises:
        ValueError: `x` is not in 0..n-1.
    """
    if not 0 <= x < n:
        raise ValueError(f"invalid number {x}: expected 0 to {n - 1}")
    b = _half_bits(n)
    low = (1 << b) - 1
    while True:
        left, right = x >> b, x & low
        for key in _round_keys(seed):
            left, right = right, left ^ (_mix((key + right) & MASK) & low)
        x = left << b | right
        if x < n:
            return x


def chain_of(layout: Layout, table: Sequence[int], index: int) -> int:
    """Returns the chain of a file's chunk; `table` lists the ids of the chains.

    Raises:
        ValueError: the stripe is wider than the table, or `index` is negative.
    """
    if index < 0:
        raise ValueError(f"there is no chunk {index}")
    _check_width(layout, table)
    return table[permute(layout.seed, len(table), index % layout.stripe)]


def chains_of(
    layout: Layout, table: Sequence[int], indexes: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Computes `chain_of` for many chunks in one call.

    Args:
        indexes: [k], integers from 0.

    Returns:
        [k], ids of chains.
    """
    if indexes.size and int(indexes.min()) < 0:
        raise ValueError(f"there is no chunk {int(indexes.min())}")
    _check_width(layout, table)
    slots = indexes.astype(np.uint64) % np.uint64(layout.stripe)
    few = indexes.size < layout.stripe
    wanted = slots if few else np.arange(layout.stripe, dtype=np.uint64)
    order = _permute_all(layout.seed, len(table), wanted)
    chains: npt.NDArray[np.int64] = np.asarray(table, np.int64)[order if few else order[slots]]
    return chains


def _check_width(layout: Layout, table: Sequence[int]) -> None:
    if layout.stripe > len(table):
        raise ValueError(
            f"the stripe of {layout.stripe} chains is wider than the table of {len(table)}"
        )


def _half_bits(n: int) -> int:
    return max(1, ((n - 1).bit_length() + 1) // 2)


def _round_keys(seed: int) -> list[int]:
    return [(seed + r * GOLDEN) & MASK for r in range(1, ROUNDS + 1)]


def _mix(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def _mix_all(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def _permute_all(seed: int, n: int, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Computes `permute` of each element."""
    bits = _half_bits(n)
    b, low = np.uint64(bits), np.uint64((1 << bits) - 1)
    result, walking = x.copy(), np.arange(x.size)
    while walking.size:
        left, right = result[walking] >> b, result[walking] & low
        for key in _round_keys(seed):
            left, right = right, left ^ (_mix_all(np.uint64(key) + right) & low)
        result[walking] = left << b | right
        walking = walking[result[walking] >= n]
    return result
