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
    """What became of a piece; numbers below 16 are the service's."""

    OK = 0

    STALE_ROUTING = 1

    CORRUPT = 4

    INVALID = 8

    MISMATCH = 16
    """The bytes that came do not fit their CRCs."""

    LOST = 17
    """The connection broke; a write was done or not."""

    LATE = 18
    """No answer in time; likewise."""

    UNREACHABLE = 19
    """No connection; not done."""

    NO_ROUTE = 20
    """Nobody serves that chain; not done."""

    NO_SPACE = 5

    IO_ERROR = 6

    DUPLICATE = 2

    DIVERGED = 3

    OPEN = 32

class FileMap:
    """
    Where the chunks of a file are: chunk i on chains[i % len(chains)]. Immutable.
    """

    def __init__(self, inode: int, chunk_size: int, chains: Sequence[int]) -> None: ...

    @property
    def chains(self) -> list[int]: ...

class Pieces:
    """Pieces of chunks, and the outcome of each. One thread at a time."""

    def __len__(self) -> int: ...

    @property
    def bytes(self) -> int:
        """Of all pieces together."""

    def failures(self) -> list[tuple[int, int, int, int]]:
        """(piece, outcome, chain, node asked) of those that are not OK."""

    def again(self, piece: int, node: int = 4294967295) -> None:
        """
        The next call tries it again; a read: at this node, if it serves the chain.
        """

    def chunk(self, piece: int) -> tuple[int, int]:
        """(inode, index) of a piece."""

    @property
    def holes(self) -> list[int]:
        """
        Inodes of the files, once all is read, of which it asked for bytes that no chunk has: zeros in memory.
        """

    def found(self) -> list[tuple[int, int, int]]:
        """
        Of answered questions: (index of the last chunk, chunks in a row from it downwards, as many apart as the file has chains, bytes of that chunk); a row of 0: there is none.
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
        requests: (index of the file, offset, contiguous memory), kept by the batch. ends: of each file, beyond which nothing is read; empty for a batch to write.
        """

    @property
    def counts(self) -> list[int]:
        """Bytes of each request or row."""

    def sums(self, starts: Sequence[int]) -> list[int]:
        """
        Once all is read: the CRC32C of each request or row, continuing its start; joined from the CRCs that the bytes were compared with.
        """

    @staticmethod
    def of_chunks(file: FileMap, kind: fireflyer._native.fs3.Kind, indexes: Sequence[int], length: int = 0) -> Batch:
        """The same for each of these chunks; `length`: of a chunk then."""

    @staticmethod
    def of_chains(file: FileMap, asks: Sequence[tuple[int, int]]) -> Batch:
        """
        Questions of (which chain in the file's order, index): for the last chunk up to there on that chain, and how many stand below it in a row.
        """

    @staticmethod
    def joined(batches: Sequence[Batch]) -> Batch:
        """The pieces of batches that move no bytes, one batch's after another's."""

class Engine:
    """The way to the bytes; docs/internals/fs3-service.md. Any thread."""

    def __init__(self, client: int, connect: Callable[[int, float], int], lanes: int = 8, senders: int = 2, connect_s: float = 1.0, local: bool = True) -> None:
        """
        connect(node, seconds) gives the descriptor of a connected and proved socket, which becomes the engine's, or raises PeerLost or DeadlineExceeded. local: over a Unix socket chunks are read from the node's files.
        """

    def routing(self, chains: Sequence[tuple[int, int, Sequence[int]]], local: int = 4294967295) -> None:
        """
        chains: (chain, version, nodes of the serving targets, head first). local: the node on this machine.
        """

    def read(self, batch: Pieces, seconds: float) -> int:
        """Tries what is open; returns how many pieces are not OK."""

    def write(self, batch: Pieces, seconds: float) -> int:
        """Likewise. What was tried keeps its tag, so that it is done once."""

    def query_last(self, batch: Pieces, seconds: float) -> int:
        """Likewise."""

    def statistics(self) -> dict[str, int]:
        """
        Counters: read_bytes, local_bytes (of those: read from files of this machine), written_bytes, frames, mismatches, connections; held (large reads that waited for their turn to be sent); senders, most_senders (that may send much, now and at a time).
        """
