"""Change feed: the operations of a database, read in order from its log."""

from fireflyer.errors import SnapshotGone
from fireflyer.kv.core import frames
from fireflyer.kv.core.manifest import current
from fireflyer.kv.core.operations import Read, Steps, log_name
from fireflyer.kv.core.reader import no_store

Change = tuple[int, bytes, bytes | None]
"""Operation: sequence number, key, and value (None for a deletion)."""


class Feed:
    """Position in the sequence of operations."""

    def __init__(self, after: int) -> None:
        """Starts with the operation that follows number `after`."""
        self.after = after
        self._next: int | None = None
        """Log object to read next; None: search for it."""

    def poll(self) -> Steps[list[Change]]:
        """Returns the operations of the next non-empty log object; [] if there is none yet.

        Raises:
            SnapshotGone: operations that follow `after` were collected.
        """
        while True:
            if self._next is None:
                yield from self._search()
            assert self._next is not None
            data = yield Read(log_name(self._next))
            newest = yield from current()
            if newest is None:
                raise no_store()
            if newest.feed > self._next:  # collected, and perhaps recreated by a replaced writer
                self._next = None
                continue
            if data is None:
                return []
            frame = frames.decode(self._next, data)
            if frame.sequence > self.after + 1:
                raise self._gone(frame.sequence)
            self._next += 1
            found = [
                (sequence, key, value)
                for sequence, key, value, _ in frames.operations(frame)
                if sequence > self.after
            ]
            if found:
                self.after = found[-1][0]
                return found

    def _search(self) -> Steps[None]:
        newest = yield from current()
        if newest is None:
            raise no_store()
        if newest.feed == newest.flushed + 1 and self.after < newest.sequence:
            raise self._gone(newest.sequence + 1)
        self._next = newest.feed

    def _gone(self, first: int) -> SnapshotGone:
        return SnapshotGone(
            f"operations {self.after + 1} to {first - 1} were collected: scan the store, and follow it "
            "from the scan's sequence; `history` of the writer keeps more"
        )
