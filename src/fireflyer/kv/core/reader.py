"""Protocol of a reader, which follows the log and the manifests, without contact to the writer."""

from fireflyer._native.kv import BlockCache, Memtable, View
from fireflyer.errors import Corrupted, KvError
from fireflyer.kv.core import frames, tables
from fireflyer.kv.core.manifest import ROUNDS, Manifest, current
from fireflyer.kv.core.operations import MANIFESTS, Read, Steps, listed, log_name

_MOST_FRAMES = 256
"""Maximum log objects per refresh."""


def no_store(where: object = "") -> KvError:
    place = f"at {where}" if where else "here"
    return KvError(
        f"there is no store {place}: open it with write=True, or `fireflyer kv put`, to create one"
    )


class Reader:
    """State of a reader. Protocol steps may interleave at any operation that they yield."""

    def __init__(self, cache: BlockCache, memtable: int = 32 << 20, where: str = "") -> None:
        """Prepares a reader.

        Args:
            memtable: bytes after which a memtable is frozen.
            where: the store's location, for errors.
        """
        self.where = where
        self.handles = tables.TableSet(cache)
        self.most = memtable
        self.manifest = Manifest(0, 0, b"")
        self.next_log = 1
        self.sequence = 0
        self.memtable = Memtable()
        self.frozen: list[tuple[Memtable, int]] = []
        """Full memtables, oldest first, with the last log object in each."""
        self.view = View([self.memtable], [], 0)

    def open(self) -> Steps[None]:
        """Reads the current manifest and the log that follows it.

        Raises:
            KvError: there is no database.
        """
        found = yield from current()
        if found is None:
            raise no_store(self.where)
        self._adopt(found)
        while (yield from self.refresh()):
            pass

    def refresh(self, *, look: bool = True) -> Steps[int]:
        """Reads new log objects; returns their number, or 1 if a newer manifest replaces them.

        A manifest covers a log object if the manifest's tables have the object's operations. Only
        covered log objects are collected. A replaced writer may recreate a collected log object, so
        the reader ignores log objects that the newest manifest covers.

        Args:
            look: True to read the newest manifest even if the log has no new objects.
        """
        begin = self.next_log
        found: list[frames.Frame] = []
        while len(found) < _MOST_FRAMES:
            number = begin + len(found)
            data = yield Read(log_name(number))
            if data is None:
                break
            found.append(frames.decode(number, data))
        if not found and not look:
            return 0
        present = yield from listed(MANIFESTS)
        newest = self.manifest
        if max(present, default=0) > newest.number:
            newest = (yield from current()) or newest
        covered = newest.flushed >= begin
        if not covered:
            for frame in found:
                if frame.number == self.next_log:  # otherwise a concurrent refresh applied it
                    self._apply(frame)
        if newest.number > self.manifest.number:
            self._adopt(newest)
        return 1 if covered else len(found)

    def _apply(self, frame: frames.Frame) -> None:
        if frame.sequence != self.sequence + 1:
            raise Corrupted(f"log object {frame.number} does not continue the one before")
        if frame.kind == frames.BATCH:
            self.memtable.apply(frame.data, frames.HEADER_BYTES, frame.sequence)
        self.sequence += frame.count
        self.next_log = frame.number + 1
        self.view.sequence = self.sequence

    def _adopt(self, newest: Manifest) -> None:
        if newest.flushed >= self.next_log:
            self.next_log, self.sequence = newest.flushed + 1, newest.sequence
            self.memtable, self.frozen = Memtable(), []
        self.frozen = [(memtable, end) for memtable, end in self.frozen if end > newest.flushed]
        if self.memtable.bytes >= self.most:
            self.frozen.append((self.memtable, self.next_log - 1))
            self.memtable = Memtable()
        self.manifest = newest
        memtables = [self.memtable, *(memtable for memtable, _ in reversed(self.frozen))]
        self.view = View(memtables, self.handles.runs(newest), self.sequence)

    def get(self, key: bytes, now: int) -> Steps[bytes | None]:
        """Looks up a key in the state of the last refresh, or a newer state."""
        for _ in range(ROUNDS):
            try:
                return (yield from tables.get(self.view, key, now))
            except tables.Gone:
                yield from self.refresh()
        raise tables.collected_too_fast("read")
