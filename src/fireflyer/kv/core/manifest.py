"""Manifests: numbered states of a database; the highest number is the current state.

A writer publishes a manifest by create-if-absent, so only one writer gets each number. Object:
"FFKVMAN1", crc32c of the rest u32, msgpack.
"""

import struct

import msgspec

from fireflyer._native import crc32c
from fireflyer.errors import Corrupted, NoSpace, Stale, StorageError, Unavailable
from fireflyer.kv.core.operations import (
    MANIFESTS,
    Create,
    Pause,
    Read,
    Steps,
    listed,
    manifest_name,
)

_MAGIC = b"FFKVMAN1"
VERSION = 1
ATTEMPTS = 6
"""Maximum attempts of a create whose answer is lost; the pauses take 3 s in total."""
ROUNDS = 64
"""Maximum number of lost races after which a step fails."""


class TableRef(msgspec.Struct, frozen=True):
    """Reference to a table of a run."""

    name: str
    first: bytes
    last: bytes
    index_offset: int
    index_bytes: int
    bytes: int
    records: int


class Manifest(msgspec.Struct, frozen=True):
    """State of a database.

    Attributes:
        epoch: fencing token of the writer that published it; each take-over increments it.
        flushed: number of the last log object whose operations are in the tables.
        sequence: sequence number of the last operation in the tables.
        boundary: lowest number of a manifest that is kept without a pin; the collector deletes
            manifests with lower numbers.
        runs: newest first; the tables of a run ascend and do not overlap.
        feed: number of the lowest log object that is kept for change feeds.
    """

    number: int
    epoch: int
    writer: bytes
    flushed: int = 0
    sequence: int = 0
    boundary: int = 1
    runs: tuple[tuple[TableRef, ...], ...] = ()
    feed: int = 1
    version: int = VERSION

    def tables(self) -> set[str]:
        return {table.name for run in self.runs for table in run}


def encode(manifest: Manifest) -> bytes:
    body = msgspec.msgpack.encode(manifest)
    return _MAGIC + struct.pack("<I", crc32c(body)) + body


def decode(number: int, data: bytes) -> Manifest:
    """Decodes and verifies a manifest.

    Raises:
        Corrupted: the checksum does not match, or the structure is invalid.
        StorageError: a newer release wrote it.
    """
    body = data[12:]
    if data[:8] != _MAGIC or data[8:12] != struct.pack("<I", crc32c(body)):
        raise Corrupted(f"manifest {number} is damaged: restore it from a replica")
    try:
        found = msgspec.msgpack.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise Corrupted(f"manifest {number} has an invalid structure: {error}") from error
    if found.version != VERSION:
        raise StorageError(f"manifest {number} has format {found.version}: upgrade fireflyer")
    if found.number != number:
        raise Corrupted(f"manifest {number} holds manifest {found.number}")
    return found


def current() -> Steps[Manifest | None]:
    """Reads the current manifest; None if there is no database."""
    for _ in range(ROUNDS):
        present = yield from listed(MANIFESTS)
        if not present:
            return None
        data = yield Read(manifest_name(max(present)))
        if data is not None:  # None: collected meanwhile, so a higher one exists
            return decode(max(present), data)
    raise Unavailable("cannot read the current manifest: it changes too often; try again")


def create_own(name: str, data: bytes) -> Steps[bool]:
    """Creates an object of unique content; returns True if the object has this content now.

    An answer may be lost, so the create is retried with the same bytes until the outcome is known.

    Raises:
        NoSpace: the object was not created.
        StorageError: any other failure; the object may exist, or be created later.
    """
    unknown = False
    for attempt in range(ATTEMPTS):
        try:
            if (yield Create(name, data)):
                return True
            found = yield Read(name)
            return bool(found == data)
        except NoSpace as error:
            if not unknown:
                raise
            if attempt == ATTEMPTS - 1:
                raise Unavailable(f"cannot tell whether {name} was created: {error}") from error
        except Unavailable:
            unknown = True
            if attempt == ATTEMPTS - 1:
                raise
        yield Pause(0.1 * 2**attempt)
    raise AssertionError


def publish(manifest: Manifest) -> Steps[bool]:
    """Publishes a manifest; returns False if another manifest has its number.

    A number whose manifest was collected can be created again. In that case a higher manifest
    exists, because the highest one is never collected.
    """
    if not (yield from create_own(manifest_name(manifest.number), encode(manifest))):
        return False
    present = yield from listed(MANIFESTS)
    return max(present, default=0) == manifest.number


def stale(epoch: int, found: int) -> Stale:
    return Stale(
        f"the writer of epoch {epoch} was replaced by that of epoch {found}: it acknowledges no more; "
        "open the store again to write"
    )
