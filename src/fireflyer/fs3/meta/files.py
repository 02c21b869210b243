"""Operations on files: create, open, close, append, truncate, reports of lengths, wider stripes."""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import (
    READ,
    WRITE,
    Context,
    check_name,
    load,
    require,
    store,
)
from fireflyer.fs3.meta.directory_entries import DOTS, new_inode, put_entry
from fireflyer.fs3.meta.inode import (
    DIRECTORY,
    FILE,
    FILES,
    LINKS_FOLLOWED,
    SPECIAL,
    SYMLINK,
    Inode,
    Layout,
    encode,
    entry_key,
    inode_key,
    session_key,
    sessions_of,
    too_big,
)
from fireflyer.fs3.meta.messages import (
    OMIT,
    Append,
    Close,
    Create,
    CreateMany,
    ExtendStripe,
    Inodes,
    Open,
    ReportLength,
    Truncate,
)
from fireflyer.fs3.meta.walk import Place, child, entry, find, place

_MASK = (1 << 64) - 1


def seed_of(number: int) -> int:
    """Returns a file's seed: splitmix64's finalizer of its inode number.

    The layout of a file is therefore reproducible.
    """
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def new_file(t: Transaction, ctx: Context, at: Place, name: bytes, mode: int) -> Inode:
    inode = new_inode(ctx, FILE, mode, at, name=name)
    like = at.directory.layout
    if like is not None:
        version, width = ctx.tables.get(like.table, (like.table_version, like.stripe))
        inode.layout = Layout(
            like.table, version, like.chunk_size, min(like.stripe, width), seed_of(inode.number)
        )
    t.set(inode_key(inode.number), encode(inode))
    put_entry(t, ctx, at.directory, name, inode)
    t.add(FILES, 1)
    return inode


def create(t: Transaction, ctx: Context, call: Create) -> Inode:
    """Executes open(O_CREAT), with O_EXCL if `exclusive`.

    Without O_EXCL it follows symlinks, even if the target does not exist.

    Raises:
        FileError: EEXIST, EISDIR, EACCES, ELOOP, and the errors of path resolution.
    """
    start, path = call.inode, call.path
    for _ in range(LINKS_FOLLOWED + 1):
        at = place(t, ctx.user, start, path)
        if at.name in DOTS:
            raise FileError(errno.EEXIST if call.exclusive else errno.EISDIR, path)
        number = entry(t, at.directory, at.name)
        if number is None:
            if at.slash:
                raise FileError(errno.EISDIR, path)
            require(ctx.user, at.directory, WRITE, path)
            inode = new_file(t, ctx, at, at.name, call.mode)
            if call.handle:
                t.set(session_key(inode.number, ctx.client, call.handle), b"")
            return inode
        if call.exclusive:
            raise FileError(errno.EEXIST, path)
        inode = child(t, at, path)
        if inode.kind != SYMLINK:
            return _opened(t, ctx, inode, call.handle, path, read=False)
        start, path = at.directory.number, inode.target
    raise FileError(errno.ELOOP, call.path)


def create_many(t: Transaction, ctx: Context, call: CreateMany) -> Inodes:
    """Executes an exclusive `create` for several names in a directory; errors are per name."""
    directory = load(t, call.inode)
    if directory.kind != DIRECTORY:
        raise FileError(errno.ENOTDIR)
    require(ctx.user, directory, 1 | WRITE, b"")
    taken = t.get_many([entry_key(directory.number, name) for name in call.names])
    made: list[Inode | int] = []
    at = Place(directory, b"", False)
    for name in call.names:
        try:
            check_name(name, name)
            if not name or b"/" in name:
                raise FileError(errno.EINVAL if name else errno.ENOENT, name)
            key = entry_key(directory.number, name)
            if name in DOTS or key in taken or key in t.writes:
                raise FileError(errno.EEXIST, name)
            made.append(new_file(t, ctx, at, name, call.mode))
        except FileError as error:
            made.append(error.errno or errno.EIO)
    return Inodes(made)


def _opened(
    t: Transaction, ctx: Context, inode: Inode, handle: int, path: bytes, *, read: bool
) -> Inode:
    if inode.kind == DIRECTORY and handle:
        raise FileError(errno.EISDIR, path)
    if inode.kind == SYMLINK:
        raise FileError(errno.ELOOP, path)
    if inode.kind in SPECIAL:
        raise FileError(
            errno.ENXIO, path, "fifos, sockets and devices can be opened on a mount only"
        )
    if inode.nlink == 0:
        raise FileError(errno.ENOENT, path)
    if read:
        require(ctx.user, inode, READ, path)
    if handle:
        require(ctx.user, inode, WRITE, path)
        t.set(session_key(inode.number, ctx.client, handle), b"")
    return inode


