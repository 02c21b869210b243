"""Batched reads and writes of file bytes; removal of chunks."""

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fireflyer._native.fs3 import Kind
from fireflyer._native.fs3.client import Batch, FileMap, Pieces
from fireflyer.fs3.client.cluster import Cluster
from fireflyer.fs3.client.metadata import natural
from fireflyer.fs3.client.retry import Retry
from fireflyer.fs3.client.settings import Settings
from fireflyer.fs3.client.walk import LAST_INDEX, Answers, Asks, walk
from fireflyer.fs3.layout import Layout
from fireflyer.fs3.meta.inode import Inode

Buffer = Any
"""Contiguous memory: an object with the buffer protocol or a torch tensor on the CPU."""


class Source(NamedTuple):
    """File to read from: its chunk map, and its length `end` in bytes."""

    map: FileMap
    end: int


class ReadResult(NamedTuple):
    """Result of a read.

    Attributes:
        counts: number of bytes read for each request; less than requested only at a file's end.
        holes: inodes of the files in which the read found holes: ranges without a chunk.
    """

    counts: list[int]
    holes: list[int]


class Data:
    """Reads, writes and removes the bytes of files on storage nodes. Thread-safe."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster, self._settings = cluster, settings

    def map_of(self, inode: Inode) -> FileMap:
        """Returns the map from a file's chunks to chains; raises StorageError."""
        return self._cluster.file_map(inode.number, layout_of(inode))

    def read(
        self,
        sources: Sequence[Source],
        requests: Sequence[tuple[int, int, Buffer]],
        what: str,
        deadline_s: float | None = None,
    ) -> ReadResult:
        """Reads from files into memory; holes are read as zeros.

        Args:
            requests: (index of the source, offset, writable memory).

        Raises:
            Corrupted, StorageError, DeadlineExceeded: the read failed, and the contents of all
                memory are undefined.
        """
        requests = [(source, offset, memory_of(buffer)) for source, offset, buffer in requests]
        maps, ends = [source.map for source in sources], [source.end for source in sources]
        try:
            batch = Batch.of_buffers(maps, ends, requests)
        except BufferError:
            raise TypeError("a read-write bytes-like object is required") from None
        except TypeError:  # offsets are checked only now: a batch may have thousands of requests
            for _, offset, _ in requests:
                natural(offset, "offset")
            raise
        if len(batch):
            retry = Retry(self._cluster, self._settings, f"reading {what}", writes=False)
            retry.run(self._cluster.engine.read, batch, batch.bytes, deadline_s)
        return ReadResult(batch.counts, batch.holes if len(batch) else [])

    def read_rows(
        self, maps: Sequence[FileMap], rows: np.ndarray[Any, Any], what: str
    ) -> list[int]:
        """Reads like `read`, to addresses of memory that must stay valid until the call returns.

        Args:
            rows: int64[n, 4] of (file, offset, bytes, address).

        Returns:
            Holes, as in `ReadResult`.
        """
        return self._read_rows(maps, rows, what).holes

    def read_summed(
        self,
        maps: Sequence[FileMap],
        rows: np.ndarray[Any, Any],
        starts: Sequence[int],
        what: str,
    ) -> tuple[list[int], list[int]]:
        """Reads like `read_rows`; returns the holes, and each row's CRC32C from its initial value."""
        batch = self._read_rows(maps, rows, what)
        return batch.holes, batch.sums(starts)

    def _read_rows(self, maps: Sequence[FileMap], rows: np.ndarray[Any, Any], what: str) -> Batch:
        batch = Batch(maps, rows)
        retry = Retry(self._cluster, self._settings, f"reading {what}", writes=False)
        retry.run(self._cluster.engine.read, batch, batch.bytes, None)
        return batch

    def write(
        self,
        maps: Sequence[FileMap],
        requests: Sequence[tuple[int, int, Buffer]],
        what: str,
        deadline_s: float | None = None,
    ) -> int:
        """Writes memory to files, durably on all replicas. Ranges must not overlap.

        Returns:
            Bytes written.

        Raises:
            NoSpace, StorageError, DeadlineExceeded: any part of the data may have been written.
        """
        requests = [(file, offset, memory_of(buffer)) for file, offset, buffer in requests]
        batch = Batch.of_buffers(maps, [], requests)
        size = batch.bytes
        if len(batch):
            self._write(batch, size, f"writing {what}", deadline_s)
        return size

    def finish(self, pieces: Pieces, what: str, *, writes: bool) -> None:
        """Retries the failed pieces of an engine's attempt; raises the errors of `read` or `write`."""
        engine = self._cluster.engine
        retry = Retry(self._cluster, self._settings, what, writes=writes)
        retry.run(engine.write if writes else engine.read, pieces, pieces.bytes, None)

    def cut(
        self, inode: Inode, length: int, what: str, go_on: Callable[[int], bool] = lambda _: True
    ) -> bool:
        """Removes the bytes beyond `length` from all chains that may hold chunks of the file.

        Args:
            go_on: callback that gets the number of chunks just removed; it returns False to pause
                the removal.

        Returns:
            True if nothing is left beyond `length`.
        """
        files = self.map_of(inode)
        first, within = divmod(length, layout_of(inode).chunk_size)
        if within:
            if any(True for _ in self.existing_chunks(inode, what, first, first)):
                edge = Batch.of_chunks(files, Kind.truncate, [first], within)
                self._write(edge, 0, f"cutting {what}", None)
            first += 1
        gone = False
        while not gone:  # also removes chunks that other clients write meanwhile
            gone = True
            for indexes in self.existing_chunks(inode, what, first):
                gone = False
                for begin in range(0, len(indexes), REMOVED_AT_ONCE):
                    some = indexes[begin : begin + REMOVED_AT_ONCE].tolist()
                    removal = Batch.of_chunks(files, Kind.remove, some)
                    self._write(removal, 0, f"removing chunks of {what}", None)
                    if not go_on(len(some)):
                        return False
        return True

    def serves(self, inode: Inode) -> bool:
        """Returns whether each chain of the file's chunks is known to have a serving target."""
        chains = set(self.map_of(inode).chains[: inode.chains])
        return all(self._cluster.serving(chain) for chain in chains)

    def empty_small(self, inodes: Sequence[Inode], what: str) -> list[bool]:
        """Removes all chunks of several small files with one query and one removal.

        Skips files with more than REMOVED_AT_ONCE chunks or with holes; use `cut` for them.

        Returns:
            True for each file that had no chunks before this call.
        """
        maps = [self.map_of(inode) for inode in inodes]
        asks = [[(chain, LAST_INDEX) for chain in range(inode.chains)] for inode in inodes]
        batch = Batch.joined([Batch.of_chains(*each) for each in zip(maps, asks, strict=True)])
        retry = Retry(self._cluster, self._settings, f"looking for chunks of {what}", writes=False)
        if len(batch):
            retry.run(self._cluster.engine.query_last, batch, 0, None)
        answers = iter(batch.found())
        removals, empty = [], []
        for inode, files, questions in zip(inodes, maps, asks, strict=True):
            rows = [row for row in itertools.islice(answers, len(questions)) if row[1]]
            empty.append(not rows)
            stride = layout_of(inode).stripe
            whole = all(index < row * stride for index, row, _ in rows)
            if rows and whole and sum(row for _, row, _ in rows) <= REMOVED_AT_ONCE:
                indexes = [at for last, _, _ in rows for at in range(last, -1, -stride)]
                removals.append(Batch.of_chunks(files, Kind.remove, indexes))
        if removals:
            self._write(Batch.joined(removals), 0, f"removing chunks of {what}", None)
        return empty

    def existing_chunks(
        self, inode: Inode, what: str, first: int = 0, last: int = LAST_INDEX
    ) -> Iterator[npt.NDArray[np.int64]]:
        """Yields the indexes of a file's existing chunks, from the last to the first, as `walk`
        does.

        Raises the errors of `read`.
        """
        files = self.map_of(inode)
        stripe = layout_of(inode).stripe
        return walk(lambda asks: self._query(files, asks, what), inode.chains, stripe, first, last)

    def length(self, inode: Inode, what: str) -> int:
        """Queries a file's chains; returns the end of its last chunk as the length in bytes. Raises
        the errors of `read`."""
        asks = [(chain, LAST_INDEX) for chain in range(inode.chains)]
        size = layout_of(inode).chunk_size
        found = self._query(self.map_of(inode), asks, what)
        return max((index * size + length for index, row, length in found if row), default=0)

    def _query(self, files: FileMap, asks: Asks, what: str) -> Answers:
        batch = Batch.of_chains(files, asks)
        retry = Retry(self._cluster, self._settings, f"looking for chunks of {what}", writes=False)
        retry.run(self._cluster.engine.query_last, batch, 0, None)
        return batch.found()

    def _write(self, batch: Batch, size: int, what: str, deadline_s: float | None) -> None:
        retry = Retry(self._cluster, self._settings, what, writes=True)
        retry.run(self._cluster.engine.write, batch, size, deadline_s)


REMOVED_AT_ONCE = 1024
"""Maximum number of chunks that one batch removes."""


@functools.lru_cache(maxsize=1024)
def _layout(table: int, version: int, chunk_size: int, stripe: int, seed: int) -> Layout:
    return Layout(table, version, chunk_size, stripe, seed)


def layout_of(inode: Inode) -> Layout:
    """Returns the layout of a file."""
    kept = inode.layout
    assert kept is not None
    return _layout(kept.table, kept.table_version, kept.chunk_size, kept.stripe, kept.seed)


def memory_of(buffer: Buffer) -> Buffer:
    """Returns a buffer unchanged, or the memory of a tensor. The caller must keep the tensor alive.

    Raises:
        ValueError: the tensor is not contiguous, or not in this machine's memory.
    """
    address = getattr(buffer, "data_ptr", None)
    if address is None:
        return buffer
    if not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise ValueError("a tensor must be contiguous and on the CPU")
    return (ctypes.c_ubyte * buffer.nbytes).from_address(address())
