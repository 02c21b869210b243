import enum

from fireflyer._native.fs3 import (
    client as client,
    io as io,
    mount as mount,
    replica as replica,
    store as store
)


class Kind(enum.Enum):
    """Effect of a write on a chunk."""

    write = 0

    truncate = 1

    extend = 2

    remove = 3

    replace = 4

class Status(enum.Enum):
    """Outcome of a request."""

    ok = 0

    stale_routing = 1

    duplicate = 2

    diverged = 3

    corrupt = 4

    no_space = 5

    io_error = 6

    not_found = 7

    invalid = 8

class ChunkId:
    """
    Identifies a chunk. Ids are ordered by inode and index. Inode 0 has no chunks.
    """

    def __init__(self, inode: int, index: int = 0) -> None: ...

    @property
    def inode(self) -> int: ...

    @property
    def index(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __lt__(self, arg: ChunkId, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Tag:
    """
    Idempotency key of a client's write while the client may retry it; client 0: none.
    """

    def __init__(self, client: int = 0, channel: int = 0, seq: int = 0) -> None: ...

    @property
    def client(self) -> int: ...

    @property
    def channel(self) -> int: ...

    @property
    def seq(self) -> int: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __lt__(self, arg: Tag, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class StoreLookup(replica.Lookup):
    """A replica's queries to a chunk store, which stays open."""

    def __init__(self, core: store.Core) -> None: ...
