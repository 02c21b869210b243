"""Layout of a state: the metadata that ranks exchange to divide a save, without the values.

A training run saves states of the same layout repeatedly, so the last layout is cached. Flattening
a state that still has this layout costs one comparison per leaf.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast

import msgspec
import numpy as np
import torch

from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.leaves import (
    Description,
    Leaf,
    Local,
    Shard,
    describe,
    end_in_storage,
    local_of,
)
from fireflyer.checkpoint.state.tree import (
    PLAIN_TYPES,
    Container,
    Path,
    Plain,
    Value,
    flatten,
    path_name,
)
from fireflyer.errors import CheckpointError


class ValueSlot(msgspec.Struct, frozen=True, tag_field="node", tag="value"):
    """Slot of a plain value."""

    path: Path


class TensorSlot(msgspec.Struct, frozen=True, tag_field="node", tag="tensor"):
    """Slot of a tensor, or of a rank's box of a tensor."""

    path: Path
    kind: Literal["torch", "numpy"]
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """Offsets of the rank's box; None if the rank has no element of the tensor."""
    extents: tuple[int, ...] | None
    """Shape of the rank's box; None if the rank has no element of the tensor."""

    @property
    def box(self) -> Box | None:
        if self.offsets is None or self.extents is None:
            return None
        return Box(self.offsets, self.extents)


Slot = Container | ValueSlot | TensorSlot


class Layout:
    """Slots of one rank's state, parents before children; compared by `digest`."""

    def __init__(self, slots: tuple[Slot, ...]) -> None:
        self.slots = slots
        self.encoded = msgspec.msgpack.encode(slots)
        self.digest = _digest(self.encoded)
        self.tensors = [slot for slot in slots if isinstance(slot, TensorSlot)]
        self.values = [slot.path for slot in slots if isinstance(slot, ValueSlot)]

    @classmethod
    def decode(cls, encoded: bytes) -> "Layout":
        return cls(msgspec.msgpack.decode(encoded, type=tuple[Slot, ...]))


def _digest(data: bytes) -> int:
    """Returns a digest above 0 and below 2**63."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 or 1


def digest_of_all(layouts: list[int]) -> int:
    """Returns a digest of the digests of all ranks' layouts, in rank order."""
    return _digest(repr(layouts).encode())


class Taken(NamedTuple):
    """State divided into its layout, leaves and values."""

    layout: Layout
    leaves: list[Leaf]
    """Leaves in the order of `layout.tensors`."""
    locals: list[Local]
    values: list[Plain]
    """Plain values in the order of `layout.values`."""


