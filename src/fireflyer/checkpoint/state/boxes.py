"""Boxes: axis-parallel parts of a tensor, in elements; their containment, overlap and byte order.

Pure arithmetic. "C order" is the order of a contiguous tensor: the last dimension varies fastest.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Box of the elements `offsets[d] <= index[d] < offsets[d] + shape[d]` of a tensor."""

    offsets: Shape
    shape: Shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def within(self, outer: "Box") -> "Box":
        """Returns the same elements in the coordinates of `outer`."""
        offsets = tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True))
        return Box(offsets, self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that selects the box from the tensor."""
        return tuple(
            slice(offset, offset + extent)
            for offset, extent in zip(self.offsets, self.shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """Returns the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the elements that are in both boxes; None if there are none."""
    offsets, shape = [], []
    for a_start, a_extent, b_start, b_extent in zip(*a, *b, strict=True):
        start = max(a_start, b_start)
        extent = min(a_start + a_extent, b_start + b_extent) - start
        if extent <= 0:
            return None
        offsets.append(start)
        shape.append(extent)
    return Box(tuple(offsets), tuple(shape))


def flaw(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Returns the reason why the boxes do not partition a tensor of this shape; None if they do."""
    for box in boxes:
        inside = len(box.offsets) == len(box.shape) == len(shape) and all(
            offset >= 0 and extent > 0 and offset + extent <= limit
            for offset, extent, limit in zip(box.offsets, box.shape, shape, strict=True)
        )
        if not inside:
            return f"{_drawn(box)} is not inside shape {list(shape)}"
    for a, b in _neighbours(shape, boxes):
        if intersection(a, b) is not None:
            return f"{_drawn(a)} and {_drawn(b)} overlap"
    missing = math.prod(shape) - sum(box.elements for box in boxes)
    return f"{missing} elements of shape {list(shape)} are in no part" if missing else None


def _drawn(box: Box) -> str:
    if len(box.offsets) != len(box.shape):
        return f"{list(box.shape)} at {list(box.offsets)}"
    return "[" + ", ".join(f"{a}:{a + extent}" for a, extent in zip(*box, strict=True)) + "]"


def _neighbours(shape: Shape, boxes: Sequence[Box]) -> Iterator[tuple[Box, Box]]:
    """Yields all pairs that overlap in the dimension with the most distinct offsets."""
    if not shape or len(boxes) < 2:
        yield from itertools.combinations(boxes, 2)
        return
    cut = max(range(len(shape)), key=lambda d: len({box.offsets[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[cut]):
        start = box.offsets[cut]
        open_boxes = [old for old in open_boxes if old.offsets[cut] + old.shape[cut] > start]
        for old in open_boxes:
            yield old, box
        open_boxes.append(box)


def split_rows(box: Box, parts: int) -> list[Box]:
    """Cuts the box into at most `parts` nearly equal boxes, in order.

    The cuts are along the first dimension with more than one element, so each part is contiguous in
    a contiguous tensor of the box.
    """
    cut = next((d for d, extent in enumerate(box.shape) if extent > 1), None)
    if cut is None:
        return [box]
    extent = box.shape[cut]
    parts = min(parts, extent)
    ends = [extent * part // parts for part in range(parts + 1)]
    return [
        Box(_replaced(box.offsets, cut, box.offsets[cut] + a), _replaced(box.shape, cut, b - a))
        for a, b in itertools.pairwise(ends)
    ]


def _replaced(values: Shape, index: int, value: int) -> Shape:
    return (*values[:index], value, *values[index + 1 :])


def position(inner: Box, outer: Box) -> int:
    """Returns the number of elements before the first element of `inner` in a contiguous tensor of
    `outer`. REQUIRES: `outer` contains `inner`."""
    place = 0
    for offset, start, extent in zip(inner.offsets, outer.offsets, outer.shape, strict=True):
        place = place * extent + offset - start
    return place


def is_contiguous(inner: Box, outer: Box) -> bool:
    """Returns True if the elements of `inner` are adjacent in a contiguous tensor of `outer`."""
    full = True
    for extent, limit in zip(reversed(inner.shape), reversed(outer.shape), strict=True):
        if not full and extent > 1:
            return False
        full = full and extent == limit
    return True


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Yields the elements [start, stop) of a contiguous tensor as boxes, in order.

    Each box comes with the index of its first element in the flattened tensor. There are at most
    2 * len(shape) - 1 boxes, each contiguous.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield start, Box((start,) if shape else (), (stop - start,) if shape else ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _in_row(shape, first - 1, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        offsets = (first,) + (0,) * (len(shape) - 1)
        yield first * row, Box(offsets, (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, index: int, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    before = index * math.prod(shape[1:])
    for place, box in boxes_of_range(shape[1:], start - before, stop - before):
        yield before + place, Box((index, *box.offsets), (1, *box.shape))
