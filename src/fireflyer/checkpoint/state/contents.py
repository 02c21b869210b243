"""Contents of a checkpoint during a conversion between formats: nodes and streams of bytes.

A stream holds one tensor's bytes. Each format converts to and from `Contents`, so no format needs
to know another format, and no state has to fit into memory.
"""

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fireflyer.checkpoint.state.boxes import Box, whole
from fireflyer.checkpoint.state.leaves import Leaf, Local, byte_view, describe, local_of, new_local
from fireflyer.checkpoint.state.tree import (
    Container,
    Node,
    Path,
    Tensor,
    Value,
    flatten,
    path_name,
    unflatten,
)
from fireflyer.errors import CheckpointError, Corrupted

STREAM_BYTES = 4 << 20
"""Approximate size of one part of a stream."""


class Contents(abc.ABC):
    """Nodes of a state, whose `pieces` are not used, and the tensors' bytes. `str()` names the
    source for messages."""

    nodes: Sequence[Node]
    """Parents before children, children in order."""

    @property
    def tensors(self) -> list[Tensor]:
        return [node for node in self.nodes if isinstance(node, Tensor)]

    def boxes(self, node: Tensor) -> list[Box]:
        """Returns disjoint boxes that cover a tensor: the division that is cheapest to read."""
        return [whole(node.shape)] if math.prod(node.shape) else []

    @abc.abstractmethod
    def read(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        """Yields the bytes of a box in C order, in memory that no longer changes.

        Args:
            box: one of `boxes`, or a box whose elements are adjacent in the tensor.

        Raises:
            Corrupted: if the data is damaged; the error names the tensor.
        """

    def state(self) -> Any:
        """Returns the whole state in memory.

        Raises:
            Corrupted: if the nodes do not form a tree.
        """
        return unflatten_or_corrupted(
            str(self), self.nodes, {node.path: load(self, node) for node in self.tensors}
        )


def unflatten_or_corrupted(
    name: str, nodes: Sequence[Node], leaves: Mapping[Path, Leaf | Local]
) -> Any:
    """Calls `unflatten` for nodes that may be damaged; raises Corrupted if they are."""
    try:
        return unflatten(nodes, leaves)
    except (CheckpointError, ValueError, TypeError, KeyError) as error:
        raise Corrupted(f"{name}: {error}") from error


def at(path: Path, node: Node) -> Node:
    """Returns the node with another path."""
    if isinstance(node, Container):
        return Container(path=path, kind=node.kind)
    if isinstance(node, Value):
        return Value(path=path, kind=node.kind, value=node.value)
    return Tensor(path=path, kind=node.kind, dtype=node.dtype, shape=node.shape, pieces=node.pieces)


def itemsize_of(node: Tensor) -> int:
    """Returns the size of an element in bytes.

    Raises:
        CheckpointError: if this build of torch or numpy lacks the dtype.
    """
    return int(_new(node, (0,)).dtype.itemsize)


def nbytes_of(node: Tensor) -> int:
    return math.prod(node.shape) * itemsize_of(node)


def _new(node: Tensor, shape: tuple[int, ...]) -> Local:
    try:
        return new_local(node.kind, node.dtype, shape)
    except CheckpointError as error:
        raise CheckpointError(f"{path_name(node.path)}: {error}") from error
    except (ValueError, SyntaxError, RuntimeError) as error:  # numpy parses dtype strings
        name = path_name(node.path)
        raise CheckpointError(f"{name}: unknown {node.kind} dtype {node.dtype!r}") from error


def load(contents: Contents, node: Tensor) -> Local:
    """Loads one tensor into memory."""
    local = _new(node, node.shape)
    if math.prod(node.shape):
        fill(byte_view(local).reshape(-1), contents.read(node, whole(node.shape)))
    return local


def fill(memory: torch.Tensor | np.ndarray[Any, Any], stream: Iterator[memoryview]) -> None:
    """Copies a stream into memory (uint8 [bytes]) of the stream's length."""
    target, done = np.asarray(memory).data, 0
    for part in stream:
        target[done : done + len(part)] = part
        done += len(part)


def pieces_of_bytes(local: Local) -> Iterator[memoryview]:
    """Yields the bytes of a tensor or array in C order; copies only if they lie in another
    order."""
    if isinstance(local, np.ndarray):
        data = byte_view(np.ascontiguousarray(local)).reshape(-1)
    else:
        plain = local.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = byte_view(plain).reshape(-1)
    view = np.asarray(data).data
    for start in range(0, len(view), STREAM_BYTES):
        yield view[start : start + STREAM_BYTES]


class InMemory(Contents):
    """Contents of a state that lies entirely in this process."""

    def __init__(self, state: Any, name: str = "the state") -> None:
        """Describes the state's leaves.

        Raises:
            CheckpointError: if an item cannot be saved; the error names its path.
        """
        self._name = name
        self._locals: dict[Path, Local] = {}
        self.nodes = [self._node(path, item) for path, item in flatten(state)]

    def __str__(self) -> str:
        return self._name

    def _node(self, path: Path, item: Container | Value | Leaf) -> Node:
        if isinstance(item, Container | Value):
            return item
        try:
            found = describe(item)
        except CheckpointError as error:
            raise CheckpointError(f"cannot save {path_name(path)}: {error}") from error
        if math.prod(found.shape) and found.box != whole(found.shape):
            raise CheckpointError(f"cannot save {path_name(path)}: it is a shard of a tensor")
        self._locals[path] = local_of(item)
        return Tensor(path=path, kind=found.kind, dtype=found.dtype, shape=found.shape, pieces=())

    def read(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        # With the ellipsis an array without dimensions stays an array, rather than a scalar.
        within: Any = (*box.slices, ...)
        yield from pieces_of_bytes(self._locals[node.path][within])
