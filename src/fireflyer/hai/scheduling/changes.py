"""Log of changed nodes, in order: each reader continues from its own mark. Pure."""

KEPT = 8192
"""Number of changes kept; a reader further behind has to examine all nodes."""


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
        """Mark of a reader that has read everything; a reader starts at -1."""
        return self._dropped + len(self._places)

    def since(self, mark: int) -> list[int] | None:
        """Returns the changes after this mark; None: the mark is too old."""
        start = mark - self._dropped
        return self._places[start:] if start >= 0 and mark >= 0 else None
