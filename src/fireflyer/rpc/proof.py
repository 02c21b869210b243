"""Two sides show each other that they know the same key, which never crosses the wire."""

import hashlib
import hmac
import os
import stat
from pathlib import Path

from fireflyer.errors import ConfigError

PROOF_BYTES = 32
SHORTEST_SECRET = 16


def prove(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over the parts, which must have fixed lengths or a form that cannot be cut otherwise.

    One part must name the side that proves, so that a proof cannot be sent back to its maker, and both
    sides must have put something unpredictable in, so that none can be used again.
    """
    return hmac.digest(key, b"".join(parts), hashlib.sha256)


def proven(given: bytes, key: bytes, *parts: bytes) -> bool:
    """Is `given` the proof over these parts? Takes the same time either way."""
    return hmac.compare_digest(given, prove(key, *parts))


class Secret:
    """What all members of a cluster know; no secret at all is `Secret()`. Never shown nor pickled."""

    __slots__ = ("_key",)

    def __init__(self, key: bytes = b"") -> None:
        """Raises ConfigError for a key that is too short to be a secret."""
        if 0 < len(key) < SHORTEST_SECRET:
            raise ConfigError(
                f"the secret has {len(key)} bytes; it needs at least {SHORTEST_SECRET}: "
                "make one with `openssl rand -hex 32`"
            )
        self._key = key

    @classmethod
    def from_file(cls, path: str | Path) -> "Secret":
        """The contents of a file without the white space around them.

        Raises:
            ConfigError: if it cannot be read, is empty, or others than its owner may read it.
        """
        try:
            with open(path, "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                key = file.read(1 << 16).strip()
        except OSError as error:
            raise ConfigError(f"the secret file {path} cannot be read: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"others may read the secret file {path}: chmod 600 {path}")
        if not key:
            raise ConfigError(f"the secret file {path} is empty")
        return cls(key)

    @classmethod
    def from_environment(cls, name: str) -> "Secret":
        """What a variable holds; no secret where it is not set."""
        return cls(os.environ.get(name, "").strip().encode())

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return "Secret(...)" if self else "Secret()"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled: give the path of its file")

    def is_same(self, given: bytes) -> bool:
        """Is `given` the secret itself? Takes the same time either way."""
        return hmac.compare_digest(given, self._key)

    def prove(self, *parts: bytes) -> bytes:
        return prove(self._key, *parts)

    def proven(self, given: bytes, *parts: bytes) -> bool:
        return proven(given, self._key, *parts)
