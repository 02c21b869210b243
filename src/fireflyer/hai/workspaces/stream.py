"""Many blobs as one body, each as its SHA-256 (32 bytes), length (u64, little-endian), bytes. Pure."""

import struct
from collections.abc import Iterator

from fireflyer.errors import WorkspaceError

_HEAD = struct.Struct("<32sQ")


def head(sha256: str, size: int) -> bytes:
    """What stands before the bytes of a blob."""
    return _HEAD.pack(bytes.fromhex(sha256), size)


class Begun:
    """A blob begins."""

    def __init__(self, sha256: str, size: int) -> None:
        self.sha256 = sha256
        self.size = size


class Ended:
    """The blob that began last has all its bytes."""


class Splitter:
    """Takes a body in pieces of any size. `feed` tells what was in each: Begun, bytes..., Ended.

    Args:
        limit: the longest blob.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> Iterator[Begun | bytes | Ended]:
        """What these bytes add.

        Raises:
            WorkspaceError: a blob is longer than the limit.
        """
        view = memoryview(data)
        while view:
            if self._left:
                piece = view[: self._left]
                self._left -= len(piece)
                view = view[len(piece) :]
                yield bytes(piece)
                if not self._left:
                    yield Ended()
                continue
            missing = _HEAD.size - len(self._head)
            self._head += view[:missing]
            view = view[missing:]
            if len(self._head) == _HEAD.size:
                digest, size = _HEAD.unpack(self._head)
                self._head = b""
                if size > self._limit:
                    raise WorkspaceError(f"a blob of {size} bytes is longer than {self._limit}")
                self._left = size
                yield Begun(digest.hex(), size)
                if not size:
                    yield Ended()

    def finish(self) -> None:
        """The body is over.

        Raises:
            WorkspaceError: in the middle of a blob.
        """
        if self._left or self._head:
            raise WorkspaceError("the upload ends in the middle of a blob; ship again")
