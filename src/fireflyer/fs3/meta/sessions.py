"""Operations that end the sessions of expired clients, and that remove orphans (files without a
name).

The caller works in rounds. First it calls `expire`; for each returned file, it queries the chains
for the length and calls `settle`. Then it calls `collect`; for each returned file, it removes the
chunks and calls `collected`. Each step is idempotent.
"""

from fireflyer.fs3.kv.transaction import Transaction
from fireflyer.fs3.meta.context import Context, load, require_root, store
from fireflyer.fs3.meta.directory_entries import forget_inode
from fireflyer.fs3.meta.files import check_length
from fireflyer.fs3.meta.inode import (
    FILE,
    UNLINKED,
    Inode,
    client_key,
    decode,
    inode_key,
    number_in,
    orphan_key,
    rows_of,
    sessions_of,
    unpack_session,
)
from fireflyer.fs3.meta.messages import (
    Collect,
    Collected,
    Done,
    EndClient,
    Expire,
    KeepAlive,
    Removal,
    Removals,
    Settle,
)

PAGE = 1024


def record_alive(t: Transaction, client: int, now: int) -> None:
    """Records that the client is alive."""
    t.set(client_key(client), now.to_bytes(8, "big"))


def keep_alive(t: Transaction, ctx: Context, call: KeepAlive) -> Done:
    record_alive(t, ctx.client, ctx.now)
    return Done()


def end_client(t: Transaction, ctx: Context, call: EndClient) -> Done:
    """Removes the client once its sessions are settled: immediately if it has no open files."""
    if _open_files(t, {ctx.client}):
        t.set(client_key(ctx.client), bytes(8))
    else:
        _forget(t, ctx.client)
    return Done()


def _forget(t: Transaction, client: int) -> None:
    t.clear(client_key(client))
    t.clear_range(*rows_of(b"R", client))


def _expired(value: bytes | None, now: int, timeout: int) -> bool:
    return value is not None and int.from_bytes(value, "big") + timeout <= now


def _open_files(t: Transaction, clients: set[int]) -> dict[tuple[int, int], None]:
    """Returns (inode, client) of these clients' sessions, by a scan of all sessions.

    The scan does not need to conflict with concurrent opens: a client that opens a file after a
    long silence rewrites its `C` row, and `expire` conflicts with that write.
    """
    found: dict[tuple[int, int], None] = {}
    begin, end = b"S", b"T"
    while rows := t.snapshot_range(begin, end, PAGE):
        for key, _ in rows:
            number, client, _ = unpack_session(key)
            if client in clients:
                found[number, client] = None
        begin = rows[-1][0] + b"\0"
    return found


def expire(t: Transaction, ctx: Context, call: Expire) -> Removals:
    """Removes expired clients without open files; returns the open files of other expired clients."""
    require_root(ctx.user)
    gone: set[int] = set()
    for key, value in t.snapshot_range(b"C", b"D"):
        if _expired(value, ctx.now, call.timeout_ns):
            t.add_read_conflict(key)
            gone.add(number_in(key))
    if not gone:
        return Removals([])
    files = _open_files(t, gone)
    for client in gone - {client for _, client in files}:
        _forget(t, client)
    items = []
    for number, client in files:
        inode = load(t, number)
        items.append(_removal(inode, client))
    return Removals(items)


def _removal(inode: Inode, client: int = 0) -> Removal:
    assert inode.layout is not None
    return Removal(inode.number, inode.layout, inode.chains, inode.length_version, client)


def settle(t: Transaction, ctx: Context, call: Settle) -> Inode:
    """Stores the length that the chains report, and ends the client's sessions on the file.

    The length is ignored if the file was truncated meanwhile. If the client is alive again, nothing
    changes.
    """
    require_root(ctx.user)
    inode = load(t, call.inode)
    last_seen = t.get(client_key(call.client))
    if last_seen is not None and not _expired(last_seen, ctx.now, call.timeout_ns):
        return inode
    if not t.get_range(*sessions_of(call.inode, call.client), 1):
        return inode
    check_length(inode, call.length, b"inode %d" % inode.number)
    if call.length_version == inode.length_version and call.length > inode.length:
        inode.length = call.length
        inode.mtime = inode.ctime = ctx.now
        store(t, inode)
    t.clear_range(*sessions_of(call.inode, call.client))
    return inode


def collect(t: Transaction, ctx: Context, call: Collect) -> Removals:
    require_root(ctx.user)
    items: list[Removal] = []
    begin, end = orphan_key(call.after + 1), b"P"
    while len(items) < call.limit and (rows := t.snapshot_range(begin, end, PAGE)):
        for key, _ in rows:
            number = number_in(key)
            data = t.snapshot_get(inode_key(number))
            if data is None or t.snapshot_range(*sessions_of(number), 1):
                continue
            items.append(_removal(decode(data)))
            if len(items) == call.limit:
                break
        begin = rows[-1][0] + b"\0"
    return Removals(items)


def collected(t: Transaction, ctx: Context, call: Collected) -> Done:
    """Removes these inodes, except those that have a name or a session or no longer exist."""
    require_root(ctx.user)
    for number in call.inodes:
        data = t.get(inode_key(number))
        if t.get(orphan_key(number)) is None or data is None:
            continue
        if t.get_range(*sessions_of(number), 1):
            continue
        inode = decode(data)
        if inode.nlink == 0 and inode.kind == FILE:
            forget_inode(t, inode)
            t.clear(orphan_key(number))
            t.add(UNLINKED, -1)
    return Done()
