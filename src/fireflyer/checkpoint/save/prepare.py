"""Preparation of a save: all ranks agree on the save or fail together; then each rank knows its
pieces."""

import contextlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

from fireflyer.checkpoint.control_group import ControlGroup, rank_and_world
from fireflyer.checkpoint.directory.manifest import Generation, Metrics
from fireflyer.checkpoint.save.plan import Plan, make_plan
from fireflyer.checkpoint.save.staging import Stager, Table
from fireflyer.checkpoint.state.boxes import Box, whole
from fireflyer.checkpoint.state.layout import Layout, Slot, Taken, Taker, ValueSlot, digest_of_all
from fireflyer.checkpoint.state.leaves import Leaf, Local
from fireflyer.checkpoint.state.tree import Value, path_name, value_node
from fireflyer.errors import CheckpointError


class Prepared(NamedTuple):
    """One rank's share of a save on which all ranks have agreed."""

    generation: Generation
    plan: Plan
    table: Table
    boxes: list[Box]
    """Boxes of the table's sections, in whole-tensor coordinates."""
    names: list[str]
    """Names of the leaves."""
    leaves: list[Leaf]
    """Leaves of the state, then those of per_rank."""
    locals: list[Local]
    values: list[Value]
    """Plain values of the state that this rank provides."""
    own: list[Slot | Value] | None
    """State that this rank passed as `per_rank`."""
    metrics: Metrics
    """Metrics that this rank passed to `save`."""
    rejoin: bool
    """True if any rank's claim asks all ranks to join the memory tier again."""


class _Mine(NamedTuple):
    metrics: Metrics
    taken: Taken
    values: list[Value]
    own: Taken | None
    own_slots: list[Slot | Value] | None


class Preparer:
    """Caches the plan and the table until a rank's layout changes. Not thread-safe."""

    def __init__(self, control: ControlGroup, stager: Stager) -> None:
        self._control = control
        self._stager = stager
        self._taker, self._own_taker = Taker(), Taker()
        self._plan: Plan | None = None
        self._plan_key = 0
        """Digest of all ranks' layout digests."""
        self._planned_digest = 0
        """Digest of this rank's layout in the plan."""
        self._table_key = (0, 0)
        self._table = Table([])
        self._boxes: list[Box] = []
        self._names: list[str] = []

    def forget(self) -> None:
        """Drops the plan and the table, because a membership change may renumber the ranks."""
        self._plan_key = self._planned_digest = 0
        self._plan = None
        self._table_key = (0, 0)

    def prepare(
        self,
        step: SupportsIndex,
        state: Any,
        per_rank: Any | None,
        metrics: Mapping[str, float] | None,
        claim: Callable[[], tuple[int, int, bool]],
    ) -> Prepared:
        """Agrees on a save. Collective: one all-gather of a few numbers if no layout has changed.

        Args:
            claim: returns (epoch, save number, True if this rank wants all ranks to join the memory
                tier again). Only the two numbers that rank 0 returns are used. If `claim` raises,
                the save fails on all ranks.

        Raises:
            CheckpointError, FireflyerError: on all ranks, if any rank cannot take part.
            TypeError, ValueError: on the rank whose step or metric is not a number; the other ranks
                get a CheckpointError.
        """
        rank, _ = rank_and_world()
        mine: _Mine | None = None
        error: Exception | None = None
        at, epoch, number, rejoin = 0, 0, 0, False
        try:
            epoch, number, rejoin = claim()
            at = _step_to_save(step)
            mine = self._take(state, per_rank, _measured(metrics))
            if mine.taken.layout.digest == self._planned_digest:
                self._fit(mine, rank)
        except Exception as failure:  # noqa: BLE001  # the other ranks must learn of any failure
            error = failure
        digest = mine.taken.layout.digest if mine is not None else 0
        rows = self._control.numbers(
            [error is not None, at, epoch, number, digest, self._plan_key, rejoin]
        )
        self._fail_together([row[0] for row in rows], error)
        assert mine is not None
        for other, row in enumerate(rows):
            if row[1] != rows[0][1]:
                raise CheckpointError(
                    f"all ranks must save the same step: {rows[0][1]} on rank 0, {row[1]} on rank {other}"
                )
        digests = [row[4] for row in rows]
        if {row[5] for row in rows} != {digest_of_all(digests)}:
            self._agree(mine, digests)
        rejoin = any(row[6] for row in rows)
        return self._prepared(mine, rank, Generation(rows[0][2], rows[0][3], at), rejoin)

    def _take(self, state: Any, per_rank: Any | None, metrics: Metrics) -> _Mine:
        taken = self._taker.take(state)
        values = list(map(value_node, taken.layout.values, taken.values))
        if per_rank is None:
            return _Mine(metrics, taken, values, None, None)
        own = self._own_taker.take(per_rank)
        for slot in own.layout.tensors:
            if math.prod(slot.shape) and slot.box != whole(slot.shape):
                raise CheckpointError(
                    f"cannot save {path_name(slot.path)} of per_rank: it is a shard of a tensor; "
                    "put it into the state"
                )
        rest = iter(own.values)
        slots: list[Slot | Value] = [
            value_node(slot.path, next(rest)) if isinstance(slot, ValueSlot) else slot
            for slot in own.layout.slots
        ]
        return _Mine(metrics, taken, values, own, slots)

    def _agree(self, mine: _Mine, digests: Sequence[int]) -> None:
        """Makes a new plan from all ranks' layouts; equal layouts are sent once."""
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
        except Exception as failure:  # noqa: BLE001  # the other ranks must learn of any failure
            error = failure
        failed = [row[0] for row in self._control.numbers([error is not None])]
        self._fail_together(failed, error)

    def _fit(self, mine: _Mine, rank: int) -> None:
        """Assigns places to the pieces of the plan and of per_rank, and reserves the arena."""
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
            metrics=mine.metrics,
            rejoin=rejoin,
        )

    def _fail_together(self, failed: Sequence[int], error: Exception | None) -> None:
        """Raises on all ranks if any rank failed.

        Raises:
            Exception: this rank's own error, or a CheckpointError with another rank's error.
        """
        if not any(failed):
            return
        reasons = self._control.blobs(
            str(error).encode(errors="backslashreplace") if error is not None else b""
        )
        if error is not None:
            raise error
        rank = failed.index(1)
        raise CheckpointError(f"rank {rank} could not save: {reasons[rank].decode()}")


def whole_number(step: SupportsIndex) -> int:
    """Returns a step as an int; whole numbers of numpy and torch are accepted.

    Raises:
        TypeError: if the step is not a whole number.
    """
    with contextlib.suppress(TypeError):  # operator.index's message does not name the step
        if not isinstance(step, bool):
            return operator.index(step)
    raise TypeError(f"invalid step {step!r}: expected a whole number")


def _step_to_save(step: SupportsIndex) -> int:
    number = whole_number(step)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"the step {number} is {'below 0' if number < 0 else 'beyond 63 bits'}")
    return number


def _measured(metrics: Mapping[str, float] | None) -> Metrics:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"invalid metrics {metrics!r}: expected a dict of numbers by name")
    measured: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise TypeError(f"invalid metrics key {name!r}: expected a string")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"invalid metrics key {name!r}: expected text that UTF-8 can encode"
            ) from error
        try:
            measured[name] = _as_json(float(value))
        except OverflowError as error:
            raise ValueError(f"the metric {name} is too large for a float") from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"invalid metric {name} {value!r}: expected a number") from error
    return measured


def _as_json(value: float) -> float | Literal["nan", "inf", "-inf"]:
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
