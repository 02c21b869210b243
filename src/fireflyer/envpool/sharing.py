"""Memory that a pool shares with its worker processes."""

from dataclasses import dataclass
from multiprocessing import shared_memory
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64


@dataclass(frozen=True)
class Layout:
    """Shapes and dtypes of the arrays, in order; the first axis of each is the environment."""

    fields: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, observation: Any, action: Any, num_envs: int) -> "Layout":
        """Lays out the arrays for spaces of gymnasium that consist of one array each."""

        def field(name: str, dtype: DTypeLike, shape: tuple[int, ...] = ()) -> Any:
            return name, (num_envs, *shape), np.dtype(dtype).str

        return cls((
            field("observations", observation.dtype, observation.shape),
            field("actions", action.dtype, action.shape),
            field("rewards", np.float64), field("terminated", np.bool_),
            field("truncated", np.bool_), field("seeds", np.int64), field("stepping", np.int32),
        ))  # fmt: skip

    def places(self) -> tuple[list[int], int]:
        """Returns the offset of each array, and the total size in bytes."""
        at, offsets = 0, []
        for _, shape, dtype in self.fields:
            offsets.append(at)
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return offsets, at


class Shared:
    """Numpy arrays over the shared memory.

    Attributes:
        observations: (num_envs, ...), the last observations.
        actions: (num_envs, ...), the next actions.
        rewards: (num_envs,) float64.
        terminated: (num_envs,) bool.
        truncated: (num_envs,) bool.
        seeds: (num_envs,) int64, seeds of the next reset; -1: none.
        stepping: (num_envs,) int32; the first element of a worker's share is the environment that
            the worker is stepping.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    seeds: NDArray[np.int64]
    stepping: NDArray[np.int32]

    def __init__(self, memory: shared_memory.SharedMemory, layout: Layout, *, owner: bool) -> None:
        self.name, self.layout = memory.name, layout
        self._memory, self._owner = memory, owner
        offsets, _ = layout.places()
        for (name, shape, dtype), offset in zip(layout.fields, offsets, strict=True):
            array: NDArray[Any] = np.ndarray(shape, dtype, memory.buf, offset)
            setattr(self, name, array)

    @classmethod
    def create(cls, layout: Layout) -> "Shared":
        """Creates the memory, filled with zeros."""
        _, size = layout.places()
        return cls(shared_memory.SharedMemory(create=True, size=size), layout, owner=True)

    @classmethod
    def attach(cls, name: str, layout: Layout) -> "Shared":
        """Opens the memory of a pool; the pool remains the owner."""
        return cls(shared_memory.SharedMemory(name), layout, owner=False)

    def close(self) -> None:
        """Frees the memory; the arrays become invalid."""
        for name, _, _ in self.layout.fields:
            self.__dict__.pop(name, None)
        self._memory.close()
        if self._owner:
            self._owner = False
            self._memory.unlink()
