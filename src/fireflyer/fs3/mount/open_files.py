"""Open files of a mount; all open files of an inode share one write session."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from fireflyer._native.fs3.mount import FileState
from fireflyer.fs3.client.connection import Parts
from fireflyer.fs3.client.data import layout_of
from fireflyer.fs3.client.file import File
from fireflyer.fs3.meta.inode import Inode
from fireflyer.fs3.meta.messages import NOW, OMIT, Changes, Create, Open, User
from fireflyer.fs3.mount.directory_cache import Ticket

KEPT = 1 << 16
"""Maximum number of closed files whose version is kept, so that the kernel may keep their pages."""
Version = tuple[int, int, int]
"""Version of the length, length in bytes, and mtime in ns of a file."""


class OpenFile:
    """Inode that programs have open. The caller must hold `lock`, except where noted.

    Attributes:
        users: number of open files; the table's lock guards it.
        ticket: ticket of `DirectoryCache` from before the newest attributes were requested; None:
            unknown.
        state: state shared with the native code, which reads and writes bytes.
    """

    def __init__(self, parts: Parts, number: int) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.ticket: Ticket | None = None
        self._parts, self._number = parts, number  # 0: not created yet
        self._file: File | None = None
        self._state: FileState | None = None
        # True if the last close of a program may end the write session (`flush`); False after a
        # write that followed such a close, or after `hold`.
        self._ends_early = True
        self._changed_ns = 0  # time at which a program set the pending attributes

    @property
    def state(self) -> FileState:
        assert self._state is not None
        return self._state

    @property
    def known(self) -> bool:
        """False until the first open has succeeded."""
        return self._file is not None

    @property
    def file(self) -> File:
        assert self._file is not None
        return self._file

    def open(self, *, reads: bool, writes: bool) -> Inode:
        """Opens the inode, or refreshes its attributes if it is open; raises FileError."""
        if self._file is not None and (self._file.writable() or not writes):
            return self.refresh()
        metadata = self._parts.metadata
        handle = metadata.handle() if writes else 0
        call = Open(self._number, b"", reads, handle)
        metadata = self._parts.metadata
        inode = metadata.act(call, Inode) if writes else metadata.ask(call, Inode)
        self.adopt(inode, handle)
        return inode

    def create(self, call: Create, user: User | None) -> Inode:
        """Creates a file and opens it; no program on this mount has it open."""
        inode = self._parts.metadata.act(call, Inode, user)
        self.adopt(inode, call.handle)
        return inode

    def adopt(self, inode: Inode, handle: int) -> None:
        """Adopts an inode that was opened with `handle`; 0: read only."""
        data, metadata, keep_alive, _ = self._parts
        self._number = inode.number
        name = f"inode {inode.number}"
        before = self._file
        self._file = File(data, metadata, keep_alive, inode, name, readable=True, handle=handle)
        if self._state is None:
            self._state = FileState(inode.number, data.map_of(inode), inode.length)
        elif before is not None and before.version != inode.length_version:
            self.state.end = inode.length  # another client truncated the file meanwhile
        self.state.reach(inode.length)
        self._widened()

    def hold(self) -> None:
        """Opens a write session if there is none, to keep the bytes of a file that is about to lose
        its last name."""
        self._ends_early = False
        if self._file is not None and not self._file.writable():
            self.open(reads=False, writes=True)

    def refresh(self) -> Inode:
        """Fetches the attributes with the changes of other clients."""
        with self._version_watched():
            return self.file.refresh()

    def check_holes(self, holes: list[int]) -> None:
        """Checks, after a read found holes, that the file exists; raises FileError (ESTALE)."""
        with self._version_watched():
            self.file.check_holes(holes)

    def flush(self, *, last: bool = False) -> None:
        """Reports the length, so files that any client opens later have all writes.

        Args:
            last: True to end the write session in the same transaction, because this is probably
                the last close. A later write opens a new session.
        """
        if last and self._ends_early and self.file.writable():
            widened, self.state.widened = self.state.widened, 0
            if not self.state.writers:
                self._report(self.file.end_session)
                return
            self.state.widened = widened
        if self.state.dirty:
            self._report(self.file.fsync)

    def _report(self, how: Callable[[], None]) -> None:
        end = self.state.take()
        if end >= 0:
            self.file.wrote(end)
        changes = self.file.changes
        if changes is not None and self.state.written_ns > self._changed_ns:
            # A later write has set the mtime.
            self.file.change(msgspec.structs.replace(changes, mtime=OMIT))
        try:
            with self._version_watched():
                how()
        except BaseException:
            if end >= 0:
                self.state.wrote(end)  # retried by the next flush
            if changes is not None and self.file.changes is changes:
                # `wrote` has just set the time of the last write to now, although no program wrote.
                # So the attributes must count as set after that time.
                self._changed_ns = time.time_ns()
            self._widened()
            raise

    def change(self, changes: Changes) -> Inode | None:
        """Defers a change of attributes to the next report of the length, which sets them, too.

        Returns None if no report is pending; the caller must then set the attributes. If a user
        would lose access by the change, the report is sent immediately, because another client may
        open the file before a later report.
        """
        if not self.file.writable() or not self.state.dirty:
            return None
        now = time.time_ns()
        waits = _keeps_all_access(self.merged(self.file.inode), changes)
        self.file.change(_merged_changes(self.file.changes, changes, now))
        self._changed_ns = now
        if not waits:
            self.flush()
        return self.merged(self.file.inode)

    def truncate(self, size: int) -> None:
        end = self.state.take()
        if end >= 0:
            self.file.wrote(end)
        try:
            self.file.truncate(size)
        except BaseException:
            if end >= 0:
                self.state.wrote(end)
            raise
        self.state.end = size
        self._widened()

    def widen(self, offset: int, size: int) -> None:
        """Prepares a write that ends beyond the offset `state.widened`; raises FileError (EFBIG)."""
        if not self.file.writable():
            self._ends_early = False
            self.open(reads=False, writes=True)
        self.file.target(offset, size)
        self._widened()

    def close(self) -> None:
        if self._file is not None:
            self.flush()
            self._file.close()

    def merged(self, inode: Inode) -> Inode:
        """Returns the attributes as programs of this mount must see them. Needs no lock.

        If the version of the length is the same, the longer length is the newer one.
        """
        state, file = self._state, self._file
        if state is None or file is None:
            return inode
        inode = msgspec.structs.replace(inode)
        if inode.length_version <= file.version:
            inode.length = max(inode.length, state.end)
            if state.dirty:
                inode.mtime = max(inode.mtime, state.written_ns)
                inode.ctime = max(inode.ctime, inode.mtime)
        if (changes := file.changes) is not None:
            later = state.written_ns > self._changed_ns
            _apply(inode, msgspec.structs.replace(changes, mtime=OMIT) if later else changes)
            inode.ctime = max(inode.ctime, self._changed_ns)
        return inode

    def _widened(self) -> None:
        """Sets `state.widened`, the offset up to which native code may write without `widen`."""
        inode = self.file.inode
        layout = layout_of(inode)
        wide = inode.dyn_stripe >= layout.stripe
        most = inode.length_max
        own = most if wide else min(most, inode.dyn_stripe * layout.chunk_size)
        self.state.widened = own if self.file.writable() else 0

    @contextmanager
    def _version_watched(self) -> Iterator[None]:
        """Adopts the length after the block if another client truncated the file."""
        before = self.file.version
        yield
        if self.file.version != before:
            self.state.end = self.file.size
        else:
            self.state.reach(self.file.size)


class OpenFiles:
    """Table of the open files of a mount, by inode. Thread-safe."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lock = threading.Lock()  # guards the attributes below
        self._open: dict[int, OpenFile] = {}
        self._seen: dict[int, Version] = {}

    def find(self, number: int) -> OpenFile | None:
        with self._lock:
            return self._open.get(number)

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[OpenFile]:
        with self._lock:
            return list(self._open.values())

    def take(self, number: int) -> OpenFile:
        """Adds a user to an inode's entry and returns the entry; `drop` must follow."""
        with self._lock:
            entry = self._open.get(number)
            if entry is None:
                entry = self._open[number] = OpenFile(self._parts, number)
            entry.users += 1
            return entry

    def drop(self, number: int, entry: OpenFile) -> None:
        """Removes a user; the last user closes the file. Raises the errors of `File.close`."""
        with entry.lock:
            with self._lock:
                entry.users -= 1
                if entry.users:
                    return
                del self._open[number]
            entry.close()

    def add(self, number: int, made: OpenFile) -> OpenFile:
        """Adds a file that was just created, with one user; returns the entry of the inode."""
        with self._lock:
            entry = self._open.setdefault(number, made)
            entry.users += 1
            return entry

    @contextmanager
    def writing(self, number: int) -> Iterator[OpenFile]:
        """Opens an inode for writing during the block."""
        entry = self.take(number)
        try:
            with entry.lock:
                entry.open(reads=False, writes=True)
                yield entry
        finally:
            self.drop(number, entry)

    def unchanged(self, inode: Inode, *, writes: bool) -> bool:
        """Returns whether a file is unchanged since its last open, which was read-only.

        A file that this mount opens for writing counts as changed at the next open, because this
        mount would not notice a write by another client in between.
        """
        version = inode.length_version, inode.length, inode.mtime
        with self._lock:
            same = self._seen.pop(inode.number, None) == version
            if not writes:
                self._seen[inode.number] = version
            if len(self._seen) > KEPT:
                del self._seen[next(iter(self._seen))]
        return same


