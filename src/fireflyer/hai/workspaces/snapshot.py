"""Turns a folder into a manifest of its content, without the names that its .gitignore files leave
out."""

import hashlib
import os
import stat
from pathlib import Path

import msgspec

from fireflyer.errors import WorkspaceError
from fireflyer.hai.workspaces.gitignore import NAME, Rules, rules_of
from fireflyer.hai.workspaces.manifest import (
    MAX_ENTRIES,
    Entry,
    Manifest,
    check,
    in_words,
    largest,
    stays_inside,
)

DEFAULT_LIMIT = 256 << 20
"""Default maximum size of a folder in bytes; a larger folder usually contains data by mistake."""

PIECE = 1 << 20


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a folder at the time it was read."""

    root: Path
    manifest: Manifest
    left_out: tuple[str, ...]
    """Names that are neither ignored nor shipped, each with the reason, e.g. "data -> /mnt/data
    leads outside"."""

    def source(self) -> dict[str, Path]:
        """Returns, for each hash, the path of a file with this content."""
        return {entry.sha256: self.root / entry.path for entry in self.manifest.files()}


def take(root: Path, limit: int = DEFAULT_LIMIT, *, without: Path | None = None) -> Snapshot:
    """Reads a folder; every file is read once.

    Args:
        root: the folder.
        limit: maximum bytes of all files together.
        without: folder that is left out if it is inside `root`, e.g. the platform's own folder.

    Raises:
        WorkspaceError: `root` is not a folder, is too large or unreadable, or has names that cannot
            be shipped.
    """
    root = Path(os.path.realpath(root))
    if not root.is_dir():
        raise WorkspaceError(f"workspace {root} is not a directory")
    walk = _Walk(root, None if without is None else Path(os.path.realpath(without)))
    try:
        rules, prefix = rules_of(root)
        walk.directory("", prefix, rules)
    except OSError as error:
        raise WorkspaceError(
            f"cannot read {error.filename}: {error.strerror}; exclude it in a .gitignore"
        ) from None
    _within(root, walk.entries, limit)
    walk.drop_links_that_leave()
    try:
        entries = tuple(map(walk.hashed, walk.entries))
    except OSError as error:
        raise WorkspaceError(
            f"cannot read {error.filename}: {error.strerror}; exclude it in a .gitignore"
        ) from None
    manifest = Manifest(entries=entries)
    check(manifest)
    return Snapshot(root=root, manifest=manifest, left_out=tuple(walk.left_out))


def _within(root: Path, entries: list[Entry], limit: int) -> None:
    total = sum(entry.size for entry in entries)
    advice = "exclude data in a .gitignore, or raise --workspace-limit"
    if total > limit:
        raise WorkspaceError(
            f"workspace {root} has {in_words(total)}, more than {in_words(limit)}; the largest: "
            f"{largest(entries)}; {advice}"
        )
    if len(entries) > MAX_ENTRIES:
        raise WorkspaceError(
            f"workspace {root} has more than {MAX_ENTRIES} names; {advice.split(',')[0]}"
        )


class _Walk:
    def __init__(self, root: Path, without: Path | None) -> None:
        self.entries: list[Entry] = []
        self.left_out: list[str] = []
        self._root = root
        self._without = without

    def directory(self, below: str, prefix: str, rules: Rules) -> bool:
        """Records the content of the directory `below` ("" or "a/b/"). Returns whether the
        directory needs an entry, because it is empty or some of its content was recorded."""
        folder = self._root / below
        noted = len(self.entries)
        with os.scandir(folder) as found:
            names = sorted(found, key=lambda item: item.name)
        for item in names:
            self._name(item, below, prefix, rules)
        return not names or len(self.entries) > noted

    def _name(self, item: os.DirEntry[str], below: str, prefix: str, rules: Rules) -> None:
        path = below + item.name
        facts = item.stat(follow_symlinks=False)
        inside = stat.S_ISDIR(facts.st_mode)
        if item.name == ".git" or rules.leave_out(prefix + path, directory=inside):
            return
        if len(self.entries) > MAX_ENTRIES:
            return  # `_within` rejects the folder; do not read a large data set first
        mode = stat.S_IMODE(facts.st_mode) & 0o777
        if inside:
            if self._without is not None and self._without == self._root / path:
                return
            place = len(self.entries)
            deeper = rules.below(f"{prefix}{path}/", self._root / path / NAME)
            if self.directory(path + "/", prefix, deeper):
                entry = Entry(path=path, kind="directory", mode=mode | 0o700)
                self.entries.insert(place, entry)
        elif stat.S_ISREG(facts.st_mode):
            self.entries.append(Entry(path=path, kind="file", mode=mode, size=facts.st_size))
        elif stat.S_ISLNK(facts.st_mode):
            target = os.readlink(self._root / path)
            self.entries.append(Entry(path=path, kind="link", target=target))
        else:
            self.left_out.append(f"{path} is neither a file nor a directory nor a link")

    def drop_links_that_leave(self) -> None:
        """Drops links that lead outside the folder. A dropped link may leave another link dangling,
        but cannot make the other link lead outside."""
        links = {entry.path: entry.target for entry in self.entries if entry.kind == "link"}
        gone = {path for path in links if not stays_inside(path, links)}
        self.left_out += [f"{path} -> {links[path]} leads outside" for path in sorted(gone)]
        self.entries = [entry for entry in self.entries if entry.path not in gone]

    def hashed(self, entry: Entry) -> Entry:
        if entry.kind != "file":
            return entry
        digest, size = hashlib.sha256(), 0
        with (self._root / entry.path).open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                digest.update(piece)
                size += len(piece)
        return msgspec.structs.replace(entry, sha256=digest.hexdigest(), size=size)
