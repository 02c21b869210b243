"""Cache of directories' attributes, which is updated while this mount creates files in them.

The kernel drops a directory's attributes when a name in it changes, and requests them again before
it creates the next file there. Without this cache each new file costs an additional request.
"""

import threading
import time
from collections.abc import Callable

import msgspec

from fireflyer.fs3.meta.inode import DIRECTORY, Inode

Ticket = tuple[float, int]
"""Time, and number of changes by this mount up to that time."""
KEPT = 4096
"""Maximum number of cached directories."""


class DirectoryCache:
    """Cache of directories by inode. Thread-safe.

    Invariant: attributes are at most `keep_s` seconds old, and never older than the last change by
    this mount.

    Args:
        keep_s: seconds for which attributes are kept.
        now: monotonic time in seconds.
    """

    def __init__(self, keep_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._now = keep_s, now
        self._lock = threading.Lock()  # guards the attributes below
        self._known: dict[int, tuple[float, Inode]] = {}
        self._changes = 0

    def ticket(self) -> Ticket:
        """Returns a ticket for `learn` and `age`; call this before the request for attributes."""
        return self._now(), self._changes

    def age(self, ticket: Ticket) -> float | None:
        """Returns the age in seconds of the answer to a request that followed the ticket; None if
        the answer is outdated."""
        now, changes = self.ticket()
        age = now - ticket[0]
        return age if changes == ticket[1] and age < self._keep_s else None

    def learn(self, inode: Inode, ticket: Ticket) -> None:
        """Caches an answer, unless it is no directory or a change followed the ticket."""
        at, changes = ticket
        if inode.kind != DIRECTORY:
            return
        with self._lock:
            if changes != self._changes:
                return
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[inode.number] = at, inode

    def find(self, number: int) -> tuple[Inode, float] | None:
        """Returns the attributes and their age in seconds."""
        with self._lock:
            found = self._known.get(number)
        if found is None:
            return None
        at, inode = found
        age = self._now() - at
        return (inode, age) if age < self._keep_s else None

    def added(self, number: int, ns: int) -> None:
        """Records that a name was added to a directory at the server's time `ns`."""
        with self._lock:
            self._changes += 1
            found = self._known.get(number)
            if found is not None:
                at, inode = found
                times = {"mtime": max(inode.mtime, ns), "ctime": max(inode.ctime, ns)}
                self._known[number] = at, msgspec.structs.replace(inode, **times)

    def forget(self, *numbers: int) -> None:
        """Drops these inodes; call this after a change that `added` does not record."""
        with self._lock:
            self._changes += 1
            for number in numbers:
                self._known.pop(number, None)
