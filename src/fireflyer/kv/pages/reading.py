"""Verified, parallel reads of pages into the caller's memory."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

import msgspec
import numpy as np

from fireflyer._native import crc32c
from fireflyer.errors import Corrupted, StorageError, Unavailable
from fireflyer.kv.pages.layout import SEGMENTS
from fireflyer.storage import Storage, read_summed, reads_summed

_THREADS = 4
"""Number of threads that read from a storage without parallel reads."""


class Outcome(Enum):
    """Result of a read."""

    GOOD = 1
    GONE = 2
    """The segment cannot be read; it may have been evicted."""
    DAMAGED = 3
    """The segment ends too early, no replica has the bytes intact, or the bytes are wrong."""
    AWAY = 4
    """The storage does not answer."""


class Wanted(msgspec.Struct, frozen=True):
    """Page to read. `memory`: writable memory of the page's size."""

    digest: bytes
    segment: str
    offset: int
    crc: int
    memory: memoryview


class PageReader:
    """Reader that reads all pages of a call in parallel. Thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._pool = None if reads_summed(storage) else ThreadPoolExecutor(_THREADS, "kv-pages")

    def read(self, pages: Sequence[Wanted]) -> list[Outcome]:
        """Reads and verifies pages; the memory of a failed page is undefined."""
        if self._pool is None:
            return self._group(pages)
        return [
            found for each in self._pool.map(self._group, [[p] for p in pages]) for found in each
        ]

    def _group(self, pages: Sequence[Wanted]) -> list[Outcome]:
        try:
            crcs = self._fill(pages)
        except Unavailable:  # the deadline has passed, so no page is retried
            return [Outcome.AWAY] * len(pages)
        except StorageError as error:
            if len(pages) > 1:  # find the failed pages
                return [self._group([page])[0] for page in pages]
            return [Outcome.DAMAGED if isinstance(error, Corrupted) else Outcome.GONE]
        return [
            Outcome.GOOD if crc == page.crc else Outcome.DAMAGED
            for page, crc in zip(pages, crcs, strict=True)
        ]

    def _fill(self, pages: Sequence[Wanted]) -> list[int]:
        """Reads pages; returns the CRC32C over the digest and bytes of each."""
        names = {page.segment: 0 for page in pages}
        names = {name: index for index, name in enumerate(names)}
        rows = np.empty((len(pages), 4), np.int64)
        for row, page in zip(rows, pages, strict=True):
            address = ctypes.addressof(ctypes.c_char.from_buffer(page.memory))
            row[:] = names[page.segment], page.offset, len(page.memory), address
        starts = [crc32c(page.digest) for page in pages]
        files = [f"{SEGMENTS}/{name}" for name in names]
        return read_summed(self._storage, files, rows, starts)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
