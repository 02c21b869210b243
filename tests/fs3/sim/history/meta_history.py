"""What clients did to names, and whether a tree that takes one operation at a time could have
answered so."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fs3.sim.history.linearize import UNKNOWN, Verdict, linearize

ROOT = 0


@dataclass(slots=True, eq=False)
class MetaOp:
    """One operation of a client: `answer` is Failed, or what the operation returned (None: just done)."""

    client: int
    kind: str
    arguments: tuple[Any, ...]
    call: float
    end: float = UNKNOWN
    answer: Any = None

    def __str__(self) -> str:
        said = "?" if self.end == UNKNOWN else said_of(self.answer)
        end = "?" if self.end == UNKNOWN else f"{self.end:.6f}"
        what = f"{self.kind}{self.arguments}"
        return f"[{self.call:.6f}, {end}] client {self.client} {what} -> {said}"


def said_of(answer: Any) -> str:
    return errno.errorcode[answer.number] if isinstance(answer, Failed) else repr(answer)


@dataclass(frozen=True)
class Failed:
    """The answer of an operation that was refused."""

    number: int


class Refused(Exception):
    """Ends an operation of the model with an error number."""


@dataclass(frozen=True)
class Tree:
    """A state of the model.

    Attributes:
        entries: (directory, name) -> node; nodes are numbers, ROOT the root.
        nodes: node -> (is a directory, length).
        next: the number of the next node.
    """

    entries: frozenset[tuple[tuple[int, str], int]] = frozenset()
    nodes: frozenset[tuple[int, tuple[bool, int]]] = frozenset({(ROOT, (True, 0))})
    next: int = 1


@dataclass
class Work:
    """A tree while one operation changes it."""

    tree: Tree
    entries: dict[tuple[int, str], int] = field(init=False)
    nodes: dict[int, tuple[bool, int]] = field(init=False)
    next: int = field(init=False)

    def __post_init__(self) -> None:
        self.entries = dict(self.tree.entries)
        self.nodes = dict(self.tree.nodes)
        self.next = self.tree.next

    def after(self) -> Tree:
        return Tree(frozenset(self.entries.items()), frozenset(self.nodes.items()), self.next)

    def parent(self, path: str) -> tuple[int, str]:
        """The directory that holds the last name of `path`, and that name."""
        *way, name = path.strip("/").split("/")
        at = ROOT
        for step in way:
            self.directory(at)
            if (at, step) not in self.entries:
                raise Refused(errno.ENOENT)
            at = self.entries[at, step]
        self.directory(at)
        return at, name

    def directory(self, node: int) -> None:
        if not self.nodes[node][0]:
            raise Refused(errno.ENOTDIR)

    def find(self, path: str) -> int:
        if path == "/":
            return ROOT
        at = self.entries.get(self.parent(path))
        if at is None:
            raise Refused(errno.ENOENT)
        return at

    def names(self, node: int) -> list[str]:
        return sorted(name for (directory, name) in self.entries if directory == node)

    def drop(self, place: tuple[int, str]) -> None:
        node = self.entries.pop(place)
        if node not in self.entries.values():
            del self.nodes[node]

    def make(self, path: str, *, directory: bool) -> None:
        place = self.parent(path)
        if place in self.entries:
            raise Refused(errno.EEXIST)
        self.entries[place] = self.next
        self.nodes[self.next] = (directory, 0)
        self.next += 1

    def create(self, path: str) -> None:
        self.make(path, directory=False)

    def mkdir(self, path: str) -> None:
        self.make(path, directory=True)

    def unlink(self, path: str) -> None:
        if self.nodes[self.find(path)][0]:
            raise Refused(errno.EISDIR)
        self.drop(self.parent(path))

    def rmdir(self, path: str) -> None:
        node = self.find(path)
        self.directory(node)
        if self.names(node):
            raise Refused(errno.ENOTEMPTY)
        self.drop(self.parent(path))

    def link(self, source: str, target: str) -> None:
        node, place = self.find(source), self.parent(target)
        if place in self.entries:
            raise Refused(errno.EEXIST)
        if self.nodes[node][0]:
            raise Refused(errno.EPERM)
        self.entries[place] = node

    def rename(self, source: str, target: str, flag: str = "") -> None:
        old, new = self.parent(source), self.parent(target)
        node, other = self.entries.get(old), self.entries.get(new)
        if node is None or (flag == "exchange" and other is None):
            raise Refused(errno.ENOENT)
        if other is not None and flag == "noreplace":
            raise Refused(errno.EEXIST)
        if node in self.way(new[0]):
            raise Refused(errno.EINVAL)
        if other in self.way(old[0]):
            if flag == "exchange":
                raise Refused(errno.EINVAL)
            raise Refused(errno.ENOTEMPTY if self.nodes[node][0] else errno.EISDIR)
        if other == node:
            return
        if flag == "exchange":
            assert other is not None
            self.entries[old] = other
        else:
            if other is not None:
                self.replaceable(node, other)
                self.drop(new)
            del self.entries[old]
        self.entries[new] = node

    def way(self, directory: int) -> list[int]:
        """A directory and those above it, without the root."""
        above = {child: parent for (parent, _), child in self.entries.items()}
        found = []
        while directory != ROOT:
            found.append(directory)
            directory = above[directory]
        return found

    def replaceable(self, node: int, other: int) -> None:
        is_directory, other_is = self.nodes[node][0], self.nodes[other][0]
        if other_is and not is_directory:
            raise Refused(errno.EISDIR)
        if is_directory and not other_is:
            raise Refused(errno.ENOTDIR)
        if other_is and self.names(other):
            raise Refused(errno.ENOTEMPTY)

    def truncate(self, path: str, length: int) -> None:
        node = self.find(path)
        if self.nodes[node][0]:
            raise Refused(errno.EISDIR)
        self.nodes[node] = (False, length)

    def stat(self, path: str) -> tuple[bool, int, int]:
        """Whether it is a directory, its length and, of a file, how many names it has."""
        node = self.find(path)
        is_directory, length = self.nodes[node]
        return is_directory, length, 0 if is_directory else list(self.entries.values()).count(node)

    def readdir(self, path: str) -> tuple[str, ...]:
        node = self.find(path)
        self.directory(node)
        return tuple(self.names(node))


READS = ("stat", "readdir")


def perform(tree: Tree, op: MetaOp) -> tuple[Tree, Any]:
    """The tree after an operation, and the answer that it gives."""
    work = Work(tree)
    try:
        answer = getattr(work, op.kind)(*op.arguments)
    except Refused as refusal:
        return tree, Failed(refusal.args[0])
    return (tree if op.kind in READS else work.after()), answer


def step(tree: Tree, op: MetaOp) -> Tree | None:
    after, answer = perform(tree, op)
    return after if op.end == UNKNOWN or answer == op.answer else None


def check_meta(operations: Sequence[MetaOp], *, limit: int = 500_000) -> Verdict[MetaOp]:
    """Whether the operations on names, in an empty tree at first, are linearizable."""
    known = [op for op in operations if op.end != UNKNOWN or op.kind not in READS]
    return linearize(known, Tree(), step, limit=limit)
