"""Handshake of a connection (docs/internals/fs3-wire.md), a state machine without I/O.

    client                                server
    hello: magic, version, role, nonce ->
                                       <- hello
    proof                              ->
                                       <- proof, or as many zero bytes if the secrets differ

The client proves first, so a server sends no value derived from the secret to an unauthenticated
client.
"""

import secrets
import struct

from fireflyer.errors import ProtocolMismatch
from fireflyer.rpc.proof import PROOF_BYTES, Secret

MAGIC = b"FFS3"
NONCE_BYTES = 32
_HELLO = struct.Struct(f"<4sHH{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size

VERSION = 0x0200
"""Protocol version, major number in the upper byte; peers need equal major numbers."""

ANOTHER_SECRET = "the other side has another secret"
NO_SECRET = "the other side has a secret, and no secret was given here"
REFUSAL = bytes(PROOF_BYTES)


class Handshake:
    """One side of a handshake.

    Attributes:
        opening: bytes that a client sends first.
        done: True once both sides have proved the secret.
        rest: received bytes after the peer's part of the handshake.
        peer_role, peer_version: fields of the peer's hello.
    """

    def __init__(
        self,
        side: str,
        secret: Secret,
        role: int,
        *,
        version: int = VERSION,
        nonce: bytes | None = None,
    ) -> None:
        """Makes the state of one side: "client" or "server". Only tests pass a nonce."""
        self._side = side
        self._secret = secret
        self._version = version
        self._hello = _HELLO.pack(MAGIC, version, role, nonce or secrets.token_bytes(NONCE_BYTES))
        self._peer_hello = b""
        self._data = b""
        self._unsent = b""
        self.opening = self._hello if side == "client" else b""
        self.done = False
        self.rest = b""
        self.peer_role = 0
        self.peer_version = 0

    def feed(self, data: bytes) -> bytes:
        """Takes received bytes and returns the bytes to send.

        Raises:
            ProtocolMismatch: the peer is not accepted: send `refusal()`, then close the connection.
        """
        self._data += data
        answer = b""
        if not self._peer_hello:
            if not MAGIC.startswith(self._data[:4]) and self._data[:4] != MAGIC:
                raise ProtocolMismatch("the other side does not speak this protocol")
            if len(self._data) < HELLO_BYTES:
                return b""
            answer = self._unsent = self._on_hello()
        if not self.done and len(self._data) >= PROOF_BYTES:
            answer += self._verify()
        self._unsent = b""
        return answer

    def refusal(self) -> bytes:
        """Returns the bytes to send before the connection closes; b"" unless a server got a hello."""
        if self._side == "client" or not self._peer_hello:
            return b""
        if self.peer_version >> 8 != self._version >> 8:
            return self._hello
        return self._unsent + REFUSAL

    def _on_hello(self) -> bytes:
        self._peer_hello, self._data = self._data[:HELLO_BYTES], self._data[HELLO_BYTES:]
        _, self.peer_version, self.peer_role, _ = _HELLO.unpack(self._peer_hello)
        if self.peer_version >> 8 != self._version >> 8:
            raise ProtocolMismatch(
                f"this side speaks version {_name(self._version)} of the protocol and the other "
                f"{_name(self.peer_version)}: install versions with the same first number"
            )
        if self._side == "server":
            return self._hello
        return self._secret.prove(b"client", self._hello, self._peer_hello)

    def _verify(self) -> bytes:
        given, self.rest = self._data[:PROOF_BYTES], self._data[PROOF_BYTES:]
        self._data = b""
        peer = b"server" if self._side == "client" else b"client"
        if not self._secret.proven(given, peer, self._peer_hello, self._hello):
            alone = self._side == "client" and not self._secret  # only the peer has a secret
            raise ProtocolMismatch(NO_SECRET if alone else ANOTHER_SECRET)
        self.done = True
        if self._side == "client":
            return b""
        return self._secret.prove(b"server", self._hello, self._peer_hello)


def _name(version: int) -> str:
    return f"{version >> 8}.{version & 0xFF}"
