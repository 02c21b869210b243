"""Protocol between ranks and keepers, on blocking stream sockets.

A keeper (keeper.py) is a process that holds replicas of saves and runs without torch. It imports
this module, so this module must not import torch.

A message is a frame (msgpack) and a body. A body is a series of frames that ends with an empty
frame. Requests are answered in order. A replica's bytes follow their message unframed on TCP. On a
Unix socket the bytes are passed as a memfd.

    rank                              keeper
    Put                         ->
                                <-    Done: there is room
    the bytes, or their memfd   ->
                                <-    Done: held, and every CRC32 is right
"""

import hashlib
import os
import socket
from collections.abc import Callable, Iterable, Sequence

import msgspec

from fireflyer._native import crc32
from fireflyer.checkpoint.memory.inventory import Inventory, Stamp
from fireflyer.errors import (
    CheckpointError,
    Corrupted,
    DeadlineExceeded,
    FireflyerError,
    NoSpace,
    PeerLost,
    ProtocolMismatch,
    StorageError,
)
from fireflyer.hfreduce.rendezvous import handshake
from fireflyer.hfreduce.rendezvous.handshake import Hello, Purpose
from fireflyer.rpc.frames import PREFIX, frame, length

VERSION = 1
CHUNK_BYTES = 4 << 20
_SMALL_BYTES = 64 << 10
STALL_S = 120.0
"""Maximum number of seconds that one side may block the other within a message. A side that blocks
longer counts as lost. A `Join` may set another limit."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Block of a replica with its own CRC32. Gaps between blocks are ignored."""

    offset: int
    length: int
    crc32: int


class Join(msgspec.Struct, frozen=True, tag="Join"):
    """First message on a Unix socket. All later messages are about `place`."""

    version: int
    place: str
    epoch: int
    """Epoch of the run; 0 if it is still unknown."""
    limit_bytes: int
    """Limit of the place, in bytes. 0: half of the sum of the bytes that the place holds and this
    node's equal share of the machine's available memory."""
    key: bytes
    """Key of this attempt of the job; ranks on other nodes must prove that they know it."""
    address: str
    """Address at which this node's keeper listens for ranks on other nodes."""
    share: int = 1
    """Number of the job's nodes on this machine."""
    stall_s: float = STALL_S
    """Maximum number of seconds that a rank may block the keeper within a message."""


class Joined(msgspec.Struct, frozen=True, tag="Joined"):
    port: int
    inventory: Inventory


class Put(msgspec.Struct, frozen=True, tag="Put"):
    stamp: Stamp
    world: int
    rank: int
    size: int
    blocks: tuple[Block, ...]


class Place(msgspec.Struct, frozen=True, tag="Place"):
    """Report to rank 0's keeper that a rank has placed its data, or has failed. Body: the rank's
    manifest part."""

    stamp: Stamp
    world: int
    rank: int
    error: str


class Gather(msgspec.Struct, frozen=True, tag="Gather"):
    """Request for all ranks' parts, answered once all ranks have placed their data. Answer: a Done
    with the number of parts, then one Done per part, with the part as body."""

    stamp: Stamp
    world: int
    timeout_s: float


class Await(msgspec.Struct, frozen=True, tag="Await"):
    """Request to wait for the commit of a save; sent to the rank's own keeper. Answer: Done."""

    stamp: Stamp
    timeout_s: float


class Commit(msgspec.Struct, frozen=True, tag="Commit"):
    """Commit of a save. Body: the manifest."""

    stamp: Stamp
    world: int


class Abort(msgspec.Struct, frozen=True, tag="Abort"):
    stamp: Stamp


class Settle(msgspec.Struct, frozen=True, tag="Settle"):
    """Agreed newest complete save. Body: the manifest of `stamp`; empty if `stamp` is None."""

    stamp: Stamp | None
    world: int


class Fence(msgspec.Struct, frozen=True, tag="Fence"):
    epoch: int


class Look(msgspec.Struct, frozen=True, tag="Look"):
    """Request for the inventory. Answer: Holds."""


class FetchManifest(msgspec.Struct, frozen=True, tag="FetchManifest"):
    """Request for a manifest. Answer: Done with the manifest as body."""

    stamp: Stamp


class Find(msgspec.Struct, frozen=True, tag="Find"):
    """Request for a replica. Answer: Found; on a Unix socket, a memfd follows."""

    stamp: Stamp
    rank: int


class Read(msgspec.Struct, frozen=True, tag="Read"):
    """Request for ranges of a replica. Answer: Done, then the ranges' unframed bytes in order."""

    stamp: Stamp
    rank: int
    ranges: tuple[tuple[int, int], ...]
    """First byte and length of each range."""


class Found(msgspec.Struct, frozen=True, tag="Found"):
    size: int


class Holds(msgspec.Struct, frozen=True, tag="Holds"):
    inventory: Inventory


class Done(msgspec.Struct, frozen=True, tag="Done"):
    parts: int = 0


class Refused(msgspec.Struct, frozen=True, tag="Refused"):
    kind: str
    """Name of the error class, a key of ERRORS."""
    message: str


Request = (
    Join | Put | Place | Gather | Await | Commit | Abort | Settle | Fence
    | Look | FetchManifest | Find | Read
)  # fmt: skip
Reply = Joined | Done | Found | Holds | Refused

