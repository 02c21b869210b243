"""Safe reader of a packed folder's tree of names, which is a pickle of nested OrderedDicts.

The reader accepts only operations that the pickle of such a tree has, in any protocol: names,
numbers, `OrderedDict()` and the memo. The size of the pickle bounds time and memory. Python's
unpickler is not safe, even if it may build no objects. Its memo is an array, so a large memo number
in the pickle allocates memory.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

Tree = dict[str, "int | Tree"]
"""Name -> index of a file, or a directory; in the order of the pickle."""

_MAX_DEPTH = 256
_STOP = ord(".")


class _Sign(Enum):
    """Placeholders on the stack: the class OrderedDict, and the empty tuple of arguments."""

    CLASS = "collections.OrderedDict"
    EMPTY = "()"


def read_names(data: bytes, files: int) -> Tree:
    """Returns the tree in the pickle `data`, with indices below `files`.

    Raises:
        ValueError: the data is not a pickle, has values other than file names and valid indices,
            has a directory in two places, or has more than 256 levels.
    """
    try:
        return _Machine(data, files).run()
    except LookupError as error:
        raise ValueError("it ends early or refers to an item that does not exist") from error


class _Machine:
    """Stack machine of a pickle. A directory is created empty, then filled, then put into another."""

    def __init__(self, data: bytes, files: int) -> None:
        self.data, self.files, self.at = data, files, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        # Ids of directories that are inside another directory. The outer directory keeps them
        # alive, so no id is reused.
        self.placed: set[int] = set()

    def run(self) -> Tree:
        data, operations = self.data, _OPERATIONS
        while (code := data[self.at]) != _STOP:
            self.at += 1
            if code not in operations:
                raise ValueError(
                    f"the pickle operation {bytes([code])!r} is not allowed in a tree of names"
                )
            operations[code](self)
        (root,) = self.stack
        if type(root) is not dict or id(root) in self.placed:
            raise ValueError("it is not a directory")
        level: list[Any] = [root]
        for _ in range(_MAX_DEPTH + 1):
            level = [child for tree in level for child in tree.values() if type(child) is dict]
        if level:
            raise ValueError(f"it has more than {_MAX_DEPTH} levels")
        return root

    def take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise LookupError
        return self.data[start : self.at]

    def line(self) -> bytes:
        line = self.data[self.at : self.data.index(b"\n", self.at)]
        self.at += len(line) + 1
        return line

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def signed(self, size: int) -> None:
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def text(self, size: int) -> None:
        # Like pickle: invalid UTF-8 in names becomes lone surrogates.
        self.stack.append(str(self.take(self.number(size)), "utf-8", "surrogatepass"))

    def remember(self, key: int) -> None:
        self.memo[key] = self.stack[-1]

    def recall(self, key: int) -> None:
        self.stack.append(self.memo[key])

    def name_class(self, module: object, name: object) -> None:
        if (module, name) != ("collections", "OrderedDict"):
            raise ValueError(f"{module}.{name} is not allowed in a tree of names")
        self.stack.append(_Sign.CLASS)

    def stack_class(self) -> None:
        name = self.stack.pop()
        self.name_class(self.stack.pop(), name)

    def empty_tuple(self) -> None:
        if self.marks.pop() != len(self.stack):
            raise ValueError("a tuple is not allowed in a tree of names")
        self.stack.append(_Sign.EMPTY)

    def call(self) -> None:
        if self.stack.pop() is not _Sign.EMPTY or self.stack.pop() is not _Sign.CLASS:
            raise ValueError("it calls something other than OrderedDict()")
        self.stack.append({})

    def set_items(self, start: int) -> None:
        items = self.stack[start:]
        del self.stack[start:]
        tree = self.stack[-1]
        if type(tree) is not dict or len(items) % 2:
            raise ValueError("it puts names into something other than a directory")
        for name, child in zip(items[::2], items[1::2], strict=True):
            if type(name) is not str or name in ("", ".", "..") or "/" in name or "\0" in name:
                raise ValueError(f"{name!r} is not a file name")
            if name in tree:
                raise ValueError(f"{name!r} occurs twice")
            if type(child) is int:
                if not 0 <= child < self.files:
                    raise ValueError(f"file {name!r} has index {child} of {self.files}")
            elif type(child) is dict and id(child) not in self.placed:
                self.placed.add(id(child))
            else:
                raise ValueError(f"{name!r} is neither a file nor a directory of its own")
            tree[name] = child


_OPERATIONS: dict[int, Callable[[_Machine], object]] = {
    # Protocol and frames.
    0x80: lambda m: m.take(1),
    0x95: lambda m: m.take(8),
    # Names.
    ord("V"): lambda m: m.stack.append(str(m.line(), "raw-unicode-escape")),
    ord("X"): lambda m: m.text(4),
    0x8C: lambda m: m.text(1),
    0x8D: lambda m: m.text(8),
    # Numbers.
    ord("I"): lambda m: m.stack.append(int(m.line())),
    ord("J"): lambda m: m.signed(4),
    ord("K"): lambda m: m.stack.append(m.number(1)),
    ord("M"): lambda m: m.stack.append(m.number(2)),
    0x8A: lambda m: m.signed(m.number(1)),
    # OrderedDict().
    ord("c"): lambda m: m.name_class(m.line().decode(), m.line().decode()),
    0x93: lambda m: m.stack_class(),
    ord(")"): lambda m: m.stack.append(_Sign.EMPTY),
    ord("t"): lambda m: m.empty_tuple(),
    ord("R"): lambda m: m.call(),
    # Contents of an OrderedDict.
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("s"): lambda m: m.set_items(len(m.stack) - 2),
    ord("u"): lambda m: m.set_items(m.marks.pop()),
    # The memo.
    ord("p"): lambda m: m.remember(int(m.line())),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("g"): lambda m: m.recall(int(m.line())),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
}
