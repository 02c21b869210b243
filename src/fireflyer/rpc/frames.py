"""Frames on a byte stream: a length (u32, little-endian), then that many bytes.

The caller encodes the payload (msgspec structs). A length above the limit is rejected before
anything is allocated for it.
"""

from collections.abc import Iterator

from fireflyer.errors import ProtocolMismatch

FRAME_LIMIT = 16 << 20
"""Largest payload, in bytes."""

PREFIX = 4


def frame(payload: bytes) -> bytes:
    """Returns the payload with its length before it.

    Raises:
        ValueError: the payload is longer than FRAME_LIMIT.
    """
    if len(payload) > FRAME_LIMIT:
        raise ValueError(f"a frame of {len(payload)} bytes is over the limit of {FRAME_LIMIT}")
    return len(payload).to_bytes(PREFIX, "little") + payload


def length(prefix: bytes | bytearray) -> int:
    """Decodes the length in a frame's prefix.

    Raises:
        ProtocolMismatch: the length is over the limit.
    """
    announced = int.from_bytes(prefix[:PREFIX], "little")
    if announced > FRAME_LIMIT:
        raise ProtocolMismatch(
            f"the peer announces a frame of {announced} bytes, over the limit of {FRAME_LIMIT}: "
            "it does not speak this protocol"
        )
    return announced


class FrameBuffer:
    """Buffer that splits received bytes into frames; for sockets in a selector."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the payloads that `data` completes, in order.

        Raises:
            ProtocolMismatch: a length is over the limit.
        """
        self._data += data
        while len(self._data) >= PREFIX:
            end = PREFIX + length(self._data)
            if len(self._data) < end:
                return
            payload = bytes(self._data[PREFIX:end])
            del self._data[:end]
            yield payload

    @property
    def partial(self) -> bool:
        """True if a frame has begun and is not complete."""
        return bool(self._data)