ERRORS: dict[str, type[FireflyerError]] = {
    kind.__name__: kind
    for kind in (CheckpointError, Corrupted, NoSpace, StorageError, DeadlineExceeded)
}
"""Errors that a keeper may report and its caller then raises, by name."""

_encode = msgspec.msgpack.Encoder().encode
request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def send(sock: socket.socket, message: Request | Reply, body: bytes = b"") -> None:
    """Sends a message and its body.

    Raises:
        OSError: if the peer is gone, or accepts no data within the socket's timeout.
    """
    sock.sendall(frame(_encode(message)))
    for start in range(0, len(body), CHUNK_BYTES):
        sock.sendall(frame(body[start : start + CHUNK_BYTES]))
    sock.sendall(frame(b""))


def receive_body(sock: socket.socket) -> bytes:
    body = b""
    while piece := receive_frame(sock):
        body += piece
    return body


def receive_frame(sock: socket.socket) -> bytes:
    return bytes(receive_exactly(sock, length(receive_exactly(sock, PREFIX))))


def receive_exactly(sock: socket.socket, count: int) -> bytearray:
    """Receives `count` bytes.

    Raises:
        PeerLost: if the stream ends earlier.
        OSError: from the socket, e.g. a timeout.
    """
    data = bytearray(count)
    receive_into(sock, memoryview(data))
    return data


def receive_into(sock: socket.socket, rest: memoryview) -> None:
    while rest:
        count = sock.recv_into(rest)
        if not count:
            raise PeerLost("the connection ended inside a message")
        rest = rest[count:]


def send_ranges(sock: socket.socket, fd: int, ranges: Iterable[tuple[int, int]]) -> None:
    """Sends ranges (first byte, length) of a memfd in order; uses sendfile for large ranges."""
    small = bytearray()
    with open(fd, "rb", buffering=0, closefd=False) as file:
        for offset, count in ranges:
            if count < _SMALL_BYTES:
                small += os.pread(fd, count, offset)
            if len(small) >= _SMALL_BYTES or count >= _SMALL_BYTES:
                sock.sendall(small)
                small.clear()
            if count >= _SMALL_BYTES:
                sock.sendfile(file, offset, count)
    sock.sendall(small)


def check_blocks(blocks: Sequence[Block], size: int) -> None:
    """Checks the order and extent of CRC32 blocks.

    Raises:
        CheckpointError: if the blocks overlap, are not in order, or go beyond the data.
    """
    end = 0
    for block in blocks:
        if block.offset < end or block.length < 1:
            raise CheckpointError(
                f"the CRC32 block at byte {block.offset} overlaps the block before it"
            )
        end = block.offset + block.length
    if end > size:
        raise CheckpointError(f"the CRC32 blocks end at byte {end}, but the data ends at {size}")


def verify(data: memoryview, blocks: Sequence[Block], what: str) -> None:
    """Verifies the CRC32 of each block.

    Raises:
        Corrupted: if a CRC32 differs; the error names the first such block.
    """
    for block in blocks:
        if crc32(data[block.offset : block.offset + block.length]) != block.crc32:
            raise Corrupted(
                f"{what}: the CRC32 of bytes {block.offset} to {block.offset + block.length} does not match"
            )


def key_name(key: bytes) -> bytes:
    """Returns an identifier of a key; it reveals nothing about the key."""
    return hashlib.sha256(b"keeper" + key).digest()[:16]


def prove(sock: socket.socket, key: bytes, who: str) -> None:
    """Runs the caller's half of the handshake.

    Raises:
        ProtocolMismatch: if either proof is rejected.
        PeerLost: if the keeper does not know the key.
    """
    hello = Hello.make(key_name(key), Purpose.DATA, -1, -1)
    sock.sendall(hello.raw)
    if receive_exactly(sock, 1) != handshake.ADMITTED:
        raise PeerLost(f"{who} has not joined this job")
    answer = bytes(receive_exactly(sock, handshake.NONCE_BYTES + handshake.PROOF_BYTES))
    challenge, theirs = answer[: handshake.NONCE_BYTES], answer[handshake.NONCE_BYTES :]
    if not handshake.proven(theirs, key, b"callee", hello, challenge):
        raise ProtocolMismatch(f"{who} did not prove the job's key")
    sock.sendall(handshake.proof(key, b"caller", hello, challenge))
    if receive_exactly(sock, 1) != handshake.ADMITTED:
        raise ProtocolMismatch(f"{who} rejected this process's proof of the job's key")


def admit(sock: socket.socket, key_of: Callable[[bytes], bytes | None]) -> bytes | None:
    """Runs the keeper's half of the handshake; returns the caller's key, or None to drop the
    caller."""
    try:
        hello = Hello.parse(bytes(receive_exactly(sock, handshake.HELLO_BYTES)))
    except ValueError:
        return None
    key = key_of(hello.group)
    if key is None:
        sock.sendall(handshake.UNKNOWN)
        return None
    challenge = os.urandom(handshake.NONCE_BYTES)
    ours = handshake.proof(key, b"callee", hello, challenge)
    sock.sendall(handshake.ADMITTED + challenge + ours)
    theirs = bytes(receive_exactly(sock, handshake.PROOF_BYTES))
    if not handshake.proven(theirs, key, b"caller", hello, challenge):
        sock.sendall(handshake.REFUSED)
        return None
    sock.sendall(handshake.ADMITTED)
    return key
