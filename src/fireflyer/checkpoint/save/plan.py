"""The write plan: a pure function of all ranks' layouts, so every rank computes the same plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fireflyer.checkpoint.state.boxes import Box, flaw, position, split_rows
from fireflyer.checkpoint.state.layout import Layout, Slot, TensorSlot, ValueSlot
from fireflyer.checkpoint.state.tree import Container, Path, path_name
from fireflyer.errors import CheckpointError

SPLIT_BYTES = 8 << 20
"""Minimum size of the pieces into which a replicated box is cut. A rank with less than this to
write counts as idle, so small states stay in few files."""


class Share(NamedTuple):
    """Piece that one rank writes."""

    tensor: int
    """Index in `Plan.tensors`."""
    leaf: int
    """Index in the rank's `layout.tensors`."""
    box: Box
    """Box in whole-tensor coordinates."""
    start: int
    """First byte of the piece in the rank's box, in C order; the piece is contiguous there."""
    nbytes: int


@dataclass
class Plan:
    """The merged state, and the rank that provides each part of it."""

    nodes: list[Slot]
    """Slots of all ranks, parents before children, in order. The box of a tensor slot is that of an
    arbitrary rank."""
    tensors: list[TensorSlot]
    """Tensor slots of `nodes`."""
    shares: list[list[Share]]
    """Shares by rank."""
    values: list[list[int]]
    """For each rank, indices in its `layout.values` of the values that the rank provides."""


@dataclass
class _Entry:
    slot: Slot
    rank: int
    """Lowest rank that has the slot."""
    children: list[Path] = field(default_factory=list)
    holders: dict[Box, list[tuple[int, int]]] = field(default_factory=dict)
    """Ranks that have a box, as (rank, index in the rank's `layout.tensors`)."""


class _Chunk(NamedTuple):
    nbytes: int
    tensor: int
    box: Box
    start: int
    holders: list[tuple[int, int]]


def make_plan(layouts: Sequence[Layout]) -> Plan:
    """Merges the layouts and divides the pieces among the ranks.

    Args:
        layouts: layout of each rank.

    Raises:
        CheckpointError: if the ranks' states contradict one another, or a tensor's boxes overlap or
            do not cover it; the error names the path.
    """
    entries = _merge(layouts)
    order: list[_Entry] = []
    todo: list[Path] = [()]
    while todo:
        entry = entries[todo.pop()]
        order.append(entry)
        todo.extend(reversed(entry.children))
    tensors = [entry for entry in order if isinstance(entry.slot, TensorSlot)]
    shares = _share_out(tensors, len(layouts))
    values: list[list[int]] = [[] for _ in layouts]
    for rank, layout in enumerate(layouts):
        values[rank] = [
            index for index, path in enumerate(layout.values) if entries[path].rank == rank
        ]
    slots = [entry.slot for entry in order]
    return Plan(slots, [slot for slot in slots if isinstance(slot, TensorSlot)], shares, values)


def _merge(layouts: Sequence[Layout]) -> dict[Path, _Entry]:
    entries: dict[Path, _Entry] = {}
    ranks_of: dict[int, list[int]] = {}
    for rank, layout in enumerate(layouts):
        ranks_of.setdefault(layout.digest, []).append(rank)
    for ranks in ranks_of.values():
        leaf = 0
        for slot in layouts[ranks[0]].slots:
            entry = entries.get(slot.path)
            if entry is None:
                entry = entries[slot.path] = _Entry(slot, ranks[0])
                if slot.path:
                    entries[slot.path[:-1]].children.append(slot.path)
            else:
                _check_alike(entry, slot, ranks[0])
            if isinstance(slot, TensorSlot):
                if slot.box is not None:
                    holders = entry.holders.setdefault(slot.box, [])
                    holders.extend((rank, leaf) for rank in ranks)
                leaf += 1
    return entries


def _check_alike(entry: _Entry, slot: Slot, rank: int) -> None:
    ours, theirs = _described(entry.slot), _described(slot)
    if ours != theirs:
        raise CheckpointError(
            f"cannot save {path_name(slot.path)}: it is {ours} on rank {entry.rank}, {theirs} on rank {rank}"
        )


def _described(slot: Slot) -> str:
    if isinstance(slot, Container):
        return f"a {slot.kind}"
    if isinstance(slot, ValueSlot):
        return "a plain value"
    return f"a {slot.kind} {slot.dtype} tensor of shape {list(slot.shape)}"


def _share_out(tensors: Sequence[_Entry], world: int) -> list[list[Share]]:
    """Assigns each box to a rank that has it.

    A replicated box is split. Its pieces go, largest first, to the holder with the least to write.
    """
    shares: list[list[Share]] = [[] for _ in range(world)]
    loads = [0] * world
    shared: list[_Chunk] = []

    def give(chunk: _Chunk, rank: int, leaf: int) -> None:
        shares[rank].append(Share(chunk.tensor, leaf, chunk.box, chunk.start, chunk.nbytes))
        loads[rank] += chunk.nbytes

    for index, entry in enumerate(tensors):
        slot = entry.slot
        assert isinstance(slot, TensorSlot)
        if problem := flaw(slot.shape, list(entry.holders)):
            raise CheckpointError(f"cannot save {path_name(slot.path)}: {problem}")
        for box, holders in entry.holders.items():
            nbytes = box.elements * slot.itemsize
            if len(holders) == 1:
                give(_Chunk(nbytes, index, box, 0, holders), *holders[0])
                continue
            parts = max(1, min(len(holders), nbytes // SPLIT_BYTES))
            for part in split_rows(box, parts):
                start = position(part, box) * slot.itemsize
                shared.append(_Chunk(part.elements * slot.itemsize, index, part, start, holders))
    shared.sort(key=lambda chunk: (-chunk.nbytes, chunk.tensor, chunk.start))
    for chunk in shared:
        rank, leaf = min(
            chunk.holders,
            key=lambda holder: (max(loads[holder[0]] + chunk.nbytes, SPLIT_BYTES), holder[0]),
        )
        give(chunk, rank, leaf)
    for own in shares:
        own.sort(key=lambda share: (share.tensor, share.box.offsets))
    return shares
