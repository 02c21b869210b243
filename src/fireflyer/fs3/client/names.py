"""Names and attributes of files; the methods have names and behaviour of functions in `os`."""

import contextlib
import math
import operator
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fireflyer.errors import FileError
from fireflyer.fs3.client.metadata import Metadata, Path, encoded, integer, raw_name
from fireflyer.fs3.meta import messages
from fireflyer.fs3.meta.inode import (
    BLOCK_DEVICE,
    CHARACTER_DEVICE,
    DIRECTORY,
    FIFO,
    FILE,
    ROOT,
    SOCKET,
    SYMLINK,
    Inode,
    Layout,
)

KINDS = {
    FILE: stat.S_IFREG,
    DIRECTORY: stat.S_IFDIR,
    SYMLINK: stat.S_IFLNK,
    FIFO: stat.S_IFIFO,
    SOCKET: stat.S_IFSOCK,
    CHARACTER_DEVICE: stat.S_IFCHR,
    BLOCK_DEVICE: stat.S_IFBLK,
}
"""Type bits of `st_mode` by kind."""
PAGE = 1024
"""Number of names per request of a directory."""


class Entry(NamedTuple):
    """Name in a directory."""

    name: str
    inode: int
    kind: int

    def is_dir(self) -> bool:
        return self.kind == DIRECTORY

    def is_file(self) -> bool:
        return self.kind == FILE

    def is_symlink(self) -> bool:
        return self.kind == SYMLINK


