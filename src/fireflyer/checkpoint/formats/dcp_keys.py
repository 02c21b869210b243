"""Mapping between this package's trees and the flat dicts of torch.distributed.checkpoint.

DCP joins the keys on the path to a tensor with dots. All keys are text, except positions in lists.
Some items are stored as one object under one key: a list without tensors or dicts, and any item
that is neither a tensor, a dict nor a list.
"""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from fireflyer.checkpoint.state.contents import at, unflatten_or_corrupted
from fireflyer.checkpoint.state.leaves import Local
from fireflyer.checkpoint.state.tree import (
    MAX_DEPTH,
    Container,
    Key,
    Node,
    Path,
    Tensor,
    Value,
    path_name,
)
from fireflyer.errors import CheckpointError
from fireflyer.torch_internals.checkpoint import flatten_state_dict

_NUMPY_CLASSES = [
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSUmM"},
]
"""Classes to which a pickled array refers."""


def safe_classes() -> AbstractContextManager[None]:
    """Lets torch.load(weights_only=True) read numpy arrays, too."""
    found: AbstractContextManager[None] = torch.serialization.safe_globals(_NUMPY_CLASSES)
    return found


def safely_loaded(key: str, data: bytes) -> Any:
    """Loads a torch.save file of plain values, tensors and arrays.

    Raises:
        CheckpointError: if the file holds anything else; the error names the key.
    """
    try:
        with safe_classes():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle of other objects may raise anything
        raise CheckpointError(
            f"{key} cannot be read as data alone, without running code: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """Returns in one line why torch did not load a file as data alone.

    torch's own text advises the user to load the file as code.
    """
    text = str(error)
    named = re.search(r"GLOBAL (\S+)", text)
    if named is not None:
        return f"it names {named[1]}, which is not data"
    if "weights_only" in text:
        return "it is damaged, or contains more than plain data"
    return text.splitlines()[0] if text else type(error).__name__


Items = Mapping[str, Sequence[Node]]
"""Nodes under each key, with paths relative to the key."""


def tree_of(items: Items, paths: Mapping[str, Sequence[Any]] | None) -> list[Node]:
    """Returns all items as one tree, in the order of `paths`.

    As in DCP, a list position without a key gets None.

    Args:
        paths: the keys on the path to each item; an item without a path is placed at the root.

    Raises:
        CheckpointError: if the items do not make a tree.
    """
    root: dict[Key, Any] = {}
    given = paths or {}
    ordered = [key for key in given if key in items]
    for key in [*ordered, *(key for key in items if key not in given)]:
        path = tuple(given.get(key, (key,)))
        if not path or len(path) > MAX_DEPTH or not all(type(one) in (str, int) for one in path):
            raise CheckpointError(f"{key} has the invalid path {path!r}")
        branch = root
        for one in path[:-1]:
            branch = branch.setdefault(one, {})
            if not isinstance(branch, dict):
                raise CheckpointError(f"{key} is inside another item")
        if path[-1] in branch:
            raise CheckpointError(f"{key} has the same path as another item")
        branch[path[-1]] = tuple(items[key])
    nodes: list[Node] = []
    _emit(nodes, (), root, "dict")
    return nodes


def _emit(nodes: list[Node], path: Path, branch: dict[Key, Any], kind: Any) -> None:
    nodes.append(Container(path=path, kind=kind))
    keys: Sequence[Key] = list(branch)
    if kind == "list":
        last = max(key for key in branch if isinstance(key, int))
        if last > 2 * len(branch) + 1000 or min(keys) < 0:  # type: ignore[operator]
            raise CheckpointError(
                f"{path_name(path)} has positions up to {last} but {len(keys)} items"
            )
        keys = range(last + 1)
    for key in keys:
        place = (*path, key)
        found = branch.get(key)
        if found is None:
            nodes.append(Value(path=place, kind="none", value=None))
        elif isinstance(found, dict):
            is_list = all(type(one) is int for one in found)
            _emit(nodes, place, found, "list" if is_list else "dict")
        else:
            nodes.extend(at((*place, *node.path), node) for node in found)


class DcpKeys:
    """Keys that DCP gives to the items of a state with these nodes."""

    def __init__(self, name: str, nodes: Sequence[Node]) -> None:
        """Flattens the state as DCP does.

        Raises:
            CheckpointError: if the state is not a dict, two items would have one key, or this build
                of torch lacks a dtype.
        """
        self._nodes: dict[int, Tensor] = {}
        self._stand_ins: dict[Path, Local] = {}
        for node in nodes:
            if isinstance(node, Tensor):
                found = _stand_in(node)
                self._stand_ins[node.path] = found
                self._nodes[id(found)] = node
        state = unflatten_or_corrupted(name, nodes, self._stand_ins)
        if not isinstance(state, dict):
            raise CheckpointError(f"{name} is a {type(state).__name__}; DCP supports only dicts")
        try:
            flat, paths = flatten_state_dict(state)
        except ValueError as error:
            raise CheckpointError(f"cannot derive DCP keys for {name}: {error}") from error
        self.paths: dict[str, tuple[Any, ...]] = paths
        self.tensors: dict[str, Tensor] = {}
        self._objects: dict[str, Any] = {}
        for key, item in flat.items():
            if isinstance(item, torch.Tensor):
                self.tensors[key] = self._nodes[id(item)]
            else:
                self._objects[key] = item

    @property
    def objects(self) -> list[str]:
        """Keys of the items other than tensors."""
        return list(self._objects)

    def tensors_within(self, key: str) -> list[Tensor]:
        """Returns the tensors within the object under a key: arrays, and tensors in tuples."""
        return list(self._within(self._objects[key]))

    def _within(self, item: Any) -> list[Tensor]:
        if isinstance(item, torch.Tensor | np.ndarray):
            return [self._nodes[id(item)]]
        children = item.values() if isinstance(item, dict) else item
        if not isinstance(item, dict | list | tuple):
            return []
        return [node for child in children for node in self._within(child)]

    def assembled(self, key: str, loaded: Mapping[Path, Local]) -> Any:
        """Returns the object under a key, with its loaded tensors."""
        return self._replaced(self._objects[key], loaded)

    def _replaced(self, item: Any, loaded: Mapping[Path, Local]) -> Any:
        if isinstance(item, torch.Tensor | np.ndarray):
            return loaded[self._nodes[id(item)].path]
        if isinstance(item, dict):
            return {key: self._replaced(child, loaded) for key, child in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(self._replaced(child, loaded) for child in item)
        return item


def _stand_in(node: Tensor) -> Local:
    """Returns a meta tensor for a torch tensor, and an array for a numpy array, because DCP treats
    arrays as objects."""
    if node.kind == "numpy":
        return np.empty(0)
    dtype = getattr(torch, node.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"{path_name(node.path)}: unknown torch dtype {node.dtype!r}")
    return torch.empty(node.shape, dtype=dtype, device="meta")
