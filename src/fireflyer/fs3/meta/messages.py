"""Requests to a metadata service and its answers: a msgspec struct per call.

An inode and a path from it name a file: `b""` is the inode itself; a path that begins with "/"
starts at the root. Modes are the twelve permission bits after the client's umask. Times are ns.
Clients choose the numbers `client` and `handle`, which are above 0. A `client` is unique in the
cluster, a `handle` within its client.
"""

from typing import Annotated

import msgspec

from fireflyer.fs3.meta.inode import Inode, Layout

INT64_MAX = (1 << 63) - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Signed = Annotated[int, msgspec.Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""Integers of 64 bits, as in keys; decoding a request rejects numbers beyond these bounds."""
Limit = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]

OMIT = -1
"""Value that keeps a time, an owner or a length unchanged."""
NOW = -2
"""Value that stands for the server's current time."""

NOREPLACE, EXCHANGE = 1, 2
XATTR_CREATE, XATTR_REPLACE = 1, 2


class User(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """User on whose behalf a call is made."""

    uid: Number
    gid: Number
    groups: tuple[Number, ...] = ()


class Call(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of all calls."""


class Stat(Call, frozen=True, tag="Stat"):
    """Returns the attributes of a name (lookup), a path (resolve) or an inode. Answer: Inode."""

    inode: Number
    path: bytes = b""
    follow: bool = True


class StatMany(Call, frozen=True, tag="StatMany"):
    """Returns the attributes of each (inode, path), without following a last symlink.

    Answer: Inodes, in the same order.
    """

    targets: list[tuple[Number, bytes]]


class ReadDirectory(Call, frozen=True, tag="ReadDirectory"):
    """Lists the names that follow `after`, sorted by their bytes, with attributes if `plus`.

    Answer: Listing.
    """

    inode: Number
    path: bytes = b""
    after: bytes = b""
    limit: Limit = 1024
    plus: bool = False


class ReadLink(Call, frozen=True, tag="ReadLink"):
    """Answer: Blob."""

    inode: Number
    path: bytes = b""


class Names(Call, frozen=True, tag="Names"):
    """Returns all names of an inode, as paths from the root; for root only. Answer: Blobs."""

    inode: Number


class GetXattr(Call, frozen=True, tag="GetXattr"):
    """Answer: Blob."""

    inode: Number
    path: bytes
    name: bytes
    follow: bool = True


class ListXattrs(Call, frozen=True, tag="ListXattrs"):
    """Answer: Blobs."""

    inode: Number
    path: bytes = b""
    follow: bool = True


class Statfs(Call, frozen=True, tag="Statfs"):
    """Answer: Counts."""


class Create(Call, frozen=True, tag="Create"):
    """Creates a file, or opens an existing file unless `exclusive`. Answer: Inode. If `handle` is
    not 0, the file is open for writing until Close."""

    inode: Number
    path: bytes
    mode: Signed = 0o644
    exclusive: bool = False
    handle: Number = 0


class CreateMany(Call, frozen=True, tag="CreateMany"):
    """Creates new files in one directory in one transaction. Answer: Inodes."""

    inode: Number
    names: list[bytes]
    mode: Signed = 0o644


class Open(Call, frozen=True, tag="Open"):
    """Checks permissions. Answer: Inode. If `handle` is not 0, the file is open for writing until
    Close."""

    inode: Number
    path: bytes = b""
    read: bool = True
    handle: Number = 0
    follow: bool = True


class Close(Call, frozen=True, tag="Close"):
    """Ends a session; a length is reported as in ReportLength. Answer: Inode.

    If the length is not accepted, the session does not end.
    """

    inode: Number
    handle: Number
    length: Signed = OMIT
    length_version: Number = 0


class ReportLength(Call, frozen=True, tag="ReportLength"):
    """Reports the largest written offset. Answer: Inode.

    If the answer has another `length_version`, the report was not accepted, because the file was
    truncated meanwhile. The client then determines what it wrote after the truncation, and reports
    again.
    """

    inode: Number
    handle: Number
    length: Signed
    length_version: Number


class ExtendStripe(Call, frozen=True, tag="ExtendStripe"):
    """Extends the stripe. A client must call this before it writes a chunk whose `index` is at or
    beyond `Inode.dyn_stripe`.

    Answer: Inode.
    """

    inode: Number
    handle: Number
    index: Number


class Append(Call, frozen=True, tag="Append"):
    """Makes the session the only appender until the session ends. Answer: Inode."""

    inode: Number
    handle: Number


class Truncate(Call, frozen=True, tag="Truncate"):
    """Sets the length, after the client has removed the chunks beyond it. Answer: Inode."""

    inode: Number
    path: bytes
    length: Signed
    handle: Number = 0


class MakeDirectory(Call, frozen=True, tag="MakeDirectory"):
    """Answer: Inode."""

    inode: Number
    path: bytes
    mode: Signed = 0o755


class RemoveDirectory(Call, frozen=True, tag="RemoveDirectory"):
    """Answer: Done."""

    inode: Number
    path: bytes


class Unlink(Call, frozen=True, tag="Unlink"):
    """Answer: Done."""

    inode: Number
    path: bytes


class Rename(Call, frozen=True, tag="Rename"):
    """Renames a file; `flags`: NOREPLACE or EXCHANGE. Answer: Done."""

    inode: Number
    path: bytes
    new_inode: Number
    new_path: bytes
    flags: Signed = 0


class Link(Call, frozen=True, tag="Link"):
    """Adds a name to a file. Answer: Inode."""

    inode: Number
    path: bytes
    new_inode: Number
    new_path: bytes
    follow: bool = False


class Symlink(Call, frozen=True, tag="Symlink"):
    """Answer: Inode."""

    inode: Number
    path: bytes
    target: bytes


class MakeNode(Call, frozen=True, tag="MakeNode"):
    """Creates a fifo, a socket, or a device with this number. Answer: Inode."""

    inode: Number
    path: bytes
    kind: Signed
    mode: Signed = 0o644
    device: Number = 0


class ChangeMode(Call, frozen=True, tag="ChangeMode"):
    """Answer: Inode."""

    inode: Number
    path: bytes
    mode: Signed
    follow: bool = True


class ChangeOwner(Call, frozen=True, tag="ChangeOwner"):
    """Answer: Inode."""

    inode: Number
    path: bytes
    uid: Signed = OMIT
    gid: Signed = OMIT
    follow: bool = True


class SetTimes(Call, frozen=True, tag="SetTimes"):
    """Answer: Inode."""

    inode: Number
    path: bytes
    atime: Signed = NOW
    mtime: Signed = NOW
    follow: bool = True


class Changes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Attributes to set; OMIT keeps an attribute unchanged."""

    uid: Signed = OMIT
    gid: Signed = OMIT
    mode: Signed = OMIT
    atime: Signed = OMIT
    mtime: Signed = OMIT


class SetAttributes(Call, frozen=True, tag="SetAttributes"):
    """Sets attributes of an inode in one transaction. Answer: Inode.

    With a handle, the call also does ReportLength, or Close if `last`. If the length is not
    accepted, no attribute is set and the session does not end.
    """

    inode: Number
    changes: Changes
    handle: Number = 0
    length: Signed = OMIT
    length_version: Number = 0
    last: bool = False


class SetXattr(Call, frozen=True, tag="SetXattr"):
    """Sets an extended attribute; `flags`: XATTR_CREATE or XATTR_REPLACE. Answer: Done."""

    inode: Number
    path: bytes
    name: bytes
    value: bytes
    flags: Signed = 0
    follow: bool = True


class RemoveXattr(Call, frozen=True, tag="RemoveXattr"):
    """Answer: Done."""

    inode: Number
    path: bytes
    name: bytes
    follow: bool = True


class SetLayout(Call, frozen=True, tag="SetLayout"):
    """Sets the layout of a directory, which new files inherit, or of an empty file.

    The file must not be open for writing. Answer: Inode.
    """

    inode: Number
    path: bytes
    layout: Layout


class KeepAlive(Call, frozen=True, tag="KeepAlive"):
    """Sends the heartbeat of a client, which keeps its sessions alive. Answer: Done."""


class EndClient(Call, frozen=True, tag="EndClient"):
    """Ends a client without open files or requests in flight. Answer: Done."""


class Expire(Call, frozen=True, tag="Expire"):
    """Expires clients without a request for `timeout_ns`. Only for root. Answer: Removals.

    The answer has the open files of these clients. The caller must query the files' chains for the
    lengths.
    """

    timeout_ns: Number


class Settle(Call, frozen=True, tag="Settle"):
    """Ends an expired client's sessions on a file, with the length that the chains report.

    Only for root. Answer: Inode.
    """

    inode: Number
    client: Number
    length: Signed
    length_version: Number
    timeout_ns: Number


class Collect(Call, frozen=True, tag="Collect"):
    """Lists orphans without sessions that follow inode `after`, so that the caller removes their
    chunks.

    Only for root. Answer: Removals.
    """

    after: Number = 0
    limit: Limit = 256


class Collected(Call, frozen=True, tag="Collected"):
    """Confirms that the chunks of these files are removed. Only for root. Answer: Done."""

    inodes: list[Number]


class Done(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """Answer of a call that returns nothing.

    Unknown fields are forbidden, so that no other answer decodes as `Done`.
    """


class Inodes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Inode or POSIX error number for each item of the call."""

    items: list[Inode | int]


class Listing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Page of (name, inode, kind); `inodes` has the attributes, if requested, in the same order."""

    entries: list[tuple[bytes, int, int]]
    inodes: list[Inode]
    more: bool


class Blob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    data: bytes


class Blobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    items: list[bytes]


class Counts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Counters of the whole file system."""

    files: int
    name_max: int
    path_max: int
    unlinked: int
    """Number of orphans: files without a name that are open or still have chunks."""


class Removal(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """File whose length must be queried (Expire) or whose chunks must be removed (Collect)."""

    inode: Number
    layout: Layout
    chains: int
    length_version: int
    client: Number = 0
    """Client that has the sessions (Expire only)."""


class Removals(msgspec.Struct, array_like=True, frozen=True, gc=False):
    items: list[Removal]


Reading = (
    Stat | StatMany | ReadDirectory | ReadLink | Names | GetXattr | ListXattrs | Statfs | Collect
)
Writing = (
    Create
    | CreateMany
    | Open
    | Close
    | ReportLength
    | ExtendStripe
    | Append
    | Truncate
    | MakeDirectory
    | RemoveDirectory
    | Unlink
    | Rename
    | Link
    | Symlink
    | MakeNode
    | ChangeMode
    | ChangeOwner
    | SetTimes
    | SetAttributes
    | SetXattr
    | RemoveXattr
    | SetLayout
    | KeepAlive
    | EndClient
    | Expire
    | Settle
    | Collected
)
Answer = Inode | Inodes | Listing | Blob | Blobs | Counts | Removals | Done


class Request(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Call of a client.

    A `number` above 0 is an idempotency key within its client: a retry of a request is not
    executed, but gets the first answer. The client has received the answers to all its requests up
    to `acknowledged`. `again` marks a retry: earlier copies of the request may be in flight.
    """

    user: User
    client: Number
    call: Reading | Writing
    number: Number = 0
    acknowledged: Number = 0
    again: bool = False
