"""Context of an operation; permission checks; load and store of inodes."""

import errno
from collections.abc import Mapping

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction, counter
from fireflyer.fs3.meta.inode import (
    DIRECTORY,
    NAME_MAX,
    Inode,
    decode,
    encode,
    inode_key,
    pack_times,
    subdirectories_key,
    times_key,
    unpack_times,
)
from fireflyer.fs3.meta.messages import User

READ, WRITE, SEARCH = 4, 2, 1
SETUID, SETGID, STICKY = 0o4000, 0o2000, 0o1000


class Context:
    """User, client and time of an operation, and the number for its next new inode.

    Before each attempt the caller reserves as many inode numbers as the operation may use, and sets
    `number` to the first. Unused numbers are lost. For each chain table, `tables` has the newest
    version, and the number of chains of that version.
    """

    __slots__ = ("client", "now", "number", "tables", "user")

    def __init__(
        self, user: User, client: int, now: int, tables: Mapping[int, tuple[int, int]]
    ) -> None:
        self.user = user
        self.client = client
        self.now = now
        self.number = 0
        self.tables = tables

    def fresh(self) -> int:
        """Returns an inode number that was never used before."""
        assert self.number, "this call was given no numbers of inodes"
        self.number += 1
        return self.number - 1


def member(user: User, gid: int) -> bool:
    return gid == user.gid or gid in user.groups


def allowed(user: User, inode: Inode, bits: int) -> bool:
    """Returns whether the permission bits allow this user to read, write or search (execute)."""
    if user.uid == 0:
        return not bits & SEARCH or inode.kind == DIRECTORY or bool(inode.mode & 0o111)
    if inode.uid == user.uid:
        mode = inode.mode >> 6
    elif member(user, inode.gid):
        mode = inode.mode >> 3
    else:
        mode = inode.mode
    return mode & bits == bits


def require(user: User, inode: Inode, bits: int, path: bytes) -> None:
    if not allowed(user, inode, bits):
        raise FileError(errno.EACCES, path)


def require_owner(user: User, inode: Inode, path: bytes) -> None:
    if user.uid not in (0, inode.uid):
        raise FileError(errno.EPERM, path)


def require_root(user: User) -> None:
    if user.uid != 0:
        raise FileError(errno.EPERM)


def require_removable(user: User, directory: Inode, inode: Inode, path: bytes) -> None:
    """Enforces the sticky bit: only the owner of the file or directory may remove or rename."""
    if directory.mode & STICKY and user.uid not in (0, inode.uid, directory.uid):
        raise FileError(errno.EPERM, path)


def check_name(name: bytes, path: bytes) -> None:
    if len(name) > NAME_MAX:
        raise FileError(errno.ENAMETOOLONG, path)
    if b"\0" in name:
        raise FileError(errno.EINVAL, path)


def load(t: Transaction, number: int, path: bytes = b"") -> Inode:
    data = t.get(inode_key(number))
    if data is None:
        raise FileError(errno.ENOENT, path or b"inode %d" % number)
    return decode(data)


def store(t: Transaction, inode: Inode) -> None:
    t.set(inode_key(inode.number), encode(inode))


def shown(t: Transaction, inode: Inode) -> Inode:
    """Returns the inode for an answer; a directory gets times and link count from separate rows."""
    if inode.kind == DIRECTORY:
        times = t.snapshot_get(times_key(inode.number))
        if times is not None:
            inode.mtime, changed = unpack_times(times)
            inode.ctime = max(inode.ctime, changed)
        inode.nlink = 2 + counter(t.snapshot_get(subdirectories_key(inode.number)))
    return inode


def names_changed(t: Transaction, directory: Inode, now: int) -> None:
    """Records a change of a directory's names without a read, so such changes do not conflict."""
    t.set(times_key(directory.number), pack_times(now, now))
