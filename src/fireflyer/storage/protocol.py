"""The storage protocol: named byte files under one root, reached through a local directory or any fsspec URL.

A name is relative and "/"-separated, e.g. "step-000000000100/data.bin". What a writing call has
returned from survives a crash; what it has not returned from is invisible under its final name.
Several threads and processes may use one root; two writers of one name must not run at once
except through `create`.
"""

import errno
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from fireflyer.errors import NoSpace, StorageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEMPORARY_SUFFIX = ".tmp"
"""Ends the names of files that are being written; a killed writer leaves them behind."""

Chunk = bytes | bytearray | memoryview
"""Contiguous bytes to write."""

Range = tuple[str, int, int]
"""Name, first byte, byte behind the last."""

_counter = itertools.count()


class Storage(Protocol):
    """What checkpoints and datasets need of a place that holds bytes.

    Every call raises StorageError (NoSpace when the place is full), naming the file.
    """

    def size(self, name: str) -> int | None:
        """Bytes in the file; None when there is no such file."""
        ...

    def stamp(self, name: str) -> str:
        """Changes whenever the contents of the file do (an ETag, the time of the last change); "" if the
        place tells nothing of the kind, or there is no such file."""
        ...

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes [offset, offset + length) of a file; fewer at its end, all when `length` is None."""
        ...

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` (writable, contiguous bytes) from `offset`.

        Raises:
            Corrupted: if the file ends before the buffer is full.
        """
        ...

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        """What `read` gives for each range, all in one request where the place can; a range that could
        not be read has its error in its place, an `Unavailable` if it is worth repeating."""
        ...

    def read_checked(
        self, names: Sequence[str], segments: "NDArray[np.int64]", crcs: "NDArray[np.uint32]"
    ) -> None:
        """Reads many segments to their places in memory and compares their CRC32.

        Args:
            names: files.
            segments: int64[n, 4], C order: index of the name, offset, bytes (at most 4 MiB), address of
                writable memory that stays valid during the call.
            crcs: uint32[n].

        Raises:
            Corrupted: a CRC does not hold or a file ends too early. `segment` is the index of the first one
                found; any memory may have been written to.
            StorageError: likewise, of a file that cannot be read.
        """
        ...

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Makes a file of these chunks, replacing an older one: afterwards it is whole and durable; after a
        failure the older one is unchanged and nothing else is left. Chunks must not change before it returns:
        writing goes on while the next one is being waited for."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Like `write`, but returns False, changing nothing, if the name exists already."""
        ...

    def list(self, name: str = "") -> list[str]:
        """Sorted names of the files and directories directly in a directory; [] if it does not exist."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Gives a file another name, replacing what is there."""
        ...

    def delete(self, name: str) -> None:
        """Removes a file or an empty directory; leaves a directory that is not empty. No error if absent."""
        ...


def read_each(storage: Storage, ranges: Sequence[Range]) -> list[bytes | StorageError]:
    """`read_many` for a place that knows no request for several ranges."""
    answers: list[bytes | StorageError] = []
    for name, start, end in ranges:
        try:
            answers.append(storage.read(name, start, end - start))
        except StorageError as error:
            answers.append(error)
    return answers


def checked_name(name: str) -> str:
    """The name.

    Raises:
        ValueError: if it could lead out of the root.
    """
    parts = name.split("/")
    if name and (name.startswith("/") or any(part in ("", ".", "..") for part in parts)):
        raise ValueError(
            f"storage name {name!r} must be relative, without empty, '.' or '..' parts"
        )
    return name


def temporary_name(name: str) -> str:
    """One that nobody else writes to, to be renamed to `name`."""
    return f"{name}.{os.getpid()}-{next(_counter)}{TEMPORARY_SUFFIX}"


def failure_of(action: str, path: object, error: OSError) -> StorageError:
    """An error of the system as one of ours."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"cannot {action} {path}: {reason}; free some space and try again")
    return StorageError(f"cannot {action} {path}: {reason}")
