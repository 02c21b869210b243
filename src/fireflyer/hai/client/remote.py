"""Server on another machine, as named by the environment.

FIREFLYER_SERVER      https://HOST:PORT; http:// only to this machine, as requests carry a token
FIREFLYER_TOKEN_FILE  file with the token; only its owner may be able to read or write it
FIREFLYER_CA_FILE     certificates of a private authority, in PEM; default: the system's
"""

import http.client
import ipaddress
import os
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from fireflyer.errors import ConfigError


class Remote(msgspec.Struct, frozen=True, kw_only=True):
    """Server and token file from the environment."""

    url: str
    """Server address; empty: the home's server, called with `token` instead of the home's token."""
    token: Path

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Returns an unopened connection.

        Raises:
            ConfigError: the certificates cannot be used.
        """
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        authority = os.environ.get("FIREFLYER_CA_FILE") or None
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:
            raise ConfigError(f"FIREFLYER_CA_FILE {authority} cannot be used: {error}") from None
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=context
        )


def from_environment() -> Remote | None:
    """Returns the settings; None if the environment names neither a server nor a token.

    Raises:
        ConfigError: the named server or token file cannot be used.
    """
    url = os.environ.get("FIREFLYER_SERVER", "").rstrip("/")
    token = os.environ.get("FIREFLYER_TOKEN_FILE", "")
    if not url and not token:
        return None
    if not token:
        raise ConfigError("FIREFLYER_SERVER needs FIREFLYER_TOKEN_FILE, a file with your token")
    _check_private(Path(token))
    if url:
        _check_url(url)
    return Remote(url=url, token=Path(token))


def _check_private(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"FIREFLYER_TOKEN_FILE {path}: {error.strerror}") from None
    if mode & 0o077:
        raise ConfigError(f"FIREFLYER_TOKEN_FILE {path} is open to other users: chmod 600 it")


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or parts.path or parts.query:
        raise ConfigError("invalid FIREFLYER_SERVER: expected https://HOST:PORT")
    if parts.username or parts.password:
        raise ConfigError(
            "FIREFLYER_SERVER must not contain a user or password: set FIREFLYER_TOKEN_FILE instead"
        )
    if parts.scheme == "http" and not _here(host):
        raise ConfigError(
            f"FIREFLYER_SERVER {url} would send the token unencrypted over the network: use https://"
        )


def _here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
