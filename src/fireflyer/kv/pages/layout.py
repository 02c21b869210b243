"""Segments of the page cache: a head that describes the pages, and the pages.

Head, a multiple of 4 KiB: "FFKVPAG1", crc32c of the rest of the head u32, bytes of the head u32,
number of pages u32, number of salts u32; bytes of the segment u64, name of the segment 37 bytes,
salts (bytes u32, salt), entries, zeros. Entry: digest of the key 16 bytes, offset / 4096 u32, bytes
u32, crc32c of digest and page u32, index of the salt u32, position of the page in its prefix u16, 2
zeros. Pages begin at multiples of 4 KiB, with zeros between. Little-endian.
"""

import hashlib
import re
import struct
from collections.abc import Sequence

import msgspec

from fireflyer._native import crc32c
from fireflyer._native.kv import PAGE_UNIT
from fireflyer.errors import Corrupted
from fireflyer.kv.core.frames import checked_key

SEGMENTS = "segment"
DIGEST_BYTES = 16
MOST_POSITION = (1 << 16) - 1
MOST_PAGE = 1 << 30

_MAGIC = b"FFKVPAG1"
_HEAD = struct.Struct("<8sIIIIQ37s")
_ENTRY = struct.Struct("<16sIIIIHH")
_CHECKED_FROM = 12
_MOST_HEAD = 256 << 20
_NAME = re.compile(r"(\d{20})-[0-9a-f]{16}")


class Page(msgspec.Struct):
    """Page to write, or a page that an entry of a head describes."""

    digest: bytes
    size: int
    crc: int
    salt: bytes
    position: int
    offset: int = 0


class Head(msgspec.Struct):
    """Verified head of a segment.

    Attributes:
        entries: encoded entries, for the index.
        salts: salts to which the entries refer.
        size: bytes of the segment.
        head_bytes: size of the head.
    """

    entries: bytes
    salts: list[bytes]
    size: int
    head_bytes: int

    def pages(self) -> list[Page]:
        return [
            Page(digest, size, crc, self.salts[salt], position, unit * PAGE_UNIT)
            for digest, unit, size, crc, salt, position, _ in _ENTRY.iter_unpack(self.entries)
        ]


def digests_of(keys: Sequence[bytes], salt: bytes) -> list[bytes]:
    """Returns the digest of each key under a salt.

    Raises:
        InvalidKey: a key is empty or longer than 64 KiB.
    """
    prefix = struct.pack("<I", len(salt)) + salt
    found = []
    for key in keys:
        if not key or len(key) > 1 << 10:
            checked_key(key)
        found.append(hashlib.blake2b(prefix + key, digest_size=DIGEST_BYTES).digest())
    return found


def segment_name(sequence: int, writer: str) -> str:
    """Returns a unique name. `writer`: 16 hexadecimal digits that identify the process."""
    return f"{sequence:020}-{writer}"


def sequence_of(name: str) -> int | None:
    """Returns the number in the name of a segment, or None for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def padded(size: int) -> int:
    return -(-size // PAGE_UNIT) * PAGE_UNIT


def encode(name: str, pages: Sequence[Page]) -> bytes:
    """Lays out pages one after another: sets their offsets and returns the segment's head."""
    salts = {page.salt: index for index, page in enumerate(pages)}
    salts = {salt: index for index, salt in enumerate(salts)}
    named = b"".join(struct.pack("<I", len(salt)) + salt for salt in salts)
    size = padded(_HEAD.size + len(named) + _ENTRY.size * len(pages))
    end = size
    entries = []
    for page in pages:
        page.offset = end
        end += padded(page.size)
        unit = page.offset // PAGE_UNIT
        fields = (page.digest, unit, page.size, page.crc, salts[page.salt], page.position, 0)
        entries.append(_ENTRY.pack(*fields))
    head = bytearray(size)
    _HEAD.pack_into(head, 0, _MAGIC, 0, size, len(pages), len(salts), end, name.encode())
    body = named + b"".join(entries)
    head[_HEAD.size : _HEAD.size + len(body)] = body
    struct.pack_into("<I", head, 8, crc32c(memoryview(head)[_CHECKED_FROM:]))
    return bytes(head)


def head_bytes(begin: bytes) -> int:
    """Returns the size of a head from its first bytes; raises Corrupted if they are invalid."""
    if len(begin) < _HEAD.size or begin[:8] != _MAGIC:
        raise Corrupted("it does not begin with a head")
    size: int = _HEAD.unpack_from(begin)[2]
    if size % PAGE_UNIT or not 0 < size <= _MOST_HEAD:
        raise Corrupted("its head has an invalid size")
    return size


def decode(name: str, data: bytes) -> Head:
    """Decodes and verifies the head of a segment; `data` may be longer than the head.

    Raises:
        Corrupted: the checksum does not match, the structure is invalid, or the head belongs to
            another segment.
    """
    size = head_bytes(data)
    if size > len(data):
        raise Corrupted("its head ends too early")
    _, crc, _, pages, salts, total, own = _HEAD.unpack_from(data)
    if crc32c(memoryview(data)[_CHECKED_FROM:size]) != crc:
        raise Corrupted("the CRC32C of its head does not match")
    if own != name.encode():
        raise Corrupted(f"it holds segment {own.decode('ascii', 'replace')}")
    at, named = _HEAD.size, []
    for _ in range(salts):
        length = int.from_bytes(data[at : at + 4], "little")
        named.append(bytes(data[at + 4 : at + 4 + length]))
        at += 4 + length
    return Head(bytes(data[at : at + _ENTRY.size * pages]), named, total, size)
