"""How a caller and the process it calls prove to each other that they belong together. Bytes in,
bytes out.

    caller                                          callee
    hello: group, purpose, from, to, nonce    ->
                                              <-    one byte: heard, or there is no such group
                                              <-    challenge, proof over hello and challenge
    its proof over hello and challenge        ->
                                              <-    one byte: admitted or not

A proof is an HMAC-SHA256 with the group's key and the role of the side that sends it, so that
neither can be sent back to its maker. Between processes of one host the kernel vouches for the
user: hello and the first byte are all.
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
UNKNOWN = b"?"  # no such group here, or no longer
REFUSED = b"-"  # not proven

_HELLO = struct.Struct(f"<4s16sB3xii{NONCE_BYTES}s")
_MAGIC = b"ffr2"
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True)
class Lineage:
    """What stays the same when a group is formed anew with other members.

    Attributes:
        name: 16 random bytes.
        key: what members prove to each other.
    """

    name: bytes
    key: bytes

    def number(self, what: int | str) -> bytes:
        """The number of its line in an epoch, or for another purpose."""
        return hashlib.sha256(self.name + str(what).encode()).digest()[:16]


class Purpose(enum.IntEnum):
    """What a connection is for."""

    TEAM = 1
    """Descriptors of segments, between ranks of one host."""
    DATA = 2
    """Payload of collectives."""
    POST = 3
    """Point to point messages."""
    CONTROL = 4
    """News of deaths and farewells."""
    JOIN = 5
    """A process that wants to become a member."""
    REFORM = 6
    """Votes on the next membership."""
    PING = 7
    """Nothing: is there such a line?"""


@dataclass(frozen=True)
class Hello:
    """The first message of a caller.

    Attributes:
        group: 16 bytes.
        sender: the caller's rank; -1 for one that has none yet.
        receiver: the rank it means to reach; -1 for any.
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
        """Raises ValueError for anything but a hello."""
        try:
            magic, group, purpose, sender, receiver, _ = _HELLO.unpack(raw)
        except struct.error as error:
            raise ValueError("not a hello") from error
        if magic != _MAGIC:
            raise ValueError("not a hello")
        return cls(group, Purpose(purpose), sender, receiver, raw)


def proof(key: bytes, role: bytes, hello: Hello, challenge: bytes) -> bytes:
    """What the side in `role` (b"caller" or b"callee") sends to prove that it has the key."""
    return prove(key, role, hello.raw, challenge)


def proven(given: bytes, key: bytes, role: bytes, hello: Hello, challenge: bytes) -> bool:
    """Is `given` the proof of that role? Takes the same time either way."""
    return is_proven(given, key, role, hello.raw, challenge)
