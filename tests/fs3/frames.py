"""Data frames (native/fs3/io/wire/wire.hpp) made and read in Python, for tests of the service."""

import socket
import struct
from dataclasses import dataclass

from fireflyer._native import crc32c

BLOCK = 4096
HEAD = struct.Struct("<IBBHIIQQ")
READ = struct.Struct("<QIIIIII")
READ_ANSWER = struct.Struct("<QIIIIB7x")
WRITE = struct.Struct("<QQQIIIIIIIB3x")
WRITE_ANSWER = struct.Struct("<QIB3x")
MAGIC = 0x31443346
READ_KIND, READ_ANSWER_KIND, WRITE_KIND, WRITE_ANSWER_KIND = 1, 2, 3, 4
READY_KIND, GO_KIND = 9, 10
HOLD = 2
OK, STALE_ROUTING, NO_SPACE, NOT_FOUND = 0, 1, 5, 7
REMOVE = 3


@dataclass(frozen=True)
class Found:
    """One entry of a READ answer."""

    status: int
    version: int
    length: int
    offset: int
    data: bytes
    crcs: tuple[int, ...]


def pieces(offset: int, data: bytes) -> list[int]:
    """CRC32C of the pieces of `data`, cut where blocks begin."""
    crcs, at = [], 0
    while at < len(data):
        step = min(BLOCK - (offset + at) % BLOCK, len(data) - at)
        crcs.append(crc32c(data[at : at + step]))
        at += step
    return crcs


def send(
    line: socket.socket,
    kind: int,
    count: int,
    table: bytes,
    payload: bytes = b"",
    flags: int = 0,
    request: int = 1,
) -> None:
    head = HEAD.pack(MAGIC, kind, flags, count, len(table), 0, len(payload), request)
    line.sendall(head + table + payload)


def exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = line.recv(count - len(data))
        assert more, "the service closed the connection"
        data += more
    return data


def receive(line: socket.socket) -> tuple[int, int, bytes, bytes]:
    """Kind, count, table, payload."""
    magic, kind, _, count, table, _, payload, _ = HEAD.unpack(exactly(line, HEAD.size))
    assert magic == MAGIC
    return kind, count, exactly(line, table), exactly(line, payload)


def write(
    line: socket.socket,
    chain: tuple[int, int],
    chunk: tuple[int, int],
    offset: int,
    data: bytes,
    tag: tuple[int, int, int],
    kind: int = 0,
) -> tuple[int, int, int]:
    """Writes; (status, version, length of the chunk). `chain` is (number, version), `kind` e.g. REMOVE."""
    crcs = pieces(offset, data)
    entry = WRITE.pack(
        chunk[0], tag[0], tag[2], tag[1], chunk[1], *chain, offset, len(data), len(crcs), kind
    )
    send(line, WRITE_KIND, 1, entry + struct.pack(f"<{len(crcs)}I", *crcs), data)
    answered, count, table, payload = receive(line)
    assert (answered, count, payload) == (WRITE_ANSWER_KIND, 1, b"")
    version, length, status = WRITE_ANSWER.unpack(table)
    return status, version, length


def read(
    line: socket.socket, chain: tuple[int, int], wanted: list[tuple[int, int, int, int]]
) -> list[Found]:
    """Reads (inode, index, offset, length) each, in one frame."""
    table = b"".join(READ.pack(i, x, *chain, offset, length, 0) for i, x, offset, length in wanted)
    send(line, READ_KIND, len(wanted), table)
    kind, count, table, payload = receive(line)
    assert (kind, count) == (READ_ANSWER_KIND, len(wanted))
    entries = [READ_ANSWER.unpack_from(table, n * READ_ANSWER.size) for n in range(count)]
    crcs = struct.unpack_from(f"<{sum(e[4] for e in entries)}I", table, count * READ_ANSWER.size)
    found, crc_at, at = [], 0, 0
    for version, chunk_length, offset, length, number, status in entries:
        data = payload[at : at + length]
        own = crcs[crc_at : crc_at + number]
        assert tuple(pieces(offset, data)) == own
        found.append(Found(status, version, chunk_length, offset, data, own))
        at += length
        crc_at += number
    return found
