"""Metadata next to the data files: manifests, parts and claims; their names and checksummed
JSON."""

import math
import re
from typing import Annotated, Literal, TypeVar

import msgspec

from fireflyer._native import crc32
from fireflyer.checkpoint.state.boxes import Box, flaw
from fireflyer.checkpoint.state.leaves import MAX_DIMENSIONS, dtype_size
from fireflyer.checkpoint.state.tree import Count, Node, Piece, Tensor, Value, check_tree, path_name
from fireflyer.errors import CheckpointError, Corrupted

VERSION = 2
"""Version of the format; docs/internals/checkpoint.md describes it."""

CRC_BYTES = 4 << 20
"""Block size of a piece's CRC32 checksums, in bytes."""

DAMAGED = "damaged"
"""Directory for checkpoints that `load` found damaged."""


class Generation(msgspec.Struct, frozen=True, order=True):
    """Identity of one save. Generations sort by age, regardless of their steps.

    `epoch` counts the runs that have saved into the directory, `number` counts the saves of one
    run.
    """

    epoch: int
    number: int
    step: int

    @property
    def directory(self) -> str:
        return f"step-{self.step:012d}"

    def _name(self, role: str, end: str) -> str:
        return f"{self.directory}/{role}-{self.epoch:06d}-{self.number:06d}{end}"

    @property
    def manifest(self) -> str:
        return self._name("manifest", ".json")

    @property
    def failed(self) -> str:
        """File that rank 0 writes instead of a manifest; tells waiting ranks that the save
        failed."""
        return self._name("failed", ".json")

    def data(self, rank: int) -> str:
        return self._name("data", f"-{rank:05d}.bin")

    def part(self, rank: int) -> str:
        return self._name("part", f"-{rank:05d}.json")

    def done(self, rank: int) -> str:
        """Returns the name that rank 0 gives the rank's part after the commit."""
        return self._name("done", f"-{rank:05d}.json")


_FILE = re.compile(
    r"(manifest|failed|data|part|done)-(\d{6,})-(\d{6,})(-\d{5,})?\.(json|bin)(\..*)?"
)
_DIRECTORY = re.compile(r"step-(\d{12,})")


def parse_directory(name: str) -> int | None:
    """Returns the step of a save directory's name; None for another name."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def parse_file(step: int, name: str) -> tuple[str, Generation] | None:
    """Returns role and generation of a step's file, or None for another name.

    The role is "temporary" while the file is being written.
    """
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    role = "temporary" if match[6] else match[1]
    return role, Generation(epoch=int(match[2]), number=int(match[3]), step=step)


Metrics = dict[str, float | Literal["nan", "inf", "-inf"]]
"""Numbers by name, in a form that JSON can hold."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Manifest of a checkpoint. The checkpoint exists exactly as long as this file does."""

    version: int
    step: Count
    task: str
    attempt: Count
    world_size: Count
    created: Annotated[float, msgspec.Meta(ge=0, le=2**37)]
    """Seconds since 1970; informational."""
    metrics: Metrics
    """Metrics that rank 0 passed to `save`."""
    files: dict[str, int]
    """Size in bytes of each data file to which a piece refers."""
    state: tuple[Node, ...]
    """Merged state of all ranks."""
    per_rank: dict[str, tuple[Node, ...]]
    """States by rank (in decimal); a rank without a `per_rank` state is absent."""

    def measured(self) -> dict[str, float]:
        """Returns the metrics as numbers."""
        return {name: float(value) for name, value in self.metrics.items()}


class Versioned(msgspec.Struct, frozen=True):
    """Common field of manifests of all versions."""

    version: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's result of a save: the pieces that the rank wrote, or its error."""

    rank: int
    pieces: tuple[Piece, ...] = ()
    """Pieces in the order of the rank's shares in the plan."""
    values: tuple[Value, ...] = ()
    """Values that the rank provides."""
    per_rank: tuple[Node, ...] | None = None
    files: dict[str, int] = {}
    error: str | None = None


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A run's right to save into a directory; see claims.py."""

    version: Literal[1] = 1
    task: str
    attempt: int | None
    """Number of the task's attempt; None outside a task."""
    generation: int = 0
    """Generation of the attempt's membership; 0 until its members change."""
    created: float = 0.0
    """Time of the claim in seconds since 1970; 0 in a run's identity."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    crc32: int
    body: msgspec.Raw


T = TypeVar("T")


def encode(body: Manifest | Part | Claim) -> bytes:
    """Returns JSON {"crc32": ..., "body": {...}}; the CRC32 covers the body's encoded bytes."""
    raw = msgspec.json.encode(body)
    return msgspec.json.encode(_Envelope(crc32(raw), msgspec.Raw(raw)))


