"""
The CRAQ replica of a target (docs/internals/fs3-chain.md): step(event) -> actions.
"""

from collections.abc import Sequence
import enum
from typing import overload

import fireflyer._native.fs3


class State(enum.Enum):
    """State of a chain's member. Members are ordered by state."""

    serving = 0

    recovering = 1

    lastsrv = 2

    syncing = 3

    waiting = 4

    offline = 5

class Local(enum.Enum):
    """State that a target reports of itself."""

    online = 0

    uptodate = 1

    faulty = 2

class Member:
    def __init__(self, target: int, state: State, incarnation: int = 0) -> None: ...

    @property
    def target(self) -> int: ...

    @property
    def state(self) -> State: ...

    @property
    def incarnation(self) -> int: ...

class Entry:
    """State of a chunk in an index or a page; version 0: none."""

    def __init__(self, chunk: fireflyer._native.fs3.ChunkId, committed: int = 0, length: int = 0, crc: int = 0, pending: int = 0, removes: bool = False, pending_crc: int = 0) -> None: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def committed(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def crc(self) -> int: ...

    @property
    def pending(self) -> int: ...

    @property
    def removes(self) -> bool: ...

class Pending:
    """A pending version; `length`: the chunk's length in that version."""

    def __init__(self, chunk: fireflyer._native.fs3.ChunkId, version: int, length: int, removes: bool, tag: fireflyer._native.fs3.Tag = ...) -> None: ...

class Tagged:
    """The newest write of a channel; version 0: the write did not happen."""

    def __init__(self, tag: fireflyer._native.fs3.Tag, chunk: fireflyer._native.fs3.ChunkId, version: int) -> None: ...

    @property
    def tag(self) -> fireflyer._native.fs3.Tag: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

class Lookup:
    """A replica's queries to its target's store."""

class ObjectLookup(Lookup):
    """
    Queries an object with entry(chunk) -> Entry, page(after, limit) -> list[Entry], tag(client, channel) -> Tagged | None, floor() -> int, complete() -> bool and pendings() -> list[Pending].
    """

    def __init__(self, store: object) -> None: ...

class MapStore(Lookup):
    """A store whose chunks hold one number each; for tests."""

    def __init__(self) -> None: ...

    def apply(self, action: Apply, written: int = 0, bad: bool = False) -> list[Applied]:
        """Returns an Applied if refused, else []; sync() then has the outcome."""

    def commit(self, action: Commit) -> None: ...

    def drop(self, action: Drop) -> None: ...

    def mark(self) -> None: ...

    def conclude(self, action: Conclude, tags: Sequence[Tagged]) -> None: ...

    def sync(self) -> list[Applied]:
        """Makes all changes durable; returns their outcomes."""

    def entry(self, chunk: fireflyer._native.fs3.ChunkId) -> Entry: ...

    def tags(self, pending_as_they_are: bool) -> list[Tagged]: ...

class Replica:
    """
    Replica of one target in its chain. It handles no bytes: payloads are numbers of the caller.
    """

    def __init__(self, target: int, incarnation: int, lookup: Lookup, page: int = 256, window: int = 8) -> None: ...

    @overload
    def step(self, event: Applied) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Update) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Answer) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: ClientWrite) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Read) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: SendFailed) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Retry) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Damaged) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Lease) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Routing) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: PageAsk) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Page) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: SyncDone) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Fetch) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Fetched) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: TagsAsk) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @overload
    def step(self, event: Tags) -> list[Apply | Commit | Drop | Mark | Conclude | Send | Reply | ServeRead | Pause | LocalState | Release | Unrepairable]: ...

    @property
    def target(self) -> int: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def local(self) -> LocalState:
        """The last LocalState."""

    @property
    def role(self) -> State:
        """State in the chain; offline if the replica must not act in it."""

    @property
    def busy_chunks(self) -> int:
        """Number of chunks with jobs, pending versions or waiting reads."""

    @property
    def outstanding(self) -> int:
        """Number of awaited answers to Sends, Applies and Drops."""

