"""Reading boxes of saved tensors into memory, with each byte verified and a bounded buffer."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fireflyer.checkpoint.directory.manifest import CRC_BYTES
from fireflyer.checkpoint.state.boxes import (
    Box,
    boxes_of_range,
    intersection,
    is_contiguous,
    position,
)
from fireflyer.checkpoint.state.leaves import Local, address_of, byte_view
from fireflyer.checkpoint.state.tree import Piece, Tensor, path_name
from fireflyer.errors import StorageError
from fireflyer.storage import Storage

_SLOTS = 6
"""Number of blocks of CRC_BYTES in the buffer."""

_View = torch.Tensor | np.ndarray[Any, Any]


class _Block(NamedTuple):
    """Part of a piece; has its own CRC."""

    tensor: Tensor
    piece: Piece
    number: int

    @property
    def start(self) -> int:
        return self.number * CRC_BYTES

    @property
    def length(self) -> int:
        return min(CRC_BYTES, self.piece.length - self.start)


class _Scattered(NamedTuple):
    """Block that passes through the buffer: its elements in `inner` are copied to `view`, the
    memory of `box`. All boxes have a last dimension of bytes."""

    block: _Block
    inner: Box
    outer: Box
    """Box of the piece."""
    view: _View
    box: Box


class Reader:
    """Collects requests for a checkpoint's boxes, then reads them all.

    A block with the same layout in the target as in the file is read in place. All other blocks
    pass as a whole through a buffer of 24 MiB.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._direct: list[tuple[_Block, int]] = []
        self._scattered: list[_Scattered] = []

    def want(self, tensor: Tensor, local: Local, box: Box) -> None:
        """Requests that `run` fills `local` with the box `box` of `tensor`, a node of a decoded
        manifest."""
        itemsize = local.dtype.itemsize
        view, address = byte_view(local), address_of(local)
        for piece in tensor.pieces:
            outer = Box(piece.offsets, piece.shape)
            inner = intersection(outer, box)
            if inner is None or piece.length == 0:
                continue
            direct = range(0)
            if address is not None and is_contiguous(inner, outer) and is_contiguous(inner, box):
                first = position(inner, outer) * itemsize
                shift = address + position(inner, box) * itemsize - first
                direct = _whole_blocks(piece, first, first + inner.elements * itemsize)
                self._direct += [
                    (block, shift + block.start)
                    for block in (_Block(tensor, piece, index) for index in direct)
                ]
                if len(direct) == len(piece.crc32):
                    continue
            bytewise = [_bytewise(one, itemsize) for one in (inner, outer, box)]
            for index in _touched_blocks(bytewise[0], bytewise[1]):
                if index not in direct:
                    block = _Block(tensor, piece, index)
                    self._scattered.append(
                        _Scattered(block, bytewise[0], bytewise[1], view, bytewise[2])
                    )

    def run(self) -> None:
        """Reads all requested boxes.

        Raises:
            Corrupted: if the data is damaged; the error names file and tensor.
        """
        self._read([block for block, _ in self._direct], [place for _, place in self._direct])
        if not self._scattered:
            return
        buffer = np.empty((_SLOTS, CRC_BYTES), np.uint8)
        for first in range(0, len(self._scattered), _SLOTS):
            batch = self._scattered[first : first + _SLOTS]
            places = [int(row.ctypes.data) for row in buffer[: len(batch)]]
            self._read([one.block for one in batch], places)
            for one, row in zip(batch, buffer, strict=False):
                _scatter(one, row)

    def _read(self, blocks: Sequence[_Block], places: Sequence[int]) -> None:
        if not blocks:
            return
        names = {block.piece.file: 0 for block in blocks}
        numbers = {name: number for number, name in enumerate(names)}
        segments = np.array(
            [
                (numbers[block.piece.file], block.piece.offset + block.start, block.length, place)
                for block, place in zip(blocks, places, strict=True)
            ],
            np.int64,
        )
        crcs = np.array([block.piece.crc32[block.number] for block in blocks], np.uint32)
        try:
            self._storage.read_checked(list(names), segments, crcs)
        except StorageError as error:
            if error.segment is None:
                raise
            name = path_name(blocks[error.segment].tensor.path)
            raise type(error)(f"{error} (tensor {name})") from error


def _bytewise(box: Box, itemsize: int) -> Box:
    return Box((*box.offsets, 0), (*box.shape, itemsize))


def _whole_blocks(piece: Piece, start: int, stop: int) -> range:
    """Returns the blocks of a piece that lie in its bytes [start, stop)."""
    last = len(piece.crc32) if stop == piece.length else stop // CRC_BYTES
    return range(-(-start // CRC_BYTES), max(last, -(-start // CRC_BYTES)))


def _touched_blocks(inner: Box, outer: Box) -> Iterator[int]:
    """Yields the blocks of `outer`'s bytes that contain a byte of `inner`."""
    first = position(inner, outer)
    end = tuple(
        offset + extent - 1 for offset, extent in zip(inner.offsets, inner.shape, strict=True)
    )
    last = position(Box(end, inner.shape), outer)
    if is_contiguous(inner, outer):
        yield from range(first // CRC_BYTES, last // CRC_BYTES + 1)
        return
    for index in range(first // CRC_BYTES, last // CRC_BYTES + 1):
        if any(True for _ in _hits(inner, outer, index)):
            yield index


def _hits(inner: Box, outer: Box, index: int) -> Iterator[tuple[int, Box, Box]]:
    """Yields the parts of `outer`'s block `index` that overlap `inner`.

    Each result holds the part's first byte in the block, the part, and its overlap with `inner`.
    Both boxes are in whole-tensor coordinates.
    """
    start = index * CRC_BYTES
    stop = min(start + CRC_BYTES, outer.elements)
    for place, local in boxes_of_range(outer.shape, start, stop):
        offsets = tuple(a + b for a, b in zip(local.offsets, outer.offsets, strict=True))
        part = Box(offsets, local.shape)
        hit = intersection(part, inner)
        if hit is not None:
            yield place - start, part, hit


def _scatter(one: _Scattered, row: np.ndarray[Any, Any]) -> None:
    for place, part, hit in _hits(one.inner, one.outer, one.block.number):
        source = row[place : place + part.elements].reshape(part.shape)[hit.within(part).slices]
        target = one.view[hit.within(one.box).slices]
        if isinstance(target, np.ndarray):
            target[...] = source
        else:
            target.copy_(torch.from_numpy(source))
