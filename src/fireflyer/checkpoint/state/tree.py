"""State trees: conversion of nested dicts, lists and tuples to nodes that JSON can hold, and back.

A node is a container, a plain value or a tensor, each with its path of keys from the root. Parents
precede their children; children keep their order. Nothing is pickled.
"""

import base64
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from fireflyer.checkpoint.state.leaves import Leaf, Local, is_leaf
from fireflyer.errors import CheckpointError

MAX_DEPTH = 200
"""Maximum nesting depth of containers."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Crc = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]

Key = str | int
Path = tuple[Key, ...]
Plain = int | float | bool | str | bytes | None
PLAIN_TYPES = frozenset((int, float, bool, str, bytes, type(None)))


class Container(msgspec.Struct, frozen=True, kw_only=True, tag_field="node", tag="container"):
    """Node of a dict, list or tuple; its children follow."""

    path: Path
    kind: Literal["dict", "list", "tuple"]


class Value(msgspec.Struct, frozen=True, kw_only=True, tag_field="node", tag="value"):
    """Node of a plain value. Integers beyond 64 bits are hexadecimal text; floats that JSON lacks
    are "nan", "inf" or "-inf"; bytes are base64."""

    path: Path
    kind: Literal["int", "float", "bool", "str", "none", "bytes"]
    value: int | float | bool | str | None


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Box of a tensor: its bytes in C order, in the byte order of the element type."""

    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    """Path from the storage's root; names an older save's file if the piece has not changed."""
    offset: Count
    length: Count
    crc32: tuple[Crc, ...]
    """CRC32 of each block of CRC_BYTES of the piece; the last block may be shorter."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, tag_field="node", tag="tensor"):
    """Node of a tensor, cut into disjoint pieces that cover it."""

    path: Path
    kind: Literal["torch", "numpy"]
    dtype: str
    """torch: "float32", "bfloat16", ...; numpy: its dtype.str, e.g. "<f4"."""
    shape: tuple[Count, ...]
    pieces: tuple[Piece, ...]


Node = Container | Value | Tensor


def path_name(path: Sequence[Key]) -> str:
    """Returns the path in readable form: `model.weight`, `optimizer.state[0].exp_avg`."""
    name = ""
    for key in path:
        if isinstance(key, int):
            name += f"[{key}]"
        else:
            name += f".{key}" if name else key
    return name or "(the state itself)"


def flatten(state: Any) -> Iterator[tuple[Path, Container | Value | Leaf]]:
    """Yields every container, value and tensor of a state with its path, in order.

    The function does not check if a tensor can be saved.

    Raises:
        CheckpointError: if an item cannot be stored; the error names its path.
    """
    todo: list[tuple[Path, Any]] = [((), state)]
    above: list[int] = []  # ids of the item's enclosing containers, the root's first
    while todo:
        path, item = todo.pop()
        del above[len(path) :]
        if type(item) in (dict, OrderedDict, list, tuple):
            _check_nesting(path, id(item), above)
            above.append(id(item))
        if type(item) in (dict, OrderedDict):
            children = [((*path, _checked_key(path, key)), child) for key, child in item.items()]
            yield path, Container(path=path, kind="dict")
        elif type(item) in (list, tuple):
            children = [((*path, index), child) for index, child in enumerate(item)]
            yield path, Container(path=path, kind="list" if type(item) is list else "tuple")
        else:
            children = []
            yield path, _leaf(path, item)
        todo.extend(reversed(children))


def _check_nesting(path: Path, container: int, above: list[int]) -> None:
    if container in above:
        holder = path_name(path[: above.index(container)])
        raise CheckpointError(
            f"cannot save {path_name(path)}: it is {holder} itself, so the state would never end"
        )
    if len(above) >= MAX_DEPTH:
        raise CheckpointError(
            f"cannot save {path_name(path[:3])}...: it is nested more than {MAX_DEPTH} levels deep"
        )


def _checked_key(path: Path, key: object) -> Key:
    if type(key) is str:
        _checked_text((*path, key), key)
        return key
    if type(key) is int and -(2**63) <= key < 2**63:
        return key
    raise CheckpointError(
        f"cannot save the key {key!r} of {path_name(path)}: keys are strings or 64-bit integers"
    )


def _checked_text(path: Path, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = ascii(path_name(path))
        raise CheckpointError(f"cannot save {name}: its text is not valid Unicode") from error


def _leaf(path: Path, item: Any) -> Value | Leaf:
    if type(item) in PLAIN_TYPES:
        return value_node(path, item)
    if is_leaf(item):
        return item  # type: ignore[no-any-return]
    kind = type(item)
    raise CheckpointError(
        f"cannot save {path_name(path)}: a {kind.__module__}.{kind.__qualname__}; a state holds dicts, "
        "lists, tuples, torch tensors, numpy arrays, int, float, bool, str, bytes and None"
    )


def value_node(path: Path, item: Plain) -> Value:
    """Returns the node of a plain value.

    Raises:
        CheckpointError: if the value is text that is not valid Unicode.
    """
    if item is None:
        return Value(path=path, kind="none", value=None)
    if isinstance(item, bool):
        return Value(path=path, kind="bool", value=item)
    if isinstance(item, int):
        return Value(path=path, kind="int", value=item if -(2**63) <= item < 2**63 else hex(item))
    if isinstance(item, float):
        return Value(path=path, kind="float", value=item if math.isfinite(item) else str(item))
    if isinstance(item, str):
        _checked_text(path, item)
        return Value(path=path, kind="str", value=item)
    return Value(path=path, kind="bytes", value=base64.b64encode(item).decode())


def check_tree(nodes: Sequence[Node]) -> None:
    """Checks that the nodes form a tree.

    Raises:
        CheckpointError: if `unflatten` could not assemble the nodes.
    """
    unflatten(nodes, {node.path: None for node in nodes if isinstance(node, Tensor)})


def unflatten(nodes: Iterable[Node], leaves: Mapping[Path, Leaf | Local | None]) -> Any:
    """Assembles a state from its nodes and the tensors by path; the inverse of `flatten`.

    Raises:
        CheckpointError: if the nodes do not form a tree, or a value does not match its kind.
    """
    # Tuples are built as lists and converted at the end, deepest first.
    built: dict[Path, Any] = {}
    tuples: list[Path] = []
    for node in nodes:
        if isinstance(node, Container):
            item: Any = {} if node.kind == "dict" else []
            if node.kind == "tuple":
                tuples.append(node.path)
        else:
            item = leaves[node.path] if isinstance(node, Tensor) else _value(node)
        if node.path in built or len(node.path) > MAX_DEPTH:
            _refuse(node.path)
        if node.path:
            _attach(built, node.path, item)
        built[node.path] = item
    for path in reversed(tuples):
        built[path] = tuple(built[path])
        if path:
            built[path[:-1]][path[-1]] = built[path]
    if () not in built:
        raise CheckpointError("the manifest's nodes do not form a tree: the root is missing")
    return built[()]


def _attach(built: dict[Path, Any], path: Path, item: Any) -> None:
    parent = built.get(path[:-1])
    if type(parent) is list and path[-1] == len(parent):
        parent.append(item)
    elif type(parent) is dict:
        parent[path[-1]] = item
    else:
        _refuse(path)


def _refuse(path: Path) -> NoReturn:
    raise CheckpointError(
        f"the manifest's nodes do not form a tree: {path_name(path[:9])} is misplaced"
    )


_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "none": type(None)}


def _value(node: Value) -> Plain:
    value, kind = node.value, node.kind
    if type(value) is _TYPES.get(kind):
        return value
    try:
        if kind == "bytes" and type(value) is str:
            return base64.b64decode(value, validate=True)
        if kind == "int" and type(value) is str:
            return int(value, 16)
        if kind == "float" and value in ("nan", "inf", "-inf"):
            return float(value)
    except ValueError as error:
        raise CheckpointError(f"{path_name(node.path)} is not a valid {kind}: {error}") from error
    raise CheckpointError(f"{path_name(node.path)} is not a valid {kind}: {value!r:.40}")
