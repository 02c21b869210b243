"""Transfers between two nodes, after a mutual proof of a secret.

Protocol, over TCP. The listener sends a nonce of 32 bytes. The sender answers with its own nonce
and HMAC-SHA-256 of both under the secret, labelled "sender"; the listener closes the connection if
the proof is wrong, and proves itself in the same way, labelled "listener". Then the sender makes
requests: a byte and a length of 8 bytes, big-endian. `S`: so many bytes follow, the listener
answers one byte when it has them all. `E`: the listener answers one byte at once.
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
"""Time for each answer."""

NONCE_BYTES = 32
PROOF_BYTES = 32
MOST_BYTES = 1 << 36
"""Maximum size of one transfer; a listener closes on more."""

FIRST_BYTES = 1 << 20
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
        ConfigError: no file, or the secret is short.
    """
    if path is None:
        raise ConfigError("transfers between nodes need --secret-file FILE, the same on all nodes")
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the secret {path}: {error.strerror}") from None
    if len(secret) < LEAST_SECRET:
        raise ConfigError(f"the secret in {path} has fewer than {LEAST_SECRET} bytes: use more")
    return secret


def listen(address: Address, secret: bytes) -> socket.socket:
    """Returns a listening socket. `secret` must not be empty."""
    if not secret:
        raise ValueError("a listener needs a secret")
    return socket.create_server(address, backlog=16)


def serve_one(listener: socket.socket, secret: bytes) -> None:
    """Serves one sender until it closes; a sender without the secret is refused."""
    connection, _ = listener.accept()
    with connection:
        serve(connection, secret)


def serve(connection: socket.socket, secret: bytes) -> None:
    """Serves an accepted connection until its end; errors of the peer end it, too."""
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
    """Sender's end. A context manager; not thread-safe.

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
                raise ConnectionRefusedError("the listener has another secret") from None
            if not hmac.compare_digest(proof, _proof(secret, b"listener", other, mine)):
                raise ConnectionRefusedError("the listener does not know the secret")
        except OSError:
            self._socket.close()
            raise

    def send(self, size: int) -> float:
        """Sends so many bytes and returns the bytes per second until they were received."""
        begin = time.perf_counter()
        self._socket.sendall(_HEAD.pack(b"S", size))
        left = size
        while left:
            left -= self._socket.send(_BLOCK[:left] if left < len(_BLOCK) else _BLOCK)
        _read(self._socket, 1)
        return size / (time.perf_counter() - begin)

    def echo(self) -> float:
        """Returns the seconds of one round trip."""
        begin = time.perf_counter()
        self._socket.sendall(_HEAD.pack(b"E", 0))
        _read(self._socket, 1)
        return time.perf_counter() - begin

    def bytes_for(self, seconds: float) -> int:
        """Returns the size of a transfer that takes about so long."""
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
