"""Handlers of a mount for the kernel's requests about names, attributes and open files.

The kernel checks permissions (`default_permissions`), so the mount calls the servers as its own
user. A new file belongs to the user of the program that creates it.
"""

import errno
import os
import stat
import threading
import time
from collections.abc import Callable

from fireflyer._native.fs3.client import Pieces
from fireflyer._native.fs3.mount import PAGE, FileState, Request
from fireflyer.errors import FileError, FileTimeout, FireflyerError, NoSpace
from fireflyer.fs3.client import Client
from fireflyer.fs3.client.names import KINDS
from fireflyer.fs3.meta import messages
from fireflyer.fs3.meta.inode import FILE, SPECIAL, SYMLINK, Inode
from fireflyer.fs3.mount.caller import Caller
from fireflyer.fs3.mount.directory_cache import DirectoryCache
from fireflyer.fs3.mount.open_files import OpenFile, OpenFiles, access_of
from fireflyer.log import get_logger

Attributes = tuple[int, int, int, int, int, int, int, int, int, int, int, float]
Answer = (
    int
    | bytes
    | list[tuple[bytes, Attributes]]
    | Attributes
    | tuple[FileState, bool]
    | tuple[FileState, Attributes]
    | tuple[int, int, int, int]
)

MODE, UID, GID, SIZE, ATIME, MTIME, ATIME_NOW, MTIME_NOW = 1, 2, 4, 8, 16, 32, 128, 256
"""Bits of FUSE_SETATTR that select the fields to set."""
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
"""Bits of fallocate."""
ZEROS = bytes(1 << 20)
BY_NUMBER = {
    *("getattr", "setattr", "open", "readdir", "readlink", "mknod", "mkdir", "symlink", "create"),
    *("getxattr", "setxattr", "listxattr", "removexattr"),
}
"""Requests for which ENOENT means that the inode is gone.

The answer is ESTALE instead, so the kernel repeats the lookup: another client may have replaced the
file.
"""
SPACE_S = 10.0
"""Seconds for which the result of statfs is cached."""
BLOCK = 4096
SPECIAL_KINDS = {KINDS[kind]: kind for kind in SPECIAL}


