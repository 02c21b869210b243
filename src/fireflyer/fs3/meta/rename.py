"""Operation rename, for files and directories, with NOREPLACE and EXCHANGE."""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import (
    SEARCH,
    WRITE,
    Context,
    load,
    names_changed,
    require,
    require_removable,
    store,
)
from fireflyer.fs3.meta.directories import require_empty
from fireflyer.fs3.meta.directory_entries import (
    DOTS,
    drop_directory,
    drop_name,
    move_name,
    put_entry,
)
from fireflyer.fs3.meta.inode import DIRECTORY, ROOT, Inode, entry_key, subdirectories_key
from fireflyer.fs3.meta.messages import EXCHANGE, NOREPLACE, Done, Rename
from fireflyer.fs3.meta.walk import Place, child, entry, place


def rename(t: Transaction, ctx: Context, call: Rename) -> Done:
    """Moves an entry atomically, replacing an entry at the target, or exchanges two entries.

    Raises:
        FileError: EINVAL (into itself, ".", unknown flags), EEXIST, ENOTEMPTY, EISDIR, ENOTDIR,
            EBUSY (root), EACCES, EPERM (sticky), and the errors of path resolution.
    """
    if call.flags not in (0, NOREPLACE, EXCHANGE):
        raise FileError(errno.EINVAL, call.path)
    old = place(t, ctx.user, call.inode, call.path)
    new = place(t, ctx.user, call.new_inode, call.new_path)
    if old.name in DOTS or new.name in DOTS:
        raise FileError(errno.EINVAL, call.path)
    moved = child(t, old, call.path)
    number = entry(t, new.directory, new.name)
    if number is None and call.flags == EXCHANGE:
        raise FileError(errno.ENOENT, call.new_path)
    if number is not None and call.flags == NOREPLACE:
        raise FileError(errno.EEXIST, call.new_path)
    replaced = load(t, number, call.new_path) if number is not None else None
    if new.slash and DIRECTORY not in (moved.kind, replaced.kind if replaced else 0):
        raise FileError(errno.ENOTDIR, call.new_path)
    _check(t, ctx, call, old, new, moved, replaced)
    if replaced is not None and replaced.number == moved.number:
        return Done()
    if replaced is not None and call.flags == EXCHANGE:
        _put(t, ctx, replaced, new, old)
        _count(t, new, old, replaced)
    else:
        if replaced is not None:
            _replace(t, ctx, call, new, moved, replaced)
        t.clear(entry_key(old.directory.number, old.name))
        names_changed(t, old.directory, ctx.now)
    _put(t, ctx, moved, old, new)
    _count(t, old, new, moved)
    return Done()


def _check(
    t: Transaction,
    ctx: Context,
    call: Rename,
    old: Place,
    new: Place,
    moved: Inode,
    replaced: Inode | None,
) -> None:
    """Checks permissions, and that no directory moves into itself."""
    user = ctx.user
    require(user, old.directory, WRITE | SEARCH, call.path)
    require(user, new.directory, WRITE | SEARCH, call.new_path)
    require_removable(user, old.directory, moved, call.path)
    _check_move(t, ctx, moved, old, new, call.path)
    if replaced is not None:
        require_removable(user, new.directory, replaced, call.new_path)
        if call.flags == EXCHANGE:
            _check_move(t, ctx, replaced, new, old, call.new_path)


def _check_move(
    t: Transaction, ctx: Context, moved: Inode, old: Place, new: Place, path: bytes
) -> None:
    if moved.kind != DIRECTORY or old.directory.number == new.directory.number:
        return
    # The directory's ".." changes, which is a write to the directory.
    require(ctx.user, moved, WRITE, path)
    above = new.directory
    while True:
        if above.number == moved.number:
            raise FileError(errno.EINVAL, path)
        if above.number == ROOT:
            return
        above = load(t, above.parent)


def _replace(
    t: Transaction, ctx: Context, call: Rename, at: Place, moved: Inode, replaced: Inode
) -> None:
    if replaced.kind == DIRECTORY:
        if moved.kind != DIRECTORY:
            raise FileError(errno.EISDIR, call.new_path)
        require_empty(t, replaced, call.new_path)
        t.add(subdirectories_key(at.directory.number), -1)
        drop_directory(t, replaced)
    else:
        if moved.kind == DIRECTORY:
            raise FileError(errno.ENOTDIR, call.new_path)
        drop_name(t, ctx, replaced, at)


def _put(t: Transaction, ctx: Context, inode: Inode, old: Place, new: Place) -> None:
    move_name(t, inode, old, new)
    inode.ctime = ctx.now
    store(t, inode)
    put_entry(t, ctx, new.directory, new.name, inode)


def _count(t: Transaction, old: Place, new: Place, moved: Inode) -> None:
    if moved.kind == DIRECTORY and old.directory.number != new.directory.number:
        t.add(subdirectories_key(old.directory.number), -1)
        t.add(subdirectories_key(new.directory.number), 1)
