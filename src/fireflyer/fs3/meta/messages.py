"""Requests to a meta service and its answers: msgspec structs, one a call.

Files are named by an inode and a path from it: `b""` is the inode itself, a path that begins with "/"
starts at the root. Modes are the twelve permission bits, already masked by the caller's umask. Times are ns.
`client` and `handle` are numbers that clients choose, above 0: a client's is unique among all, a handle's in
its client.
"""

from typing import Annotated

import msgspec

from fireflyer.fs3.meta.inode import Inode, Layout

INT64_MAX = (1 << 63) - 1
Number = Annotated[int, msgspec.Meta(ge=0, le=INT64_MAX)]
Signed = Annotated[int, msgspec.Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""What is of neither kind is refused where a request is decoded: keys hold numbers of 64 bits."""
Limit = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]

OMIT = -1
"""A time, an owner or a length that stays as it is."""
NOW = -2
"""A time: the server's."""

NOREPLACE, EXCHANGE = 1, 2
XATTR_CREATE, XATTR_REPLACE = 1, 2


class User(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """On whose behalf."""

    uid: Number
    gid: Number
    groups: tuple[Number, ...] = ()


class Call(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is asked."""


class Stat(Call, frozen=True, tag="Stat"):
    """Attributes: of a name (lookup), of a path (resolve), of an inode. Answer: Inode."""

    inode: Number
    path: bytes = b""
    follow: bool = True


class StatMany(Call, frozen=True, tag="StatMany"):
    """Answer: Inodes, one for each (inode, path); symlinks at the end are not followed."""

    targets: list[tuple[Number, bytes]]


class ReadDirectory(Call, frozen=True, tag="ReadDirectory"):
    """Names behind `after` in order of their bytes, with attributes if `plus`. Answer: Listing."""

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
    """All names of an inode, as paths from the root; for root only. Answer: Blobs."""

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
    """Checks permissions; with a handle it is open for writing until Close. Answer: Inode."""

    inode: Number
    path: bytes = b""
    read: bool = True
    handle: Number = 0
    follow: bool = True


class Close(Call, frozen=True, tag="Close"):
    """Ends a session; with a length also ReportLength. Answer: Inode.

    A length that is not taken leaves the session.
    """

    inode: Number
    handle: Number
    length: Signed = OMIT
    length_version: Number = 0


class ReportLength(Call, frozen=True, tag="ReportLength"):
    """The largest end written. Answer: Inode; with another `length_version` it was not taken.

    The file was truncated since, then: the caller finds out what it wrote after that, and reports again.
    """

    inode: Number
    handle: Number
    length: Signed
    length_version: Number


class ExtendStripe(Call, frozen=True, tag="ExtendStripe"):
    """Before the first chunk at index `dyn_stripe` or beyond is written: `index` is its. Answer: Inode."""

    inode: Number
    handle: Number
    index: Number


class Append(Call, frozen=True, tag="Append"):
    """Before the first append: until its session ends, no other one appends to the file. Answer: Inode."""

    inode: Number
    handle: Number


class Truncate(Call, frozen=True, tag="Truncate"):
    """Sets the length; the chunks beyond it were cut before this call. Answer: Inode."""

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
    """A further name of a file. Answer: Inode."""

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
    """Of a directory (for files made later) or of an empty file that nobody writes. Answer: Inode."""

    inode: Number
    path: bytes
    layout: Layout


class KeepAlive(Call, frozen=True, tag="KeepAlive"):
    """The client lives; all of its sessions stay. Answer: Done."""


class EndClient(Call, frozen=True, tag="EndClient"):
    """The client is finished, has closed its files and awaits no answers. Answer: Done."""


class Expire(Call, frozen=True, tag="Expire"):
    """Forgets clients not seen for `timeout_ns`; names their files, of which the length must be asked from
    the chains. For root only. Answer: Removals."""

    timeout_ns: Number


class Settle(Call, frozen=True, tag="Settle"):
    """Ends the sessions of a vanished client on a file, with the length that its chains know. For root only.
    Answer: Inode."""

    inode: Number
    client: Number
    length: Signed
    length_version: Number
    timeout_ns: Number


class Collect(Call, frozen=True, tag="Collect"):
    """Files without names and sessions, behind inode `after`: their chunks are to be removed. For root only.
    Answer: Removals."""

    after: Number = 0
    limit: Limit = 256


class Collected(Call, frozen=True, tag="Collected"):
    """The chunks of these files are removed. For root only. Answer: Done."""

    inodes: list[Number]


class Done(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):  # another answer is none
    """It is done."""


class Inodes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One inode or POSIX error number for each thing asked."""

    items: list[Inode | int]


class Listing(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """(name, inode, kind) in order; `inodes` likewise where attributes were asked."""

    entries: list[tuple[bytes, int, int]]
    inodes: list[Inode]
    more: bool


class Blob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    data: bytes


class Blobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    items: list[bytes]


class Counts(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of the whole file system."""

    files: int
    name_max: int
    path_max: int
    unlinked: int
    """Files without a name that are still open, or whose chunks are not all removed yet."""


class Removal(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A file whose first `chains` chains must be asked (Expire) or emptied of it (Collect)."""

    inode: Number
    layout: Layout
    chains: int
    length_version: int
    client: Number = 0
    """Of Expire: whose sessions."""


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
    | ChangeMode
    | ChangeOwner
    | SetTimes
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
    """One call of one client.

    A `number` above 0 names the request for ever within its client: sent again, it is not done again but
    answered as the first time. The client has the answers of all its requests up to `acknowledged`.
    `again`: it was sent before, so copies of it may still be on their way.
    """

    user: User
    client: Number
    call: Reading | Writing
    number: Number = 0
    acknowledged: Number = 0
    again: bool = False