class Requests:
    """File system behind a mount. Thread-safe.

    Args:
        caller: record of the program whose request each thread executes.
        space: function that returns total and free bytes, divided by the number of replicas.
        cache_s: seconds for which attributes may be cached.
    """

    def __init__(
        self,
        client: Client,
        caller: Caller,
        space: Callable[[], tuple[int, int]],
        cache_s: float,
    ) -> None:
        self._names, self._metadata = client, client.parts.metadata
        self._data = client.parts.data
        self._parts = client.parts
        self._caller = caller
        self.files = OpenFiles(client.parts)
        self._directories = DirectoryCache(cache_s)
        self._space, self._root = space, os.getuid() == 0
        self._space_lock = threading.Lock()  # guards `_space_known`
        self._space_known = (-SPACE_S, 0, 0)
        self._log = get_logger("fs3.mount")

    def call(self, request: Request) -> Answer:
        """Executes a request; returns its answer or a POSIX error number."""
        # A release is executed even if the program that closed the file was killed.
        self._caller.thread_id = request.caller_pid if request.op != "release" else 0
        try:
            answer: Answer = getattr(self, f"_{request.op}")(request)
        except (FireflyerError, OSError, ValueError) as error:
            number = self._number_of(error, f"{request.op} of inode {request.inode}")
            gone = number == errno.ENOENT and request.op in BY_NUMBER
            return errno.ESTALE if gone else number
        return answer

    def finish(self, number: int, pieces: Pieces, write: bool, caller_pid: int) -> int:
        """Retries the failed pieces of a read or write. If a read found holes, also checks that the
        file exists.

        Returns 0 or a POSIX error number.
        """
        self._caller.thread_id = caller_pid
        what = f"inode {number}"
        try:
            if pieces.failures():
                self._data.finish(pieces, what, writes=write)
            entry = self.files.find(number)
            if not write and pieces.holes and entry is not None:
                with entry.lock:
                    entry.check_holes(pieces.holes)
        except (FireflyerError, OSError, ValueError) as error:
            return self._number_of(error, f"{'write' if write else 'read'} of {what}")
        return 0

    def sync(self) -> None:
        """Reports the lengths of all open files."""
        for entry in self.files.all():
            try:
                with entry.lock:
                    entry.flush()
            except (FireflyerError, OSError) as error:
                self._number_of(error, "the last flush")

    def _number_of(self, error: Exception, what: str) -> int:
        if isinstance(error, FileError):
            return error.errno or errno.EIO
        if isinstance(error, NoSpace):
            self._log.warning("%s: %s", what, error)
            return errno.ENOSPC
        if isinstance(error, ValueError):
            return errno.EINVAL
        self._log.error("%s: %s", what, error)
        return errno.ETIMEDOUT if isinstance(error, FileTimeout) else errno.EIO

    # Attributes

    def _described(self, inode: Inode, age_s: float = 0.0) -> Attributes:
        block = BLOCK
        if inode.kind == FILE:
            block = min(inode.layout.chunk_size, 1 << 20) if inode.layout else BLOCK
            if (entry := self.files.find(inode.number)) is not None:
                inode = entry.merged(inode)
        size = len(inode.target) if inode.kind == SYMLINK else inode.length
        mode = KINDS[inode.kind] | inode.mode
        own = inode.number, mode, inode.nlink, inode.uid, inode.gid, size
        return *own, inode.atime, inode.mtime, inode.ctime, block, inode.device, age_s

    def _stat(self, number: int, name: bytes = b"") -> Inode:
        ticket = self._directories.ticket()
        inode = self._metadata.ask(messages.Stat(number, name, False), Inode)
        self._directories.learn(inode, ticket)
        return inode

    def _lookup(self, request: Request) -> Answer:
        return self._described(self._stat(request.inode, request.name))

    def _getattr(self, request: Request) -> Answer:
        entry = self.files.find(request.inode)
        if entry is None:
            known = self._directories.find(request.inode)
            return self._described(*known or (self._stat(request.inode),))
        with entry.lock:
            if entry.ticket and (age := self._directories.age(entry.ticket)) is not None:
                return self._described(entry.file.inode, age)
            if not entry.known:
                return self._described(self._stat(request.inode))
            ticket = self._directories.ticket()
            inode = entry.refresh()
            entry.ticket = ticket
            return self._described(inode)

    def _setattr(self, request: Request) -> Answer:
        number, valid = request.inode, request.flags
        if valid & SIZE:
            with self.files.writing(number) as entry:
                entry.truncate(request.size)
                inode = entry.file.inode
        changes = _changes(request)
        if changes != messages.Changes():
            inode = self._change(number, changes)
        elif not valid & SIZE:
            return self._getattr(request)
        return self._described(inode)

    def _change(self, number: int, changes: messages.Changes) -> Inode:
        entry = self.files.find(number)
        if entry is not None and entry.known:
            with entry.lock:
                if self._root and (inode := entry.change(changes)) is not None:
                    return inode
                entry.flush()  # a later report of the length would overwrite the new time
        inode = self._metadata.act(messages.SetAttributes(number, changes), Inode)
        self._directories.forget(number)
        return inode

    def _statfs(self, _: Request) -> Answer:
        with self._space_lock:
            at, size, free = self._space_known
            if time.monotonic() - at >= SPACE_S:
                size, free = self._space()
                self._space_known = time.monotonic(), size, free
        return BLOCK, size // BLOCK, free // BLOCK, self._names.statfs().files

    # Names

    def _user(self, request: Request) -> messages.User | None:
        """Returns the user of the calling program; None if the mount does not run as root.

        With None, the servers use the mount's own user.
        """
        if not self._root:
            return None
        groups = _groups(request.caller_pid) if request.caller_uid else ()
        return messages.User(request.caller_uid, request.caller_gid, groups)

    def _make(self, call: messages.Writing, request: Request) -> Answer:
        inode = self._metadata.act(call, Inode, self._user(request))
        self._directories.added(request.inode, inode.btime)
        return self._described(inode)

    def _mknod(self, request: Request) -> Answer:
        mode, kind = request.mode & 0o7777, stat.S_IFMT(request.mode)
        if kind in (0, stat.S_IFREG):
            return self._make(messages.Create(request.inode, request.name, mode, True), request)
        if kind not in SPECIAL_KINDS:
            return errno.EINVAL
        made = SPECIAL_KINDS[kind], mode, request.size
        return self._make(messages.MakeNode(request.inode, request.name, *made), request)

    def _mkdir(self, request: Request) -> Answer:
        mode = request.mode & 0o7777
        call = messages.MakeDirectory(request.inode, request.name, mode)
        made = self._metadata.act(call, Inode, self._user(request))
        self._directories.forget(request.inode)
        return self._described(made)

    def _symlink(self, request: Request) -> Answer:
        call = messages.Symlink(request.inode, request.name, request.data)
        return self._make(call, request)

    def _link(self, request: Request) -> Answer:
        call = messages.Link(request.inode, b"", request.other, request.name)
        inode = self._metadata.act(call, Inode)
        self._directories.added(request.other, inode.ctime)
        return self._described(inode)

    def _unlink(self, request: Request) -> Answer:
        self._hold(request.inode, request.name)
        self._metadata.act(messages.Unlink(request.inode, request.name), messages.Done)
        self._directories.forget(request.inode)
        return 0

    def _rmdir(self, request: Request) -> Answer:
        self._metadata.act(messages.RemoveDirectory(request.inode, request.name), messages.Done)
        self._directories.forget(request.inode)
        return 0

    def _rename(self, request: Request) -> Answer:
        if request.flags & ~(messages.NOREPLACE | messages.EXCHANGE):
            return errno.EINVAL
        if not request.flags:
            self._hold(request.other, request.data)
        ends = request.inode, request.name, request.other, request.data
        self._metadata.act(messages.Rename(*ends, request.flags), messages.Done)
        self._directories.forget(request.inode, request.other)
        return 0

    def _hold(self, parent: int, name: bytes) -> None:
        """Keeps the bytes of a file whose name is about to be removed, if the file is open."""
        if not len(self.files):
            return
        try:
            entry = self.files.find(self._stat(parent, name).number)
        except FileError:
            return
        if entry is not None:
            with entry.lock:
                entry.hold()

    def _readlink(self, request: Request) -> Answer:
        return self._metadata.ask(messages.ReadLink(request.inode), messages.Blob).data

    def _readdir(self, request: Request) -> Answer:
        call = messages.ReadDirectory(request.inode, b"", request.name, PAGE, True)
        found = self._metadata.ask(call, messages.Listing)
        rows = zip(found.entries, found.inodes, strict=True)
        return [(name, self._described(inode)) for (name, _, _), inode in rows]

    # Extended attributes

    def _getxattr(self, request: Request) -> Answer:
        call = messages.GetXattr(request.inode, b"", request.name, False)
        return self._metadata.ask(call, messages.Blob).data

    def _setxattr(self, request: Request) -> Answer:
        name, data = request.name, request.data
        call = messages.SetXattr(request.inode, b"", name, data, request.flags, False)
        self._metadata.act(call, messages.Done)
        self._directories.forget(request.inode)
        return 0

    def _listxattr(self, request: Request) -> Answer:
        call = messages.ListXattrs(request.inode, b"", False)
        names = self._metadata.ask(call, messages.Blobs).items
        return b"".join(name + b"\0" for name in names)

    def _removexattr(self, request: Request) -> Answer:
        call = messages.RemoveXattr(request.inode, b"", request.name, False)
        self._metadata.act(call, messages.Done)
        self._directories.forget(request.inode)
        return 0

    # Open files

    def _open(self, request: Request) -> Answer:
        reads, writes = access_of(request.flags)
        entry = self.files.take(request.inode)
        try:
            with entry.lock:
                inode = entry.open(reads=reads, writes=writes)
                if request.flags & os.O_TRUNC:
                    entry.truncate(0)
        except BaseException:
            self.files.drop(request.inode, entry)
            raise
        return entry.state, self.files.unchanged(inode, writes=writes)

    def _create(self, request: Request) -> Answer:
        made = OpenFile(self._parts, 0)
        exclusive, mode = bool(request.flags & os.O_EXCL), request.mode & 0o7777
        handle = self._metadata.handle()
        call = messages.Create(request.inode, request.name, mode, exclusive, handle)
        at, _ = self._directories.ticket()
        inode = made.create(call, self._user(request))
        self._directories.added(request.inode, inode.btime)
        entry = self.files.add(inode.number, made)
        if entry is made:
            made.ticket = at, self._directories.ticket()[1]
        if entry is not made:  # the file existed and is already open
            made.close()
            with entry.lock:
                entry.open(reads=False, writes=True)
        if request.flags & os.O_TRUNC and inode.length:
            with entry.lock:
                entry.truncate(0)
            inode = self._stat(inode.number)
        return entry.state, self._described(inode)

    def _release(self, request: Request) -> Answer:
        entry = self.files.find(request.inode)
        if entry is not None:
            self.files.drop(request.inode, entry)
        return 0

    def _flush(self, request: Request, *, last: bool = True) -> Answer:
        entry = self.files.find(request.inode)
        if entry is not None and entry.known:
            with entry.lock:
                entry.flush(last=last and entry.users == 1)
        return 0

    def _fsync(self, request: Request) -> Answer:
        return self._flush(request, last=False)

    def _widen(self, request: Request) -> Answer:
        entry = self.files.find(request.inode)
        if entry is None:
            return errno.EBADF
        with entry.lock:
            entry.widen(request.offset, request.size)
        return 0

    def _fallocate(self, request: Request) -> Answer:
        mode, begin, end = request.flags, request.offset, request.offset + request.size
        zeroes = mode & (PUNCH_HOLE | ZERO_RANGE)
        if mode & ~(KEEP_SIZE | PUNCH_HOLE | ZERO_RANGE) or zeroes == PUNCH_HOLE | ZERO_RANGE:
            return errno.EOPNOTSUPP
        with self.files.writing(request.inode) as entry:
            entry.flush()
            entry.file.check_end(begin, request.size)
            size = entry.state.end
            stop = min(end, size) if zeroes else begin
            for at in range(begin, stop, len(ZEROS)):
                entry.file.pwrite(ZEROS[: stop - at], at)
            entry.file.fsync()
            if end > size and not mode & KEEP_SIZE:
                entry.truncate(end)
        return 0


def _changes(request: Request) -> messages.Changes:
    valid = request.flags
    return messages.Changes(
        uid=request.uid if valid & UID else messages.OMIT,
        gid=request.gid if valid & GID else messages.OMIT,
        mode=request.mode & 0o7777 if valid & MODE else messages.OMIT,
        atime=_time(request.atime, valid, ATIME, ATIME_NOW),
        mtime=_time(request.mtime, valid, MTIME, MTIME_NOW),
    )


def _time(ns: int, valid: int, given: int, now: int) -> int:
    if not valid & given:
        return messages.OMIT
    return messages.NOW if valid & now else ns


def _groups(pid: int) -> tuple[int, ...]:
    """Returns the supplementary groups of a process; none if it has ended."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Groups:"):
                    return tuple(map(int, line.split()[1:]))
    except OSError:
        pass
    return ()
