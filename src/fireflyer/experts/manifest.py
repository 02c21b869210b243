"""Manifest of an expert: the name of the file that holds its bytes, and the bytes' checksums.

    NAME.safetensors     the tensors
    NAME.expert          8 hexadecimal digits: CRC32C of the rest | newline | JSON

The manifest is written after the file, so an expert with a manifest is complete. The manifest has
the CRC32 of each 4 MiB of the file, including the safetensors header.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator

import msgspec

from fireflyer._native import crc32, crc32c
from fireflyer.errors import ConfigError, Corrupted, DamagedExpert, NoSuchExpert
from fireflyer.storage import Chunk, Storage

SUFFIX = ".expert"
FILE_SUFFIX = ".safetensors"
PIECE = 4 << 20
"""Number of bytes per checksum."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


class Manifest(msgspec.Struct, frozen=True):
    """Content of a manifest."""

    file: str
    size: int
    """Bytes of the file."""
    crc32: tuple[int, ...]
    """Checksum of each piece of PIECE bytes; the last piece may be shorter."""
    version: int = 1

    def encode(self) -> bytes:
        body = msgspec.json.encode(self)
        return b"%08x\n" % crc32c(body) + body

    def digest(self, name: str) -> str:
        """Returns a digest of the expert's name and checksums: 32 hexadecimal digits."""
        text = name.encode() + b"\n" + self.encode()
        return hashlib.blake2b(text, digest_size=16).hexdigest()


def checked_name(name: str) -> str:
    """Validates the name of an expert and returns it.

    Raises:
        ConfigError: the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid name of an expert {name[:60]!r}: expected at most 200 letters, digits, '_', "
            "'-' and '.', the first not '.' or '-'"
        )
    return name


def names(storage: Storage) -> list[str]:
    """Returns the names of all experts of a folder."""
    found = (name.removesuffix(SUFFIX) for name in storage.list() if name.endswith(SUFFIX))
    return [name for name in found if _NAME.fullmatch(name)]


def read(storage: Storage, name: str) -> Manifest:
    """Reads a manifest.

    Raises:
        NoSuchExpert: there is no such expert.
        DamagedExpert: the manifest is damaged.
        StorageError: the manifest cannot be read.
    """
    file = checked_name(name) + SUFFIX
    if storage.size(file) is None:
        raise NoSuchExpert(f"{storage} has no expert {name}", name)
    data = storage.read(file)
    head, _, body = data.partition(b"\n")
    try:
        if head != b"%08x" % crc32c(body):
            raise ValueError("its checksum does not match")
        manifest = msgspec.json.decode(body, type=Manifest)
        if manifest.version != 1:
            raise ValueError(f"it has version {manifest.version}, not 1")
        if len(manifest.crc32) != -(-manifest.size // PIECE) or manifest.size < 1:
            raise ValueError(f"it has {len(manifest.crc32)} checksums for {manifest.size} bytes")
        if "/" in manifest.file or manifest.file in ("", ".", ".."):
            raise ValueError(f"{manifest.file!r} is no file of the folder")
    except (ValueError, msgspec.DecodeError) as error:
        raise DamagedExpert(
            f"expert {name} is damaged: {storage}/{file}: {error}; add it again", name
        ) from error
    return manifest


class Summed:
    """Iterator that passes chunks through and computes their checksums."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = chunks
        self._crcs: list[int] = []
        self._bytes = 0

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            rest = memoryview(chunk).cast("B")
            while rest:
                part = rest[: PIECE - self._bytes % PIECE]
                if self._bytes % PIECE == 0:
                    self._crcs.append(0)
                self._crcs[-1] = crc32(part, self._crcs[-1])
                self._bytes += len(part)
                rest = rest[len(part) :]
            yield chunk

    def manifest(self, file: str) -> Manifest:
        """Returns the manifest of the bytes that have passed."""
        return Manifest(file, self._bytes, tuple(self._crcs))


def pieces(storage: Storage, file: str) -> Iterator[bytes]:
    """Yields the bytes of a file in pieces.

    Raises:
        Corrupted: the file ended too early.
        StorageError: the file cannot be read.
    """
    size = storage.size(file)
    if size is None:
        raise Corrupted(f"{storage}/{file} is missing")
    for start in range(0, size, PIECE):
        data = storage.read(file, start, min(PIECE, size - start))
        if len(data) < min(PIECE, size - start):
            raise Corrupted(f"{storage}/{file} ends at byte {start + len(data)} of {size}")
        yield data
