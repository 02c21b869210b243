"""Preparing a save: the ranks agree on it, or all fail together; afterwards each knows what it writes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fireflyer.checkpoint.boxes import Box, whole
from fireflyer.checkpoint.control import Control, rank_and_world
from fireflyer.checkpoint.layout import Layout, Slot, Taken, Taker, ValueSlot, digest_of_all
from fireflyer.checkpoint.leaves import Leaf, Local
from fireflyer.checkpoint.manifest import Generation
from fireflyer.checkpoint.plan import Plan, make_plan
from fireflyer.checkpoint.staging import Stager, Table
from fireflyer.checkpoint.tree import Value, path_name, value_node
from fireflyer.errors import CheckpointError


class Prepared(NamedTuple):
    """One rank's side of a save that all ranks have agreed on."""

    generation: Generation
    plan: Plan
    table: Table
    boxes: list[Box]
    """Of the table's sections, in their whole tensors."""
    names: list[str]
    """Of the leaves."""
    leaves: list[Leaf]
    """The state's, then per_rank's."""
    locals: list[Local]
    values: list[Value]
    """Those that this rank provides."""
    own: list[Slot | Value] | None
    """Its per_rank state."""
    rejoin: bool
    """Whether any rank's claim has said so."""


class _Mine(NamedTuple):
    taken: Taken
    values: list[Value]
    own: Taken | None
    own_slots: list[Slot | Value] | None


