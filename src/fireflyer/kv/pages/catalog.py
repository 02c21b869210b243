"""Catalog of a cache in one process: the known segments, and an index of their pages.

Thread contract: one thread at a time calls `refresh`, `adopt` and `drop`. `lock` guards the index
and is not held during storage operations.
"""

import threading
from collections.abc import Sequence

import msgspec

from fireflyer._native.kv import PageIndex
from fireflyer.errors import Corrupted, StorageError
from fireflyer.kv.pages import layout
from fireflyer.kv.pages.layout import SEGMENTS, Head, Page
from fireflyer.storage import Storage

_FIRST_READ = 64 << 10
_BATCH = 64


class Segment(msgspec.Struct):
    """Segment in the storage. `number`: its number in the index; None: its head is damaged."""

    name: str
    sequence: int
    size: int
    number: int | None


def read_heads(storage: Storage, names: Sequence[str]) -> list[Head | StorageError]:
    """Reads and verifies the heads of segments."""
    answers = storage.read_many([(f"{SEGMENTS}/{name}", 0, _FIRST_READ) for name in names])
    found: list[Head | StorageError] = []
    for name, answer in zip(names, answers, strict=True):
        try:
            if isinstance(answer, StorageError):
                raise answer
            if (size := layout.head_bytes(answer)) > len(answer):
                answer = storage.read(f"{SEGMENTS}/{name}", 0, size)
            found.append(layout.decode(name, answer))
        except StorageError as error:
            found.append(error)
    return found


class Catalog:
    """Index of all pages, and the segments that hold them."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.lock = threading.Lock()
        self.index = PageIndex()
        self.segments: dict[str, Segment] = {}
        """Segments by name. The lowest name is the oldest segment."""
        self.names: dict[int, str] = {}
        """Names of segments, by their number in the index."""
        self._salts: dict[bytes, int] = {}
        self._next = 0

    def refresh(self) -> None:
        """Adds new segments to the index, and drops removed segments.

        Raises:
            StorageError: the folder cannot be listed.
        """
        listed = [name for name in self.storage.list(SEGMENTS) if layout.sequence_of(name)]
        present = set(listed)
        for name in [name for name in self.segments if name not in present]:
            self.drop(name)
        unknown = [name for name in listed if name not in self.segments]
        for at in range(0, len(unknown), _BATCH):
            names = unknown[at : at + _BATCH]
            for name, head in zip(names, read_heads(self.storage, names), strict=True):
                if isinstance(head, Head):
                    self.adopt(name, head.entries, head.salts, head.size)
                elif isinstance(head, Corrupted):  # it uses space: eviction must find it
                    size = self.storage.size(f"{SEGMENTS}/{name}") or 0
                    self.segments[name] = self._segment(name, size, None)

    def adopt(self, name: str, entries: bytes, salts: Sequence[bytes], size: int) -> None:
        """Adds the pages of a segment to the index."""
        with self.lock:
            number = self._next
            self._next += 1
            numbers = [self._salts.setdefault(salt, len(self._salts)) for salt in salts]
            self.index.insert(number, entries, numbers)
            self.names[number] = name
        self.segments[name] = self._segment(name, size, number)

    def drop(self, name: str) -> None:
        """Removes a segment and its pages from the index."""
        number = self.segments.pop(name).number
        if number is not None:
            with self.lock:
                self.index.forget(number)
                del self.names[number]

    def total(self) -> int:
        """Returns the total bytes of all segments."""
        return sum(segment.size for segment in self.segments.values())

    def oldest(self) -> list[Segment]:
        return sorted(self.segments.values(), key=lambda each: (each.sequence, each.name))

    def next_sequence(self) -> int:
        return 1 + max((segment.sequence for segment in self.segments.values()), default=0)

    def usage(self) -> dict[bytes, int]:
        """Returns the total bytes of pages by salt."""
        with self.lock:
            found = {salt: self.index.bytes_of(number) for salt, number in self._salts.items()}
        return {salt: size for salt, size in found.items() if size}

    @staticmethod
    def _segment(name: str, size: int, number: int | None) -> Segment:
        return Segment(name, layout.sequence_of(name) or 0, size, number)


def entries_of(name: str, pages: Sequence[Page]) -> tuple[bytes, Head]:
    """Lays out pages in a segment; returns its head, encoded and decoded."""
    head = layout.encode(name, pages)
    return head, layout.decode(name, head)
