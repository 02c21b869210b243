"""Replicas of saves in the nodes' memory: each keeper's holdings, evictions, complete saves.

Pure: no I/O, thread, clock or torch. docs/internals/checkpoint-tiers.md describes the protocol.

A keeper is a process of a node that holds saves in memory. A save is *complete* if at least one
keeper has its commit mark and every rank's data is in at least one keeper. The mark is made only
after two keepers have each rank's data. So a keeper that gets the mark drops all older saves. A
keeper without the mark keeps the previous save. A keeper holds at most two saves: the newest marked
save and the next save.
"""

from collections.abc import Sequence

import msgspec

from fireflyer.errors import CheckpointError, NoSpace


class Stamp(msgspec.Struct, frozen=True, order=True):
    """Identity of a save; stamps sort by age. Equals `manifest.Generation`, without file names or
    torch."""

    epoch: int
    number: int
    step: int


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One keeper's contents of one save."""

    stamp: Stamp
    world: int
    committed: bool
    """True if the keeper has the commit mark, hence the manifest."""
    ranks: tuple[int, ...]
    """Ranks whose data the keeper holds, ascending."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """One keeper's contents for one place. A place is the identity of a checkpoint directory.

    The inventory of a node that has lost its keeper has no entries.
    """

    entries: tuple[Entry, ...] = ()


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """Save that can be loaded from memory."""

    stamp: Stamp
    holders: tuple[tuple[int, ...], ...]
    """Nodes that hold a rank's data, by rank; at least one node each."""
    marked: tuple[int, ...]
    """Nodes that have the commit mark and the manifest; at least one."""


def buddies(nodes: int) -> tuple[int | None, ...]:
    """Returns, for each node, the node with the second copy of its data; None for a single node.

    Neighbours hold each other's data. If the number of nodes is odd, the last three form a ring. Of
    all maps with one copy, this map loses data in the fewest pairs of lost nodes (GEMINI, SOSP'23,
    §4).
    """
    if nodes < 2:
        return (None,) * nodes
    pairs: list[int | None] = [node ^ 1 for node in range(nodes)]
    if nodes % 2:
        pairs[-3:] = [nodes - 2, nodes - 1, nodes - 3]
    return tuple(pairs)


def newest_complete(inventories: Sequence[Inventory]) -> Complete | None:
    """Returns the newest complete save; `inventories` has one entry per node."""
    entries = [(node, e) for node, held in enumerate(inventories) for e in held.entries]
    for stamp in sorted({e.stamp for _, e in entries if e.committed}, reverse=True):
        of_save = [(node, e) for node, e in entries if e.stamp == stamp]
        marked = tuple(node for node, e in of_save if e.committed)
        world = next(e.world for _, e in of_save if e.committed)
        holders = tuple(
            tuple(node for node, e in of_save if rank in e.ranks) for rank in range(world)
        )
        if all(holders):
            return Complete(stamp=stamp, holders=holders, marked=marked)
    return None


_GIVEN_UP = 64
"""Number of newest aborted saves that a table remembers, in addition to the last one aborted."""


class _Save:
    def __init__(self, world: int) -> None:
        self.world = world
        self.committed = False
        self.sizes: dict[int, int] = {}
        self.placed: dict[int, str] = {}
        """Placement by rank, at rank 0's keeper: "" if the data is in place, else the error."""


