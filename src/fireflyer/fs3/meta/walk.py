"""Path resolution: from an inode and a path to an inode, or to a directory and the last name."""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import SEARCH, check_name, load, require
from fireflyer.fs3.meta.inode import (
    DIRECTORY,
    LINKS_FOLLOWED,
    PATH_MAX,
    ROOT,
    SYMLINK,
    Inode,
    entry_key,
    unpack_entry,
)
from fireflyer.fs3.meta.messages import User


class Place:
    """Directory and last name of a path; `slash` is true if the path must name a directory."""

    __slots__ = ("directory", "name", "slash")

    def __init__(self, directory: Inode, name: bytes, slash: bool) -> None:
        self.directory = directory
        self.name = name
        self.slash = slash


def find(t: Transaction, user: User, start: int, path: bytes, follow: bool = True) -> Inode:
    """Resolves a path to an inode.

    Raises:
        FileError: ENOENT, ENOTDIR, EACCES (no search), ELOOP, ENAMETOOLONG, EINVAL (NUL).
    """
    if not path:
        return load(t, start)
    found = _walk(t, user, start, path, follow, parent=False)
    assert isinstance(found, Inode)
    return found


def place(t: Transaction, user: User, start: int, path: bytes) -> Place:
    """Resolves a path to the directory of its last name, and that name.

    The name need not exist and may be "." or "..".

    Raises:
        FileError: the errors of `find`; ENOENT for an empty path.
    """
    if not path:
        raise FileError(errno.ENOENT, path)
    if b"/" not in path:
        directory = load(t, start, path)
        _enter(user, directory, path)
        check_name(path, path)
        return Place(directory, path, False)
    found = _walk(t, user, start, path, False, parent=True)
    assert isinstance(found, Place)
    return found


def entry(t: Transaction, directory: Inode, name: bytes) -> int | None:
    """Returns the inode number of a name in a directory, or None."""
    value = t.get(entry_key(directory.number, name))
    if value is None:
        return None
    number, _ = unpack_entry(value)
    assert isinstance(number, int)
    return number


def child(t: Transaction, at: Place, path: bytes) -> Inode:
    """Returns the inode at a place.

    Raises:
        FileError: ENOENT; ENOTDIR if the path ends in a slash and the inode is no directory.
    """
    number = entry(t, at.directory, at.name)
    if number is None:
        raise FileError(errno.ENOENT, path)
    inode = load(t, number, path)
    if at.slash and inode.kind != DIRECTORY:
        raise FileError(errno.ENOTDIR, path)
    return inode


def _enter(user: User, directory: Inode, path: bytes) -> None:
    if directory.kind != DIRECTORY:
        raise FileError(errno.ENOTDIR, path)
    require(user, directory, SEARCH, path)


def _parts(path: bytes) -> list[bytes]:
    return [part for part in reversed(path.split(b"/")) if part]


def _walk(
    t: Transaction, user: User, start: int, path: bytes, follow: bool, *, parent: bool
) -> Inode | Place:
    if len(path) > PATH_MAX:
        raise FileError(errno.ENAMETOOLONG, path)
    at = load(t, ROOT if path[0] == 0x2F else start, path)
    left = _parts(path) or [b"."]
    slash = path.endswith(b"/")
    links = 0
    while left:
        name = left.pop()
        _enter(user, at, path)
        check_name(name, path)
        if parent and not left:
            return Place(at, name, slash)
        if name == b".":
            continue
        if name == b"..":
            at = load(t, at.parent, path)
            continue
        inode = child(t, Place(at, name, False), path)
        if inode.kind == SYMLINK and (left or follow or slash):
            links += 1
            if links > LINKS_FOLLOWED:
                raise FileError(errno.ELOOP, path)
            if not left and inode.target.endswith(b"/"):
                slash = True
            left += _parts(inode.target) or [b"."]
            if inode.target[0] == 0x2F:
                at = load(t, ROOT, path)
            continue
        at = inode
    if slash and at.kind != DIRECTORY:
        raise FileError(errno.ENOTDIR, path)
    return at
