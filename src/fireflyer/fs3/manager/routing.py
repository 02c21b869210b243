"""Routing: nodes, targets, chains and chain tables, with versions; and its rows in the store.

A `Routing` object holds the whole routing, or the part that changed after a version. Each entry has
a row in the metadata store. The row's key is `A`, a letter for the kind of the entry, and the
entry's numbers; the value is [version at which the entry changed, entry].
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from fireflyer.errors import Corrupted
from fireflyer.fs3.manager.chains import Chain

SLOTS = 256
"""Maximum number of targets of a node: target s of node n has the number n * 256 + s."""

TABLE = 1
"""Number of the chain table that new files use."""

PREFIX = b"A"
PRIMARY_KEY = b"Ap"
CLUSTER_KEY = b"Ai"
"""Key of the row with the number of the file system; the row holds no entry."""


class Node(msgspec.Struct, frozen=True, array_like=True):
    """Machine or process that holds targets.

    Attributes:
        name: name that the operator chose; a node keeps its number as long as it keeps its name.
        address: address of the node's data service.
        slots: number of the node's targets.
        local: machine and path of a socket for clients of that machine, or ""; see `fs3.same_node`.
        identity: identity of the node's folder, see `storage.identity`; "": unknown.
    """

    id: int
    name: str
    address: str
    slots: int
    local: str = ""
    identity: str = ""

    def targets(self) -> range:
        return range(self.id * SLOTS, self.id * SLOTS + self.slots)


class Table(msgspec.Struct, frozen=True, array_like=True):
    """Immutable list of chains from which files choose."""

    id: int
    version: int
    chains: tuple[int, ...]


Entry = Node | Chain | Table


class Routing(msgspec.Struct, frozen=True, array_like=True):
    """Whole routing (`since` 0), or the changes after version `since`.

    Attributes:
        question: growing number that a node's next heartbeat repeats, to prove that the heartbeat
            was sent after the question.
        scrub: newest scrub request, a growing number; 0: not sent.
    """

    since: int
    version: int
    nodes: tuple[Node, ...] = ()
    chains: tuple[Chain, ...] = ()
    tables: tuple[Table, ...] = ()
    question: int = 0
    scrub: int = 0


class Records:
    """All entries, each with the version at which it changed."""

    def __init__(self) -> None:
        self.version = 0
        self.nodes: dict[int, Node] = {}
        self.chains: dict[int, Chain] = {}
        self.tables: dict[tuple[int, int], Table] = {}
        self._stamps: dict[bytes, int] = {}

    @classmethod
    def load(cls, rows: Iterable[tuple[bytes, bytes]]) -> "Records":
        """Loads the rows of the metadata store that begin with PREFIX.

        Raises:
            Corrupted: a row cannot be read.
        """
        records = cls()
        for key, value in rows:
            kind = _KINDS.get(key[1:2])
            if kind is None:
                continue
            try:
                stamp, entry = msgspec.msgpack.decode(value, type=tuple[int, kind])  # type: ignore[valid-type]
            except (msgspec.DecodeError, ValueError) as error:
                raise Corrupted(f"the manager's row {key!r} cannot be read: {error}") from None
            records._put(entry, stamp)
        return records

    def rows(self, entries: Iterable[Entry], version: int) -> dict[bytes, bytes]:
        """Returns the rows that make `entries` part of the records at `version`."""
        return {key_of(entry): msgspec.msgpack.encode((version, entry)) for entry in entries}

    def apply(self, entries: Iterable[Entry], version: int) -> Routing:
        """Adds entries that are in the store; returns the routing to publish."""
        since = self.version
        for entry in entries:
            self._put(entry, version)
        return self.after(since)

    def after(self, since: int) -> Routing:
        """Returns the changes after a version; the whole routing if that version never existed."""
        if not 0 <= since <= self.version:
            since = 0
        if since == self.version:
            return Routing(since, since)

        def new(entry: Entry) -> bool:
            return self._stamps[key_of(entry)] > since

        return Routing(
            since,
            self.version,
            tuple(filter(new, self.nodes.values())),
            tuple(filter(new, self.chains.values())),
            tuple(filter(new, self.tables.values())),
        )

    def _put(self, entry: Entry, stamp: int) -> None:
        if isinstance(entry, Node):
            self.nodes[entry.id] = entry
        elif isinstance(entry, Chain):
            self.chains[entry.id] = entry
        else:
            self.tables[entry.id, entry.version] = entry
        self._stamps[key_of(entry)] = stamp
        self.version = max(self.version, stamp)


def key_of(entry: Entry) -> bytes:
    """Returns the key of an entry's row."""
    if isinstance(entry, Node):
        return PREFIX + b"n" + entry.id.to_bytes(4, "big")
    if isinstance(entry, Chain):
        return PREFIX + b"c" + entry.id.to_bytes(4, "big")
    return PREFIX + b"t" + entry.id.to_bytes(4, "big") + entry.version.to_bytes(4, "big")


_KINDS: dict[bytes, Any] = {b"n": Node, b"c": Chain, b"t": Table}


MOST_AHEAD = 64
"""Maximum number of parts that a view keeps while earlier parts are missing."""


class View:
    """Copy of the routing at a client or node, updated by parts in any order."""

    def __init__(self) -> None:
        self._ahead: list[Routing] = []
        self.version = 0
        self.question = 0
        self.scrub = 0
        self.nodes: dict[int, Node] = {}
        self.chains: dict[int, Chain] = {}
        self.tables: dict[tuple[int, int], Table] = {}

    def take(self, part: Routing) -> list[Routing]:
        """Adds a part; returns the parts that now take effect, in order.

        Returns no part if this part has no new entries, or if an earlier part is missing. In the
        second case this part is kept until the earlier part arrives. The caller may have to request
        the earlier part.
        """
        self.question = max(self.question, part.question)
        self.scrub = max(self.scrub, part.scrub)
        if part.version <= self.version:
            return []
        if part.since > self.version:
            self._ahead = [*self._ahead, part][-MOST_AHEAD:]
            return []
        self._add(part)
        taken, ahead = [part], sorted(self._ahead, key=lambda later: later.since)
        self._ahead = []
        for later in ahead:
            if later.since > self.version:
                self._ahead.append(later)
            elif later.version > self.version:
                self._add(later)
                taken.append(later)
        return taken

    def _add(self, part: Routing) -> None:
        self.chains.update((chain.id, chain) for chain in part.chains)
        self.nodes.update((node.id, node) for node in part.nodes)
        self.tables.update(((table.id, table.version), table) for table in part.tables)
        self.version = part.version
