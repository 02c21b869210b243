"""What POSIX says of names, permissions and lengths, in the simplest form: objects that hold each other.

Every operation first collects all errors that apply (`Wrong.numbers`); any one of them may be reported.
"""

import errno as e
from dataclasses import dataclass, field

from fireflyer.fs3.meta.messages import User

R, W, X = 4, 2, 1


class Wrong(Exception):
    """The operation must fail with one of these."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(numbers)
        self.numbers = set(numbers)


@dataclass(eq=False)
class Node:
    mode: int
    uid: int
    gid: int
    nlink: int = 1
    length: int = 0
    version: int = 0
    writers: set[int] = field(default_factory=set)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    mtime: int = 0


@dataclass(eq=False)
class File(Node):
    pass


@dataclass(eq=False)
class Folder(Node):
    names: dict[bytes, Node] = field(default_factory=dict)
    parent: "Folder | None" = None
    setgid: bool = False


@dataclass(eq=False)
class Sym(Node):
    target: bytes = b""


def may(user: User, node: Node, bits: int) -> bool:
    if user.uid == 0:
        return True
    shift = 0
    if user.uid == node.uid:
        shift = 6
    elif node.gid in (user.gid, *user.groups):
        shift = 3
    return (node.mode >> shift) & bits == bits


class Model:
    def __init__(self) -> None:
        self.root = Folder(0o777, 0, 0)
        self.files = 1
        self.now = 0

    # Paths.

    def walk(
        self, user: User, start: Folder, path: bytes, hops: list[int] | None = None
    ) -> tuple[Folder, bytes]:
        """The folder and last name of a path that does not end in a slash."""
        hops = hops if hops is not None else [0]
        at = start
        *before, last = path.split(b"/")
        for part in before:
            if not may(user, at, X):
                raise Wrong(e.EACCES)
            below: Node | None = at.parent or at if part == b".." else at.names.get(part)
            if below is None:
                raise Wrong(e.ENOENT)
            if isinstance(below, Sym):
                below = self.follow(user, at, below, hops)
            if not isinstance(below, Folder):
                raise Wrong(e.ENOTDIR)
            at = below
        if not may(user, at, X):
            raise Wrong(e.EACCES)
        return at, last

    def follow(self, user: User, at: Folder, node: Node, hops: list[int]) -> Node:
        if not isinstance(node, Sym):
            return node
        hops[0] += 1
        if hops[0] > 40:
            raise Wrong(e.ELOOP)
        folder, name = self.walk(user, at, node.target, hops)
        if name == b"..":
            return folder.parent or folder
        if name not in folder.names:
            raise Wrong(e.ENOENT)
        return self.follow(user, folder, folder.names[name], hops)

    def get(self, user: User, start: Folder, path: bytes, follow: bool = True) -> Node:
        hops = [0]
        folder, name = self.walk(user, start, path, hops)
        if name == b"..":
            return folder.parent or folder
        if name not in folder.names:
            raise Wrong(e.ENOENT)
        node = folder.names[name]
        return self.follow(user, folder, node, hops) if follow else node

    # Making.

    def _place(self, user: User, start: Folder, path: bytes) -> tuple[Folder, bytes]:
        folder, name = self.walk(user, start, path)
        wrong = set()
        if name in folder.names or name == b"..":
            wrong.add(e.EEXIST)
        if not may(user, folder, W):
            wrong.add(e.EACCES)
        if wrong:
            raise Wrong(*wrong)
        return folder, name

    def _add(self, folder: Folder, name: bytes, node: Node) -> None:
        folder.names[name] = node
        folder.mtime = self.now

    def _own(self, user: User, folder: Folder, node: Node) -> None:
        node.uid, node.gid, node.mtime = user.uid, user.gid, self.now
        if folder.mode & 0o2000:
            node.gid = folder.gid
            if isinstance(node, Folder):
                node.mode |= 0o2000
        self.files += 1

    def create(
        self, user: User, start: Folder, path: bytes, mode: int, exclusive: bool, handle: int
    ) -> Node:
        folder, name = self.walk(user, start, path)
        for _ in range(41):
            there = folder.names.get(name)
            if exclusive or not isinstance(there, Sym):
                break
            folder, name = self.walk(user, folder, there.target)
        else:
            raise Wrong(e.ELOOP)
        if name == b"..":
            raise Wrong(e.EEXIST, e.EISDIR)
        if there is None:
            folder, name = self._place(user, folder, name)
            node = File(mode, 0, 0)
            self._own(user, folder, node)
            self._add(folder, name, node)
        elif exclusive:
            raise Wrong(e.EEXIST)
        else:
            node = self._open(user, there, handle)
        if handle:
            node.writers.add(handle)
        return node

    def _open(self, user: User, node: Node, handle: int) -> File:
        wrong = set()
        if handle and isinstance(node, Folder):
            wrong.add(e.EISDIR)
        if handle and not may(user, node, W):
            wrong.add(e.EACCES)
        if wrong:
            raise Wrong(*wrong)
        return node  # type: ignore[return-value]

    def open(self, user: User, start: Folder, path: bytes, handle: int) -> Node:
        node = self.get(user, start, path)
        self._open(user, node, handle).writers.add(handle)
        return node

    def mkdir(self, user: User, start: Folder, path: bytes, mode: int) -> Node:
        folder, name = self._place(user, start, path)
        node = Folder(mode, 0, 0, nlink=2, parent=folder)
        self._own(user, folder, node)
        self._add(folder, name, node)
        folder.nlink += 1
        return node

    def symlink(self, user: User, start: Folder, path: bytes, target: bytes) -> Node:
        folder, name = self._place(user, start, path)
        node = Sym(0o777, 0, 0, target=target, length=len(target))
        self._own(user, folder, node)
        self._add(folder, name, node)
        return node

    def link(self, user: User, start: Folder, path: bytes, to: Folder, new: bytes) -> Node:
        wrong = set()
        node = None
        try:
            node = self.get(user, start, path, follow=False)
            if isinstance(node, Folder):
                wrong.add(e.EPERM)
        except Wrong as error:
            wrong |= error.numbers
        try:
            folder, name = self._place(user, to, new)
        except Wrong as error:
            wrong |= error.numbers
        if wrong or node is None:
            raise Wrong(*wrong)
        self._add(folder, name, node)
        node.nlink += 1
        return node

    # Removing.

    def _removable(self, user: User, folder: Folder, node: Node) -> set[int]:
        wrong = set()
        if not may(user, folder, W):
            wrong.add(e.EACCES)
        if folder.mode & 0o1000 and user.uid not in (0, folder.uid, node.uid):
            wrong.add(e.EPERM)
        return wrong

    def _gone(self, folder: Folder, node: Node) -> None:
        if isinstance(node, Folder):
            folder.nlink -= 1
            node.nlink = 0
        else:
            node.nlink -= 1
        if node.nlink == 0:
            self.files -= 1

    def remove(self, user: User, start: Folder, path: bytes, directory: bool) -> None:
        folder, name = self.walk(user, start, path)
        if name == b"..":
            raise Wrong(e.ENOTEMPTY, e.EISDIR)
        if name not in folder.names:
            raise Wrong(e.ENOENT)
        node = folder.names[name]
        wrong = self._removable(user, folder, node)
        if directory and not isinstance(node, Folder):
            wrong.add(e.ENOTDIR)
        if directory and isinstance(node, Folder) and node.names:
            wrong.add(e.ENOTEMPTY)
        if not directory and isinstance(node, Folder):
            wrong.add(e.EISDIR)
        if wrong:
            raise Wrong(*wrong)
        del folder.names[name]
        folder.mtime = self.now
        self._gone(folder, node)

    def _inside(self, folder: Folder, node: Node) -> bool:
        at: Folder | None = folder
        while at is not None:
            if at is node:
                return True
            at = at.parent
        return False

    def rename(
        self, user: User, start: Folder, path: bytes, to: Folder, new: bytes, flags: int
    ) -> None:
        wrong: set[int] = set()
        places = []
        for folder, name in ((start, path), (to, new)):
            try:
                places.append(self.walk(user, folder, name))
            except Wrong as error:
                wrong |= error.numbers
        if wrong:
            raise Wrong(*wrong)
        (old, old_name), (target, new_name) = places
        if b".." in (old_name, new_name):
            raise Wrong(e.EINVAL, e.EBUSY)
        moved, there = old.names.get(old_name), target.names.get(new_name)
        if moved is None or (flags == 2 and there is None):
            wrong.add(e.ENOENT)
        if flags == 1 and there is not None:
            wrong.add(e.EEXIST)
        for folder, node in ((old, moved), (target, there)):
            if node is not None:
                wrong |= self._removable(user, folder, node)
            elif not may(user, folder, W):
                wrong.add(e.EACCES)
        crossing = [(moved, target)] + ([(there, old)] if flags == 2 else [])
        for node, into in crossing:
            if isinstance(node, Folder) and old is not target:
                if self._inside(into, node):
                    wrong.add(e.EINVAL)
                if not may(user, node, W):
                    wrong.add(e.EACCES)
        if flags != 2 and moved is not None and there is not None and moved is not there:
            if isinstance(there, Folder) and not isinstance(moved, Folder):
                wrong.add(e.EISDIR)
            if isinstance(moved, Folder) and not isinstance(there, Folder):
                wrong.add(e.ENOTDIR)
            if isinstance(there, Folder) and there.names:
                wrong.add(e.ENOTEMPTY)
        if wrong or moved is None:
            raise Wrong(*wrong)
        if moved is there:
            return
        del old.names[old_name]
        if there is not None and flags != 2:
            self._gone(target, there)
        if there is not None and flags == 2:
            old.names[old_name] = there
            self._moved(there, target, old)
        target.names[new_name] = moved
        self._moved(moved, old, target)
        old.mtime = target.mtime = self.now

    @staticmethod
    def _moved(node: Node, old: Folder, new: Folder) -> None:
        if isinstance(node, Folder):
            node.parent = new
            old.nlink -= 1
            new.nlink += 1

    # Attributes.

    def chmod(self, user: User, start: Folder, path: bytes, mode: int) -> Node:
        node = self.get(user, start, path)
        if user.uid not in (0, node.uid):
            raise Wrong(e.EPERM)
        node.mode = mode
        if user.uid and node.gid not in (user.gid, *user.groups):
            node.mode &= ~0o2000
        return node

    def chown(self, user: User, start: Folder, path: bytes, uid: int, gid: int) -> Node:
        node = self.get(user, start, path, follow=False)
        groups = (user.gid, *user.groups)
        if user.uid:
            mine = user.uid == node.uid
            if not mine or uid not in (-1, node.uid) or gid not in (-1, node.gid, *groups):
                raise Wrong(e.EPERM)
        node.uid = node.uid if uid == -1 else uid
        node.gid = node.gid if gid == -1 else gid
        if isinstance(node, File):
            self._strip(node)
        return node

    @staticmethod
    def _strip(node: Node) -> None:
        node.mode &= ~0o4000
        if node.mode & 0o010:
            node.mode &= ~0o2000

    def truncate(self, user: User, start: Folder, path: bytes, length: int) -> Node:
        node = self.get(user, start, path)
        wrong = set()
        if isinstance(node, Folder):
            wrong.add(e.EISDIR)
        if not may(user, node, W):
            wrong.add(e.EACCES)
        if wrong:
            raise Wrong(*wrong)
        node.length, node.version, node.mtime = length, node.version + 1, self.now
        if user.uid:
            self._strip(node)
        return node

    def report(self, user: User, node: Node, length: int, version: int) -> None:
        if version == node.version:
            node.length, node.mtime = max(node.length, length), self.now
            if user.uid:
                self._strip(node)

    def utimens(self, user: User, start: Folder, path: bytes, mtime: int) -> Node:
        node = self.get(user, start, path)
        if user.uid not in (0, node.uid):
            raise Wrong(e.EPERM)
        node.mtime = mtime
        return node

    def set_xattr(self, user: User, start: Folder, path: bytes, value: bytes, flags: int) -> None:
        node = self.get(user, start, path)
        wrong = set()
        if not may(user, node, W):
            wrong.add(e.EACCES)
        if isinstance(node, Folder) and node.mode & 0o1000 and user.uid not in (0, node.uid):
            wrong.add(e.EPERM)
        if flags == 1 and b"user.x" in node.xattrs:
            wrong.add(e.EEXIST)
        if flags == 2 and b"user.x" not in node.xattrs:
            wrong.add(e.ENODATA)
        if wrong:
            raise Wrong(*wrong)
        node.xattrs[b"user.x"] = value
