"""Who writes what: a pure function of all ranks' layouts, so that every rank finds the same plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fireflyer.checkpoint.boxes import Box, flaw, position, split_rows
from fireflyer.checkpoint.layout import Layout, Slot, TensorSlot, ValueSlot
from fireflyer.checkpoint.tree import Container, Path, path_name
from fireflyer.errors import CheckpointError

SPLIT_BYTES = 8 << 20
"""A replica is cut into pieces of this size at least; a rank with less to write is as good as idle, so that
small states stay in few files."""


class Share(NamedTuple):
    """A piece that one rank writes."""

    tensor: int
    """Index in `Plan.tensors`."""
    leaf: int
    """Index in the rank's `layout.tensors`."""
    box: Box
    """In the whole tensor."""
    start: int
    """Its first byte in the rank's box of the tensor, in C order; it is contiguous there."""
    nbytes: int


@dataclass
class Plan:
    """The merged state and who provides what of it."""

    nodes: list[Slot]
    """All ranks' slots, parents before children, children in order; offsets of tensors mean nothing here."""
    tensors: list[TensorSlot]
    """Those of `nodes`."""
    shares: list[list[Share]]
    """By rank."""
    values: list[list[int]]
    """By rank: the indexes in its `layout.values` of those that it provides."""


@dataclass
class _Entry:
    slot: Slot
    rank: int
    """The lowest that has it."""
    children: list[Path] = field(default_factory=list)
    holders: dict[Box, list[tuple[int, int]]] = field(default_factory=dict)
    """Who has a box: (rank, leaf)."""


class _Chunk(NamedTuple):
    nbytes: int
    tensor: int
    box: Box
    start: int
    holders: list[tuple[int, int]]


def make_plan(layouts: Sequence[Layout]) -> Plan:
    """
    Args:
        layouts: by rank.

    Raises:
        CheckpointError: naming the path at which the ranks' states contradict one another, or a tensor
            whose boxes overlap or leave a part of it out.
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
    """Each box goes to a rank that has it; what several have, the largest first, to the least burdened."""
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
