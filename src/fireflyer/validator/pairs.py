"""Transfers between two nodes, after a mutual handshake with a shared secret.

Protocol, over TCP. The listener sends a nonce of 32 bytes. The sender answers with a nonce of its
own and a proof: an HMAC-SHA-256, keyed with the secret, of the label "sender" and both nonces. If
that proof is wrong, the listener closes the connection. Otherwise the listener sends the same proof
with the label "listener".

Then the sender makes requests: one byte, and a length of 8 bytes, big-endian. After `S` that many
bytes follow, and the listener answers with one byte when it has received them all. After `E` the
listener answers with one byte at once.
"""

import hmac
import secrets
import socket
import struct
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from fireflyer.errors import ConfigError

TIMEOUT_S = 20.0
"""Timeout of each answer."""

NONCE_BYTES = 32
PROOF_BYTES = 32
MOST_BYTES = 1 << 36
"""Maximum size of one transfer; a listener closes the connection on larger ones."""

FIRST_BYTES = 1 << 20
"""Size of the transfers from which `Link.bytes_for` estimates the speed."""

LEAST_SECRET = 16

_HEAD = struct.Struct(">cQ")
_BLOCK = bytes(1 << 18)

Address = tuple[str, int]


def parse_address(text: str) -> Address:
    """Parses HOST:PORT.

    Raises:
        ConfigError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ConfigError(f"invalid address {text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def read_secret(path: Path | None) -> bytes:
    """Returns the secret in a file.

    Raises:
        ConfigError: there is no file, or the secret is too short.
    """
    if path is None:
        raise ConfigError("transfers between nodes need --secret-file FILE, the same on all nodes")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret {path}: {error.strerror}") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the secret in {path} has fewer than {LEAST_SECRET} bytes: use a longer secret"
        )
    return secret


def listen(address: Address, secret: bytes) -> socket.socket:
    """Opens a listening socket. `secret` must not be empty."""
    if not secret:
        raise ValueError("a listener needs a secret")
    return socket.create_server(address, backlog=16)


def serve_one(listener: socket.socket, secret: bytes) -> None:
    """Accepts one connection and serves it until the sender closes it; rejects a wrong secret."""
    connection, _ = listener.accept()
    with connection:
        serve(connection, secret)


def serve(connection: socket.socket, secret: bytes) -> None:
    """Serves an accepted connection until the sender closes it or fails."""
    try:
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(mine)
        other = _read(connection, NONCE_BYTES)
        if not hmac.compare_digest(
            _read(connection, PROOF_BYTES), _proof(secret, b"sender", mine, other)
        ):
            return
        connection.sendall(_proof(secret, b"listener", mine, other))
        block = bytearray(1 << 18)
        while True:
            kind, size = _HEAD.unpack(_read(connection, _HEAD.size))
            if kind not in (b"S", b"E") or size > MOST_BYTES:
                return
            while size:
                count = connection.recv_into(block, min(size, len(block)))
                if not count:
                    return
                size -= count
            connection.sendall(b"\0")
    except OSError:
        return


class Link:
    """Sender's end of a connection. A context manager; not thread-safe.

    Raises:
        OSError: the listener cannot be reached, refuses the secret, or stops answering.
    """

    def __init__(self, address: Address, secret: bytes) -> None:
        self._socket = socket.create_connection(address, timeout=TIMEOUT_S)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other, mine = _read(self._socket, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
            self._socket.sendall(mine + _proof(secret, b"sender", other, mine))
            try:
                proof = _read(self._socket, PROOF_BYTES)
            except OSError:
                raise ConnectionRefusedError(
                    "the listener rejected the secret: use the same on all nodes"
                ) from None
            if not hmac.compare_digest(proof, _proof(secret, b"listener", other, mine)):
                raise ConnectionRefusedError(
                    "the listener does not know the secret: use the same on all nodes"
                )
        except OSError:
            self._socket.close()
            raise

    def send(self, size: int) -> float:
        """Sends this many bytes; returns the bytes per second until the listener confirmed them."""
        begin = time.perf_counter()
        self._socket.sendall(_HEAD.pack(b"S", size))
        left = size
        while left:
            left -= self._socket.send(_BLOCK[:left] if left < len(_BLOCK) else _BLOCK)
        _read(self._socket, 1)
        return size / (time.perf_counter() - begin)

    def echo(self) -> float:
        """Returns the duration of one round trip, in seconds."""
        begin = time.perf_counter()
        self._socket.sendall(_HEAD.pack(b"E", 0))
        _read(self._socket, 1)
        return time.perf_counter() - begin

    def bytes_for(self, seconds: float) -> int:
        """Returns the size of a transfer that takes about this many seconds."""
        self.send(FIRST_BYTES)
        return max(FIRST_BYTES // 4, int(self.send(FIRST_BYTES) * seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._socket.close()


def _proof(secret: bytes, who: bytes, listener: bytes, sender: bytes) -> bytes:
    return hmac.digest(secret, who + listener + sender, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionResetError("the peer closed the connection")
        data += piece
    return data
