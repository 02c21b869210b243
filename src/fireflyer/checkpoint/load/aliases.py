"""Load targets that share memory: filled if the saved values agree, rejected if they do not."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fireflyer.checkpoint.load.reader import Reader
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.leaves import Local, byte_view, new_local, writable
from fireflyer.checkpoint.state.tree import Path, Tensor, path_name
from fireflyer.errors import CheckpointError
from fireflyer.storage import Storage


class Place(NamedTuple):
    """Target memory for a box of a saved tensor."""

    node: Tensor
    local: Local
    box: Box

    @property
    def address(self) -> int:
        if isinstance(self.local, np.ndarray):
            return int(self.local.__array_interface__["data"][0])
        return self.local.data_ptr()

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes."""
        if isinstance(self.local, np.ndarray):
            return self.local.strides
        return tuple(stride * self.local.dtype.itemsize for stride in self.local.stride())

    @property
    def extent(self) -> tuple[str, int, int]:
        """Device, address of the first byte, and address after the last byte."""
        device = "cpu" if isinstance(self.local, np.ndarray) else str(self.local.device)
        spans = [a * (n - 1) for a, n in zip(self.strides, self.local.shape, strict=True)]
        first = self.address + sum(span for span in spans if span < 0)
        last = self.address + sum(span for span in spans if span > 0)
        return device, first, last + self.local.dtype.itemsize


def agreed(storage: Storage, places: Sequence[Place]) -> dict[Path, Local | None]:
    """Determines the values of places that share memory, before anything is written.

    Tensors in the same memory whose saved pieces and checksums are equal are filled once. For other
    overlapping places, and for interleaved views that share no element, the values are read into
    separate memory.

    Returns:
        For each path the value with which to `fill` the place; None if another place of the same
        memory already fills it.

    Raises:
        CheckpointError: if two places share memory in which their saved values differ; the error
            names both.
        Corrupted: if the data is damaged; the error names file and tensor.
    """
    found: dict[Path, Local | None] = {}
    for group in _groups(places):
        first: dict[Any, Place] = {}
        for one in group:
            if first.setdefault(_identity(one), one) is not one:
                found[one.node.path] = None
        if len(first) > 1:
            distinct = list(first.values())
            values = _values(storage, distinct)
            _check(distinct, values)
            found.update(
                (one.node.path, value) for one, value in zip(distinct, values, strict=True)
            )
    return found


def fill(local: Local, value: Local) -> None:
    """Copies a contiguous CPU value to a target of the same type and shape, byte by byte."""
    with writable(local) as place:
        view, source = byte_view(place), byte_view(value)
        assert isinstance(source, np.ndarray)  # the value is on the CPU
        if isinstance(view, np.ndarray):
            view[...] = source
        else:
            view.copy_(torch.from_numpy(source))


def _groups(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yields groups of at least two places whose extents overlap."""
    group: list[Place] = []
    device, end = "", 0
    for extent, one in sorted(((one.extent, one) for one in places), key=lambda pair: pair[0]):
        if extent[0] != device or extent[1] >= end:
            if len(group) > 1:
                yield group
            group = []
            device, end = extent[0], 0
        group.append(one)
        end = max(end, extent[2])
    if len(group) > 1:
        yield group


def _identity(one: Place) -> tuple[object, ...]:
    """Returns a key that is equal for two places of the same memory that receive the same bytes."""
    node, local = one.node, one.local
    lazy = (local.is_conj(), local.is_neg()) if isinstance(local, torch.Tensor) else (False, False)
    saved = tuple((piece.offsets, piece.shape, piece.crc32) for piece in node.pieces)
    return one.address, one.strides, lazy, node.kind, node.dtype, node.shape, one.box, saved


def _values(storage: Storage, places: Sequence[Place]) -> list[Local]:
    reader = Reader(storage)
    values = []
    for one in places:
        values.append(new_local(one.node.kind, one.node.dtype, one.box.shape))
        reader.want(one.node, values[-1], one.box)
    reader.run()
    return values


def _check(places: Sequence[Place], values: Sequence[Local]) -> None:
    """Writes all values to scratch memory in the targets' layout, and checks that no value changes
    another value."""
    first = min(one.extent[1] for one in places)
    scratch = np.empty(max(one.extent[2] for one in places) - first, np.uint8)
    views: list[np.ndarray[Any, Any]] = [
        np.ndarray(
            (*one.local.shape, one.local.dtype.itemsize),
            np.uint8,
            scratch,
            one.address - first,
            (*one.strides, 1),
        )
        for one in places
    ]
    stored = [_stored(one.local, value) for one, value in zip(places, values, strict=True)]
    for view, source in zip(views, stored, strict=True):
        view[...] = source
    for index, (view, source) in enumerate(zip(views, stored, strict=True)):
        if np.array_equal(view, source):
            continue
        view[...] = source
        for later in range(index + 1, len(places)):
            views[later][...] = stored[later]
            if not np.array_equal(view, source):
                names = [path_name(places[one].node.path) for one in (index, later)]
                raise CheckpointError(
                    f"cannot load {names[0]} and {names[1]}: the given ones share memory, but their saved "
                    "values differ"
                )


def _stored(local: Local, value: Local) -> np.ndarray[Any, Any]:
    """Returns the bytes of the value in the memory layout of `local`."""
    if isinstance(local, torch.Tensor) and isinstance(value, torch.Tensor):
        if local.is_neg():
            value = torch.neg(value)
        if local.is_conj():
            value = value.conj().resolve_conj()
    view = byte_view(value)
    assert isinstance(view, np.ndarray)  # the value is on the CPU
    return view
