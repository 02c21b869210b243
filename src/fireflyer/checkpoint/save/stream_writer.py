"""Saving without a manager: each process writes its data file in order; one process commits.

import:   save_contents                  one process, any source
DCP:      write_sections on each rank    the coordinator receives the pieces and commits
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from fireflyer._native import crc32
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.claims import Claims, identity
from fireflyer.checkpoint.directory.manifest import CRC_BYTES, VERSION, Generation, Manifest, encode
from fireflyer.checkpoint.save.staging import ALIGNMENT
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.contents import Contents, itemsize_of
from fireflyer.checkpoint.state.tree import Node, Piece, Tensor, path_name
from fireflyer.errors import CheckpointError, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

_log = get_logger("checkpoint")


class Section(NamedTuple):
    """A piece to write."""

    name: str
    """Name of the tensor, for messages."""
    box: Box
    nbytes: int
    stream: Callable[[], Iterable[memoryview]]
    """Source of the piece's bytes in C order, in memory that does not change."""


def write_sections(storage: Storage, file: str, sections: Sequence[Section]) -> list[Piece]:
    """Writes a data file that is durable at the return; writes no file if there are no bytes.

    Returns:
        The pieces, in order.

    Raises:
        StorageError: if the write fails; no file is left.
        CheckpointError: if the length of a section's stream differs from the section's `nbytes`.
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
    """Returns the size of each file to which pieces of `write_sections` refer."""
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
    """Yields the file's bytes; appends each section's checksums to `crcs`."""
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
            raise CheckpointError(
                f"{section.name} returned {seen} bytes: expected {section.nbytes}"
            )
        written += seen
        crcs.append(tuple(found))


def _extend(crcs: list[int], position: int, part: memoryview) -> None:
    """Updates the CRCs of a piece's blocks with `part`; `part` starts at byte `position` of the
    piece."""
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
    """Commits a checkpoint with these nodes of the state tree. Their pieces must be durable.

    Raises:
        CheckpointError: if a newer run owns the directory.
        Corrupted: if a data file is missing or has another size.
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
    # A newer run that made its claim before the manifest existed may not have seen the manifest.
    claims.check(generation.epoch)
    try:
        catalog.sweep(generation)
    except StorageError as error:
        _log.warning("step %d is saved, but temporary files remain: %s", generation.step, error)


def save_contents(
    storage: Storage, step: int, contents: Contents, advance: Callable[[int], None] = lambda _: None
) -> Generation:
    """Saves any contents as a checkpoint; needs memory for only a few blocks.

    The call claims the directory, so an older run that saves there is fenced off.

    Args:
        advance: progress callback; receives numbers of written bytes.

    Raises:
        CheckpointError: if the contents cannot be saved, or a newer run owns the directory.
        StorageError: if the contents cannot be read or written; then no file is left.
    """
    if step < 0:
        raise CheckpointError(f"invalid step {step}: expected at least 0")
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
