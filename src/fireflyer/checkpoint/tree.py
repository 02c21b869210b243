"""State trees: nested dicts, lists and tuples taken apart into nodes that JSON can hold, and back.

A node is a container, a plain value or a tensor, each with its path of keys from the root;
parents come before their children, children in their order. Nothing is pickled.
"""

import base64
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from fireflyer.errors import CheckpointError

MAX_DEPTH = 200
"""How many containers may lie within one another."""

Key = str | int
Path = tuple[Key, ...]
Leaf = torch.Tensor | np.ndarray[Any, Any]


class Container(msgspec.Struct, frozen=True, kw_only=True, tag_field="node", tag="container"):
    """A dict, list or tuple; its children follow."""

    path: Path
    kind: Literal["dict", "list", "tuple"]


class Value(msgspec.Struct, frozen=True, kw_only=True, tag_field="node", tag="value"):
    """A plain leaf. Integers beyond 64 bits are hexadecimal text, floats that JSON lacks are "nan", "inf" or
    "-inf", bytes are base64."""

    path: Path
    kind: Literal["int", "float", "bool", "str", "none", "bytes"]
    value: int | float | bool | str | None


class Tensor(msgspec.Struct, frozen=True, kw_only=True, tag_field="node", tag="tensor"):
    """A tensor's bytes: C order, the element type's own byte order, `length` bytes at `offset` of `file`."""

    path: Path
    kind: Literal["torch", "numpy"]
    dtype: str
    """torch: "float32", "bfloat16", ...; numpy: its dtype.str, e.g. "<f4"."""
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int
    crc32: int


Node = Container | Value | Tensor


def path_name(path: Sequence[Key]) -> str:
    """The path as people write it: `model.weight`, `optimizer.state[0].exp_avg`."""
    name = ""
    for key in path:
        if isinstance(key, int):
            name += f"[{key}]"
        else:
            name += f".{key}" if name else key
    return name or "(the state itself)"


def flatten(state: Any) -> Iterator[tuple[Path, Container | Value | Leaf]]:
    """Takes a state apart: every container, value and tensor with its path, in order.

    Raises:
        CheckpointError: naming the path of what cannot be stored.
    """
    todo: list[tuple[Path, Any]] = [((), state)]
    above: list[int] = []  # ids of the containers on the way to the item, the root's first
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
    kind = type(item)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        _check_tensor(path, item)
        return item  # type: ignore[no-any-return]
    if kind is np.ndarray:
        if item.dtype.hasobject or item.dtype.names is not None or item.dtype.subdtype is not None:
            raise CheckpointError(f"cannot save {path_name(path)}: numpy dtype {item.dtype}")
        return item  # type: ignore[no-any-return]
    if item is None:
        return Value(path=path, kind="none", value=None)
    if kind is bool:
        return Value(path=path, kind="bool", value=item)
    if kind is int:
        return Value(path=path, kind="int", value=item if -(2**63) <= item < 2**63 else hex(item))
    if kind is float:
        return Value(path=path, kind="float", value=item if math.isfinite(item) else str(item))
    if kind is str:
        _checked_text(path, item)
        return Value(path=path, kind="str", value=item)
    if kind is bytes:
        return Value(path=path, kind="bytes", value=base64.b64encode(item).decode())
    raise CheckpointError(
        f"cannot save {path_name(path)}: a {kind.__module__}.{kind.__qualname__}; a state holds dicts, "
        "lists, tuples, torch tensors, numpy arrays, int, float, bool, str, bytes and None"
    )


def _check_tensor(path: Path, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise CheckpointError(
            f"cannot save {path_name(path)}: a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
        )


def leaf_dtype(leaf: Leaf) -> str:
    """The dtype as the manifest holds it."""
    return (
        leaf.dtype.str if isinstance(leaf, np.ndarray) else str(leaf.dtype).removeprefix("torch.")
    )


def leaf_kind(leaf: Leaf) -> Literal["torch", "numpy"]:
    return "numpy" if isinstance(leaf, np.ndarray) else "torch"


def empty_leaf(node: Tensor) -> Leaf:
    """A new tensor or array to read `node` into.

    Raises:
        CheckpointError: if this build of torch or numpy lacks the dtype.
    """
    try:
        if node.kind == "numpy":
            return np.empty(node.shape, np.dtype(node.dtype))
        dtype = getattr(torch, node.dtype)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"torch.{node.dtype} is no dtype")
        return torch.empty(node.shape, dtype=dtype)
    except (AttributeError, TypeError) as error:
        raise CheckpointError(
            f"cannot load {path_name(node.path)}: unknown {node.kind} dtype {node.dtype!r}"
        ) from error


def unflatten(nodes: Sequence[Node], leaves: dict[Path, Leaf]) -> Any:
    """Puts a state together from its nodes and the tensors by path; inverse of `flatten`.

    Raises:
        CheckpointError: if the nodes do not make a tree.
    """
    # Tuples are built as lists and turned at the end, deepest first.
    built: dict[Path, Any] = {}
    tuples: list[Path] = []
    for node in nodes:
        if isinstance(node, Container):
            item: Any = {} if node.kind == "dict" else []
            if node.kind == "tuple":
                tuples.append(node.path)
        else:
            item = leaves[node.path] if isinstance(node, Tensor) else _value(node)
        built[node.path] = item
        if node.path:
            _attach(built, node.path, item)
    for path in reversed(tuples):
        built[path] = tuple(built[path])
        if path:
            built[path[:-1]][path[-1]] = built[path]
    if () not in built:
        raise CheckpointError("the manifest's nodes make no tree: there is no root")
    return built[()]


def _attach(built: dict[Path, Any], path: Path, item: Any) -> None:
    parent = built.get(path[:-1])
    if type(parent) is list and path[-1] == len(parent):
        parent.append(item)
    elif type(parent) is dict:
        parent[path[-1]] = item
    else:
        raise CheckpointError(f"the manifest's nodes make no tree: {path_name(path)} has no place")


def _value(node: Value) -> int | float | bool | str | bytes | None:
    value = node.value
    if node.kind == "bytes":
        return base64.b64decode(str(value))
    if node.kind == "float":
        return float(str(value))
    if node.kind == "int" and isinstance(value, str):
        return int(value, 16)
    return value
