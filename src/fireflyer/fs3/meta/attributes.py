"""Operations on attributes: stat (lookup, resolve), stat_many, chmod, chown, utimens, layouts, statfs."""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction, counter
from fireflyer.fs3.meta.context import (
    SEARCH,
    WRITE,
    Context,
    allowed,
    load,
    member,
    require_owner,
    shown,
    store,
)
from fireflyer.fs3.meta.directory_entries import DOTS
from fireflyer.fs3.meta.files import extended, seed_of, session_of
from fireflyer.fs3.meta.inode import (
    CHUNK_MAX,
    CHUNK_MIN,
    DIRECTORY,
    FILE,
    FILES,
    NAME_MAX,
    PATH_MAX,
    SYMLINK,
    UNLINKED,
    Inode,
    Layout,
    decode,
    entry_key,
    inode_key,
    pack_times,
    sessions_of,
    times_key,
)
from fireflyer.fs3.meta.messages import (
    NOW,
    OMIT,
    ChangeMode,
    ChangeOwner,
    Counts,
    Inodes,
    SetAttributes,
    SetLayout,
    SetTimes,
    Stat,
    Statfs,
    StatMany,
)
from fireflyer.fs3.meta.walk import find

STRIPE_MAX = 1 << 16
IDS = range(1 << 32)


def stat(t: Transaction, ctx: Context, call: Stat) -> Inode:
    return shown(t, find(t, ctx.user, call.inode, call.path, call.follow))


def stat_many(t: Transaction, ctx: Context, call: StatMany) -> Inodes:
    """Executes `stat` for each target, without following symlinks.

    The function resolves each directory once and looks up all names together.
    """
    folders: dict[tuple[int, bytes], int] = {}
    keys: list[bytes | None] = []
    for number, path in call.targets:
        if not path:
            keys.append(None)
            continue
        above, slash, name = path.rpartition(b"/")
        above += slash
        folder = folders.get((number, above))
        if folder is None:
            folder = folders[number, above] = _searchable(t, ctx, number, above)
        simple = folder and name and name not in DOTS and len(path) <= PATH_MAX
        keys.append(entry_key(folder, name) if simple else None)
    entries = t.get_many([key for key in keys if key is not None], conflict=False)
    wanted: list[bytes | None] = []
    for (number, path), key in zip(call.targets, keys, strict=True):
        value = entries.get(key) if key is not None else None
        if value is not None:
            wanted.append(b"I" + value[:8])
        else:
            wanted.append(None if path else inode_key(number))
    inodes = t.get_many([key for key in wanted if key is not None], conflict=False)
    items: list[Inode | int] = []
    for (number, path), key in zip(call.targets, wanted, strict=True):
        data = inodes.get(key) if key is not None else None
        if data is not None:
            inode = decode(data)
            items.append(shown(t, inode) if inode.kind == DIRECTORY else inode)
            continue
        try:
            items.append(shown(t, find(t, ctx.user, number, path, follow=False)))
        except FileError as error:
            items.append(error.errno or errno.EIO)
    return Inodes(items)


def _searchable(t: Transaction, ctx: Context, number: int, path: bytes) -> int:
    """Returns the inode number of a directory; 0 if there is no directory, or the user may not
    search it."""
    try:
        directory = find(t, ctx.user, number, path)
    except FileError:
        return 0
    found = directory.kind == DIRECTORY and allowed(ctx.user, directory, SEARCH)
    return directory.number if found else 0


def change_mode(t: Transaction, ctx: Context, call: ChangeMode) -> Inode:
    """Changes the permission bits.

    Raises:
        FileError: EPERM (not the owner), EOPNOTSUPP (a symlink), ...
    """
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    if inode.kind == SYMLINK:
        raise FileError(errno.EOPNOTSUPP, call.path)
    _set_mode(ctx, inode, call.mode, call.path)
    store(t, inode)
    return shown(t, inode)


def _set_mode(ctx: Context, inode: Inode, mode: int, path: bytes) -> None:
    require_owner(ctx.user, inode, path)
    inode.mode = mode & 0o7777
    if ctx.user.uid != 0 and not member(ctx.user, inode.gid):
        inode.mode &= ~0o2000
    inode.ctime = ctx.now


def change_owner(t: Transaction, ctx: Context, call: ChangeOwner) -> Inode:
    """Changes owner and group.

    Raises:
        FileError: EPERM (only root may change an owner; other users may set only their own groups),
            EINVAL, ...
    """
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    _set_owner(ctx, inode, call.uid, call.gid, call.path)
    store(t, inode)
    return shown(t, inode)


