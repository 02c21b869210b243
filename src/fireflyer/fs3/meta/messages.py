"""Requests to a metadata service and its answers: a msgspec struct per call.

Files are named by an inode and a path from it: `b""` is the inode itself, a path that begins with
"/" starts at the root. Modes are the twelve permission bits, already masked by the caller's umask.
Times are ns. Clients choose the numbers `client` and `handle`, above 0: a client's is unique among
all, a handle's within its client.
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
"""Value that leaves a time, an owner or a length as it is."""
NOW = -2
"""Value of a time: the server's time."""

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
    """Stats each (inode, path); symlinks at the end are not followed.

    Answer: Inodes, one for each.
    """

    targets: list[tuple[Number, bytes]]


class ReadDirectory(Call, frozen=True, tag="ReadDirectory"):
    """Lists names behind `after` in order of their bytes, with attributes if `plus`.

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
    """Makes a file, or finds it if not `exclusive`; a handle opens it for writing. Answer: Inode."""

    inode: Number
    path: bytes
    mode: Signed = 0o644
    exclusive: bool = False
    handle: Number = 0


class CreateMany(Call, frozen=True, tag="CreateMany"):
    """Makes files in one directory, exclusively, in one transaction. Answer: Inodes."""

    inode: Number
    names: list[bytes]
    mode: Signed = 0o644


class Open(Call, frozen=True, tag="Open"):
    """Checks permissions; a handle opens the file for writing until Close. Answer: Inode."""

    inode: Number
    path: bytes = b""
    read: bool = True
    handle: Number = 0
    follow: bool = True


class Close(Call, frozen=True, tag="Close"):
    """Ends a session; with a length also ReportLength. Answer: Inode.

    If the length is not accepted, the session stays.
    """

    inode: Number
    handle: Number
    length: Signed = OMIT
    length_version: Number = 0


class ReportLength(Call, frozen=True, tag="ReportLength"):
    """Reports the largest end written. Answer: Inode; another `length_version` means not accepted.

    In that case the file was truncated since. The client finds out what it wrote after that, and
    reports again.
    """

    inode: Number
    handle: Number
    length: Signed
    length_version: Number


class ExtendStripe(Call, frozen=True, tag="ExtendStripe"):
    """Extends the stripe before a chunk at index `dyn_stripe` or beyond is written.

    `index` is that chunk's. Answer: Inode.
    """

    inode: Number
    handle: Number
    index: Number


class Append(Call, frozen=True, tag="Append"):
    """Makes the session the only appender until it ends; before the first append. Answer: Inode."""

    inode: Number
    handle: Number


class Truncate(Call, frozen=True, tag="Truncate"):
    """Sets the length; the client has removed the chunks beyond it before. Answer: Inode."""

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
    """`flags`: NOREPLACE or EXCHANGE. Answer: Done."""

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
    """Makes a fifo, a socket, or a device with this number. Answer: Inode."""

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
    """Attributes to set; OMIT leaves one as it is."""

    uid: Signed = OMIT
    gid: Signed = OMIT
    mode: Signed = OMIT
    atime: Signed = OMIT
    mtime: Signed = OMIT


class SetAttributes(Call, frozen=True, tag="SetAttributes"):
    """Sets attributes of an inode in one transaction. Answer: Inode.

    With a handle also ReportLength, or Close if `last`. If the length is not accepted, nothing is
    set and the session stays.
    """

    inode: Number
    changes: Changes
    handle: Number = 0
    length: Signed = OMIT
    length_version: Number = 0
    last: bool = False


class SetXattr(Call, frozen=True, tag="SetXattr"):
    """`flags`: XATTR_CREATE or XATTR_REPLACE. Answer: Done."""

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
    """Sets the layout of a directory (for files made later), or of an empty file.

    No session may write the file. Answer: Inode.
    """

    inode: Number
    path: bytes
    layout: Layout


class KeepAlive(Call, frozen=True, tag="KeepAlive"):
    """Heartbeat of a client; all of its sessions stay. Answer: Done."""


class EndClient(Call, frozen=True, tag="EndClient"):
    """Ends a client that has closed its files and awaits no answers. Answer: Done."""


class Expire(Call, frozen=True, tag="Expire"):
    """Forgets clients not seen for `timeout_ns`. For root only. Answer: Removals.

    The answer names their open files. The length of these must be queried from the chains.
    """

    timeout_ns: Number


class Settle(Call, frozen=True, tag="Settle"):
    """Ends a vanished client's sessions on a file, with the length that the file's chains report.

    For root only. Answer: Inode.
    """

    inode: Number
    client: Number
    length: Signed
    length_version: Number
    timeout_ns: Number


class Collect(Call, frozen=True, tag="Collect"):
    """Lists files without names and sessions behind inode `after`, to remove their chunks.

    For root only. Answer: Removals.
    """

    after: Number = 0
    limit: Limit = 256


class Collected(Call, frozen=True, tag="Collected"):
    """Confirms that the chunks of these files are removed. For root only. Answer: Done."""

    inodes: list[Number]


class Done(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):  # no other answer decodes as this one
    """Answer of a call that returns nothing."""


class Inodes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One inode or POSIX error number for each item of the call."""

    items: list[Inode | int]


class Listing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Page of (name, inode, kind) in order; `inodes` likewise if attributes were requested."""

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
    """Files without a name that are still open, or whose chunks are not all removed yet."""


class Removal(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """File whose first `chains` chains must be queried (Expire) or emptied of it (Collect)."""

    inode: Number
    layout: Layout
    chains: int
    length_version: int
    client: Number = 0
    """Client whose sessions these are (Expire only)."""


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

    A `number` above 0 is an idempotency key of its client, for ever: a request sent again is not
    executed again but answered as the first time. The client has the answers of all its requests up
    to `acknowledged`. `again`: the request was sent before, so copies of it may still be in flight.
    """

    user: User
    client: Number
    call: Reading | Writing
    number: Number = 0
    acknowledged: Number = 0
    again: bool = False