def open_file(t: Transaction, ctx: Context, call: Open) -> Inode:
    """Opens a file.

    Raises:
        FileError: EISDIR (a directory, for writing), ELOOP (a symlink, not followed), EACCES,
            ENOENT, ENXIO (a special file), ...
    """
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    return _opened(t, ctx, inode, call.handle, call.path, read=call.read)


def session_of(t: Transaction, ctx: Context, number: int, handle: int) -> tuple[Inode, bytes]:
    """Returns the inode and session key of a file that this client has open for writing.

    Raises:
        FileError: EBADF: the client does not have this session.
    """
    key = session_key(number, ctx.client, handle)
    if t.get(key) is None:
        raise FileError(errno.EBADF, b"inode %d" % number)
    return load(t, number), key


def check_length(inode: Inode, length: int, path: bytes) -> None:
    """Checks a length.

    Raises:
        FileError: EINVAL (negative), EFBIG (beyond the last chunk that a file can have).
    """
    if length < 0:
        raise FileError(errno.EINVAL, path)
    if length > inode.length_max:
        raise too_big(inode, path)


def extended(ctx: Context, inode: Inode, length: int, version: int) -> bool:
    """Applies a reported length; returns False if the report is older than a truncation."""
    check_length(inode, length, b"inode %d" % inode.number)
    if version != inode.length_version:
        return False
    inode.length = max(inode.length, length)
    inode.mtime = inode.ctime = ctx.now
    _strip(ctx, inode)
    return True


def _reported(t: Transaction, ctx: Context, inode: Inode, length: int, version: int) -> bool:
    """Stores a reported length; returns the result of `extended`."""
    accepted = extended(ctx, inode, length, version)
    if accepted:
        store(t, inode)
    return accepted


def _strip(ctx: Context, inode: Inode) -> None:
    """Removes setuid, and setgid if group-executable, when a user other than root writes."""
    if ctx.user.uid != 0:
        inode.mode &= ~(0o6000 if inode.mode & 0o010 else 0o4000)


def close(t: Transaction, ctx: Context, call: Close) -> Inode:
    inode, key = session_of(t, ctx, call.inode, call.handle)
    if call.length == OMIT or _reported(t, ctx, inode, call.length, call.length_version):
        t.clear(key)
    return inode


def report_length(t: Transaction, ctx: Context, call: ReportLength) -> Inode:
    inode, _ = session_of(t, ctx, call.inode, call.handle)
    _reported(t, ctx, inode, call.length, call.length_version)
    return inode


def extend_stripe(t: Transaction, ctx: Context, call: ExtendStripe) -> Inode:
    inode, _ = session_of(t, ctx, call.inode, call.handle)
    stripe = inode.layout.stripe if inode.layout is not None else 1
    if not 0 <= call.index < 1 << 32:
        raise FileError(errno.EFBIG, b"inode %d" % inode.number)
    wanted = inode.dyn_stripe
    while wanted <= call.index and wanted < stripe:
        wanted *= 2
    if wanted != inode.dyn_stripe:
        inode.dyn_stripe = wanted
        store(t, inode)
    return inode


_APPENDS = b"a"
"""Row value of a session that appends."""


def append(t: Transaction, ctx: Context, call: Append) -> Inode:
    """Makes the session the only appender of the file.

    Raises:
        FileError: EBUSY: another session appends.
    """
    inode, key = session_of(t, ctx, call.inode, call.handle)
    for other, value in t.get_range(*sessions_of(inode.number)):
        if value == _APPENDS and other != key:
            raise FileError(errno.EBUSY, b"inode %d" % inode.number)
    t.set(key, _APPENDS)
    return inode


def truncate(t: Transaction, ctx: Context, call: Truncate) -> Inode:
    """Sets the length of a file.

    Raises:
        FileError: EISDIR, EINVAL (negative length, or not a file), EFBIG, EACCES, EBADF (unknown
            handle).
    """
    if call.length < 0:
        raise FileError(errno.EINVAL, call.path)
    if call.handle:
        inode, _ = session_of(t, ctx, call.inode, call.handle)
    else:
        inode = find(t, ctx.user, call.inode, call.path)
        if inode.kind == DIRECTORY:
            raise FileError(errno.EISDIR, call.path)
        if inode.kind != FILE:
            raise FileError(errno.EINVAL, call.path)
        require(ctx.user, inode, WRITE, call.path)
    check_length(inode, call.length, call.path)
    inode.length = call.length
    inode.length_version += 1
    inode.mtime = inode.ctime = ctx.now
    _strip(ctx, inode)
    store(t, inode)
    return inode