def _set_owner(ctx: Context, inode: Inode, uid: int, gid: int, path: bytes) -> None:
    user = ctx.user
    for number in (uid, gid):
        if number != OMIT and number not in IDS:
            raise FileError(errno.EINVAL, path)
    if user.uid != 0:
        if uid not in (OMIT, inode.uid) or inode.uid != user.uid:
            raise FileError(errno.EPERM, path)
        if gid not in (OMIT, inode.gid) and not member(user, gid):
            raise FileError(errno.EPERM, path)
    inode.uid = inode.uid if uid == OMIT else uid
    inode.gid = inode.gid if gid == OMIT else gid
    if inode.kind == FILE:
        inode.mode &= ~(0o6000 if inode.mode & 0o010 else 0o4000)
    inode.ctime = ctx.now


def set_times(t: Transaction, ctx: Context, call: SetTimes) -> Inode:
    """Sets atime and mtime.

    Raises:
        FileError: EPERM (another user's inode), EACCES (another user's inode, set to the current
            time without write permission), ...
    """
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    if call.atime != OMIT or call.mtime != OMIT:
        _set_times(ctx, inode, call.atime, call.mtime, call.path)
        _stored_times(t, ctx, inode, call.mtime)
    return shown(t, inode)


def _set_times(ctx: Context, inode: Inode, atime: int, mtime: int, path: bytes) -> None:
    if ctx.user.uid not in (0, inode.uid):
        if (atime, mtime) != (NOW, NOW):
            raise FileError(errno.EPERM, path)
        if not allowed(ctx.user, inode, WRITE):
            raise FileError(errno.EACCES, path)
    if atime != OMIT:
        inode.atime = ctx.now if atime == NOW else atime
    if mtime != OMIT:
        inode.mtime = ctx.now if mtime == NOW else mtime
    inode.ctime = ctx.now


def _stored_times(t: Transaction, ctx: Context, inode: Inode, mtime: int) -> None:
    """Stores an inode, and the separate row of a directory's times."""
    if inode.kind == DIRECTORY and mtime != OMIT:
        t.set(times_key(inode.number), pack_times(inode.mtime, ctx.now))
    store(t, inode)


def set_attributes(t: Transaction, ctx: Context, call: SetAttributes) -> Inode:
    """Reports a length, then sets owner, mode and times, in one transaction.

    Raises:
        FileError: the errors of `report_length`, `change_owner`, `change_mode` and `set_times`.
    """
    key, path, wanted = b"", b"inode %d" % call.inode, call.changes
    if call.handle:
        inode, key = session_of(t, ctx, call.inode, call.handle)
        if call.length != OMIT and not extended(ctx, inode, call.length, call.length_version):
            return inode
    else:
        inode = find(t, ctx.user, call.inode, b"")
    if wanted.uid != OMIT or wanted.gid != OMIT:
        _set_owner(ctx, inode, wanted.uid, wanted.gid, path)
    if wanted.mode != OMIT:
        if inode.kind == SYMLINK:
            raise FileError(errno.EOPNOTSUPP, path)
        _set_mode(ctx, inode, wanted.mode, path)
    if wanted.atime != OMIT or wanted.mtime != OMIT:
        _set_times(ctx, inode, wanted.atime, wanted.mtime, path)
    _stored_times(t, ctx, inode, wanted.mtime)
    if key and call.last:
        t.clear(key)
    return shown(t, inode)


def set_layout(t: Transaction, ctx: Context, call: SetLayout) -> Inode:
    """Sets the layout of a directory, or of an empty file.

    Raises:
        FileError: EINVAL (invalid sizes, or a special file), EPERM, EBUSY (the file is open for
            writing), ENOTEMPTY (the file is not empty), ...
    """
    inode = find(t, ctx.user, call.inode, call.path)
    require_owner(ctx.user, inode, call.path)
    layout = call.layout
    size = layout.chunk_size
    if inode.kind not in (FILE, DIRECTORY):
        raise FileError(errno.EINVAL, call.path)
    if not CHUNK_MIN <= size <= CHUNK_MAX or size & (size - 1):
        raise FileError(errno.EINVAL, call.path)
    if not 1 <= layout.stripe <= STRIPE_MAX or layout.table < 0 or layout.table_version < 0:
        raise FileError(errno.EINVAL, call.path)
    if inode.kind == FILE:
        if inode.length:
            raise FileError(errno.ENOTEMPTY, call.path)
        if t.get_range(*sessions_of(inode.number), 1):
            raise FileError(errno.EBUSY, call.path)
    seed = seed_of(inode.number) if inode.kind == FILE else 0
    inode.layout = Layout(layout.table, layout.table_version, size, layout.stripe, seed)
    inode.ctime = ctx.now
    store(t, inode)
    return shown(t, inode)


def statfs(t: Transaction, ctx: Context, call: Statfs) -> Counts:
    load(t, 1)
    files, unlinked = (counter(t.snapshot_get(key)) for key in (FILES, UNLINKED))
    return Counts(files, NAME_MAX, PATH_MAX, unlinked)
