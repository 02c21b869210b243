"""Storage protocol: named byte files under one root, in a local directory or at any fsspec URL.

A name is relative and "/"-separated, e.g. "step-000000000100/data.bin". The effect of a completed
write call survives a crash. An incomplete write is invisible under the final name. Several threads
and processes may use one root. Two writers of one name must not run concurrently, except through
`create`.
"""

import ctypes
import errno
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from fireflyer._native import crc32c
from fireflyer.errors import NoSpace, StorageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of files that are being written; a killed writer leaves such files behind."""

Chunk = bytes | bytearray | memoryview
"""Contiguous bytes to write."""

Range = tuple[str, int, int]
"""Range of a file: name, first byte, end byte (exclusive)."""

_counter = itertools.count()


class Storage(Protocol):
    """Byte storage for checkpoints and datasets.

    A call that fails raises StorageError (NoSpace if the store is full), whose text names the file.
    """

    def size(self, name: str) -> int | None:
        """Returns the size of the file in bytes; None if the file does not exist."""
        ...

    def stamp(self, name: str) -> str:
        """Returns a tag that changes with the content of the file (an ETag or modification time).

        It is "" if the store has no such tag, or if the file does not exist.
        """
        ...

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Returns `length` bytes of a file at `offset`, or fewer if the file ends before.

        Without `length`, returns all bytes from `offset` on.
        """
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous bytes) from `offset`.

        Raises:
            Corrupted: if the file ends before the buffer is full.
        """
        ...

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        """Reads each range like `read`, in one request if the store supports that.

        The result has an error in place of a range that cannot be read; `Unavailable` is retryable.
        """
        ...

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        """Reads many segments into memory and verifies their CRC32.

        Args:
            names: files.
            segments: int64[n, 4], C order: index of the name, offset, bytes (at most 4 MiB),
                address of writable memory that stays valid during the call.
            crcs: uint32[n].

        Raises:
            Corrupted: a CRC does not match or a file ends too early. The error's `segment` is the
                index of the first such segment. Any part of the memory may have been overwritten.
            StorageError: a file cannot be read. The error's `segment` is the index of the segment.
        """
        ...

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Writes these chunks as a file and replaces an existing file.

        On return the file is complete and durable. After a failure an existing file is unchanged
        and no other file is left. Chunks must not change before `write` returns, because it writes
        a chunk while it waits for the next.
        """
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Writes like `write`; if the name exists, returns False and changes nothing."""
        ...

    def list(self, name: str = "") -> list[str]:
        """Returns the sorted names of the entries of a directory; [] if it does not exist."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Renames a file, replacing an existing file."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file or an empty directory; ignores a missing name and a non-empty directory."""
        ...


def creates_exclusively(storage: Storage) -> bool:
    """Returns whether exactly one of several concurrent `create` calls for a name succeeds.

    An implementation declares this by an attribute `exclusive_create`.
    """
    return bool(getattr(storage, "exclusive_create", False))


def reads_summed(storage: Storage) -> bool:
    """Returns whether the storage has its own `read_summed`, with many reads in flight."""
    return hasattr(storage, "read_summed")


def read_summed(
    storage: Storage, names: Sequence[str], rows: "NDArray[np.int64]", starts: Sequence[int]
) -> list[int]:
    """Reads many ranges into memory; returns the CRC32C of each.

    An implementation with many reads in flight has a method of this name.

    Args:
        names: files that are written once and never replaced: an implementation may keep them open.
        rows: int64[n, 4], C order, like the segments of `read_checked`, but of any size.
        starts: initial values of the CRC32Cs.

    Raises:
        Corrupted: a file ends inside a range.
        StorageError: a file cannot be read. After an error, any part of the memory may have
            been overwritten.
    """
    if (own := getattr(storage, "read_summed", None)) is not None:
        found: list[int] = own(names, rows, starts)
        return found
    crcs = []
    for (index, offset, size, address), start in zip(rows.tolist(), starts, strict=True):
        memory = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        storage.read_into(names[index], offset, memory)
        crcs.append(crc32c(memory, start))
    return crcs


def read_shared(
    storage: Storage,
    names: Sequence[str],
    segments: "NDArray[np.int64]",
    crcs: "NDArray[np.uint32]",
) -> None:
    """Reads like `read_checked`, but lets the disk write directly to the memory (O_DIRECT).

    An implementation that supports this has a method of this name. The memory must be shared (a
    mapping of a file), or the process must not fork meanwhile.
    """
    own = getattr(storage, "read_shared", None)
    (storage.read_checked if own is None else own)(names, segments, crcs)


def read_each(storage: Storage, ranges: Sequence[Range]) -> list[bytes | StorageError]:
    """Implements `read_many` for a store without multi-range requests."""
    answers: list[bytes | StorageError] = []
    for name, start, end in ranges:
        try:
            answers.append(storage.read(name, start, end - start))
        except StorageError as error:
            answers.append(error)
    return answers


def checked_name(name: str) -> str:
    """Validates a name and returns it unchanged.

    Raises:
        ValueError: the name could lead out of the root.
    """
    parts = name.split("/")
    if name and (name.startswith("/") or any(part in ("", ".", "..") for part in parts)):
        raise ValueError(
            f"storage name {name!r} must be relative, without empty, '.' or '..' parts"
        )
    return name


def temporary_name(name: str) -> str:
    """Returns a unique temporary name, to be renamed to `name`."""
    return f"{name}.{os.getpid()}-{next(_counter)}{TEMPORARY_SUFFIX}"


def failure_of(action: str, path: object, error: OSError) -> StorageError:
    """Converts an operating-system error to a StorageError or NoSpace."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"cannot {action} {path}: {reason}; free some space and try again")
    return StorageError(f"cannot {action} {path}: {reason}")
