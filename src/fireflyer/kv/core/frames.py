"""Log objects. Each is a frame with a batch of operations, or with the fence of a new writer.

Frame, little-endian: "FFKVLOG1", crc32c of the rest u32, kind u8, 3 bytes 0, number u64, epoch u64;
writer 8 bytes, sequence of the first operation u64, number of operations u32, 4 bytes 0; operations
(native/kv/record.hpp).
"""

import struct
from collections.abc import Iterator, Sequence

import msgspec

from fireflyer._native import crc32c
from fireflyer._native.kv import MOST_KEY, MOST_VALUE
from fireflyer.errors import Corrupted, InvalidKey, KvError

_MAGIC = b"FFKVLOG1"
_FRAME = struct.Struct("<8sIB3xQQ8sQI4x")
_OPERATION = struct.Struct("<BIIq")
HEADER_BYTES = _FRAME.size
_CHECKED_FROM = 12
BATCH, FENCE = 1, 2
PUT, ERASE = 1, 2

MOST_BATCH = 128 << 20
"""Maximum bytes of the operations of one batch."""


class Frame(msgspec.Struct, frozen=True):
    """Header of a log object, and its bytes."""

    kind: int
    number: int
    epoch: int
    writer: bytes
    sequence: int
    """Sequence number of the first operation."""
    count: int
    data: bytes


def encode(
    kind: int,
    number: int,
    epoch: int,
    writer: bytes,
    sequence: int,
    count: int,
    parts: Sequence[bytes],
) -> bytes:
    """Encodes a log object."""
    fields = (kind, number, epoch, writer, sequence, count)
    data = bytearray(b"".join((_FRAME.pack(_MAGIC, 0, *fields), *parts)))
    struct.pack_into("<I", data, 8, crc32c(memoryview(data)[_CHECKED_FROM:]))
    return bytes(data)


def decode(number: int, data: bytes) -> Frame:
    """Decodes and verifies log object `number`.

    Raises:
        Corrupted: the checksum does not match, or the structure is invalid.
    """
    if len(data) < HEADER_BYTES or data[:8] != _MAGIC:
        raise Corrupted(f"log object {number} is no frame: restore it from a replica")
    _, crc, kind, own, epoch, writer, sequence, count = _FRAME.unpack_from(data)
    if crc32c(memoryview(data)[_CHECKED_FROM:]) != crc:
        raise Corrupted(
            f"the CRC32C of log object {number} does not match: restore it from a replica"
        )
    if own != number or kind not in (BATCH, FENCE):
        raise Corrupted(f"log object {number} holds frame {own} of kind {kind}")
    return Frame(kind, own, epoch, writer, sequence, count, data)


def operation(key: bytes, value: bytes | None, expires: int = 0) -> bytes:
    """Encodes a put, or a deletion if `value` is None. `expires`: ms since 1970; 0: never.

    Raises:
        InvalidKey: the key is empty or longer than 64 KiB.
        KvError: the value exceeds 64 MiB.
    """
    checked_key(key)
    if value is None:
        return _OPERATION.pack(ERASE, len(key), 0, 0) + key
    if len(value) > MOST_VALUE:
        raise KvError(
            f"a value has {len(value)} bytes: at most {MOST_VALUE} are possible; divide it"
        )
    return b"".join((_OPERATION.pack(PUT, len(key), len(value), expires), key, value))


def checked_key(key: bytes) -> None:
    """Checks that a key has 1 byte to 64 KiB; raises InvalidKey, or TypeError if it is not bytes."""
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, not {type(key).__name__}: encode it first")
    if not 0 < len(key) <= MOST_KEY:
        raise InvalidKey(f"a key has {len(key)} bytes: expected 1 to {MOST_KEY}")


def operations(frame: Frame) -> Iterator[tuple[int, bytes, bytes | None, int]]:
    """Yields (sequence, key, value or None, expiry) of a verified frame."""
    data, at = frame.data, HEADER_BYTES
    for index in range(frame.count):
        kind, key_bytes, value_bytes, expires = _OPERATION.unpack_from(data, at)
        at += _OPERATION.size
        key = data[at : at + key_bytes]
        at += key_bytes
        value = data[at : at + value_bytes] if kind == PUT else None
        at += value_bytes
        yield frame.sequence + index, key, value, expires
