"""Saving without a manager: bytes streamed in order into data files, by whoever has them, then one commit.

import:   save_contents                  one process, any source
DCP:      write_sections on each rank    the pieces go to the coordinator, which commits
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from fireflyer._native import crc32
from fireflyer.checkpoint.boxes import Box
from fireflyer.checkpoint.catalog import Catalog
from fireflyer.checkpoint.claims import Claims, identity
from fireflyer.checkpoint.contents import Contents, itemsize_of
from fireflyer.checkpoint.manifest import CRC_BYTES, VERSION, Generation, Manifest, encode
from fireflyer.checkpoint.staging import ALIGNMENT
from fireflyer.checkpoint.tree import Node, Piece, Tensor, path_name
from fireflyer.errors import CheckpointError, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

_log = get_logger("checkpoint")


class Section(NamedTuple):
    """A piece to write."""

    name: str
    """The tensor's, for messages."""
    box: Box
    nbytes: int
    stream: Callable[[], Iterable[memoryview]]
    """Its bytes in C order, in memory that stays as it is."""


def write_sections(storage: Storage, file: str, sections: Sequence[Section]) -> list[Piece]:
    """Writes a data file, durable at the return; no file for no bytes.

    Returns:
        The pieces, in order.

    Raises:
        StorageError: nothing is left then.
        CheckpointError: if a stream has another length than its section.
    """
    crcs: list[tuple[int, ...]] = []
    places = list(_places(sections))
    if any(section.nbytes for section in sections):
        storage.write(file, _file(sections, places, crcs))
    else:
        crcs = [() for _ in sections]
    return [
        Piece(
            offsets=section.box.offsets,
            shape=section.box.shape,
            file=file,
            offset=place,
            length=section.nbytes,
            crc32=found,
        )
        for section, place, found in zip(sections, places, crcs, strict=True)
    ]


def file_sizes(pieces: Iterable[Piece]) -> dict[str, int]:
    """Bytes of the files that pieces of `write_sections` name."""
    sizes: dict[str, int] = {}
    for piece in pieces:
        if piece.length:
            sizes[piece.file] = max(sizes.get(piece.file, 0), piece.offset + piece.length)
    return sizes


def _places(sections: Sequence[Section]) -> Iterator[int]:
    end = 0
    for section in sections:
        place = -(-end // ALIGNMENT) * ALIGNMENT
        yield place
        end = place + section.nbytes


def _file(
    sections: Sequence[Section], places: Sequence[int], crcs: list[tuple[int, ...]]
) -> Iterator[memoryview | bytes]:
    """The file's bytes; adds each section's checksums to `crcs` on the way."""
    written = 0
    for section, place in zip(sections, places, strict=True):
        if section.nbytes and place > written:
            yield bytes(place - written)
            written = place
        found: list[int] = []
        seen = 0
        for part in section.stream():
            seen += len(part)
            if seen > section.nbytes:
                break
            _extend(found, seen - len(part), part)
            yield part
        if seen != section.nbytes:
            raise CheckpointError(f"{section.name} gave {seen} bytes instead of {section.nbytes}")
        written += seen
        crcs.append(tuple(found))


def _extend(crcs: list[int], position: int, part: memoryview) -> None:
    """Takes up the bytes of a piece from `position` on into the CRCs of its blocks."""
    done = 0
    while done < len(part):
        room = CRC_BYTES - (position + done) % CRC_BYTES
        block = part[done : done + room]
        if room == CRC_BYTES:
            crcs.append(crc32(block))
        else:
            crcs[-1] = crc32(block, crcs[-1])
        done += len(block)


def commit(
    catalog: Catalog,
    claims: Claims,
    generation: Generation,
    world: int,
    nodes: Sequence[Node],
    metrics: Mapping[str, float | Literal["nan", "inf", "-inf"]] | None = None,
) -> None:
    """Makes a checkpoint of nodes whose pieces are durable.

    Raises:
        CheckpointError: if a newer run owns the directory.
        Corrupted: if a data file is not there.
        StorageError: if the manifest cannot be written.
    """
    files = file_sizes(piece for node in nodes if isinstance(node, Tensor) for piece in node.pieces)
    catalog.check_files(files)
    manifest = Manifest(
        version=VERSION,
        step=generation.step,
        task=claims.me.task,
        attempt=claims.me.attempt or 0,
        world_size=world,
        created=time.time(),
        metrics=dict(metrics or {}),
        files=files,
        state=tuple(nodes),
        per_rank={},
    )
    claims.check(generation.epoch)
    catalog.storage.write(generation.manifest, [encode(manifest)])
    # A newer run that claimed before the manifest was there may not have seen it.
    claims.check(generation.epoch)
    try:
        catalog.sweep(generation)
    except StorageError as error:
        _log.warning("step %d is saved, but leftovers stay: %s", generation.step, error)


def save_contents(
    storage: Storage, step: int, contents: Contents, advance: Callable[[int], None] = lambda _: None
) -> Generation:
    """Makes a checkpoint of any contents, in memory of a few blocks. Claims the directory: a run that saves
    there is fenced off.

    Args:
        advance: called with numbers of bytes.

    Raises:
        CheckpointError: if the contents cannot be saved, or a newer run owns the directory.
        StorageError: if they cannot be read or written; nothing is left then.
    """
    if step < 0:
        raise CheckpointError(f"step {step} is below 0")
    catalog, claims = Catalog(storage), Claims(storage, identity())
    generation = Generation(claims.take(), 1, step)
    sections, counts = [], []
    for node in contents.tensors:
        size, boxes = itemsize_of(node), contents.boxes(node)
        counts.append(len(boxes))
        for box in boxes:
            stream = _counted(contents, node, box, advance)
            sections.append(Section(path_name(node.path), box, box.elements * size, stream))
    file = generation.data(0)
    try:
        pieces = iter(write_sections(storage, file, sections))
        divided = iter([tuple(next(pieces) for _ in range(count)) for count in counts])
        nodes = [
            _with_pieces(node, next(divided)) if isinstance(node, Tensor) else node
            for node in contents.nodes
        ]
        commit(catalog, claims, generation, 1, nodes)
    except BaseException:
        if storage.size(generation.manifest) is None:
            storage.delete(file)
            storage.delete(generation.directory)
        raise
    return generation


def _counted(
    contents: Contents, node: Tensor, box: Box, advance: Callable[[int], None]
) -> Callable[[], Iterator[memoryview]]:
    def stream() -> Iterator[memoryview]:
        for part in contents.read(node, box):
            yield part
            advance(len(part))

    return stream


def _with_pieces(node: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    return Tensor(path=node.path, kind=node.kind, dtype=node.dtype, shape=node.shape, pieces=pieces)
