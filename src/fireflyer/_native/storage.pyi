"""
Files at the speed of the disk: appending past the page cache, reading with checksums.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer


class Writer:
    """
    Writes one new file from its begin to its end, past the page cache where that is possible, with several requests under way, also between the calls. Errors are OSError; then only close().
    """

    def __init__(self, fd: int, size: int = 0) -> None:
        """
        `fd`: of an empty file, stays the caller's and must stay open until close(). `size`: the bytes to come, if known, so that a full disk is noticed here.
        """

    def append(self, data: Buffer) -> None:
        """
        Adds contiguous bytes, which must not change until finish(). Straight from their memory where it begins at a page and the bytes before are a multiple of 4096; else by a copy.
        """

    def finish(self) -> None:
        """
        All requests are over and the file has its length; fsync is the caller's.
        """

    def close(self) -> None:
        """Waits for requests that are under way and lets the buffers go."""

def advise_huge(address: int, bytes: int) -> None:
    """
    Asks for huge pages in fresh memory, so that filling it takes fewer page faults; a wish, never an error.
    """

def read_summed(paths: Sequence[str], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], starts: Sequence[int]) -> list[int]:
    """
    Reads ranges, int64[n, 4] of (index of the path, offset, bytes, address), on several threads; returns the CRC32C of each, continuing its start. The memory must stay alive. Raises Corrupted for a file that ends too early, StorageError for one that cannot be read.
    """

def read_checked(paths: Sequence[str], segments: Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], crcs: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int = 0, in_place: bool = False) -> None:
    """
    Reads segments, int64[n, 4] of (index of the path, offset, bytes <= 4 MiB, address), and compares their CRC32 with crcs, uint32[n]. The memory must stay alive. Raises Corrupted for a mismatch or a file that ends too early, StorageError for one that cannot be read, whose `segment` is the segment's index. in_place: the disk may write to the memory itself, which must be shared, or the process must not fork meanwhile.
    """
