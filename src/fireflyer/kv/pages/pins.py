"""Pins: pages that eviction must keep for some time, by the clock of the evicting process.

Object pins/<id>: "FFKVPPN1", crc32c of the rest u32, msgpack of seconds and joined digests.
"""

import secrets
import struct

import msgspec

from fireflyer._native import crc32c
from fireflyer.errors import Corrupted, StorageError
from fireflyer.kv.pages.layout import DIGEST_BYTES
from fireflyer.storage import Storage

PINS = "pins"
_MAGIC = b"FFKVPPN1"


class PinBody(msgspec.Struct, frozen=True):
    """Content of a pin: its lifetime, which starts when an evicting process first sees the pin, and
    the protected pages."""

    seconds: float
    digests: bytes


def encode(body: PinBody) -> bytes:
    data = msgspec.msgpack.encode(body)
    return _MAGIC + struct.pack("<I", crc32c(data)) + data


def decode(name: str, data: bytes) -> PinBody:
    """Decodes and verifies a pin. Raises Corrupted."""
    body = data[12:]
    if data[:8] != _MAGIC or data[8:12] != struct.pack("<I", crc32c(body)):
        raise Corrupted(f"pin {name} is damaged: it protects nothing")
    try:
        return msgspec.msgpack.decode(body, type=PinBody)
    except msgspec.DecodeError as error:
        raise Corrupted(f"pin {name} has an invalid structure: {error}") from error


class Pin:
    """Protection of pages from eviction, until `release`, the end of a `with` block, or its expiry."""

    def __init__(self, storage: Storage, digests: list[bytes], seconds: float) -> None:
        self._storage = storage
        self.name = secrets.token_hex(12)
        body = PinBody(seconds, b"".join(digests))
        storage.write(f"{PINS}/{self.name}", [encode(body)])

    def release(self) -> None:
        """Ends the protection."""
        self._storage.delete(f"{PINS}/{self.name}")

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PinWatch:
    """Pins in the storage as one process sees them; it deletes expired and damaged pins."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[PinBody, float]] = {}

    def pinned(self, storage: Storage, now: float) -> set[bytes]:
        """Returns the digests of pinned pages. `now`: monotonic seconds."""
        names = [name for name in storage.list(PINS) if not name.endswith(".tmp")]
        self._known = {name: known for name, known in self._known.items() if name in names}
        found: set[bytes] = set()
        for name in names:
            if name not in self._known:
                try:
                    body = decode(name, storage.read(f"{PINS}/{name}"))
                except Corrupted:
                    storage.delete(f"{PINS}/{name}")
                    continue
                except StorageError:  # the pin was released meanwhile
                    continue
                self._known[name] = (body, now)
            body, since = self._known[name]
            if now - since > body.seconds:
                storage.delete(f"{PINS}/{name}")
                del self._known[name]
                continue
            parts = range(0, len(body.digests), DIGEST_BYTES)
            found.update(body.digests[at : at + DIGEST_BYTES] for at in parts)
        return found
