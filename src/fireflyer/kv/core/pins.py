"""Pins: expiring references that protect a manifest and its tables from collection.

A pin is an object that its owner rewrites with a new count before it expires. The collector
compares no clocks: a pin expires if its count does not change for its lifetime, by the collector's
own clock.
"""

import msgspec

from fireflyer.errors import Corrupted, SnapshotGone
from fireflyer.kv.core.manifest import Manifest, current, decode
from fireflyer.kv.core.operations import PINS, Delete, ListNames, Read, Steps, Write, manifest_name


class Pin(msgspec.Struct, frozen=True):
    """Reference to a manifest.

    Attributes:
        seconds: lifetime after the last renewal, in seconds.
        count: number of renewals.
    """

    manifest: int
    seconds: float
    count: int = 0


def pin_name(identity: str) -> str:
    return f"{PINS}/{identity}"


def write(identity: str, pin: Pin) -> Steps[None]:
    yield Write(pin_name(identity), msgspec.msgpack.encode(pin))


def read(identity: str) -> Steps[Pin | None]:
    """Reads a pin; None if it does not exist. Raises Corrupted."""
    data = yield Read(pin_name(identity))
    if data is None:
        return None
    try:
        return msgspec.msgpack.decode(data, type=Pin)
    except msgspec.DecodeError as error:
        raise Corrupted(f"pin {identity} has an invalid structure: {error}") from error


def pinned(identity: str, manifest: Manifest, seconds: float) -> Steps[bool]:
    """Pins a manifest; returns False if it is already being collected.

    The collector publishes a boundary before it reads the pins. This function writes a pin before
    it reads the boundary. So at least one of them sees the other's write.
    """
    yield from write(identity, Pin(manifest.number, seconds))
    newest = yield from current()
    if newest is not None and newest.boundary <= manifest.number:
        return True
    yield Delete(pin_name(identity))
    return False


def manifest_of(identity: str) -> Steps[Manifest]:
    """Reads the manifest of a pin.

    Raises:
        SnapshotGone: the pin does not exist or has expired.
    """
    pin = yield from read(identity)
    data = (yield Read(manifest_name(pin.manifest))) if pin else None
    if pin is None or data is None:
        raise SnapshotGone(f"snapshot {identity} does not exist or expired: take another one")
    return decode(pin.manifest, data)


class PinWatch:
    """Expiry of pins by the collector's clock."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Pin, float]] = {}

    def living(self, now: float) -> Steps[dict[str, Pin]]:
        """Returns the valid pins and deletes expired ones. `now`: monotonic seconds."""
        found: dict[str, Pin] = {}
        names: list[str] = yield ListNames(PINS)
        for identity in names:
            if identity.endswith(".tmp"):
                continue
            pin = yield from read(identity)
            if pin is None:
                continue
            known, since = self._seen.get(identity, (None, now))
            if known != pin:
                since = now
            if now - since > pin.seconds:
                yield Delete(pin_name(identity))
                continue
            found[identity] = pin
            self._seen[identity] = (pin, since)
        self._seen = {name: seen for name, seen in self._seen.items() if name in found}
        return found
