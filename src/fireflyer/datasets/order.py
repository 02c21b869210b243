"""Order of an epoch: a permutation of [0, n) that depends only on (seed, epoch, n, block).

Any position is computed independently, in constant time and without memory that grows with n. The
values of an `ORDER_VERSION` never change; docs/guide/datasets.md describes version 1.
"""

import struct
from functools import lru_cache
from hashlib import blake2b
from math import isqrt

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1

DEFAULT_BLOCK = 256

Positions = npt.NDArray[np.int64]

_SORTED = 1024
"""Maximum n of a permutation of [0, n) that is kept as a table, made by sorting keyed hashes."""
_HALF_ROUNDS = 8
_WORD = 1 << 64


def _key(*parts: int) -> bytes:
    """Returns 64 bytes that depend on all of `parts`, each in [0, 2^64)."""
    packed = struct.pack(f"<{len(parts) + 1}Q", ORDER_VERSION, *parts)
    return blake2b(packed, digest_size=64, person=b"fireflyer order").digest()


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Permutes 64-bit words; every input bit affects every output bit (splitmix64 finalizer)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Permutation:
    """Bijection of [0, n) chosen by a key of 64 bytes."""

    def __init__(self, n: int, key: bytes) -> None:
        self.n = n
        self._words = np.frombuffer(key, "<u8").astype(np.uint64)
        self._table: Positions | None = None
        if n <= _SORTED:
            numbers = np.arange(n, dtype=np.uint64)
            hashes = _mix(_mix(numbers ^ self._words[0]) + self._words[1])
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)
        else:
            self._a = np.uint64(isqrt(n - 1) + 1)
            self._b = np.uint64(-(-n // int(self._a)))

    def at(self, positions: Positions) -> Positions:
        """Returns the images of `positions`, which lie in [0, n); int64, of the same shape."""
        if self._table is not None:
            return self._table[positions]
        values = self._network(positions.astype(np.uint64))
        # The network permutes [0, a*b). Repeating it until the value is below n permutes [0, n).
        outside = np.flatnonzero(values >= np.uint64(self.n))
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= np.uint64(self.n)]
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Permutes [0, a * b) by a Feistel network with halves in [0, a) and [0, b)."""
        left, right = values // self._b, values % self._b
        for number in range(0, _HALF_ROUNDS, 2):
            left = (left + _mix(right + self._words[number]) % self._a) % self._a
            right = (right + _mix(left + self._words[number + 1]) % self._b) % self._b
        return left * self._b + right


class Order:
    """Mapping from positions of an epoch to samples.

    Args:
        n: number of samples, below 2^62.
        seed, epoch: in [0, 2^64).
        shuffle: False keeps the order of the samples.
        block: None permutes single samples; otherwise runs of `block` consecutive samples are
            permuted, and the samples inside each run.
    """

    def __init__(
        self, n: int, seed: int, epoch: int, shuffle: bool = True, block: int | None = None
    ) -> None:
        if not 0 <= n < _WORD // 4:
            raise ValueError(f"invalid n {n}: expected 0 to 2^62 positions")
        if not (0 <= seed < _WORD and 0 <= epoch < _WORD):
            raise ValueError(f"invalid seed {seed} or epoch {epoch}: expected values in [0, 2^64)")
        if block is not None and not 0 < block < _WORD // 4:
            raise ValueError(f"invalid block {block}: expected 1 to 2^62 samples")
        self.n, self.seed, self.epoch, self.shuffle, self.block = n, seed, epoch, shuffle, block
        if not shuffle:
            return
        if block is None:
            self._all = Permutation(n, _key(seed, epoch, n, 0, 0))
            return
        full, self._short = divmod(n, block)
        key = _key(seed, epoch, n, block, 1)
        self._all = Permutation(full, key)
        self._full = full
        draw = int.from_bytes(_key(seed, epoch, n, block, 2)[:16], "little")
        # Number of full runs that precede the short run in the order; all runs if none is short.
        self._place = draw % (full + 1) if self._short else full

    def at(self, positions: npt.NDArray[np.integer]) -> Positions:
        """Returns the samples at `positions`; int64, of the same shape.

        Raises:
            IndexError: a position is negative or not below n.
        """
        places = np.asarray(positions, dtype=np.int64)
        if places.size and not (places.min() >= 0 and places.max() < self.n):
            raise IndexError(f"a position is outside [0, {self.n})")
        if not self.shuffle:
            return places.copy()
        if self.block is None:
            return self._all.at(places)
        return self._in_blocks(places.ravel(), self.block).reshape(places.shape)

    def span(self, start: int, stop: int) -> Positions:
        """Returns the samples at positions [start, stop)."""
        return self.at(np.arange(start, stop, dtype=np.int64))

    def _in_blocks(self, places: Positions, block: int) -> Positions:
        before = self._place * block
        behind = places >= before + self._short
        short = (places >= before) & ~behind
        shifted = np.where(behind, places - self._short, places)
        number, inside = shifted // block, shifted % block
        number[short], inside[short] = self._full, places[short] - before
        samples = np.empty_like(places)
        # Neighbouring positions lie in few runs, and each run has its own permutation.
        for slot in np.unique(number).tolist():
            mine = number == slot
            run = self._full if slot == self._full else int(self._all.at(np.array([slot]))[0])
            length = self._short if slot == self._full else block
            own = _inside(self.seed, self.epoch, self.n, block, run, length)
            samples[mine] = run * block + own.at(inside[mine])
        return samples


@lru_cache(maxsize=64)
def _inside(seed: int, epoch: int, n: int, block: int, run: int, length: int) -> Permutation:
    return Permutation(length, _key(seed, epoch, n, block, 3, run))
