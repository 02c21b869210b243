"""Operations on names: unlink, link, symlink, mknod, readlink, all names of an inode."""

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
    require_root,
    store,
)
from fireflyer.fs3.meta.directories import path_of
from fireflyer.fs3.meta.directory_entries import (
    DOTS,
    add_name,
    drop_name,
    free_place,
    new_inode,
    put_entry,
)
from fireflyer.fs3.meta.inode import (
    BLOCK_DEVICE,
    CHARACTER_DEVICE,
    DIRECTORY,
    FILES,
    PATH_MAX,
    ROOT,
    SPECIAL,
    SYMLINK,
    Inode,
    entry_key,
    rows_of,
)
from fireflyer.fs3.meta.messages import (
    Blob,
    Blobs,
    Done,
    Link,
    MakeNode,
    Names,
    ReadLink,
    Symlink,
    Unlink,
)
from fireflyer.fs3.meta.walk import child, find, place

LINKS_MAX = 1 << 31


def unlink(t: Transaction, ctx: Context, call: Unlink) -> Done:
    """Removes a name of a file or symlink.

    Raises:
        FileError: EISDIR, EACCES, EPERM (sticky), and the errors of path resolution.
    """
    path = call.path
    at = place(t, ctx.user, call.inode, path)
    if at.name in DOTS:
        raise FileError(errno.EISDIR, path)
    inode = child(t, at, path)
    require(ctx.user, at.directory, WRITE | SEARCH, path)
    require_removable(ctx.user, at.directory, inode, path)
    if inode.kind == DIRECTORY:
        raise FileError(errno.EISDIR, path)
    t.clear(entry_key(at.directory.number, at.name))
    names_changed(t, at.directory, ctx.now)
    drop_name(t, ctx, inode, at)
    return Done()


def link(t: Transaction, ctx: Context, call: Link) -> Inode:
    """Adds a name to a file.

    Raises:
        FileError: EPERM (a directory), EEXIST, EACCES, EMLINK, ENOENT (no name is left), ...
    """
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    at = free_place(t, ctx, call.new_inode, call.new_path, directory=False)
    if inode.kind == DIRECTORY:
        raise FileError(errno.EPERM, call.path)
    if inode.nlink == 0:
        raise FileError(errno.ENOENT, call.path)
    if inode.nlink >= LINKS_MAX:
        raise FileError(errno.EMLINK, call.path)
    add_name(t, ctx, inode, at)
    return inode


def symlink(t: Transaction, ctx: Context, call: Symlink) -> Inode:
    """Makes a symlink.

    Raises:
        FileError: EEXIST, EACCES, ENAMETOOLONG, ENOENT (an empty target), EINVAL (NUL), ...
    """
    target = call.target
    if not target:
        raise FileError(errno.ENOENT, target)
    if len(target) >= PATH_MAX:
        raise FileError(errno.ENAMETOOLONG, target)
    if b"\0" in target:
        raise FileError(errno.EINVAL, target)
    at = free_place(t, ctx, call.inode, call.path, directory=False)
    inode = new_inode(ctx, SYMLINK, 0o777, at)
    inode.layout = None
    inode.target = target
    inode.length = len(target)
    store(t, inode)
    put_entry(t, ctx, at.directory, at.name, inode)
    t.add(FILES, 1)
    return inode


def make_node(t: Transaction, ctx: Context, call: MakeNode) -> Inode:
    """Makes a special file.

    Raises:
        FileError: EINVAL (another kind), EPERM (a device, not for root), EEXIST, EACCES, ...
    """
    if call.kind not in SPECIAL:
        raise FileError(errno.EINVAL, call.path)
    device = call.kind in (CHARACTER_DEVICE, BLOCK_DEVICE)
    at = free_place(t, ctx, call.inode, call.path, directory=False)
    if device and ctx.user.uid != 0:
        raise FileError(errno.EPERM, call.path)
    inode = new_inode(ctx, call.kind, call.mode, at)
    inode.layout = None
    inode.device = call.device if device else 0
    store(t, inode)
    put_entry(t, ctx, at.directory, at.name, inode)
    t.add(FILES, 1)
    return inode


def read_link(t: Transaction, ctx: Context, call: ReadLink) -> Blob:
    inode = find(t, ctx.user, call.inode, call.path, follow=False)
    if inode.kind != SYMLINK:
        raise FileError(errno.EINVAL, call.path)
    return Blob(inode.target)


def names(t: Transaction, ctx: Context, call: Names) -> Blobs:
    require_root(ctx.user)
    inode = load(t, call.inode)
    if inode.number == ROOT:
        return Blobs([b"/"])
    found = [path_of(t, inode.parent, inode.name)] if inode.nlink else []
    for key, _ in t.snapshot_range(*rows_of(b"P", inode.number)):
        found.append(path_of(t, int.from_bytes(key[9:17], "big"), key[17:]))
    return Blobs(found)
