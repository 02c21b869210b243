"""Keeps the memory of operations in flight alive."""

from collections.abc import Iterator

from fireflyer.hfreduce.backend.work import Work


class InFlight:
    """Works that the engine has not finished. Thread-safe: each operation on the dict is atomic.

    The engine holds bare addresses, and a caller may drop a Work and its tensors at any time. This
    object keeps both alive until the operation ends, but no longer: they may hold a large part of a
    model.

    Args:
        in_order: True if works end in the order of `add`. The search for ended works then stops at
            the first unfinished one.
    """

    def __init__(self, in_order: bool) -> None:
        self._in_order = in_order
        self._works: dict[int, Work] = {}

    def __iter__(self) -> Iterator[Work]:
        return iter(list(self._works.values()))

    def add(self, work: Work) -> None:
        """Adds a work and discards works that have ended without a wait."""
        for earlier in self:
            if earlier.is_completed():
                self.discard(earlier)
            elif self._in_order:
                break
        self._works[id(work)] = work

    def discard(self, work: Work) -> None:
        """Removes a work; does nothing if the work is not kept."""
        self._works.pop(id(work), None)

    def clear(self) -> None:
        self._works.clear()