class Preparer:
    """Keeps the plan and the table while the layouts of all ranks stay. Not safe for threads."""

    def __init__(self, control: Control, stager: Stager) -> None:
        self._control = control
        self._stager = stager
        self._taker, self._own_taker = Taker(), Taker()
        self._plan: Plan | None = None
        self._plan_key = 0
        """Made from the digests of all ranks' layouts."""
        self._planned_digest = 0
        """Of this rank's layout in the plan."""
        self._table_key = (0, 0)
        self._table = Table([])
        self._boxes: list[Box] = []
        self._names: list[str] = []

    def prepare(
        self,
        step: int,
        state: Any,
        per_rank: Any | None,
        claim: Callable[[], tuple[int, int, bool]],
    ) -> Prepared:
        """Collective: one all-gather of a few numbers while the layouts stay.

        Args:
            claim: gives rank 0's epoch and save number, anything on other ranks; and whether this rank wants
                all to join the memory tier again. What it raises fails the save on all ranks.

        Raises:
            CheckpointError, FireflyerError: on all ranks, if it cannot be done on any.
        """
        rank, _ = rank_and_world()
        mine: _Mine | None = None
        error: Exception | None = None
        epoch, number, rejoin = 0, 0, False
        try:
            if step < 0:
                raise ValueError(f"step {step} is below 0")
            epoch, number, rejoin = claim()
            mine = self._take(state, per_rank)
            if mine.taken.layout.digest == self._planned_digest:
                self._fit(mine, rank)
        except Exception as failure:  # noqa: BLE001  # the other ranks must hear of any
            error = failure
        digest = mine.taken.layout.digest if mine is not None else 0
        rows = self._control.numbers(
            [error is not None, step, epoch, number, digest, self._plan_key, rejoin]
        )
        self._fail_together(step, [row[0] for row in rows], error)
        assert mine is not None
        for other, row in enumerate(rows):
            if row[1] != rows[0][1]:
                raise CheckpointError(
                    f"the ranks save different steps: {rows[0][1]} on rank 0, {row[1]} on rank {other}"
                )
        digests = [row[4] for row in rows]
        if {row[5] for row in rows} != {digest_of_all(digests)}:
            self._agree(step, mine, digests)
        rejoin = any(row[6] for row in rows)
        return self._prepared(mine, rank, Generation(rows[0][2], rows[0][3], step), rejoin)

    def _take(self, state: Any, per_rank: Any | None) -> _Mine:
        taken = self._taker.take(state)
        values = list(map(value_node, taken.layout.values, taken.values))
        if per_rank is None:
            return _Mine(taken, values, None, None)
        own = self._own_taker.take(per_rank)
        for slot in own.layout.tensors:
            if math.prod(slot.shape) and slot.box != whole(slot.shape):
                raise CheckpointError(
                    f"cannot save {path_name(slot.path)} of per_rank: it is a part of a tensor, "
                    "which belongs into the state"
                )
        rest = iter(own.values)
        slots: list[Slot | Value] = [
            value_node(slot.path, next(rest)) if isinstance(slot, ValueSlot) else slot
            for slot in own.layout.slots
        ]
        return _Mine(taken, values, own, slots)

    def _agree(self, step: int, mine: _Mine, digests: Sequence[int]) -> None:
        """A new plan, from all ranks' layouts; alike ones are sent once."""
        rank, _ = rank_and_world()
        layout = mine.taken.layout
        first = {digest: digests.index(digest) for digest in digests}
        blobs = self._control.blobs(layout.encoded if first[layout.digest] == rank else b"")
        layouts: Mapping[int, Layout] = {
            digest: layout if digest == layout.digest else Layout.decode(blobs[holder])
            for digest, holder in first.items()
        }
        self._plan_key = self._planned_digest = 0
        self._plan = make_plan([layouts[digest] for digest in digests])
        self._plan_key, self._planned_digest = digest_of_all(list(digests)), layout.digest
        error: Exception | None = None
        try:
            self._fit(mine, rank)
        except Exception as failure:  # noqa: BLE001  # the other ranks must hear of any
            error = failure
        failed = [row[0] for row in self._control.numbers([error is not None])]
        self._fail_together(step, failed, error)

    def _fit(self, mine: _Mine, rank: int) -> None:
        """Gives the pieces of the plan and of per_rank their places, and the arena the room for them."""
        key = (self._plan_key, mine.own.layout.digest if mine.own is not None else 0)
        if key != self._table_key:
            self._lay_out(mine, rank)
            self._table_key = key
        self._stager.reserve(self._table.size)

    def _lay_out(self, mine: _Mine, rank: int) -> None:
        assert self._plan is not None
        tensors = mine.taken.layout.tensors
        own = mine.own.layout.tensors if mine.own is not None else []
        pieces: list[tuple[int, Box, int, int]] = []
        boxes: list[Box] = []
        for share in self._plan.shares[rank]:
            holder = tensors[share.leaf].box
            assert holder is not None
            pieces.append((share.leaf, share.box.within(holder), share.start, share.nbytes))
            boxes.append(share.box)
        for leaf, slot in enumerate(own, len(tensors)):
            if slot.box is not None:
                pieces.append((leaf, slot.box, 0, slot.box.elements * slot.itemsize))
                boxes.append(slot.box)
        self._table, self._boxes = Table(pieces), boxes
        self._names = [path_name(slot.path) for slot in [*tensors, *own]]

    def _prepared(self, mine: _Mine, rank: int, generation: Generation, rejoin: bool) -> Prepared:
        assert self._plan is not None
        own = mine.own
        return Prepared(
            generation=generation,
            plan=self._plan,
            table=self._table,
            boxes=self._boxes,
            names=self._names,
            leaves=mine.taken.leaves + (own.leaves if own is not None else []),
            locals=mine.taken.locals + (own.locals if own is not None else []),
            values=[mine.values[index] for index in self._plan.values[rank]],
            own=mine.own_slots,
            rejoin=rejoin,
        )

    def _fail_together(self, step: int, failed: Sequence[int], error: Exception | None) -> None:
        """
        Raises:
            Exception: this rank's own error; a CheckpointError that tells another rank's.
        """
        if not any(failed):
            return
        reasons = self._control.blobs(str(error).encode() if error is not None else b"")
        if error is not None:
            raise error
        rank = failed.index(1)
        raise CheckpointError(f"rank {rank} could not save step {step}: {reasons[rank].decode()}")
