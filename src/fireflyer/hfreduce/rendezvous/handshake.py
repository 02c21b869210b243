"""Mutual authentication of a caller and the process that it calls. Pure: bytes in, bytes out.

    caller                                          callee
    hello: group, purpose, from, to, nonce    ->
                                              <-    one byte: group known or unknown
                                              <-    challenge, proof over hello and challenge
    its proof over hello and challenge        ->
                                              <-    one byte: admitted or not

A proof is an HMAC-SHA256 with the group's key and the role of its sender, so neither proof can be
reflected to its sender. Between processes of one host the kernel authenticates the user, so the
hello and the first byte suffice.
"""

import enum
import hashlib
import secrets
import struct
from dataclasses import dataclass

from fireflyer.rpc.proof import PROOF_BYTES as PROOF_BYTES
from fireflyer.rpc.proof import prove
from fireflyer.rpc.proof import proven as is_proven

NONCE_BYTES = 32
ADMITTED = b"+"
UNKNOWN = b"?"  # this process has left that group
REFUSED = b"-"  # the proof was wrong

_HELLO = struct.Struct(f"<4s16sB3xii{NONCE_BYTES}s")
_MAGIC = b"ffr2"
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True)
class Lineage:
    """Identity of a group that persists when the group is formed anew with other members.

    Attributes:
        name: 16 random bytes.
        key: secret that members prove to each other.
    """

    name: bytes
    key: bytes

    def number(self, what: int | str) -> bytes:
        """Returns the number of the group's endpoint in epoch `what`, or for a purpose such as
        "join"."""
        return hashlib.sha256(self.name + str(what).encode()).digest()[:16]


class Purpose(enum.IntEnum):
    """Purpose of a connection."""

    TEAM = 1
    """Descriptors of segments, between ranks of one host."""
    DATA = 2
    """Payload of collectives."""
    POST = 3
    """Point-to-point messages."""
    CONTROL = 4
    """Notices of ranks that die or leave."""
    JOIN = 5
    """Requests of processes that want to become members."""
    REFORM = 6
    """Votes on the next membership."""
    PING = 7
    """Probe: checks only whether the endpoint exists."""


@dataclass(frozen=True)
class Hello:
    """First message of a caller.

    Attributes:
        group: 16-byte number of the group's endpoint.
        sender: the caller's rank; -1 if it has no rank yet.
        receiver: rank to reach; -1 for any.
        raw: the whole message, which the proofs cover.
    """

    group: bytes
    purpose: Purpose
    sender: int
    receiver: int
    raw: bytes

    @classmethod
    def make(cls, group: bytes, purpose: Purpose, sender: int, receiver: int) -> "Hello":
        nonce = secrets.token_bytes(NONCE_BYTES)
        raw = _HELLO.pack(_MAGIC, group, purpose, sender, receiver, nonce)
        return cls(group, purpose, sender, receiver, raw)

    @classmethod
    def parse(cls, raw: bytes) -> "Hello":
        """Parses a hello; raises ValueError for anything else."""
        try:
            magic, group, purpose, sender, receiver, _ = _HELLO.unpack(raw)
        except struct.error as error:
            raise ValueError("not a hello") from error
        if magic != _MAGIC:
            raise ValueError("not a hello")
        return cls(group, Purpose(purpose), sender, receiver, raw)


def proof(key: bytes, role: bytes, hello: Hello, challenge: bytes) -> bytes:
    """Returns the proof of the key for the side in `role` (b"caller" or b"callee")."""
    return prove(key, role, hello.raw, challenge)


def proven(given: bytes, key: bytes, role: bytes, hello: Hello, challenge: bytes) -> bool:
    """Returns True if `given` is the proof of that role; compares in constant time."""
    return is_proven(given, key, role, hello.raw, challenge)
