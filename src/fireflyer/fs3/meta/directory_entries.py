"""Additions, moves and removals of inodes' names, for all operations on names.

Invariant: an inode's `parent` and `name` are one of its names; every other name has a `P` row.
"""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import WRITE, Context, names_changed, require, store
from fireflyer.fs3.meta.inode import (
    DIRECTORY,
    FILE,
    FILES,
    UNLINKED,
    Inode,
    entry_key,
    inode_key,
    orphan_key,
    other_name_key,
    pack_entry,
    rows_of,
    subdirectories_key,
    times_key,
)
from fireflyer.fs3.meta.walk import Place, entry, place

DOTS = (b".", b"..")


def free_place(t: Transaction, ctx: Context, start: int, path: bytes, *, directory: bool) -> Place:
    """Finds the place of a new entry.

    Raises:
        FileError: EEXIST, EACCES, ENOENT (a slash after the name of a non-directory), and the
            errors of path resolution.
    """
    at = place(t, ctx.user, start, path)
    if at.name in DOTS or entry(t, at.directory, at.name) is not None:
        raise FileError(errno.EEXIST, path)
    if at.slash and not directory:
        raise FileError(errno.ENOENT, path)
    require(ctx.user, at.directory, WRITE, path)
    return at


def put_entry(t: Transaction, ctx: Context, directory: Inode, name: bytes, inode: Inode) -> None:
    """Writes an entry; the caller stores the inode's own row."""
    t.set(entry_key(directory.number, name), pack_entry(inode.number, inode.kind))
    names_changed(t, directory, ctx.now)


def new_inode(ctx: Context, kind: int, mode: int, at: Place, *, name: bytes | None = None) -> Inode:
    """Makes an inode that the user owns, with its first name.

    An inode in a setgid directory inherits the directory's group; a new directory also inherits
    setgid.
    """
    directory = at.directory
    gid = ctx.user.gid
    if directory.mode & 0o2000:
        gid = directory.gid
        if kind == DIRECTORY:
            mode |= 0o2000
    now = ctx.now
    number = ctx.fresh()
    nlink = 2 if kind == DIRECTORY else 1
    layout = directory.layout if kind != FILE else None
    return Inode(
        1,
        number,
        kind,
        mode & 0o7777,
        ctx.user.uid,
        gid,
        nlink,
        now,
        now,
        now,
        now,
        0,
        0,
        layout,
        1,
        directory.number,
        name if name is not None else at.name,
    )


def add_name(t: Transaction, ctx: Context, inode: Inode, at: Place) -> None:
    """Adds a name to a file and stores the inode."""
    t.set(other_name_key(inode.number, at.directory.number, at.name), b"")
    inode.nlink += 1
    inode.ctime = ctx.now
    store(t, inode)
    put_entry(t, ctx, at.directory, at.name, inode)


def move_name(t: Transaction, inode: Inode, old: Place, new: Place) -> None:
    """Replaces a name of an inode by another name; the caller stores the inode's row."""
    if (inode.parent, inode.name) == (old.directory.number, old.name):
        inode.parent, inode.name = new.directory.number, new.name
    else:
        t.clear(other_name_key(inode.number, old.directory.number, old.name))
        t.set(other_name_key(inode.number, new.directory.number, new.name), b"")


def drop_name(t: Transaction, ctx: Context, inode: Inode, at: Place) -> None:
    """Removes a name of a file or symlink; the caller removes or overwrites the entry.

    A file without names is an orphan: its inode remains until its last session has ended and its
    chunks are removed.
    """
    inode.nlink -= 1
    inode.ctime = ctx.now
    if inode.nlink > 0:
        if (inode.parent, inode.name) == (at.directory.number, at.name):
            key = t.get_range(*rows_of(b"P", inode.number), 1)[0][0]
            inode.parent, inode.name = int.from_bytes(key[9:17], "big"), key[17:]
            t.clear(key)
        else:
            t.clear(other_name_key(inode.number, at.directory.number, at.name))
        store(t, inode)
        return
    t.add(FILES, -1)
    if inode.kind == FILE:
        store(t, inode)
        t.set(orphan_key(inode.number), b"")
        t.add(UNLINKED, 1)
    else:
        forget_inode(t, inode)


def drop_directory(t: Transaction, inode: Inode) -> None:
    """Removes an empty directory's rows; the caller updates the entry and the parent's count."""
    t.add(FILES, -1)
    t.clear(subdirectories_key(inode.number))
    t.clear(times_key(inode.number))
    forget_inode(t, inode)


def forget_inode(t: Transaction, inode: Inode) -> None:
    t.clear(inode_key(inode.number))
    t.clear_range(*rows_of(b"X", inode.number))