class Taker:
    """Divides states into layout, leaves and values; fast if a state has the same layout as the
    state before."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._form: _Branch | None = None

    def take(self, state: Any) -> Taken:
        """Divides a state.

        Raises:
            CheckpointError: if an item cannot be saved; the error names its path.
        """
        if self._layout is not None and self._form is not None:
            taken = Taken(self._layout, [], [], [])
            if self._form.match([state], taken):
                return taken
        items = list(flatten(state))
        described = [_described(path, item) for path, item in items]
        layout = Layout(
            tuple(_slot(*pair, found) for pair, found in zip(items, described, strict=True))
        )
        leaves = [item for _, item in items if not isinstance(item, Container | Value)]
        self._form = _Branch([state], iter(described))
        self._layout = layout
        values: list[Plain] = []
        _values(state, values)
        return Taken(layout, leaves, [local_of(leaf) for leaf in leaves], values)


def _values(item: Any, found: list[Plain]) -> None:
    if type(item) in PLAIN_TYPES:
        found.append(item)
    elif isinstance(item, dict | list | tuple):
        for child in item.values() if isinstance(item, dict) else item:
            _values(child, found)


def _described(path: Path, item: Container | Value | Leaf) -> Description | None:
    if isinstance(item, Container | Value):
        return None
    try:
        return describe(item)
    except CheckpointError as error:
        raise CheckpointError(f"cannot save {path_name(path)}: {error}") from error


def _slot(path: Path, item: Container | Value | Leaf, found: Description | None) -> Slot:
    if isinstance(item, Container):
        return item
    if isinstance(item, Value) or found is None:
        return ValueSlot(path)
    offsets, extents = found.box if found.box is not None else (None, None)
    return TensorSlot(path, found.kind, found.dtype, found.itemsize, found.shape, offsets, extents)


class _Branch:
    """Container of a known form; its children are branches, leaf tests, or None for plain
    values."""

    def __init__(self, item: Any, described: Iterator[Description | None]) -> None:
        self.kind = type(item)
        keyed = isinstance(item, dict)
        self.keys = list(item) if keyed else None
        self.key_types = list(map(type, item)) if keyed else None
        self.children = [_form(child, described) for child in (item.values() if keyed else item)]

    def match(self, item: Any, taken: Taken) -> bool:
        """Returns True if the container has this form; if so, adds leaves and values to `taken`."""
        if type(item) is not self.kind:
            return False
        if self.keys is not None:
            if list(item) != self.keys or list(map(type, item)) != self.key_types:
                return False
            children = item.values()
        else:
            if len(item) != len(self.children):
                return False
            children = item
        for form, child in zip(self.children, children, strict=True):
            if form is None:
                if type(child) not in PLAIN_TYPES:
                    return False
                taken.values.append(child)
            elif type(form) is _Branch:
                if not form.match(child, taken):
                    return False
            else:
                local = cast("_Test", form)(child)
                if local is None:
                    return False
                taken.leaves.append(child)
                taken.locals.append(local)
        return True


_Test = Callable[[Any], Local | None]
"""Function that returns the leaf's local part if the leaf's description is unchanged, else None."""


def _form(item: Any, described: Iterator[Description | None]) -> "_Branch | _Test | None":
    found = next(described)
    if found is not None:
        return _test(item)
    return None if type(item) in PLAIN_TYPES else _Branch(item, described)


def _test(leaf: Leaf) -> _Test:
    if isinstance(leaf, Shard):
        inner, shape, offsets = _test(leaf.local), leaf.shape, leaf.offsets

        def test_shard(item: Any) -> Local | None:
            same = type(item) is Shard and item.shape == shape and item.offsets == offsets
            return inner(item.local) if same else None

        return test_shard
    if isinstance(leaf, np.ndarray):
        return _test_array(leaf.dtype, leaf.shape)
    if type(leaf) is torch.Tensor or type(leaf) is torch.nn.Parameter:
        return _test_tensor(leaf)
    return _test_dtensor(leaf)


def _test_array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Test:
    def test(item: Any) -> Local | None:
        same = type(item) is np.ndarray and item.dtype == dtype and item.shape == shape
        return cast(Local, item) if same else None

    return test


def _test_tensor(like: torch.Tensor) -> _Test:
    plain, parameter, strided = torch.Tensor, torch.nn.Parameter, torch.strided
    dtype, shape, itemsize = like.dtype, like.shape, like.dtype.itemsize
    extent = end_in_storage(like) - like.storage_offset() * itemsize

    def test(item: Any) -> Local | None:
        kind = type(item)
        if (kind is not plain and kind is not parameter) or item.is_nested or item.is_meta:
            return None
        if item.dtype is not dtype or item.layout is not strided or item.shape != shape:
            return None
        held = item.untyped_storage().nbytes() - item.storage_offset() * itemsize
        return cast(Local, item) if held >= extent else None  # None: memory was freed

    return test


def _test_dtensor(leaf: Any) -> _Test:
    kind, mesh, placements, shape = type(leaf), leaf.device_mesh, leaf.placements, leaf.shape
    inner = _test_tensor(cast(torch.Tensor, local_of(leaf)))

    def test(item: Any) -> Local | None:
        if type(item) is not kind or item.shape != shape or item.placements != placements:
            return None
        return inner(local_of(item)) if item.device_mesh == mesh else None

    return test
