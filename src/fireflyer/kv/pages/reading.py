"""Verified reads of pages into the caller's memory, several at once."""

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import msgspec
import numpy as np

from fireflyer._native import crc32c
from fireflyer.errors import StorageError
from fireflyer.kv.pages.layout import SEGMENTS
from fireflyer.storage import Storage, read_summed

_INLINE = 1 << 20
"""Bytes that the calling thread reads by itself."""


class Outcome(Enum):
    """Result of a read."""

    GOOD = 1
    GONE = 2
    """The segment cannot be read; it may have been evicted."""
    DAMAGED = 3


class Wanted(msgspec.Struct, frozen=True):
    """Page to read. `memory`: writable bytes of its size."""

    digest: bytes
    segment: str
    offset: int
    crc: int
    memory: memoryview


class PageReader:
    """Reads pages on a few threads. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._threads = min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, "kv-pages")

    def read(self, pages: Sequence[Wanted]) -> list[Outcome]:
        """Fills the memory of pages and verifies them; memory of a failed page is undefined."""
        if len(pages) < 2 or sum(len(page.memory) for page in pages) <= _INLINE:
            return self._group(pages)
        size = -(-len(pages) // (2 * self._threads))
        groups = [pages[at : at + size] for at in range(0, len(pages), size)]
        return [outcome for each in self._pool.map(self._group, groups) for outcome in each]

    def _group(self, pages: Sequence[Wanted]) -> list[Outcome]:
        try:
            crcs = self._fill(pages)
        except StorageError:
            if len(pages) > 1:  # find out which
                return [self._group([page])[0] for page in pages]
            return [self._reason(pages[0])]
        return [
            Outcome.GOOD if crc == page.crc else Outcome.DAMAGED
            for page, crc in zip(pages, crcs, strict=True)
        ]

    def _fill(self, pages: Sequence[Wanted]) -> list[int]:
        """Fills the memory of pages; returns the CRC32C of each with its digest."""
        names = {page.segment: 0 for page in pages}
        names = {name: index for index, name in enumerate(names)}
        rows = np.empty((len(pages), 4), np.int64)
        for row, page in zip(rows, pages, strict=True):
            address = ctypes.addressof(ctypes.c_char.from_buffer(page.memory))
            row[:] = names[page.segment], page.offset, len(page.memory), address
        starts = [crc32c(page.digest) for page in pages]
        files = [f"{SEGMENTS}/{name}" for name in names]
        return read_summed(self._storage, files, rows, starts)

    def _reason(self, page: Wanted) -> Outcome:
        """Returns why a page could not be read: a file that ends too early is damaged."""
        try:
            size = self._storage.size(f"{SEGMENTS}/{page.segment}")
        except StorageError:
            return Outcome.GONE
        short = size is not None and size < page.offset + len(page.memory)
        return Outcome.DAMAGED if short else Outcome.GONE

    def close(self) -> None:
        self._pool.shutdown()
