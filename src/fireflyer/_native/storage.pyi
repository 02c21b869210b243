"""
Files at the speed of the disk: appending with O_DIRECT, reading with checksums.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer


class Writer:
    """
    Writes one new file sequentially, with O_DIRECT where possible. Several requests are in flight, also between the calls. Errors are OSError; after one, only close() may be called.
    """

    def __init__(self, fd: int, size: int = 0) -> None:
        """
        `fd`: an empty file that the caller owns and keeps open until close(). `size`: number of bytes that will be appended, if known; a full disk is then detected here.
        """

    def append(self, data: Buffer) -> None:
        """
        Adds contiguous bytes, which must not change until finish(). They are written without a copy if their memory begins at a page and the number of bytes before them is a multiple of 4096.
        """

    def finish(self) -> None:
        """
        Waits for all requests and cuts the file to its length. Does not fsync.
        """

    def close(self) -> None:
        """Waits for requests in flight and releases the buffers."""

def advise_huge(address: int, bytes: int) -> None:
    """
    Asks for huge pages in fresh memory, so that filling it takes fewer page faults. Never fails.
    """

def read_summed(paths: Sequence[str], rows: Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], starts: Sequence[int]) -> list[int]:
    """
    Reads ranges, int64[n, 4] of (index of the path, offset, bytes, address), on several threads. Returns the CRC32C of each range, continued from its value in `starts`. The memory must stay alive. Raises Corrupted if a file ends inside a range, StorageError if a file cannot be read.
    """

def read_checked(paths: Sequence[str], segments: Annotated[NDArray[numpy.int64], dict(shape=(None, 4), order='C', device='cpu', writable=False)], crcs: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], threads: int = 0, in_place: bool = False) -> None:
    """
    Reads segments, int64[n, 4] of (index of the path, offset, bytes <= 4 MiB, address), and compares their CRC32 with crcs, uint32[n]. The memory must stay alive. Raises Corrupted for a mismatch or a file that ends inside a segment, StorageError if a file cannot be read; the error's `segment` is the segment's index. in_place: the disk may write directly to the memory, which must be shared unless the process does not fork meanwhile.
    """
