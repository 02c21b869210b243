"""Inspection of a checkpoint directory: lists its checkpoints and verifies every byte."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.manifest import (
    CRC_BYTES,
    DAMAGED,
    Generation,
    Manifest,
    decode,
    parse_directory,
    parse_file,
)
from fireflyer.checkpoint.state.tree import Node, Piece, Tensor, Value, path_name
from fireflyer.errors import CheckpointError, Corrupted, StorageError, Unavailable

_BATCH_BYTES = 32 << 20
_BATCH_BLOCKS = 4096


class Summary(msgspec.Struct, kw_only=True):
    """Summary of one checkpoint."""

    step: int
    epoch: int
    number: int
    """Number of the save in its run; (epoch, number) orders checkpoints by age."""
    state: Literal["whole", "damaged", "unreadable", "unknown version", "set aside"]
    """State according to the manifest and the sizes of the files. "set aside": it lies in
    damaged/."""
    reason: str = ""
    created: float | None = None
    """Seconds since 1970. If the manifest cannot be read, this field and all later fields are None
    or empty."""
    bytes: int | None = None
    """Size of the tensors in bytes."""
    older_bytes: int | None = None
    """Number of these bytes that lie in files of older saves."""
    world_size: int | None = None
    tensors: int | None = None
    values: int | None = None
    task: str | None = None
    attempt: int | None = None
    metrics: dict[str, float | Literal["nan", "inf", "-inf"]] = {}


def summaries(catalog: Catalog) -> list[Summary]:
    """Returns all checkpoints, newest first, then those in damaged/."""
    found = [_summary(catalog, one) for one in catalog.generations()]
    return [one for one in found if one is not None] + _set_aside(catalog)


def _is_gone(catalog: Catalog, generation: Generation) -> bool:
    """Returns True if a run or `prune` removed the checkpoint, whose manifest is removed first."""
    try:
        return catalog.storage.size(generation.manifest) is None
    except Unavailable:
        raise
    except StorageError:
        return False


def _summary(catalog: Catalog, generation: Generation) -> Summary | None:
    """Returns a checkpoint's summary; None if the checkpoint was removed meanwhile."""
    found = _inspected(catalog, generation)
    return None if found.state != "whole" and _is_gone(catalog, generation) else found


def _inspected(catalog: Catalog, generation: Generation) -> Summary:
    found = Summary(
        step=generation.step, epoch=generation.epoch, number=generation.number, state="whole"
    )
    try:
        manifest = catalog.decoded(generation)
    except Corrupted as error:
        found.state, found.reason = "damaged", str(error)
        return found
    except CheckpointError as error:
        found.state, found.reason = "unknown version", str(error)
        return found
    except Unavailable:
        raise
    except StorageError as error:
        found.state, found.reason = "unreadable", str(error)
        return found
    _describe(found, generation, manifest)
    try:
        catalog.check_files(manifest.files)
    except Corrupted as error:
        found.state, found.reason = "damaged", str(error)
    except Unavailable:
        raise
    except StorageError as error:
        found.state, found.reason = "unreadable", str(error)
    return found


def _describe(found: Summary, generation: Generation, manifest: Manifest) -> None:
    own = f"{generation.directory}/data-{generation.epoch:06d}-{generation.number:06d}-"
    pieces = [piece for node in _tensors(manifest) for piece in node.pieces]
    found.created = manifest.created
    found.bytes = sum(piece.length for piece in pieces)
    found.older_bytes = sum(piece.length for piece in pieces if not piece.file.startswith(own))
    found.world_size = manifest.world_size
    found.tensors = sum(isinstance(node, Tensor) for node in manifest.state)
    found.values = sum(isinstance(node, Value) for node in manifest.state)
    found.task, found.attempt = manifest.task, manifest.attempt
    found.metrics = manifest.metrics


def _tensors(manifest: Manifest) -> Iterator[Tensor]:
    every: Sequence[Sequence[Node]] = [manifest.state, *manifest.per_rank.values()]
    for nodes in every:
        yield from (node for node in nodes if isinstance(node, Tensor))


def _set_aside(catalog: Catalog) -> list[Summary]:
    found = []
    for directory in catalog.storage.list(DAMAGED):
        step = parse_directory(directory)
        for name in catalog.storage.list(f"{DAMAGED}/{directory}") if step is not None else ():
            parsed = parse_file(step, name) if step is not None else None
            if parsed is None or parsed[0] != "manifest":
                continue
            generation = parsed[1]
            one = Summary(
                step=generation.step,
                epoch=generation.epoch,
                number=generation.number,
                state="set aside",
                reason=f"in {DAMAGED}/{directory}",
            )
            try:
                path = f"{DAMAGED}/{generation.manifest}"
                _describe(one, generation, decode(catalog.storage.read(path), Manifest, path))
            except Corrupted as error:
                one.reason = str(error)
            found.append(one)
    return sorted(found, key=lambda one: (one.epoch, one.number), reverse=True)


class Damage(msgspec.Struct, frozen=True):
    """Part of a checkpoint that is missing or differs from the bytes that the save wrote."""

    step: int
    file: str
    tensors: list[str]
    message: str


class Verified(msgspec.Struct):
    """Totals of a verification."""

    checkpoints: int = 0
    bytes: int = 0
    """Number of bytes read; bytes that several checkpoints share count once."""
    damages: list[Damage] = []


