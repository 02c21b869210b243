"""Native handles of a manifest's tables, and lookups that read missing blocks."""

from fireflyer._native.kv import BlockCache, Scan, Table, View
from fireflyer.errors import Corrupted, StorageError, Unavailable
from fireflyer.kv.core.manifest import Manifest, TableRef
from fireflyer.kv.core.operations import TABLES, Read, Steps

READ_AHEAD = 1 << 20
"""Bytes of neighbouring blocks per read of a scan or merge."""

Item = tuple[bytes, bytes]


class Gone(StorageError):
    """A table of the view was collected: read the current manifest and try again."""


class TableSet:
    """Handles of tables by name; a table that is still in use keeps its cached blocks."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._known: dict[str, Table] = {}

    def runs(self, manifest: Manifest) -> list[list[Table]]:
        """Returns the native runs of a manifest; drops the handles of other tables."""
        self._known = {
            ref.name: self._known.get(ref.name) or handle(ref, self._cache)
            for run in manifest.runs
            for ref in run
        }
        return [[self._known[ref.name] for ref in run] for run in manifest.runs]


def handle(ref: TableRef, cache: BlockCache) -> Table:
    return Table(ref.name, ref.first, ref.last, ref.index_offset, ref.index_bytes, cache)


def supply(table: Table, block: int, most: int = 0) -> Steps[None]:
    """Reads and verifies a range of a table that a view needs.

    Args:
        block: number of the first block; -1: the index of the table.
        most: maximum total bytes if missing blocks after `block` are read, too; 0: only `block`.

    Raises:
        Gone: the table does not exist.
        Corrupted: a checksum does not match.
    """
    offset, size = table.range(block, most)
    name = f"{TABLES}/{table.name}"
    data = yield Read(name, offset, size)
    if data is None:
        raise Gone(f"table {table.name} does not exist any more")
    try:
        table.supply(offset, data)
    except Corrupted as error:
        raise Corrupted(f"{name}, bytes {offset} to {offset + size}: {error}") from error


def get(view: View, key: bytes, now: int) -> Steps[bytes | None]:
    """Looks up a key."""
    while isinstance(found := view.get(key, now), tuple):
        yield from supply(*found)
    return found


def scan(walk: Scan, now: int, most: int, ahead: int = READ_AHEAD) -> Steps[list[Item]]:
    """Reads at most `most` pairs, at least one; [] at the end."""
    while True:
        items, state = walk.next(now, most, 4 << 20)
        if isinstance(state, tuple):
            yield from supply(*state, ahead)
        if items or state is True:
            return items


def collected_too_fast(action: str) -> Unavailable:
    return Unavailable(
        f"cannot {action}: tables are collected faster than they are read; try again"
    )
