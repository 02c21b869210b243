"""Which nodes have changed, in order: each reader goes on from where it stopped. Pure."""

KEPT = 8192
"""A reader that is more changes behind has to look at all nodes."""


class Changes:
    """A list of places that only grows, of which the front is forgotten."""

    __slots__ = ("_dropped", "_places")

    def __init__(self) -> None:
        self._places: list[int] = []
        self._dropped = 0

    def add(self, place: int) -> None:
        """The node at this place has changed."""
        self._places.append(place)
        if len(self._places) > 2 * KEPT:
            del self._places[:KEPT]
            self._dropped += KEPT

    @property
    def mark(self) -> int:
        """Where a reader stands that has seen all; it starts at -1."""
        return self._dropped + len(self._places)

    def since(self, mark: int) -> list[int] | None:
        """What has changed after this mark; None: it is too long ago to say."""
        start = mark - self._dropped
        return self._places[start:] if start >= 0 and mark >= 0 else None