def _merged_changes(before: Changes | None, changes: Changes, now: int) -> Changes:
    """Merges two changes; the second has precedence."""
    wanted = {
        name: now if value == NOW else value
        for name, value in msgspec.structs.asdict(changes).items()
        if value != OMIT
    }
    return msgspec.structs.replace(before or Changes(), **wanted)


def _apply(inode: Inode, changes: Changes) -> None:
    for name, value in msgspec.structs.asdict(changes).items():
        if value != OMIT:
            setattr(inode, name, value)


def _keeps_all_access(inode: Inode, changes: Changes) -> bool:
    """Returns whether no user loses access to the inode by these changes.

    The function returns False for mode bits beyond the nine permission bits.
    """
    uid, gid, mode = changes.uid, changes.gid, changes.mode
    return (
        not (inode.mode | max(mode, 0)) & 0o7000
        and (mode == OMIT or mode & inode.mode == inode.mode)
        and (uid in (OMIT, inode.uid) or inode.uid == 0)
        and (gid in (OMIT, inode.gid) or not inode.mode & 0o070)
    )


def access_of(flags: int) -> tuple[bool, bool]:
    """Returns whether open flags request reading, and writing."""
    mode = flags & os.O_ACCMODE
    return mode != os.O_WRONLY, mode != os.O_RDONLY or bool(flags & os.O_TRUNC)
