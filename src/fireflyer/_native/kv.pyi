"""Sorted tables, memtables and the index of the page cache. No I/O."""

from collections.abc import Sequence


PAGE_UNIT: int = 4096

class PageIndex:
    """Index of a page cache: 16-byte digest of a key -> place of its page."""

    def __init__(self) -> None: ...

    def insert(self, segment: int, entries: bytes, salts: Sequence[int]) -> None:
        """
        Adds the pages of a new segment. A digest that is already known moves to that segment. `salts[i]`: number of the salt of entries that have salt index i.
        """

    def leading(self, digests: bytes, start: int = 0) -> int:
        """
        Index of the first digest from `start` on that is unknown; the number of digests if all are known.
        """

    def find(self, digests: bytes, hit: bool) -> list[tuple[int, int, int, int, int] | None]:
        """
        Returns (segment, offset, bytes, CRC32C, hits) of each digest, or None. `hit`: count a use.
        """

    def remove(self, digest: bytes, segment: int) -> None:
        """Removes a page if it lies in this segment."""

    def forget(self, segment: int) -> None:
        """Removes a segment and its pages."""

    def bytes_of(self, salt: int) -> int:
        """Bytes of the pages with this salt."""

    def __len__(self) -> int: ...

    @property
    def memory(self) -> int:
        """Bytes of the table."""

MOST_KEY: int = 65536

MOST_VALUE: int = 67108864

TRAILER_BYTES: int = 28

class Memtable:
    """Recent operations in the order of their keys."""

    def __init__(self) -> None: ...

    def apply(self, frame: bytes, offset: int, sequence: int) -> int:
        """
        Adds the operations of a log frame from `offset` on; returns their number. Raises Corrupted.
        """

    def __len__(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Approximate memory in bytes."""

class BlockCache:
    """Blocks of tables in memory, at most `capacity` bytes."""

    def __init__(self, capacity: int) -> None: ...

    @property
    def bytes(self) -> int: ...

class Table:
    """Sorted table, whose file the caller reads."""

    def __init__(self, name: str, first: bytes, last: bytes, index_offset: int, index_bytes: int, cache: BlockCache) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def blocks(self) -> int:
        """Number of blocks; 0 before the index is supplied."""

    def range(self, block: int, most: int = 0) -> tuple[int, int]:
        """
        (offset, bytes) of the index for block -1; else of this block and the missing ones after it, at most `most` bytes.
        """

    def supply(self, offset: int, data: bytes) -> None:
        """Supplies the bytes of a range. Raises Corrupted."""

class View:
    """Memtables and runs of tables, newest first, up to a sequence number."""

    def __init__(self, memtables: Sequence[Memtable], runs: Sequence[Sequence[Table]], sequence: int) -> None: ...

    @property
    def sequence(self) -> int: ...

    @sequence.setter
    def sequence(self, arg: int, /) -> None: ...

    def copy(self) -> View: ...

    def get(self, key: bytes, now: int) -> bytes | tuple[Table, int] | None:
        """
        Returns the value, None, or the (table, block) to supply before another try. `now`: ms since 1970.
        """

class Scan:
    """Walk through the visible records of a view, in the order of keys."""

    def __init__(self, view: View, start: bytes, end: bytes | None) -> None: ...

    def next(self, now: int, items: int, most: int) -> tuple[list[tuple[bytes, bytes]], tuple[Table, int] | bool]:
        """
        Returns at most `items` pairs of about `most` bytes, and a second value: the (table, block) to supply before the next call, True at the end, else False.
        """

class Compaction:
    """Writes a view as tables."""

    def __init__(self, view: View, target: int, bottom: bool, dead_before: int) -> None:
        """
        `bottom`: leave out deletions, and records that expired before `dead_before` (ms).
        """

    def step(self) -> bool | tuple[Table, int]:
        """
        Returns the (table, block) to supply; or, when a table is ready for `take`, whether it is the last one.
        """

    def take(self) -> tuple[bytes, bytes, bytes, int, int, int] | None:
        """
        (bytes, first key, last key, offset of the index, its bytes, records), or None without records.
        """