def status_of(inode: Inode) -> os.stat_result:
    """Returns the result of `os.stat`. The size of a symlink is its target's length; a directory's is 0."""
    size = len(inode.target) if inode.kind == SYMLINK else inode.length
    block = inode.layout.chunk_size if inode.layout and inode.kind == FILE else 4096
    times = (inode.atime, inode.mtime, inode.ctime)
    whole = tuple(t // 10**9 for t in times)
    extra = {
        **{f"st_{n}time": t / 1e9 for n, t in zip("amc", times, strict=True)},
        **{f"st_{n}time_ns": t for n, t in zip("amc", times, strict=True)},
        "st_blksize": block,
        "st_blocks": (size + 511) // 512,
        "st_rdev": inode.device,
    }
    mode = KINDS[inode.kind] | inode.mode
    fields = (mode, inode.number, 0, inode.nlink, inode.uid, inode.gid, size, *whole)
    return os.stat_result(fields, extra)


def _ns(times: tuple[float, float]) -> tuple[int, int]:
    """Converts seconds to ns, rounded down as in `os.utime`."""
    if not isinstance(times, tuple) or len(times) != 2:
        raise TypeError("utime: 'times' must be a tuple of two numbers")
    atime, mtime = map(_ns_of, times)
    return atime, mtime


def _ns_of(seconds: Any) -> int:
    if not isinstance(seconds, float):
        return operator.index(seconds) * 10**9
    part, whole = math.modf(seconds)
    return int(whole) * 10**9 + math.floor(part * 1e9)


def _times(ns: tuple[int, int]) -> tuple[int, int]:
    if not isinstance(ns, tuple) or len(ns) != 2:
        raise TypeError("utime: 'ns' must be a tuple of two ints")
    atime, mtime = (integer(time, "time") for time in ns)
    if {atime, mtime} & {messages.OMIT, messages.NOW}:
        raise ValueError(f"times of {messages.OMIT} and {messages.NOW} ns cannot be set")
    return atime, mtime


class Names:
    """Names of a file system, for the user of this process. Paths start at the root. Thread-safe.

    Paths are str (with `surrogateescape` for bytes that are not UTF-8), bytes or os.PathLike.
    Returned names are str. Every method raises FileError, which is also Python's OSError of its
    kind (FileNotFoundError, ...), and WireError if no service answers. Invalid paths and numbers
    raise ValueError, TypeError and OverflowError where `os` does.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    # Reading names

    def stat(self, path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        return status_of(self.inode(path, follow_symlinks=follow_symlinks))

    def lstat(self, path: Path) -> os.stat_result:
        return self.stat(path, follow_symlinks=False)

    def inode(self, path: Path, *, follow_symlinks: bool = True) -> Inode:
        """Returns all stored attributes of a file, with its layout and times in ns."""
        call = messages.Stat(ROOT, encoded(path), follow_symlinks)
        return self._metadata.ask(call, Inode)

    def stat_many(self, paths: Sequence[Path]) -> list[os.stat_result | FileError]:
        """Returns the result of `lstat` or the error for each path, in one call."""
        call = messages.StatMany([(ROOT, encoded(path)) for path in paths])
        found = self._metadata.ask(call, messages.Inodes).items
        return [
            FileError(item, raw_name(path)) if isinstance(item, int) else status_of(item)
            for path, item in zip(paths, found, strict=True)
        ]

    def exists(self, path: Path) -> bool:
        try:
            self.inode(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        return True

    def isdir(self, path: Path) -> bool:
        return self._is(path, DIRECTORY)

    def isfile(self, path: Path) -> bool:
        return self._is(path, FILE)

    def _is(self, path: Path, kind: int) -> bool:
        try:
            return self.inode(path).kind == kind
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False

    def listdir(self, path: Path = "/") -> list[str]:
        """Returns the names, sorted by their bytes."""
        return [entry.name for entry in self.scandir(path)]

    def scandir(self, path: Path = "/") -> Iterator[Entry]:
        """Yields the entries, sorted by the bytes of their names; requests them page by page."""
        for listing in self._listings(ROOT, encoded(path), plus=False):
            for name, inode, kind in listing.entries:
                yield Entry(os.fsdecode(name), inode, kind)

    def _listings(self, directory: int, path: bytes, *, plus: bool) -> Iterator[messages.Listing]:
        after, more = b"", True
        while more:
            call = messages.ReadDirectory(directory, path, after, PAGE, plus)
            listing = self._metadata.ask(call, messages.Listing)
            yield listing
            more = listing.more
            after = listing.entries[-1][0] if listing.entries else after

    def walk(self, top: Path = "/") -> Iterator[tuple[str, list[str], list[str]]]:
        """Walks like `os.walk`, top-down, to any depth; does not follow symlinks."""
        waiting = [(os.fsdecode(top), self.inode(top).number)]
        while waiting:
            path, directory = waiting.pop()
            below: list[tuple[str, int]] = []
            others: list[str] = []
            for listing in self._listings(directory, b"", plus=False):
                for raw, number, kind in listing.entries:
                    name = os.fsdecode(raw)
                    if kind == DIRECTORY:
                        below.append((name, number))
                    else:
                        others.append(name)
            yield path, [name for name, _ in below], others
            waiting.extend((f"{path.rstrip('/')}/{name}", at) for name, at in reversed(below))

    # Calls relative to a directory's inode number, like `openat`: the directory's depth has no cost

    def entries_of(self, directory: int) -> Iterator[tuple[str, Inode]]:
        """Yields the names in a directory with their attributes, sorted by the names' bytes.

        The user needs permission to read and to search the directory.
        """
        for listing in self._listings(directory, b"", plus=True):
            for (name, _, _), inode in zip(listing.entries, listing.inodes, strict=True):
                yield os.fsdecode(name), inode

    def unlink_at(self, directory: int, name: str) -> None:
        self._metadata.act(messages.Unlink(directory, raw_name(name)), messages.Done)

    def rmdir_at(self, directory: int, name: str) -> None:
        self._metadata.act(messages.RemoveDirectory(directory, raw_name(name)), messages.Done)

    def readlink(self, path: Path) -> str:
        call = messages.ReadLink(ROOT, encoded(path))
        return os.fsdecode(self._metadata.ask(call, messages.Blob).data)

    def statfs(self) -> messages.Counts:
        return self._metadata.ask(messages.Statfs(), messages.Counts)

    # Changing names

    def mkdir(self, path: Path, mode: int = 0o777) -> None:
        call = messages.MakeDirectory(ROOT, encoded(path), self._metadata.masked(mode))
        self._metadata.act(call, Inode)

    def makedirs(self, path: Path, mode: int = 0o777, exist_ok: bool = False) -> None:
        """Makes a directory and its missing ancestors."""
        text = os.fsdecode(encoded(path)).rstrip("/") or "/"
        missing = []
        above = text
        while above.rpartition("/")[0] and not self.exists(above.rpartition("/")[0]):
            above = above.rpartition("/")[0].rstrip("/")
            missing.append(above)
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another caller made it first
                self.mkdir(one)
        try:
            self.mkdir(text, mode)
        except FileExistsError:
            if not exist_ok or not self.isdir(text):
                raise

    def rmdir(self, path: Path) -> None:
        self._metadata.act(messages.RemoveDirectory(ROOT, encoded(path)), messages.Done)

    def unlink(self, path: Path) -> None:
        """Removes a name; the contents remain while the file is open for writing."""
        self._metadata.act(messages.Unlink(ROOT, encoded(path)), messages.Done)

    remove = unlink

    def rename(self, old: Path, new: Path, *, replace: bool = True, exchange: bool = False) -> None:
        """Renames; replaces a file or an empty directory at `new` unless `replace` is false.

        Args:
            exchange: True: exchange both names instead.
        """
        flags = (0 if replace else messages.NOREPLACE) | (messages.EXCHANGE if exchange else 0)
        call = messages.Rename(ROOT, encoded(old), ROOT, encoded(new), flags)
        self._metadata.act(call, messages.Done)

    def replace(self, old: Path, new: Path) -> None:
        self.rename(old, new)

    def link(self, old: Path, new: Path, *, follow_symlinks: bool = False) -> None:
        call = messages.Link(ROOT, encoded(old), ROOT, encoded(new), follow_symlinks)
        self._metadata.act(call, Inode)

    def symlink(self, target: Path, path: Path) -> None:
        call = messages.Symlink(ROOT, encoded(path), raw_name(target))
        self._metadata.act(call, Inode)

    def create_many(
        self, directory: Path, names: Sequence[Path], mode: int = 0o666
    ) -> list[Inode | FileError]:
        """Creates empty files in one transaction; returns the inode or the error for each name."""
        parent = self.inode(directory).number
        raw = [raw_name(name) for name in names]
        call = messages.CreateMany(parent, raw, self._metadata.masked(mode))
        made = self._metadata.act(call, messages.Inodes).items
        return [
            FileError(item, name) if isinstance(item, int) else item
            for name, item in zip(raw, made, strict=True)
        ]

    # Changing attributes

    def chmod(self, path: Path, mode: int, *, follow_symlinks: bool = True) -> None:
        bits = integer(mode, "mode") & 0o7777
        call = messages.ChangeMode(ROOT, encoded(path), bits, follow_symlinks)
        self._metadata.act(call, Inode)

    def chown(self, path: Path, uid: int, gid: int, *, follow_symlinks: bool = True) -> None:
        """Changes owner and group; -1 keeps the current value."""
        owner, group = integer(uid, "uid"), integer(gid, "gid")
        call = messages.ChangeOwner(ROOT, encoded(path), owner, group, follow_symlinks)
        self._metadata.act(call, Inode)

    def utime(
        self,
        path: Path,
        times: tuple[float, float] | None = None,
        *,
        ns: tuple[int, int] | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        """Sets the times of last access and modification; default: the server's current time.

        Args:
            times: times in s since 1970.
            ns: times in ns since 1970.
        """
        if times is not None and ns is not None:
            raise ValueError("utime: you may specify either 'times' or 'ns' but not both")
        if times is not None:
            ns = _ns(times)
        atime, mtime = (messages.NOW, messages.NOW) if ns is None else _times(ns)
        call = messages.SetTimes(ROOT, encoded(path), atime, mtime, follow_symlinks)
        self._metadata.act(call, Inode)

    def set_layout(self, path: Path, layout: Layout) -> None:
        """Sets the layout of an empty file, or of new files in a directory."""
        if not isinstance(layout, Layout):
            raise TypeError(f"a Layout is required, not {type(layout).__name__!r}")
        self._metadata.act(messages.SetLayout(ROOT, encoded(path), layout), Inode)

    def getxattr(self, path: Path, name: str, *, follow_symlinks: bool = True) -> bytes:
        call = messages.GetXattr(ROOT, encoded(path), raw_name(name), follow_symlinks)
        return self._metadata.ask(call, messages.Blob).data

    def setxattr(
        self, path: Path, name: str, value: bytes, flags: int = 0, *, follow_symlinks: bool = True
    ) -> None:
        """Sets an attribute; `flags` may be os.XATTR_CREATE or os.XATTR_REPLACE."""
        data, how = bytes(memoryview(value)), integer(flags, "flags")
        call = messages.SetXattr(ROOT, encoded(path), raw_name(name), data, how, follow_symlinks)
        self._metadata.act(call, messages.Done)

    def listxattr(self, path: Path, *, follow_symlinks: bool = True) -> list[str]:
        call = messages.ListXattrs(ROOT, encoded(path), follow_symlinks)
        return [os.fsdecode(name) for name in self._metadata.ask(call, messages.Blobs).items]

    def removexattr(self, path: Path, name: str, *, follow_symlinks: bool = True) -> None:
        call = messages.RemoveXattr(ROOT, encoded(path), raw_name(name), follow_symlinks)
        self._metadata.act(call, messages.Done)
