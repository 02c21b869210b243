"""Names of datasets and of their files, and the checksummed JSON manifest that makes a version exist."""

import json
import re
from hashlib import sha256
from typing import Annotated, Any

import msgspec

from fireflyer.errors import ConfigError, Corrupted

FORMAT = 1
"""Version of the manifest; docs/datasets.md draws it."""

MANIFEST = "manifest.json"
REMOVED = "removed.json"
MAX_BYTES = 64 << 20
"""A longer manifest is not read."""

_PART = r"[a-z0-9][a-z0-9._-]{0,63}"
_NAME = re.compile(rf"{_PART}(/{_PART}){{0,3}}")
_USER = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,250}\.ffr")
_DATA = re.compile(r"data-([0-9a-f]{8,16})-([0-9a-f]{16})")
_VERSION = re.compile(r"@([1-9][0-9]{0,8})")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


def checked_name(name: str) -> str:
    """`name` if it is one of a dataset.

    Raises:
        ConfigError: else.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a dataset's name: 1 to 4 parts joined by '/', each of 1 to 64 characters "
            "a-z 0-9 . _ -, beginning with a letter or digit"
        )
    return name


def checked_version(version: int) -> int:
    """
    Raises:
        ConfigError: `version` is not a whole number from 1 to 999,999,999.
    """
    if type(version) is not int or not 1 <= version < 10**9:
        raise ConfigError(f"{version!r} is not a version: versions are 1, 2, 3, ...")
    return version


def directory_of(name: str, version: int) -> str:
    return f"{name}/@{version}"


def parse_version(entry: str) -> int | None:
    """The version that a directory's name stands for."""
    match = _VERSION.fullmatch(entry)
    return int(match[1]) if match else None


def data_name(seconds: int, token: bytes) -> str:
    """Name of the data directory of one attempt to publish, begun `seconds` after 1970."""
    return f"data-{seconds:08x}-{token.hex()}"


def parse_data(entry: str) -> int | None:
    """When the attempt whose data directory is called `entry` began, in seconds since 1970."""
    match = _DATA.fullmatch(entry)
    return int(match[1], 16) if match else None


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One record file of a version."""

    name: str
    samples: Count
    bytes: Count
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.name):
            raise ValueError(f"{self.name[:300]!r} is not a plain name of a record file")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError(f"file {self.name}: its sha256 is not one")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of a dataset: it exists exactly as long as this file does."""

    format: int
    name: str
    version: int
    data: str
    """Directory of the files, beside the manifest."""
    created: float
    """Seconds since 1970, for people."""
    owner: str
    readers: tuple[str, ...] | None
    """Who else may read; None: everybody."""
    licence: str
    description: str
    schema: Any
    """What the publisher says of the samples; any JSON."""
    files: tuple[File, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format {self.format} is not known here, only {FORMAT}")
        for user in (self.owner, *(self.readers or ())):
            if not _USER.fullmatch(user):
                raise ValueError(f"{user[:300]!r} is not a user's name")
        if parse_data(self.data) is None:
            raise ValueError(f"{self.data[:300]!r} is not the name of a data directory")
        if not self.files or len({file.name for file in self.files}) != len(self.files):
            raise ValueError("there must be files, and no name twice")
        if self.samples >= 1 << 62:
            raise ValueError("more samples than can be counted")

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
    """JSON {"sha256": ..., "body": {...}}; the sum is that of the body's bytes as they stand.

    Raises:
        ConfigError: the schema is not JSON.
    """
    try:
        raw = msgspec.json.encode(manifest)
        msgspec.json.decode(raw)
        # msgspec would write null for what is no number.
        json.dumps(msgspec.to_builtins(manifest.schema), allow_nan=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"the schema of {manifest.name} is not JSON: {error}") from error
    return msgspec.json.encode(_Envelope(sha256(raw).hexdigest(), msgspec.Raw(raw)))


def decode(data: bytes, where: str, name: str, version: int) -> tuple[Manifest, str]:
    """The manifest of that name and version, and its SHA-256; `where` is for errors.

    Raises:
        Corrupted: a byte is not as written, or the content is not a manifest of this version.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        digest = sha256(bytes(envelope.body)).hexdigest()
        if digest != envelope.sha256:
            raise Corrupted(f"{where}: its SHA-256 does not hold")
        manifest = msgspec.json.decode(envelope.body, type=Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupted(f"{where} is not a manifest: {error}") from error
    if (manifest.name, manifest.version) != (name, version):
        raise Corrupted(
            f"{where} is the manifest of {manifest.name[:200]!r} version {manifest.version}"
        )
    return manifest, digest
