"""Frames on a byte stream: a u32 little-endian length, then that many bytes.

The payload is for the caller to encode (msgspec structs). A length above the limit is refused before
anything is allocated for it.
"""

import asyncio
from collections.abc import Iterator

from fireflyer.errors import PeerLost, ProtocolMismatch

FRAME_LIMIT = 16 << 20
"""Largest payload, in bytes."""

_PREFIX = 4


def frame(payload: bytes) -> bytes:
    """The payload with its length before it.

    Raises:
        ValueError: if it is longer than FRAME_LIMIT.
    """
    if len(payload) > FRAME_LIMIT:
        raise ValueError(f"a frame of {len(payload)} bytes is over the limit of {FRAME_LIMIT}")
    return len(payload).to_bytes(_PREFIX, "little") + payload


def _length(prefix: bytes | bytearray) -> int:
    length = int.from_bytes(prefix[:_PREFIX], "little")
    if length > FRAME_LIMIT:
        raise ProtocolMismatch(
            f"the peer announces a frame of {length} bytes, over the limit of {FRAME_LIMIT}: "
            "it does not speak this protocol"
        )
    return length


class FrameBuffer:
    """Cuts received bytes into frames; for sockets that a selector serves."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that `data` completes, in order.

        Raises:
            ProtocolMismatch: if a length is over the limit.
        """
        self._data += data
        while len(self._data) >= _PREFIX:
            end = _PREFIX + _length(self._data)
            if len(self._data) < end:
                return
            payload = bytes(self._data[_PREFIX:end])
            del self._data[:end]
            yield payload

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._data)


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next payload, or None where the stream ends between two frames.

    Raises:
        PeerLost: if it ends or breaks inside a frame.
        ProtocolMismatch: if the length is over the limit.
    """
    try:
        prefix = await reader.readexactly(_PREFIX)
        return await reader.readexactly(_length(prefix))
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _PREFIX:
            return None
        raise PeerLost("the connection ended inside a frame") from error
    except ConnectionError as error:
        raise PeerLost(f"the connection broke: {error.strerror}") from error
