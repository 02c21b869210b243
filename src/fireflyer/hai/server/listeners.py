"""Listeners: loopback for the home's own user, and an optional public address for other users.

The public address has TLS, is behind a proxy with TLS, or is a loopback address.
"""

import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
from starlette.types import ASGIApp

from fireflyer.errors import ConfigError

BACKLOG = 2048


class Public(msgspec.Struct, frozen=True, kw_only=True):
    """Public address that other users connect to."""

    host: str
    port: int
    certificate: str = ""
    """PEM file with the chain; empty: this server has no TLS."""
    key: str = ""
    """PEM file of the private key."""
    behind_proxy: bool = False
    """True if a proxy in front of the server provides TLS."""

    @property
    def secure(self) -> bool:
        """Returns whether users connect with TLS."""
        return bool(self.certificate) or self.behind_proxy


class Web(uvicorn.Server):
    """uvicorn without its signal handlers, because the platform's server handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def parse_public(text: str, certificate: str, key: str, *, behind_proxy: bool) -> Public:
    """Parses `--listen ADDR:PORT` and its TLS options.

    Raises:
        ConfigError: an option is invalid, or tokens would cross the network unencrypted.
    """
    host, _, digits = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        port = int(digits)
    except ValueError:
        raise ConfigError(
            f"invalid --listen {text!a}: expected ADDR:PORT, e.g. 10.0.0.5:8443"
        ) from None
    if bool(certificate) != bool(key):
        raise ConfigError("--tls-cert and --tls-key require each other")
    if behind_proxy and certificate:
        raise ConfigError(
            "--behind-proxy means that the proxy provides TLS: omit --tls-cert and --tls-key"
        )
    if not (certificate or behind_proxy or address.is_loopback):
        raise ConfigError(
            f"--listen {text} would send tokens unencrypted over the network: "
            "give --tls-cert FILE and --tls-key FILE, or --behind-proxy if a proxy provides TLS"
        )
    for name, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if path and not Path(path).is_file():
            raise ConfigError(f"{name} {path}: no such file")
    return Public(
        host=str(address), port=port, certificate=certificate, key=key, behind_proxy=behind_proxy
    )


def _unavailable(at: str, option: str, error: OSError) -> str:
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.EADDRNOTAVAIL:
        reason = "this machine has no such address"
    return f"cannot listen on {at}: {reason}; choose another {option}"


@contextlib.contextmanager
def listen(host: str, port: int, option: str = "--port") -> Iterator[socket.socket]:
    """Opens a listening socket.

    Args:
        option: option of the command line that set the address; error messages name the option.

    Raises:
        ConfigError: the port is invalid or not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OverflowError:
            raise ConfigError(f"invalid port {port}: expected 0 to 65535") from None
        except OSError as error:
            at = f"port {port}" if option == "--port" else f"{host} port {port}"
            raise ConfigError(_unavailable(at, option, error)) from None
        yield listener


def web_config(app: ASGIApp, public: Public | None = None) -> uvicorn.Config:
    """Returns the uvicorn configuration of the platform.

    Raises:
        ConfigError: the certificate or the key cannot be used.
    """
    secure = public is not None and bool(public.certificate)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        loop="asyncio",
        http="h11",
        ws="none",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=public.certificate if public is not None and secure else None,
        ssl_keyfile=public.key if public is not None and secure else None,
    )
    try:
        config.load()
    except OSError as error:  # includes ssl.SSLError
        raise ConfigError(f"the TLS certificate or key cannot be used: {error}") from None
    return config
