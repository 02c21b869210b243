"""Format of a body with many blobs: for each blob its SHA-256 (32 bytes), its length (u64,
little-endian) and its bytes. Pure."""

import struct
from collections.abc import Iterator

from fireflyer.errors import WorkspaceError

_HEAD = struct.Struct("<32sQ")


def head(sha256: str, size: int) -> bytes:
    """Returns the header of a blob."""
    return _HEAD.pack(bytes.fromhex(sha256), size)


class Begun:
    """Start of a blob."""

    def __init__(self, sha256: str, size: int) -> None:
        self.sha256 = sha256
        self.size = size


class Ended:
    """End of the blob that began last."""


class Splitter:
    """Splits a body that arrives in pieces of any size. `feed` yields, for each blob: Begun,
    bytes..., Ended.

    Args:
        limit: maximum bytes of a blob.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._head = b""
        self._left = 0

    def feed(self, data: bytes) -> Iterator[Begun | bytes | Ended]:
        """Yields the parts of blobs that the next bytes of the body contain.

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
        """Ends the body.

        Raises:
            WorkspaceError: the body ends in the middle of a blob.
        """
        if self._left or self._head:
            raise WorkspaceError("the upload ends in the middle of a blob; ship again")
