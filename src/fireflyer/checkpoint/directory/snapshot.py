"""Random access to one checkpoint: reads any box of any tensor, verified, in bounded memory."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.manifest import Generation, Manifest
from fireflyer.checkpoint.load.reader import Reader
from fireflyer.checkpoint.state.boxes import Box, boxes_of_range, is_contiguous, position, whole
from fireflyer.checkpoint.state.contents import Contents, itemsize_of
from fireflyer.checkpoint.state.tree import Piece, Tensor
from fireflyer.errors import CheckpointError
from fireflyer.storage import Storage

_WINDOW_BYTES = 16 << 20
"""Maximum number of bytes per read: four blocks of CRC_BYTES."""


class Snapshot(Contents):
    """Merged state of a checkpoint, without the ranks' `per_rank` states."""

    def __init__(self, storage: Storage, generation: Generation, manifest: Manifest) -> None:
        self.storage = storage
        self.generation = generation
        self.manifest = manifest
        self.nodes = manifest.state

    def __str__(self) -> str:
        return f"step {self.generation.step} in {self.storage}"

    @classmethod
    def open(cls, catalog: Catalog, step: int | None = None) -> "Snapshot":
        """Opens the newest checkpoint (of `step`, if given) that has an undamaged manifest and
        files of the right size.

        Raises:
            CheckpointError: if there is no checkpoint.
            Corrupted: if all checkpoints are damaged; the error describes the newest.
        """
        first: Exception | None = None
        for generation in catalog.generations(step):
            try:
                return cls(catalog.storage, generation, catalog.manifest(generation))
            except Exception as error:  # noqa: BLE001  # raised below unless an older one is whole
                first = first or error
        if first is not None:
            raise first
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise CheckpointError(f"there is no {what} in {catalog.storage}")

    def boxes(self, node: Tensor) -> list[Box]:
        return [Box(piece.offsets, piece.shape) for piece in node.pieces]

    def read(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        size = itemsize_of(node)
        flat = _flattened(node, size) if is_contiguous(box, whole(node.shape)) else None
        if flat is None:
            yield from self._read_boxes(
                _bytewise(node, size), Box((*box.offsets, 0), (*box.shape, size))
            )
            return
        first = position(box, whole(node.shape)) * size
        starts = [piece.offsets[0] for piece in flat.pieces]
        for start, stop in _cut(starts, first, first + box.elements * size, size):
            yield self._fetch(flat, Box((start,), (stop - start,)))

    def _read_boxes(self, node: Tensor, box: Box) -> Iterator[memoryview]:
        """Yields the bytes of a box if the box or the pieces are not contiguous in the tensor."""
        total = box.elements
        for start in range(0, total, _WINDOW_BYTES):
            stop = min(start + _WINDOW_BYTES, total)
            for _, part in boxes_of_range(box.shape, start, stop):
                moved = tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True))
                yield self._fetch(node, Box(moved, part.shape))

    def _fetch(self, node: Tensor, box: Box) -> memoryview:
        data = np.empty(box.shape, np.uint8)
        reader = Reader(self.storage)
        reader.want(node, data, box)
        reader.run()
        return data.reshape(-1).data


def _cut(starts: Sequence[int], first: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Divides the bytes [first, stop) into windows of whole elements.

    Windows also start where pieces start, so that only few blocks are read twice.
    """
    window = _WINDOW_BYTES // size * size
    ends = sorted({start for start in starts if first < start < stop} | {stop})
    for end in ends:
        for start in range(first, end, window):
            yield start, min(start + window, end)
        first = end


def _flattened(node: Tensor, size: int) -> Tensor | None:
    """Returns the tensor as one dimension of bytes; None if one of its pieces is not contiguous."""
    everything = whole(node.shape)
    pieces = []
    for piece in node.pieces:
        box = Box(piece.offsets, piece.shape)
        if not is_contiguous(box, everything):
            return None
        pieces.append(_moved(piece, (position(box, everything) * size,), (box.elements * size,)))
    shape = (math.prod(node.shape) * size,)
    return Tensor(path=node.path, kind="numpy", dtype="|u1", shape=shape, pieces=tuple(pieces))


def _bytewise(node: Tensor, size: int) -> Tensor:
    """Returns the tensor with a last dimension of bytes."""
    pieces = tuple(_moved(one, (*one.offsets, 0), (*one.shape, size)) for one in node.pieces)
    shape = (*node.shape, size)
    return Tensor(path=node.path, kind="numpy", dtype="|u1", shape=shape, pieces=pieces)


def _moved(piece: Piece, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Piece:
    return Piece(
        offsets=offsets,
        shape=shape,
        file=piece.file,
        offset=piece.offset,
        length=piece.length,
        crc32=piece.crc32,
    )
