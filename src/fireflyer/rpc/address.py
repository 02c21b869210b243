"""Addresses of control connections: `host:port`, `[IPv6]:port`, `unix:/path`."""

import ipaddress
import socket
from dataclasses import dataclass

from fireflyer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server: `path` of a Unix socket, or `host` and `port`."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parses an address; raises ConfigError if it is invalid."""
        if text.startswith("unix:"):
            if not text[5:]:
                raise ConfigError("invalid address 'unix:': expected unix:/path")
            return cls(path=text[5:])
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise ConfigError(f"invalid address {text!r}: expected brackets, [IPv6]:port")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) < 65536):
            raise ConfigError(
                f"invalid address {text!r}: expected host:port, [IPv6]:port or unix:/path"
            )
        return cls(host, int(port))

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True if only processes of this machine can reach the address; False for host names other
        than localhost.
        """
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self, timeout_s: float) -> socket.socket:
        """Returns a connected socket with this timeout. Raises OSError."""
        if self.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(timeout_s)
            try:
                sock.connect(self.path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((self.host, self.port), timeout_s)
        tune(sock)
        return sock


def tune(sock: socket.socket) -> None:
    """Disables Nagle's delay; keepalives detect a vanished machine within half a minute."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
