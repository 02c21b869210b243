"""Extended attributes: `user.*` of files and directories, `trusted.*` for root."""

import errno

from fireflyer.errors import FileError
from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import (
    READ,
    STICKY,
    WRITE,
    Context,
    require,
    require_owner,
    store,
)
from fireflyer.fs3.meta.inode import DIRECTORY, FILE, NAME_MAX, Inode, rows_of, xattr_key
from fireflyer.fs3.meta.messages import (
    XATTR_CREATE,
    XATTR_REPLACE,
    Blob,
    Blobs,
    Done,
    GetXattr,
    ListXattrs,
    RemoveXattr,
    SetXattr,
)
from fireflyer.fs3.meta.walk import find

VALUE_MAX = 65_536
_TRUSTED = b"trusted."


def _check(ctx: Context, inode: Inode, name: bytes, bits: int, path: bytes) -> None:
    if not name or len(name) > NAME_MAX:
        raise FileError(errno.ERANGE, path)
    if b"\0" in name:
        raise FileError(errno.EINVAL, path)
    if name.startswith(_TRUSTED):
        if ctx.user.uid != 0:
            raise FileError(errno.EPERM if bits == WRITE else errno.ENODATA, path)
        return
    if not name.startswith(b"user."):
        raise FileError(errno.EOPNOTSUPP, path)
    if inode.kind not in (FILE, DIRECTORY):
        raise FileError(errno.EPERM if bits == WRITE else errno.ENODATA, path)
    if bits == WRITE and inode.kind == DIRECTORY and inode.mode & STICKY:
        require_owner(ctx.user, inode, path)
    require(ctx.user, inode, bits, path)


def get_xattr(t: Transaction, ctx: Context, call: GetXattr) -> Blob:
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    _check(ctx, inode, call.name, READ, call.path)
    value = t.get(xattr_key(inode.number, call.name))
    if value is None:
        raise FileError(errno.ENODATA, call.path)
    return Blob(value)


def list_xattrs(t: Transaction, ctx: Context, call: ListXattrs) -> Blobs:
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    rows = t.snapshot_range(*rows_of(b"X", inode.number))
    found = [key[9:] for key, _ in rows]
    return Blobs([name for name in found if ctx.user.uid == 0 or not name.startswith(_TRUSTED)])


def set_xattr(t: Transaction, ctx: Context, call: SetXattr) -> Done:
    """Sets an extended attribute.

    Raises:
        FileError: EEXIST (XATTR_CREATE), ENODATA (XATTR_REPLACE), E2BIG, EOPNOTSUPP (other
            namespaces), ...
    """
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    _check(ctx, inode, call.name, WRITE, call.path)
    if call.flags not in (0, XATTR_CREATE, XATTR_REPLACE):
        raise FileError(errno.EINVAL, call.path)
    if len(call.value) > VALUE_MAX:
        raise FileError(errno.E2BIG, call.path)
    key = xattr_key(inode.number, call.name)
    there = t.get(key) is not None
    if call.flags == XATTR_CREATE and there:
        raise FileError(errno.EEXIST, call.path)
    if call.flags == XATTR_REPLACE and not there:
        raise FileError(errno.ENODATA, call.path)
    t.set(key, call.value)
    inode.ctime = ctx.now
    store(t, inode)
    return Done()


def remove_xattr(t: Transaction, ctx: Context, call: RemoveXattr) -> Done:
    inode = find(t, ctx.user, call.inode, call.path, call.follow)
    _check(ctx, inode, call.name, WRITE, call.path)
    key = xattr_key(inode.number, call.name)
    if t.get(key) is None:
        raise FileError(errno.ENODATA, call.path)
    t.clear(key)
    inode.ctime = ctx.now
    store(t, inode)
    return Done()
