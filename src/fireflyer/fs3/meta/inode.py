"""Keys and values of the metadata store. Numbers in keys are big-endian, so that ranges are in order."""

import errno
import struct

import msgspec

from fireflyer.errors import Corrupted, FileError

FORMAT = 1
ROOT = 1
FILE, DIRECTORY, SYMLINK = 1, 2, 3
FIFO, SOCKET, CHARACTER_DEVICE, BLOCK_DEVICE = 4, 5, 6, 7
SPECIAL = (FIFO, SOCKET, CHARACTER_DEVICE, BLOCK_DEVICE)
"""Kinds of special files, which only the kernel of a mount can open."""

CHUNK_MIN, CHUNK_MAX = 4 << 10, 64 << 20
"""Smallest and largest chunk, in bytes."""
NAME_MAX = 255
PATH_MAX = 4096
LINKS_FOLLOWED = 40


class Layout(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Placement of chunks; new files inherit their directory's layout, but each has its own seed."""

    table: int
    table_version: int
    chunk_size: int
    """Bytes."""
    stripe: int
    """Number of chains that a file uses."""
    seed: int = 0


class Inode(msgspec.Struct, array_like=True, gc=False):
    """File, directory, symlink or special file. Times are ns since 1970.

    `parent` and `name` are one of the inode's names. In the store, `M` rows hold later changes of a
    directory's mtime, ctime and nlink; in an answer these are included.
    """

    format: int
    number: int
    kind: int
    mode: int
    """Twelve permission bits."""
    uid: int
    gid: int
    nlink: int
    atime: int
    mtime: int
    ctime: int
    btime: int
    length: int
    length_version: int
    """Number that grows with each truncation; a length reported for an older version is ignored."""
    layout: Layout | None
    dyn_stripe: int
    """Number of chains that may hold the file's chunks: the first ones in the file's order of
    chains."""
    parent: int
    name: bytes
    target: bytes = b""
    """Target of a symlink."""
    device: int = 0
    """Number of a device, as in `st_rdev`."""

    @property
    def length_max(self) -> int:
        """Maximum length of the file in bytes: a chunk's index has 32 bits."""
        return (self.layout.chunk_size if self.layout is not None else CHUNK_MAX) << 32

    @property
    def chains(self) -> int:
        """Number of chains that may hold chunks of this file."""
        return min(self.layout.stripe, self.dyn_stripe) if self.layout is not None else 0


def too_big(inode: Inode, path: str | bytes) -> FileError:
    """Returns EFBIG, with the limit."""
    return FileError(errno.EFBIG, path, f"a file has at most 2^32 chunks: {inode.length_max} bytes")


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Inode).decode


def decode(data: bytes) -> Inode:
    """Decodes the inode in a row.

    Raises:
        Corrupted: the row is no inode, or has another format.
    """
    try:
        inode = _decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupted(f"a row of the metadata is not an inode: {error}") from error
    if inode.format != FORMAT:
        raise Corrupted(f"inode {inode.number} has format {inode.format}, not {FORMAT}")
    return inode


_ENTRY = struct.Struct(">QB")
_NUMBER = struct.Struct(">cQ")
_SESSION = struct.Struct(">cQQQ")
_TIMES = struct.Struct(">qq")

pack_entry = _ENTRY.pack
unpack_entry = _ENTRY.unpack
pack_times = _TIMES.pack
unpack_times = _TIMES.unpack

ALLOCATOR = b"Ninode"
"""Counter that holds the first inode number that is not reserved."""
FILES = b"Nfiles"
"""Counter of inodes that have a name."""
UNLINKED = b"Nunlinked"
"""Counter of orphans: files without a name that are open or still have chunks."""

_pack = _NUMBER.pack


def inode_key(number: int) -> bytes:
    return _pack(b"I", number)


def entry_key(parent: int, name: bytes) -> bytes:
    return _pack(b"D", parent) + name


def entries_range(parent: int, after: bytes = b"") -> tuple[bytes, bytes]:
    """Returns the key range of the names in a directory that follow `after`."""
    begin = _pack(b"D", parent)
    return (begin + after + b"\0" if after else begin), _pack(b"D", parent + 1)


def times_key(directory: int) -> bytes:
    """Returns the key of a directory's mtime and ctime; the row is written without a read."""
    return _pack(b"M", directory) + b"t"


def subdirectories_key(directory: int) -> bytes:
    """Returns the key of the counter of directories in a directory."""
    return _pack(b"M", directory) + b"n"


def xattr_key(number: int, name: bytes) -> bytes:
    return _pack(b"X", number) + name


def other_name_key(number: int, parent: int, name: bytes) -> bytes:
    return _pack(b"P", number) + parent.to_bytes(8, "big") + name


def rows_of(prefix: bytes, number: int) -> tuple[bytes, bytes]:
    """Returns the key range of one inode's (or client's) rows under a one-byte prefix."""
    return _pack(prefix, number), _pack(prefix, number + 1)


def session_key(number: int, client: int, handle: int) -> bytes:
    return _SESSION.pack(b"S", number, client, handle)


def unpack_session(key: bytes) -> tuple[int, int, int]:
    """Returns (inode, client, handle)."""
    _, number, client, handle = _SESSION.unpack(key)
    return number, client, handle


def sessions_of(number: int, client: int | None = None) -> tuple[bytes, bytes]:
    """Returns the key range of the sessions of an inode, or of one client on it."""
    if client is None:
        return rows_of(b"S", number)
    first = _pack(b"S", number) + client.to_bytes(8, "big")
    return first, _pack(b"S", number) + (client + 1).to_bytes(8, "big")


def orphan_key(number: int) -> bytes:
    return _pack(b"O", number)


def client_key(client: int) -> bytes:
    return _pack(b"C", client)


def number_in(key: bytes) -> int:
    """Returns the number that follows a one-byte prefix."""
    return int.from_bytes(key[1:9], "big")