class _Block(NamedTuple):
    """Part of a piece; has its own CRC."""

    name: str
    piece: Piece
    start: int

    @property
    def length(self) -> int:
        return min(CRC_BYTES, self.piece.length - self.start)


class Verifier:
    """Reads every byte of checkpoints once, even if they share files."""

    def __init__(self, catalog: Catalog, advance: Callable[[int], None] = lambda _: None) -> None:
        """
        Args:
            advance: progress callback; receives numbers of verified bytes.
        """
        self._catalog = catalog
        self._advance = advance
        self._buffer = np.empty(0, np.uint8)
        self._seen: dict[Piece, list[str]] = {}
        """Errors of the pieces read so far."""
        self.found = Verified()

    def verify(self, generation: Generation) -> list[Damage] | None:
        """Returns the damages of one checkpoint and adds them to `found`.

        If the checkpoint was removed, it is not counted, and the result is None.

        Raises:
            CheckpointError: if a different version of the format wrote it.
            Unavailable: if the storage does not answer.
        """
        damages = list(self._damages(generation))
        if damages and _is_gone(self._catalog, generation):
            return None
        self.found.checkpoints += 1
        self.found.damages += damages
        return damages

    def _damages(self, generation: Generation) -> Iterator[Damage]:
        step = generation.step
        try:
            manifest = self._catalog.decoded(generation)
        except Unavailable:
            raise
        except StorageError as error:
            yield Damage(step, generation.manifest, [], str(error))
            return
        lost = {}
        for file, size in manifest.files.items():
            try:
                self._catalog.check_files({file: size})
            except Unavailable:
                raise
            except StorageError as error:
                lost[file] = str(error)
        blocks: list[_Block] = []
        for label, nodes in _states(manifest):
            for node in nodes:
                if isinstance(node, Tensor):
                    blocks += _blocks(label + path_name(node.path), node, lost)
        for file, message in lost.items():
            names = [
                label + path_name(node.path)
                for label, nodes in _states(manifest)
                for node in nodes
                if isinstance(node, Tensor) and any(one.file == file for one in node.pieces)
            ]
            yield Damage(step, file, names, message)
        yield from self._read(step, blocks)

    def _read(self, step: int, blocks: Sequence[_Block]) -> Iterator[Damage]:
        fresh = [block for block in blocks if block.piece not in self._seen]
        for batch in _batches(fresh):
            for block in batch:
                self._seen.setdefault(block.piece, [])
            total = sum(block.length for block in batch)
            if total > len(self._buffer):
                self._buffer = np.empty(total, np.uint8)
            for block, message in self._bad(batch):
                self._seen[block.piece].append(message)
            self.found.bytes += total
            self._advance(total)
        for name, piece in dict.fromkeys((block.name, block.piece) for block in blocks):
            for message in self._seen[piece]:
                yield Damage(step, piece.file, [name], message)

    def _bad(self, blocks: Sequence[_Block]) -> Iterator[tuple[_Block, str]]:
        """Yields the damaged blocks; finds them by bisection."""
        try:
            self._check(blocks)
        except Unavailable:
            raise
        except StorageError as error:
            if len(blocks) == 1:
                yield blocks[0], str(error)
                return
            half = len(blocks) // 2
            yield from self._bad(blocks[:half])
            yield from self._bad(blocks[half:])

    def _check(self, blocks: Sequence[_Block]) -> None:
        names = list({block.piece.file: 0 for block in blocks})
        numbers = {name: number for number, name in enumerate(names)}
        place = int(self._buffer.ctypes.data)
        rows = []
        for block in blocks:
            offset = block.piece.offset + block.start
            rows.append((numbers[block.piece.file], offset, block.length, place))
            place += block.length
        crcs = [block.piece.crc32[block.start // CRC_BYTES] for block in blocks]
        self._catalog.storage.read_checked(
            names, np.array(rows, np.int64), np.array(crcs, np.uint32)
        )


def _states(manifest: Manifest) -> list[tuple[str, Sequence[Node]]]:
    """Returns all states, each with the prefix of its tensors' names."""
    own = [(f"per_rank[{rank}] ", nodes) for rank, nodes in manifest.per_rank.items()]
    return [("", manifest.state), *own]


def _blocks(name: str, node: Tensor, lost: dict[str, str]) -> Iterator[_Block]:
    for piece in node.pieces:
        if piece.file not in lost:
            for start in range(0, piece.length, CRC_BYTES):
                yield _Block(name, piece, start)


def _batches(blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
    batch: list[_Block] = []
    filled = 0
    for block in blocks:
        if batch and (filled + block.length > _BATCH_BYTES or len(batch) == _BATCH_BLOCKS):
            yield batch
            batch, filled = [], 0
        batch.append(block)
        filled += block.length
    if batch:
        yield batch


def bytes_to_verify(catalog: Catalog, generations: Sequence[Generation]) -> int:
    """Returns the number of bytes that `Verifier` will read; unreadable manifests do not count."""
    pieces: dict[Piece, int] = {}
    for generation in generations:
        try:
            manifest = catalog.decoded(generation)
        except Unavailable:
            raise
        except (StorageError, CheckpointError):
            continue
        for node in _tensors(manifest):
            pieces.update((piece, piece.length) for piece in node.pieces)
    return sum(pieces.values())