class Apply:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def base(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def kind(self) -> fireflyer._native.fs3.Kind: ...

    @property
    def committed(self) -> bool: ...

    @property
    def any_base(self) -> bool: ...

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def tag(self) -> fireflyer._native.fs3.Tag: ...

    @property
    def payload(self) -> int: ...

class Commit:
    def __repr__(self) -> str: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

class Drop:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

class Mark:
    def __repr__(self) -> str: ...

class Conclude:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def floor(self) -> int: ...

    @property
    def payload(self) -> int: ...

class Send:
    def __repr__(self) -> str: ...

    @property
    def to(self) -> int: ...

    @property
    def message(self) -> Update | Answer | PageAsk | Page | SyncDone | Fetch | Fetched | TagsAsk | Tags:
        """A copy of the message, which is an event of the receiver."""

    @property
    def as_is(self) -> bool: ...

class Reply:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def status(self) -> fireflyer._native.fs3.Status: ...

    @property
    def version(self) -> int: ...

    @property
    def length(self) -> int: ...

class ServeRead:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

class Pause:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

class LocalState:
    def __repr__(self) -> str: ...

    @property
    def state(self) -> Local: ...

    @property
    def version(self) -> int: ...

class Release:
    def __repr__(self) -> str: ...

    @property
    def payload(self) -> int: ...

class Unrepairable:
    def __repr__(self) -> str: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

class Applied:
    def __init__(self, op: int, status: fireflyer._native.fs3.Status = fireflyer._native.fs3.Status.ok, length: int = 0) -> None: ...

    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def status(self) -> fireflyer._native.fs3.Status: ...

    @property
    def length(self) -> int: ...

class Update:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def settled(self) -> int: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def base(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def kind(self) -> fireflyer._native.fs3.Kind: ...

    @property
    def offset(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def tag(self) -> fireflyer._native.fs3.Tag: ...

    @property
    def payload(self) -> int: ...

    @payload.setter
    def payload(self, arg: int, /) -> None: ...

    @property
    def forget(self) -> bool: ...

class Answer:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def status(self) -> fireflyer._native.fs3.Status: ...

class ClientWrite:
    def __init__(self, op: int, chain_version: int, chunk: fireflyer._native.fs3.ChunkId, kind: fireflyer._native.fs3.Kind, offset: int = 0, length: int = 0, tag: fireflyer._native.fs3.Tag = ..., payload: int = 0) -> None: ...

    def __repr__(self) -> str: ...

class Read:
    def __init__(self, op: int, chain_version: int, chunk: fireflyer._native.fs3.ChunkId, allow_uncommitted: bool = False) -> None: ...

    def __repr__(self) -> str: ...

class SendFailed:
    def __init__(self, op: int, status: fireflyer._native.fs3.Status = fireflyer._native.fs3.Status.io_error) -> None: ...

    def __repr__(self) -> str: ...

class Retry:
    def __init__(self, op: int) -> None: ...

    def __repr__(self) -> str: ...

class Damaged:
    def __init__(self, chunk: fireflyer._native.fs3.ChunkId) -> None: ...

    def __repr__(self) -> str: ...

class Lease:
    def __init__(self, runs: bool, version: int = 0) -> None: ...

    def __repr__(self) -> str: ...

class Routing:
    def __init__(self, version: int, members: Sequence[Member]) -> None: ...

    def __repr__(self) -> str: ...

class PageAsk:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def after(self) -> fireflyer._native.fs3.ChunkId: ...

class Page:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def entries(self) -> list[Entry]: ...

    @property
    def more(self) -> bool: ...

    @property
    def floor(self) -> int: ...

class SyncDone:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def floor(self) -> int: ...

    @property
    def payload(self) -> int: ...

    @payload.setter
    def payload(self, arg: int, /) -> None: ...

class Fetch:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

    @property
    def as_is(self) -> bool: ...

class Fetched:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def chunk(self) -> fireflyer._native.fs3.ChunkId: ...

    @property
    def version(self) -> int: ...

    @property
    def status(self) -> fireflyer._native.fs3.Status: ...

    @status.setter
    def status(self, arg: fireflyer._native.fs3.Status, /) -> None: ...

    @property
    def payload(self) -> int: ...

    @payload.setter
    def payload(self, arg: int, /) -> None: ...

class TagsAsk:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

class Tags:
    def __repr__(self) -> str: ...

    @property
    def op(self) -> int: ...

    @property
    def from_target(self) -> int: ...

    @property
    def chain_version(self) -> int: ...

    @property
    def floor(self) -> int: ...

    @property
    def payload(self) -> int: ...

    @payload.setter
    def payload(self, arg: int, /) -> None: ...
