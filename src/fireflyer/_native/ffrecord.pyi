"""Random batch reads of FFRecord files."""

from collections.abc import Callable, Sequence

import numpy
import numpy.typing


class Reader:
    """
    Open record files, their samples numbered as one sequence; thread-safe.
    """

    def __init__(self, paths: Sequence[str], check_data: bool, strategy: str = 'auto', threads: int = 0) -> None: ...

    @property
    def n(self) -> int: ...

    def read(self, indices: numpy.typing.NDArray[numpy.int64]) -> tuple[numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.int64]]:
        """
        Returns one arena and the k + 1 offsets of the k samples in it, in the order of `indices`.
        """

    def read_list(self, indices: numpy.typing.NDArray[numpy.int64]) -> list[numpy.typing.NDArray[numpy.uint8]]:
        """The samples as views on one new arena."""

    def read_views(self, indices: numpy.typing.NDArray[numpy.int64]) -> list[numpy.typing.NDArray[numpy.uint8]]:
        """The samples as read-only views on the mapped files, each checked once."""

    def check_all(self) -> None:
        """Reads every file completely and compares every checksum."""

    def unchecked(self) -> list[str]:
        """Files whose metadata carries no checksum."""

    def versions(self) -> list[int]:
        """Version of the format of each file."""

    def schema(self, file: int) -> bytes:
        """The columns of one file as JSON; empty if it has none."""

    def size(self, file: int) -> int:
        """Bytes of one file up to the end of its last commit."""

    def part(self, file: int, start: int, end: int) -> bytes:
        """
        Bytes of one file as it was opened, even if its path was replaced since.
        """

    def locate(self, index: int) -> tuple[str, int]:
        """The file of a sample and its number in that file."""

    def extents(self, indices: numpy.typing.NDArray[numpy.int64]) -> numpy.typing.NDArray[numpy.uint8]:
        """
        Index entries in the layout of v2, 32 bytes each, in the order of `indices`; also for v1 files.
        """

    def last_commit(self, file: int) -> tuple[int, int, int, int, int, int, bool, list[tuple[int, int, int]]]:
        """
        The last commit of a v2 file: alignment, commit number, footer offset, end, samples, slot offset, whether that slot is torn, and the runs. A run: (first sample, offset of the first index page, samples).
        """

    def offsets(self, file: int) -> numpy.typing.NDArray[numpy.int64]:
        """Start of each sample of one file in bytes, and the size of the file."""

    def checksums(self, file: int) -> numpy.typing.NDArray[numpy.uint32]:
        """CRC32 of each sample of one file."""

class V2Index:
    """Metadata of a v2 file whose bytes the caller reads; thread-safe."""

    def __init__(self, name: str, size: int, read: Callable[[int, int], bytes], size_now: Callable[[], int]) -> None:
        """
        `read(start, end)` returns bytes of the file. `size_now()` returns its current size; it is called only if the file seems to have grown.
        """

    @property
    def count(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def schema(self) -> bytes: ...

    def pages(self, indices: numpy.typing.NDArray[numpy.int64]) -> numpy.typing.NDArray[numpy.int64]:
        """Offset in the file of each sample's index page (4096 bytes)."""

    def extents(self, indices: numpy.typing.NDArray[numpy.int64], places: numpy.typing.NDArray[numpy.int64], pages: numpy.typing.NDArray[numpy.uint8]) -> numpy.typing.NDArray[numpy.uint8]:
        """
        Returns the samples' index entries, 32 bytes each. `pages`: their index pages, each of which is checked; `places`: the ascending places of these pages.
        """

class Arenas:
    """
    Memory for batches, reused after the last array on it is destroyed; thread-safe.
    """

    def __init__(self) -> None: ...

    def take(self, bytes: int) -> numpy.typing.NDArray[numpy.uint8]: ...

def chunk_name(key: str, chunk: int) -> str:
    """Path of a chunk in its cache."""

def read_pieces(directory: str, keys: Sequence[str], pieces: numpy.typing.NDArray[numpy.int64], arena: numpy.typing.NDArray[numpy.uint8]) -> tuple[numpy.typing.NDArray[numpy.uint8], int]:
    """
    Fills pieces from chunk files. A row of `pieces`: index of the key, chunk, first byte, bytes, place in the arena. Returns 1 for each piece that was read whole (0 for others), and the errno of a failed read, or 0.
    """

def check_samples(arena: numpy.typing.NDArray[numpy.uint8], offsets: numpy.typing.NDArray[numpy.int64], crcs: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint8]:
    """Returns 1 for each sample whose CRC32 matches, 0 for others."""

def arena_bytes() -> int:
    """Memory of all arenas of this process, in use or kept."""
