"""Definition of a workspace: names, modes and hashes, without the bytes of the files. Pure.

A manifest is untrusted input until `check` has accepted it. Writing the entries of a checked
manifest in order into an empty folder never reaches outside the folder.
"""

import hashlib
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec

from fireflyer.errors import WorkspaceError

MAX_BYTES = 4 << 30
"""Maximum bytes of all files of a workspace; a blob counts once for each file that contains it."""
MAX_ENTRIES = 100_000
MAX_MANIFEST_BYTES = 64 << 20
MAX_PATH_BYTES = 1024
MAX_NAME_BYTES = 255
MAX_LINKS = 40
"""Maximum number of symbolic links that a path may lead through, as in Linux."""

Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}\\Z")]


class Entry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Name in a workspace."""

    path: str
    """Path relative to the workspace's root, parts separated by "/"."""
    kind: Literal["file", "directory", "link"]
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] = 0
    """Permission bits; 0 for links."""
    size: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] = 0
    """Bytes of a file."""
    sha256: str = ""
    """SHA-256 of a file's bytes, 64 hex digits."""
    target: str = ""
    """Target of a link: relative, and inside the workspace."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All names of a workspace, sorted by path; a directory comes before its content."""

    entries: tuple[Entry, ...]

    def files(self) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.kind == "file")

    def bytes(self) -> int:
        return sum(entry.size for entry in self.files())

    def blobs(self) -> dict[str, int]:
        """Returns the size of each blob by its hash."""
        return {entry.sha256: entry.size for entry in self.files()}


def encode(manifest: Manifest) -> bytes:
    """Encodes a manifest in its canonical form: equal manifests have equal bytes."""
    return msgspec.json.encode(manifest)


def identify(manifest: Manifest) -> str:
    """Returns the workspace's id: the SHA-256 of its manifest, 64 hex digits."""
    return hashlib.sha256(encode(manifest)).hexdigest()


def decode(data: bytes) -> Manifest:
    """Decodes and checks a manifest.

    Raises:
        WorkspaceError: the manifest cannot be read, or `check` rejects it.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise WorkspaceError(f"the manifest has more than {MAX_MANIFEST_BYTES >> 20} MiB")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WorkspaceError(f"the manifest cannot be read: {error}") from None
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Rejects a manifest that cannot be written exactly, or that could reach outside its folder.

    Raises:
        WorkspaceError: the manifest is rejected; the error names the entry.
    """
    entries = manifest.entries
    if len(entries) > MAX_ENTRIES:
        raise WorkspaceError(f"a workspace has at most {MAX_ENTRIES} names, not {len(entries)}")
    if manifest.bytes() > MAX_BYTES:
        raise WorkspaceError(f"a workspace has at most {MAX_BYTES >> 30} GiB: {largest(entries)}")
    directories = {""}
    folded: dict[str, str] = {}
    sizes: dict[str, int] = {}
    before: tuple[str, ...] = ()
    for entry in entries:
        _check_path(entry.path)
        parts = tuple(entry.path.split("/"))
        if parts <= before:
            raise WorkspaceError(f"{entry.path!a} is listed twice, or not in order")
        before = parts
        parent = "/".join(parts[:-1])
        if parent not in directories:
            raise WorkspaceError(
                f"{entry.path!a} is in {parent!a}, which is not a listed directory"
            )
        same = folded.setdefault(_fold(entry.path), entry.path)
        if same != entry.path:
            raise WorkspaceError(f"{same!a} and {entry.path!a} differ only in case or in form")
        _check_kind(entry)
        if entry.kind == "directory":
            directories.add(entry.path)
        elif entry.kind == "file" and sizes.setdefault(entry.sha256, entry.size) != entry.size:
            raise WorkspaceError(f"{entry.path!a} has the hash of a file of another size")
    links = {entry.path: entry.target for entry in entries if entry.kind == "link"}
    for path in links:
        if not stays_inside(path, links):
            raise WorkspaceError(
                f"the link {path!a} leads out of the workspace, or is part of a loop"
            )


def _check_path(path: str) -> None:
    try:
        data = path.encode()
    except UnicodeEncodeError:
        raise WorkspaceError(f"the name {path!a} is not valid UTF-8") from None
    if len(data) > MAX_PATH_BYTES:
        raise WorkspaceError(f"the name {path[:64]!a}... has more than {MAX_PATH_BYTES} bytes")
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise WorkspaceError(f"the name {path!a} is not a plain relative path")
        if len(part.encode()) > MAX_NAME_BYTES:
            raise WorkspaceError(f"a part of {path[:64]!a}... has more than {MAX_NAME_BYTES} bytes")
        if _fold(part) == ".git":
            raise WorkspaceError(f"{path!a} is in a .git folder, which is never shipped")
    if any(unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") for character in path):
        raise WorkspaceError(f"the name {path!a} has control characters")


def _check_kind(entry: Entry) -> None:
    whole = entry.kind == "file"
    if whole != bool(entry.sha256) or (entry.size and not whole):
        raise WorkspaceError(
            f"{entry.path!a} must have a hash and a size if it is a file, otherwise neither"
        )
    if whole and (len(entry.sha256) != 64 or set(entry.sha256) - set("0123456789abcdef")):
        raise WorkspaceError(f"{entry.path!a} has a hash that is not a SHA-256")
    if (entry.kind == "link") != bool(entry.target) or (entry.kind == "link" and entry.mode):
        raise WorkspaceError(f"{entry.path!a} must have a target and no mode if it is a link")
    if entry.kind == "directory" and entry.mode & 0o700 != 0o700:
        raise WorkspaceError(f"the directory {entry.path!a} must be usable by its owner")
    if "\0" in entry.target or len(entry.target) > MAX_PATH_BYTES or not _is_text(entry.target):
        raise WorkspaceError(f"the link {entry.path!a} has an invalid target")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fold(path: str) -> str:
    """Maps two names to the same text if a file system that ignores case or Unicode forms would
    treat them as one name."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", path).casefold())


def stays_inside(path: str, links: dict[str, str]) -> bool:
    """Returns whether a link, followed through all other links, stays below the root. Missing names
    count as directories."""
    place: list[str] = path.split("/")[:-1]
    todo = links[path].split("/")[::-1]
    if links[path].startswith("/"):
        return False
    followed = 1
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not place:
                return False
            place.pop()
            continue
        place.append(part)
        target = links.get("/".join(place))
        if target is not None:
            followed += 1
            if target.startswith("/") or followed > MAX_LINKS:
                return False
            place.pop()
            todo += target.split("/")[::-1]
    return True


def largest(entries: Iterable[Entry], count: int = 5) -> str:
    """Lists the largest files as text, e.g. "data/a.bin (1.5 GiB), b (20 MiB)"."""
    found = sorted(entries, key=lambda entry: (-entry.size, entry.path))[:count]
    return ", ".join(f"{entry.path} ({in_words(entry.size)})" for entry in found)


def in_words(size: int) -> str:
    """Formats a size, e.g. "12 B", "1.5 GiB"."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
