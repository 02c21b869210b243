"""The client's engine"""

from collections.abc import Callable, Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer

import fireflyer._native.fs3


ANY_NODE: int = 4294967295

class Outcome(enum.IntEnum):
    """Outcome of a piece; numbers below 16 are those of Status."""

    OK = 0

    STALE_ROUTING = 1

    CORRUPT = 4

    INVALID = 8

    MISMATCH = 16
    """The received bytes do not match their CRCs."""

    LOST = 17
    """The connection broke; a write may have been done."""

    LATE = 18
    """No answer before the deadline; a write may have been done."""

    UNREACHABLE = 19
    """No connection; not done."""

    NO_ROUTE = 20
    """No target serves that chain; not done."""

    NO_SPACE = 5

    IO_ERROR = 6

    DUPLICATE = 2

    DIVERGED = 3

    OPEN = 32

class FileMap:
    """
    Chains of a file's chunks: chunk i is on chains[i % len(chains)]. Immutable.
    """

    def __init__(self, inode: int, chunk_size: int, chains: Sequence[int]) -> None: ...

    @property
    def chains(self) -> list[int]: ...

class Pieces:
    """
    Pieces of chunks, and the outcome of each. Only one thread at a time may use them.
    """

    def __len__(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Bytes of all pieces together."""

    def failures(self) -> list[tuple[int, int, int, int]]:
        """(piece, outcome, chain, node asked) of each piece that is not OK."""

    def again(self, piece: int, node: int = 4294967295) -> None:
        """
        Makes the next call retry this piece. A read is retried at this node, if it serves the chain.
        """

    def chunk(self, piece: int) -> tuple[int, int]:
        """(inode, index) of a piece."""

    @property
    def holes(self) -> list[int]:
        """
        Inodes of files in which a requested byte belongs to no chunk (zeros in memory). Valid once all is read.
        """

    def found(self) -> list[tuple[int, int, int]]:
        """
        Answers to the queries of a batch made by of_chains: (index of the last chunk, number of chunks in the row that ends there, bytes of the last chunk). The indexes in a row are len(chains) apart. 0 chunks in the row: there is no chunk.
        """

class Batch(Pieces):
    """Pieces with the memory that they fill or write."""

    def __init__(self, files: Sequence[FileMap], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order='C', device='cpu', writable=False)]) -> None:
        """
        rows: int64[n, 4] of (index of the file, offset, bytes, address). The memory must stay alive; ranges that are written must not overlap.
        """

    @staticmethod
    def of_buffers(files: Sequence[FileMap], ends: Sequence[int], requests: Sequence[tuple[int, int, Buffer]]) -> Batch:
        """
        requests: (index of the file, offset, contiguous memory), kept by the batch. ends: length of each file, beyond which nothing is read; empty for writes.
        """

    @property
    def counts(self) -> list[int]:
        """Bytes of each request or row."""

    def sums(self, starts: Sequence[int]) -> list[int]:
        """
        CRC32C of each request or row, which continues its value in `starts`. Combines the CRCs with which the bytes were checked. Valid once all is read.
        """

    @staticmethod
    def of_chunks(file: FileMap, kind: fireflyer._native.fs3.Kind, indexes: Sequence[int], length: int = 0) -> Batch:
        """
        Makes a batch with the same change of each chunk; `length`: the chunk's new length.
        """

    @staticmethod
    def of_chains(file: FileMap, asks: Sequence[tuple[int, int]]) -> Batch:
        """
        Makes a query for each (position of a chain in the file's order, index): for the last chunk up to the index on that chain, and the number of chunks in the row that ends there.
        """

    @staticmethod
    def joined(batches: Sequence[Batch]) -> Batch:
        """Joins the pieces of batches that move no bytes, in order."""

class Engine:
    """The client's data path; docs/internals/fs3-service.md. Any thread."""

    def __init__(self, client: int, connect: Callable[[int, float], int], lanes: int = 8, senders: int = 2, connect_s: float = 1.0, local: bool = True) -> None:
        """
        connect(node, seconds) returns the descriptor of a connected and authenticated socket, which the engine then owns, or raises PeerLost or DeadlineExceeded. local: over a Unix socket, read chunks from the node's files.
        """

    def routing(self, chains: Sequence[tuple[int, int, Sequence[int]]], local: int = 4294967295) -> None:
        """
        chains: (chain, version, nodes of the serving targets, head first). local: the node on this machine.
        """

    def read(self, batch: Pieces, seconds: float) -> int:
        """Reads the open pieces; returns how many pieces are not OK."""

    def write(self, batch: Pieces, seconds: float) -> int:
        """
        Writes the open pieces; returns how many are not OK. A piece that was tried keeps its tag, so that the write is done once.
        """

    def query_last(self, batch: Pieces, seconds: float) -> int:
        """Sends the open queries; returns how many pieces are not OK."""

    def statistics(self) -> dict[str, int]:
        """
        Counters: read_bytes, local_bytes (part of read_bytes: from files of this machine), written_bytes, frames, mismatches, connections, held (large reads whose answers waited for a permit), senders and most_senders (permits in use: now, and most at a time).
        """
