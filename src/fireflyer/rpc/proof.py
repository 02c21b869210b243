"""Proofs by which two sides show that they know the same key, which never crosses the wire."""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from fireflyer.errors import ConfigError

PROOF_BYTES = 32
SHORTEST_SECRET = 16


def prove(key: bytes, *parts: bytes) -> bytes:
    """Returns the HMAC-SHA256 of the parts.

    The parts must have fixed lengths, or an encoding that can be split in only one way. One part
    must name the side that proves, so that a proof cannot be reflected to that side. Both sides
    must contribute a nonce, so that no proof can be replayed.
    """
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def proven(given: bytes, key: bytes, *parts: bytes) -> bool:
    """Returns whether `given` is the proof over these parts, in constant time."""
    return hmac.compare_digest(given, prove(key, *parts))


class Secret:
    """Secret of all members of a cluster; `Secret()` means that there is none.

    A secret is never printed and never pickled.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes = b"") -> None:
        """Raises ConfigError if the key is too short to be a secret."""
        if 0 < len(key) < SHORTEST_SECRET:
            raise ConfigError(
                f"the secret has {len(key)} bytes; it needs at least {SHORTEST_SECRET}: "
                "make one with `openssl rand -hex 32`"
            )
        self._key = key

    @classmethod
    def from_file(cls, path: str | Path) -> "Secret":
        """Reads the secret from a file, without surrounding white space.

        Raises:
            ConfigError: the file cannot be read, is empty, or is readable by other users.
        """
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(1 << 16).strip()
        except OSError as error:
            raise ConfigError(f"the secret file {path} cannot be read: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"other users can read the secret file {path}: chmod 600 {path}")
        if not key:
            raise ConfigError(f"the secret file {path} is empty")
        return cls(key)

    @classmethod
    def from_environment(cls, name: str) -> "Secret":
        """Reads the secret from an environment variable; an unset variable means no secret."""
        return cls(os.environ.get(name, "").strip().encode())

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return "Secret(...)" if self else "Secret()"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled: give the path of its file")

    def is_same(self, given: bytes) -> bool:
        """Returns whether `given` is the secret itself, in constant time."""
        return hmac.compare_digest(given, self._key)

    def prove(self, *parts: bytes) -> bytes:
        return prove(self._key, *parts)

    def proven(self, given: bytes, *parts: bytes) -> bool:
        return proven(given, self._key, *parts)
