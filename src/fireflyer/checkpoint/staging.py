"""The staging arena: the one buffer that a state is copied into while the caller waits."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fireflyer.checkpoint.tree import Leaf
from fireflyer.errors import NoSpace

_STEP_BYTES = 2 << 20


class Arena:
    """A buffer kept from save to save; it only grows, and its pages are present before they are used.

    Not safe for threads: `fill` only while nobody reads the view that the last `fill` returned.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._address = 0

    def fill(self, leaves: Sequence[Leaf]) -> memoryview:
        """Copies the leaves' bytes (C order) back to back; returns them, valid until the next `fill`."""
        total = sum(leaf.nbytes for leaf in leaves)
        memory = self._reserve(total)
        position = self._address
        for leaf in leaves:
            keep, address = _contiguous(leaf)
            # Frees the GIL and copies with one thread; torch's copy_ would take part in the
            # intra-op pool, whose threads the ranks of one machine compete for.
            ctypes.memmove(position, address, keep.nbytes)
            position += keep.nbytes
        return memoryview(memory)[:total]

    def _reserve(self, size: int) -> mmap.mmap:
        if self._memory is None or len(self._memory) < size:
            rounded = max(1, -(-size // _STEP_BYTES)) * _STEP_BYTES
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            self._memory = None  # the old pages go before the new ones come
            try:
                self._memory = mmap.mmap(-1, rounded, flags=flags)
            except OSError as error:
                raise NoSpace(
                    f"no memory for a staging arena of {rounded} bytes: {error.strerror}; "
                    "the state must fit into memory twice"
                ) from error
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        return self._memory


def _contiguous(leaf: Leaf) -> tuple[Leaf, int]:
    """The leaf itself if its memory is its bytes in order, else a copy; and the address."""
    if isinstance(leaf, np.ndarray):
        array: np.ndarray[Any, Any] = np.ascontiguousarray(leaf)
        return array, array.ctypes.data
    plain: torch.Tensor = leaf.detach().cpu().contiguous().resolve_conj().resolve_neg()
    return plain, plain.data_ptr()


def leaf_bytes(leaf: Leaf) -> memoryview:
    """The writable bytes of a contiguous CPU tensor or array; valid while the leaf lives."""
    _, address = _contiguous(leaf)
    return memoryview((ctypes.c_char * leaf.nbytes).from_address(address)).cast("B")
