"""Transfer of a state between ranks: its tensors, and a description of the rest. Uses no pickle.

A state is the result of `state_dict()`: dicts, lists and tuples of tensors, arrays and plain
values. In the description (msgpack) every list is a node, `[kind, ...]`; plain values represent
themselves.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fireflyer import hfreduce
from fireflyer.errors import ConfigError
from fireflyer.haiscale.consistency import bytes_of

CHUNK_BYTES = 8 << 20
"""Maximum size of one broadcast in bytes."""

Array = np.ndarray[Any, Any]
_PLAIN = (type(None), bool, float, str, bytes)
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "size"}
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_MAKERS: dict[str, Any] = {kind: made for made, kind in (_SEQUENCES | _DICTS).items()}


def describe(state: Any) -> tuple[bytes, list[torch.Tensor | Array]]:
    """Splits a state into a description and its tensors.

    Returns:
        The description, and the tensors and arrays in the description's order; they share the
        state's memory.

    Raises:
        ConfigError: the state contains a value that cannot be sent; the error names the value.
    """
    tensors: list[torch.Tensor | Array] = []
    return msgspec.msgpack.encode(_node(state, "", tensors)), tensors


def _node(item: Any, path: str, tensors: list[torch.Tensor | Array]) -> Any:
    kind = type(item)
    if kind in _PLAIN or (kind is int and -(2**63) <= item < 2**63):
        return item
    if kind is int:
        return ["int", hex(item)]
    if kind in _SEQUENCES:
        inner = [_node(each, f"{path}[{i}]", tensors) for i, each in enumerate(item)]
        return [_SEQUENCES[kind], *inner]
    if kind in _DICTS:
        rows = ((_node(k, f"{path}, a key,", tensors), k, v) for k, v in item.items())
        return [_DICTS[kind], *((key, _node(v, f"{path}[{k!r}]", tensors)) for key, k, v in rows)]
    if kind in (torch.Tensor, nn.Parameter) and item.layout is torch.strided and not item.is_meta:
        tensors.append(item.detach())
        return ["torch", str(item.dtype).removeprefix("torch."), *item.shape]
    if kind is np.ndarray and not item.dtype.hasobject and item.dtype.names is None:
        tensors.append(item)
        return ["numpy", item.dtype.str, *item.shape]
    if isinstance(item, np.generic) and not item.dtype.hasobject and item.dtype.names is None:
        return ["scalar", item.dtype.str, item.tobytes()]
    name = f"{kind.__module__}.{kind.__qualname__}"
    raise ConfigError(
        f"cannot send the state to other ranks: state{path} is a {name}; supported are tensors, arrays, "
        "plain values, dicts, lists and tuples"
    )


def rebuild(description: bytes) -> tuple[Any, list[torch.Tensor | Array]]:
    """Returns the state with new, uninitialised CPU tensors and arrays, and the list of these
    tensors and arrays."""
    tensors: list[torch.Tensor | Array] = []
    return _item(msgspec.msgpack.decode(description), tensors), tensors


def _item(node: Any, tensors: list[torch.Tensor | Array]) -> Any:
    if not isinstance(node, list):
        return node
    kind, *rest = node
    if kind == "int":
        return int(rest[0], 16)
    if kind == "torch":
        tensors.append(torch.empty(rest[1:], dtype=getattr(torch, rest[0])))
        return tensors[-1]
    if kind == "numpy":
        tensors.append(np.empty(rest[1:], np.dtype(rest[0])))
        return tensors[-1]
    if kind == "scalar":
        return np.frombuffer(rest[1], np.dtype(rest[0]))[0]
    made = _MAKERS[kind]
    if made in _SEQUENCES:
        return made([_item(each, tensors) for each in rest])
    return made({_item(key, tensors): _item(value, tensors) for key, value in rest})


def share(state: Any, root: int, group: hfreduce.ProcessGroupHFReduce, *, takes: bool) -> Any:
    """Sends a state from one rank to other ranks. Collective.

    Args:
        state: state of rank `root`; ignored on other ranks.
        takes: True if this rank receives the state. Otherwise the rank only takes part, and needs
            memory for one chunk.

    Returns:
        A copy of the state in new CPU memory if `takes` is set; otherwise None.

    Raises:
        ConfigError: the state on `root` cannot be sent.
        RankFailed, CollectiveError: a rank was lost meanwhile.
    """
    source = dist.get_global_rank(group, root)
    sends = group.rank() == root
    described, tensors = describe(state) if sends else (b"", [])
    sizes = torch.tensor([len(described), sum(t.nbytes for t in tensors)])
    dist.broadcast(sizes, source, group)
    length, total = sizes.tolist()
    text = torch.frombuffer(bytearray(described or bytes(length)), dtype=torch.uint8)
    dist.broadcast(text, source, group)
    result = None
    if takes and not sends:
        result, tensors = rebuild(text.numpy().tobytes())
    reel = _TensorStream(map(bytes_of, tensors)) if sends or result is not None else None
    block = hfreduce.empty(min(total, CHUNK_BYTES), dtype=torch.uint8)
    for start in range(0, total, CHUNK_BYTES):
        window = block[: total - start]
        inside = [] if reel is None else reel.wind(len(window))
        if sends:
            torch.cat(inside, out=window)
        dist.broadcast(window, source, group)
        if result is not None:
            for part, news in zip(inside, window.split([len(p) for p in inside]), strict=True):
                part.copy_(news)
    return result


class _TensorStream:
    """Byte stream over many tensors, one after the other; reads each tensor only when its turn
    comes."""

    def __init__(self, wholes: Iterator[torch.Tensor]) -> None:
        self._wholes = wholes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def wind(self, count: int) -> list[torch.Tensor]:
        """Returns views of the next `count` bytes."""
        parts: list[torch.Tensor] = []
        while count:
            if not len(self._rest):
                self._rest = next(self._wholes)
            part, self._rest = self._rest[:count], self._rest[count:]
            parts.append(part)
            count -= len(part)
        return parts
