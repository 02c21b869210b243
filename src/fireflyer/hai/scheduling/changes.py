"""Log of changed nodes, in order: each reader continues from its own mark. Pure."""

from collections.abc import Set

KEPT = 8192
"""Minimum number of changes kept. A reader that has missed more must examine all nodes."""


class Changes:
    """An append-only list of places; old entries are dropped."""

    __slots__ = ("_dropped", "_places")

    def __init__(self) -> None:
        self._places: list[int] = []
        self._dropped = 0

    def add(self, place: int) -> None:
        """Records that the node at this place has changed."""
        self._places.append(place)
        if len(self._places) > 2 * KEPT:
            del self._places[:KEPT]
            self._dropped += KEPT

    @property
    def mark(self) -> int:
        """Mark of a reader that has read all changes; a reader starts at -1."""
        return self._dropped + len(self._places)

    def since(self, mark: int) -> list[int] | None:
        """Returns the changes after this mark; None: the mark is too old."""
        start = mark - self._dropped
        return self._places[start:] if start >= 0 and mark >= 0 else None


_NONE: frozenset[int] = frozenset()


class ChangeReader:
    """Reader of the changes, with its own mark."""

    __slots__ = ("_changes", "_mark")

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._mark = -1

    def read(self) -> Set[int] | None:
        """Returns the places that have changed since the last call. None: they are not known, so all
        nodes must be examined."""
        changes = self._changes
        if self._mark == changes.mark:
            return _NONE
        found = changes.since(self._mark)
        self._mark = changes.mark
        return None if found is None else set(found)