def decode(data: bytes, kind: type[T], name: str) -> T:
    """Decodes the result of `encode`. A decoded manifest is loadable if its files are intact.

    Raises:
        Corrupted: if a byte has changed, or the contents are not what a save writes; the error
        names the file.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if crc32(bytes(envelope.body)) != envelope.crc32:
            raise Corrupted(f"{name}: its CRC32 does not match")
        body = msgspec.json.decode(envelope.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupted(f"{name}: {error}") from error
    if isinstance(body, Manifest):
        try:
            _check(body)
        except CheckpointError as error:
            raise Corrupted(f"{name}: {error}") from error
    return body


def _check(manifest: Manifest) -> None:
    """Validates a manifest.

    Raises:
        CheckpointError: if the manifest refers to a file that is not a save's data file, or to bytes
            beyond a file's end. Also if one of its states cannot be assembled.
    """
    for file, size in manifest.files.items():
        directory, _, rest = file.partition("/")
        step = parse_directory(directory)
        parsed = parse_file(step, rest) if step is not None else None
        if parsed is None or parsed[0] != "data" or not 0 <= size < 1 << 63:
            raise CheckpointError(f"{file!r} of {size} bytes is not a data file of a checkpoint")
    room = dict(manifest.files)
    for nodes in (manifest.state, *manifest.per_rank.values()):
        check_tree(nodes)
        for node in nodes:
            if isinstance(node, Tensor):
                _check_tensor(node, manifest.files, room)


def _check_tensor(node: Tensor, files: dict[str, int], room: dict[str, int]) -> None:
    """Validates a tensor's pieces.

    Args:
        room: number of bytes of each file that no earlier piece uses; updated here. Pieces share no
            bytes, so a loaded state is never larger than the files.
    """
    size = dtype_size(node.kind, node.dtype)
    problem = _shape_flaw(node, size or 1)
    if problem is None and not _is_whole(node):
        problem = flaw(node.shape, [Box(piece.offsets, piece.shape) for piece in node.pieces])
    for piece in node.pieces:
        length = piece.length
        if problem is not None:
            break
        if size is not None and length != math.prod(piece.shape) * size:
            problem = f"{length} bytes cannot be shape {list(piece.shape)}"
        elif len(piece.crc32) != -(-length // CRC_BYTES):
            problem = f"{length} bytes have {len(piece.crc32)} checksums"
        elif length and piece.offset + length > files.get(piece.file, 0):
            problem = f"{piece.file!r} has no bytes {piece.offset} to {piece.offset + length}"
        elif length:
            room[piece.file] -= length
            if room[piece.file] < 0:
                problem = f"{piece.file!r} has no room for all its pieces"
    if problem is not None:
        raise CheckpointError(
            f"the pieces of {path_name(node.path)} do not form a tensor: {problem}"
        )


def _shape_flaw(node: Tensor, size: int) -> str | None:
    if len(node.shape) > MAX_DIMENSIONS:
        return f"it has {len(node.shape)} dimensions"
    extents = (*node.shape, size) if 0 not in node.shape else [e or 1 for e in (*node.shape, size)]
    return f"shape {list(node.shape)} is absurd" if math.prod(extents) >= 1 << 63 else None


def _is_whole(node: Tensor) -> bool:
    """Returns True if the tensor consists of one piece."""
    shape = node.shape
    return (
        len(node.pieces) == 1
        and node.pieces[0].shape == shape
        and not any(node.pieces[0].offsets)
        and len(node.pieces[0].offsets) == len(shape)
        and 0 not in shape
    )
