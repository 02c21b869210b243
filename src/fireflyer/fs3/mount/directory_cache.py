"""Attributes of directories, kept current while this mount makes files in them.

The kernel drops a directory's attributes when a name in it changes, and asks for them again before
it makes the next file there. Without this cache each new file costs a request more.
"""

import threading
import time
from collections.abc import Callable

import msgspec

from fireflyer.fs3.meta.inode import DIRECTORY, Inode

Ticket = tuple[float, int]
"""Time, and how many changes this mount had made."""
KEPT = 4096
"""Maximum number of directories."""


class DirectoryCache:
    """Cache of directories by inode. Thread-safe.

    Invariant: no attributes are older than the last change that this mount made, or than `keep_s`.

    Args:
        now: monotonic time in seconds.
    """

    def __init__(self, keep_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._keep_s, self._now = keep_s, now
        self._lock = threading.Lock()  # guards the attributes below
        self._known: dict[int, tuple[float, Inode]] = {}
        self._changes = 0

    def ticket(self) -> Ticket:
        """Returns what `learn` and `age` need; call it before asking the metadata service."""
        return self._now(), self._changes

    def age(self, ticket: Ticket) -> float | None:
        """Returns the age of an answer in seconds; None if it is outdated."""
        now, changes = self.ticket()
        age = now - ticket[0]
        return age if changes == ticket[1] and age < self._keep_s else None

    def learn(self, inode: Inode, ticket: Ticket) -> None:
        """Takes an answer, unless it is no directory, or a change came after the ticket."""
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
        """Records any other change of these inodes."""
        with self._lock:
            self._changes += 1
            for number in numbers:
                self._known.pop(number, None)
