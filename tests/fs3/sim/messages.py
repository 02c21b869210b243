"""What travels between clients and storage nodes, and from replica to replica, with the bytes that go
along."""

from typing import Any

import msgspec

from fireflyer._native import crc32c
from fireflyer._native.fs3 import Status

BLOCK = 4096
Tag = tuple[int, int, int]  # client, channel, seq


class Write(msgspec.Struct, frozen=True, gc=False):
    """A client's write, truncate, extend or remove, to the head."""

    chain: int
    chain_version: int
    tag: Tag
    kind: str
    chunk: int
    offset: int
    length: int
    data: bytes


class WriteAnswer(msgspec.Struct, frozen=True, gc=False):
    status: Status
    version: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """A client's read, to any serving target."""

    chain: int
    chain_version: int
    chunk: int
    offset: int
    length: int


class ReadAnswer(msgspec.Struct, frozen=True, gc=False):
    """Whole blocks from `offset` on, with their CRC32Cs; `length` is the chunk's."""

    status: Status
    version: int = 0
    length: int = 0
    offset: int = 0
    data: bytes = b""
    crcs: bytes = b""


class Report(msgspec.Struct, frozen=True, gc=False):
    """A client says that a chunk's bytes fail their CRC."""

    chain: int
    chunk: int


class Between(msgspec.Struct, frozen=True):
    """A message of a replica to another; `cargo`: a write's bytes, whole contents with CRCs, or tags."""

    message: Any
    cargo: Any = None


class Contents(msgspec.Struct, frozen=True, gc=False):
    """A chunk whole, with the CRC32Cs of its blocks as stored."""

    data: bytes
    crcs: bytes


def good(data: bytes, crcs: bytes) -> bool:
    """Whether each whole block (the last one as long as the chunk) has its CRC (little-endian u32)."""
    return crcs == b"".join(
        crc32c(data[at : at + BLOCK]).to_bytes(4, "little") for at in range(0, len(data), BLOCK)
    )
