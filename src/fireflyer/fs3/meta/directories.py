"""Operations on directories: mkdir, rmdir, readdir."""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import (
    READ,
    SEARCH,
    WRITE,
    Context,
    load,
    names_changed,
    require,
    require_removable,
    shown,
    store,
)
from fireflyer.fs3.meta.directory_entries import drop_directory, free_place, new_inode, put_entry
from fireflyer.fs3.meta.inode import (
    DIRECTORY,
    FILES,
    ROOT,
    Inode,
    decode,
    entries_range,
    entry_key,
    inode_key,
    subdirectories_key,
    unpack_entry,
)
from fireflyer.fs3.meta.messages import (
    Done,
    Listing,
    MakeDirectory,
    ReadDirectory,
    RemoveDirectory,
)
from fireflyer.fs3.meta.walk import child, find, place

ENTRIES_AT_ONCE = 16_384


def make_directory(t: Transaction, ctx: Context, call: MakeDirectory) -> Inode:
    """Makes a directory.

    Raises:
        FileError: EEXIST, EACCES, and the errors of path resolution.
    """
    at = free_place(t, ctx, call.inode, call.path, directory=True)
    inode = new_inode(ctx, DIRECTORY, call.mode, at)
    store(t, inode)
    put_entry(t, ctx, at.directory, at.name, inode)
    t.add(subdirectories_key(at.directory.number), 1)
    t.add(FILES, 1)
    return inode


def remove_directory(t: Transaction, ctx: Context, call: RemoveDirectory) -> Done:
    """Removes an empty directory.

    Raises:
        FileError: ENOTDIR, ENOTEMPTY, EBUSY (the root), EINVAL ("."), EACCES, EPERM (sticky), ...
    """
    path = call.path
    if not path.strip(b"/") and path:
        raise FileError(errno.EBUSY, path)
    at = place(t, ctx.user, call.inode, path)
    if at.name == b".":
        raise FileError(errno.EINVAL, path)
    if at.name == b"..":
        raise FileError(errno.ENOTEMPTY, path)
    inode = child(t, at, path)
    require(ctx.user, at.directory, WRITE | SEARCH, path)
    require_removable(ctx.user, at.directory, inode, path)
    if inode.kind != DIRECTORY:
        raise FileError(errno.ENOTDIR, path)
    require_empty(t, inode, path)
    t.clear(entry_key(at.directory.number, at.name))
    t.add(subdirectories_key(at.directory.number), -1)
    names_changed(t, at.directory, ctx.now)
    drop_directory(t, inode)
    return Done()


def require_empty(t: Transaction, directory: Inode, path: bytes) -> None:
    if directory.number == ROOT:
        raise FileError(errno.EBUSY, path)
    if t.get_range(*entries_range(directory.number), 1):
        raise FileError(errno.ENOTEMPTY, path)


def read_directory(t: Transaction, ctx: Context, call: ReadDirectory) -> Listing:
    """Reads a page of a directory.

    Raises:
        FileError: ENOTDIR, EACCES, ...
    """
    directory = find(t, ctx.user, call.inode, call.path)
    if directory.kind != DIRECTORY:
        raise FileError(errno.ENOTDIR, call.path)
    require(ctx.user, directory, READ, call.path)
    if call.plus:
        require(ctx.user, directory, SEARCH, call.path)
    limit = min(max(call.limit, 1), ENTRIES_AT_ONCE)
    rows = t.snapshot_range(*entries_range(directory.number, call.after), limit + 1)
    entries = [(key[9:], *unpack_entry(value)) for key, value in rows[:limit]]
    inodes: list[Inode] = []
    if call.plus:
        keys = [inode_key(number) for _, number, _ in entries]
        found = t.get_many(keys, conflict=False)
        inodes = [shown(t, decode(found[key])) for key in keys]
    return Listing(entries, inodes, len(rows) > limit)


def path_of(t: Transaction, parent: int, name: bytes) -> bytes:
    """Returns the path of a name from the root, from the names in the parents' inodes."""
    parts = [name]
    while parent != ROOT:
        directory = load(t, parent)
        parts.append(directory.name)
        parent = directory.parent
    return b"/" + b"/".join(reversed(parts))
