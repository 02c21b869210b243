"""Names of datasets and of their files, and the checksummed JSON manifest of a version."""

import json
import re
from hashlib import sha256
from typing import Annotated, Any

import msgspec

from fireflyer.errors import ConfigError, Corrupted

FORMAT = 1
"""Version of the manifest format, which docs/guide/datasets.md describes."""

MANIFEST = "manifest.json"
REMOVED = "removed.json"
MAX_BYTES = 64 << 20
"""Maximum size of a manifest in bytes; a larger manifest is not read."""

_PART = r"[a-z0-9][a-z0-9._-]{0,63}"
_NAME = re.compile(rf"{_PART}(/{_PART}){{0,3}}")
_USER = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.ffr")
_DATA = re.compile(r"data-([0-9a-f]{8,16})-([0-9a-f]{16})")
_VERSION = re.compile(r"@([1-9][0-9]{0,8})")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


def checked_name(name: str) -> str:
    """Returns `name` if it is a valid name of a dataset.

    Raises:
        ConfigError: the name is invalid.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid dataset name {name!r}: expected 1 to 4 parts joined by '/', each of 1 to 64 "
            "characters a-z 0-9 . _ -, beginning with a letter or digit"
        )
    return name


def checked_version(version: int) -> int:
    """Returns `version` if it is valid.

    Raises:
        ConfigError: `version` is not an integer from 1 to 999,999,999.
    """
    if type(version) is not int or not 1 <= version < 10**9:
        raise ConfigError(f"invalid version {version!r}: expected 1, 2, 3, ...")
    return version


def directory_of(name: str, version: int) -> str:
    return f"{name}/@{version}"


def parse_version(entry: str) -> int | None:
    """Returns the version that a directory's name encodes; None if it encodes none."""
    match = _VERSION.fullmatch(entry)
    return int(match[1]) if match else None


def data_name(seconds: int, token: bytes) -> str:
    """Returns the name of the data directory of a publish attempt.

    Args:
        seconds: time at which the attempt began, in seconds since 1970.
    """
    return f"data-{seconds:08x}-{token.hex()}"


def parse_data(entry: str) -> int | None:
    """Returns the start of the attempt with this data directory, in seconds since 1970.

    Returns None if the entry is not a data directory.
    """
    match = _DATA.fullmatch(entry)
    return int(match[1], 16) if match else None


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record file of a version."""

    name: str
    samples: Count
    bytes: Count
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.name):
            raise ValueError(f"invalid record file name {self.name[:300]!r}")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"file {self.name}: invalid sha256")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Manifest of a version of a dataset. The version exists as long as the manifest's file."""

    format: int
    name: str
    version: int
    data: str
    """Name of the directory of the files, next to the manifest."""
    created: float
    """Creation time in seconds since 1970, for display."""
    owner: str
    readers: tuple[str, ...] | None
    """Users besides the owner who may read; None: all users."""
    licence: str
    description: str
    schema: Any
    """Publisher's description of a sample; any JSON."""
    files: tuple[File, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"unknown format {self.format}: expected {FORMAT}")
        for user in (self.owner, *(self.readers or ())):
            if not _USER.fullmatch(user):
                raise ValueError(f"invalid user name {user[:300]!r}")
        if parse_data(self.data) is None:
            raise ValueError(f"invalid data directory name {self.data[:300]!r}")
        if not self.files or len({file.name for file in self.files}) != len(self.files):
            raise ValueError("expected at least one file and no duplicate names")
        if self.samples >= 1 << 62:
            raise ValueError("too many samples: expected fewer than 2^62")

    @property
    def samples(self) -> int:
        return sum(file.samples for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def readable_by(self, user: str) -> bool:
        return self.readers is None or user == self.owner or user in self.readers


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    body: msgspec.Raw


def encode(manifest: Manifest) -> bytes:
    """Returns JSON {"sha256": ..., "body": {...}}; the sum covers the exact bytes of the body.

    Raises:
        ConfigError: the schema is not JSON.
    """
    try:
        raw = msgspec.json.encode(manifest)
        msgspec.json.decode(raw)
        # msgspec would write null for NaN and infinity.
        json.dumps(msgspec.to_builtins(manifest.schema), allow_nan=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"the schema of {manifest.name} is not JSON: {error}") from error
    return msgspec.json.encode(_Envelope(sha256(raw).hexdigest(), msgspec.Raw(raw)))


def decode(data: bytes, where: str, name: str, version: int) -> tuple[Manifest, str]:
    """Decodes the manifest of a dataset's version; returns the manifest and its SHA-256.

    Args:
        where: place of the manifest, for errors.
        name, version: name and version that the manifest must have.

    Raises:
        Corrupted: a byte has changed, or the content is not a manifest of this version.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        digest = sha256(bytes(envelope.body)).hexdigest()
        if digest != envelope.sha256:
            raise Corrupted(f"{where}: its SHA-256 does not match")
        manifest = msgspec.json.decode(envelope.body, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupted(f"{where} is not a manifest: {error}") from error
    if (manifest.name, manifest.version) != (name, version):
        raise Corrupted(
            f"{where} is the manifest of {manifest.name[:200]!r} version {manifest.version}"
        )
    return manifest, digest