class ReplicaTable:
    """Contents and decisions of one keeper for one place. Not thread-safe.

    Calls that drop saves return their stamps; the owner of the memory then frees the memory.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.fence = 0
        """Fencing token: lower epochs belong to runs that were replaced."""
        self._saves: dict[Stamp, _Save] = {}
        self._reserved: dict[tuple[Stamp, int], int] = {}
        self._given_up: set[Stamp] = set()
        """Aborted saves, some perhaps before all their data arrived; late data is rejected."""

    @property
    def used_bytes(self) -> int:
        """Number of bytes held and reserved."""
        held = sum(sum(save.sizes.values()) for save in self._saves.values())
        return held + sum(self._reserved.values())

    def newest(self) -> Stamp | None:
        """Returns the newest save with the commit mark."""
        return max((stamp for stamp, save in self._saves.items() if save.committed), default=None)

    def raise_fence(self, epoch: int) -> None:
        """Raises the fence to the epoch of a run. A run that does not know its epoch yet passes 0,
        which changes nothing.

        Raises:
            CheckpointError: if a later run has raised the fence.
        """
        if epoch:
            self._check(epoch)
            self.fence = epoch

    def reserve(self, stamp: Stamp, rank: int, size: int) -> list[Stamp]:
        """Reserves space for a rank's data; returns the saves dropped to make space.

        The saves of a run are sequential, so older unmarked saves have failed; they are dropped if
        space is short.

        Raises:
            CheckpointError: if the save is not newer than the committed save, the save was given
                up, or its run was replaced.
            NoSpace: if the data does not fit in addition to the newest committed save.
        """
        self._check(stamp.epoch)
        self._refuse_given_up(stamp)
        if (newest := self.newest()) is not None and newest >= stamp:
            raise CheckpointError(f"step {stamp.step} or a newer save is already committed")
        if (old := self._saves.get(stamp)) is not None:
            old.sizes.pop(rank, None)
        dropped: list[Stamp] = []
        if self.used_bytes + size > self.limit_bytes:
            dropped = [
                other for other, old in self._saves.items() if other < stamp and not old.committed
            ]
            self._drop(dropped)
        if self.used_bytes + size > self.limit_bytes:
            raise NoSpace(
                f"the keeper's limit of {self.limit_bytes} bytes is too low: rank {rank} needs {size} bytes, "
                f"{self.used_bytes} are in use: raise the limit or disable the memory tier"
            )
        self._reserved[stamp, rank] = size
        return dropped

    def release(self, stamp: Stamp, rank: int) -> None:
        """Cancels a reservation; does nothing if `hold` has already used it."""
        self._reserved.pop((stamp, rank), None)

    def hold(self, stamp: Stamp, world: int, rank: int) -> None:
        """Records that the reserved space holds the rank's data.

        Raises:
            CheckpointError: if the run was replaced, the save was given up meanwhile, or the space
                is not reserved, e.g. because the rank sent its data twice at the same time.
        """
        self._check(stamp.epoch)
        size = self._reserved.pop((stamp, rank), None)
        if size is None:
            raise CheckpointError(f"rank {rank} has no space reserved for step {stamp.step}")
        self._refuse_given_up(stamp)
        self._save(stamp, world).sizes[rank] = size

    def place(self, stamp: Stamp, world: int, rank: int, error: str) -> None:
        """Records that a rank's data is in place (`error` is ""), or the rank's error."""
        self._check(stamp.epoch)
        self._save(stamp, world).placed[rank] = error

    def missing(self, stamp: Stamp, world: int) -> list[int]:
        """Returns the ranks that have not yet called `place`.

        Raises:
            CheckpointError: if a rank reported an error.
        """
        save = self._saves.get(stamp)
        placed = {} if save is None else save.placed
        for rank, error in sorted(placed.items()):
            if error:
                raise CheckpointError(f"rank {rank} has no replica: {error}")
        return [rank for rank in range(world) if rank not in placed]

    def decided(self, stamp: Stamp) -> bool | None:
        """Returns True if a save is committed, None if it is undecided, and False if this keeper
        does not hold it."""
        save = self._saves.get(stamp)
        return False if save is None else save.committed or None

    def commit(self, stamp: Stamp, world: int) -> list[Stamp]:
        """Marks a complete save and drops older saves; does nothing if a newer save is marked.

        Raises:
            CheckpointError: if the run was replaced.
        """
        self._check(stamp.epoch)
        return self._mark(stamp, world)

    def settle(self, stamp: Stamp | None, world: int) -> list[Stamp]:
        """Applies a new run's agreement on the newest complete save, `stamp` (None: none).

        The save is marked if necessary; all unmarked saves are dropped.
        """
        dropped = [] if stamp is None else self._mark(stamp, world)
        unmarked = [other for other, save in self._saves.items() if not save.committed]
        self._drop(unmarked)
        return dropped + unmarked

    def abort(self, stamp: Stamp) -> list[Stamp]:
        """Drops a save that failed or was found damaged; its late data will be rejected."""
        self._given_up = {*sorted(self._given_up)[-_GIVEN_UP:], stamp}
        dropped = [stamp] if stamp in self._saves else []
        self._drop(dropped)
        return dropped

    def inventory(self) -> Inventory:
        return Inventory(
            entries=tuple(
                Entry(
                    stamp=stamp,
                    world=save.world,
                    committed=save.committed,
                    ranks=tuple(sorted(save.sizes)),
                )
                for stamp, save in sorted(self._saves.items())
            )
        )

    def _refuse_given_up(self, stamp: Stamp) -> None:
        if stamp in self._given_up:
            raise CheckpointError("rank 0 gave up this save; see its error")

    def _save(self, stamp: Stamp, world: int) -> _Save:
        return self._saves.setdefault(stamp, _Save(world))

    def _mark(self, stamp: Stamp, world: int) -> list[Stamp]:
        if (newest := self.newest()) is not None and newest > stamp:
            return []
        save = self._save(stamp, world)
        save.committed = True
        save.placed.clear()
        older = [other for other in self._saves if other < stamp]
        self._drop(older)
        return older

    def _drop(self, stamps: list[Stamp]) -> None:
        for stamp in stamps:
            del self._saves[stamp]

    def _check(self, epoch: int) -> None:
        if epoch < self.fence:
            raise CheckpointError(
                f"a later run (epoch {self.fence}) owns the memory tier; a run of epoch {epoch} cannot use it"
            )
