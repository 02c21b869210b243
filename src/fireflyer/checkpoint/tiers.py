"""Replicas of saves in the memory of nodes: who holds what, what may go, which save is whole.

No I/O, no thread, no clock, no torch. docs/checkpoint-tiers.md tells the protocol. A save is *complete*
when some keeper has its commit mark and every rank's data is with some keeper; the mark is made only
after all data was in place twice. So a keeper that has the mark lets go of everything older, and one without
it keeps the save before. At most two saves are held: the newest marked one and one that comes.
"""

from collections.abc import Sequence

import msgspec

from fireflyer.errors import CheckpointError, NoSpace


class Stamp(msgspec.Struct, frozen=True, order=True):
    """A save; stamps sort by age. `manifest.Generation` without its file names, and without torch."""

    epoch: int
    number: int
    step: int


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """What one keeper holds of one save."""

    stamp: Stamp
    world: int
    committed: bool
    """It has the commit mark, hence the manifest."""
    ranks: tuple[int, ...]
    """Whose data it holds, ascending."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one keeper holds of one place; no entries for a node that has lost its keeper."""

    entries: tuple[Entry, ...] = ()


class Complete(msgspec.Struct, frozen=True, kw_only=True):
    """A save that can be loaded from memory."""

    stamp: Stamp
    holders: tuple[tuple[int, ...], ...]
    """By rank: the nodes that hold its data, at least one."""
    marked: tuple[int, ...]
    """The nodes that have the commit mark and the manifest, at least one."""


def buddies(nodes: int) -> tuple[int | None, ...]:
    """By node: which node holds a second copy of its data; None where there is only one node.

    Neighbours hold each other's; of an odd number the last three in a ring. Of all maps with one
    copy this one loses data in the fewest pairs of lost nodes (GEMINI, SOSP'23, §4).
    """
    if nodes < 2:
        return (None,) * nodes
    pairs: list[int | None] = [node ^ 1 for node in range(nodes)]
    if nodes % 2:
        pairs[-3:] = [nodes - 2, nodes - 1, nodes - 3]
    return tuple(pairs)


def newest_complete(inventories: Sequence[Inventory]) -> Complete | None:
    """The newest complete save among what the nodes hold, by node."""
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
"""Saves of which a shelf remembers that: the newest ones, and one more."""


class _Save:
    def __init__(self, world: int) -> None:
        self.world = world
        self.committed = False
        self.sizes: dict[int, int] = {}
        self.placed: dict[int, str] = {}
        """At rank 0's keeper: the ranks whose data is in place, or why it is not ("" where it is)."""


class Shelf:
    """What one keeper holds of one place, and what it decides. Not thread-safe.

    The calls that let go of saves return their stamps; whoever owns the memory frees it then.
    """

    def __init__(self) -> None:
        self.limit_bytes = 0
        self.fence = 0
        """Epochs below it are those of runs that have been replaced."""
        self._saves: dict[Stamp, _Save] = {}
        self._reserved: dict[tuple[Stamp, int], int] = {}
        self._given_up: set[Stamp] = set()
        """Aborted, perhaps before all their data came: what comes late is refused."""

    @property
    def used_bytes(self) -> int:
        """Held and promised."""
        held = sum(sum(save.sizes.values()) for save in self._saves.values())
        return held + sum(self._reserved.values())

    def newest(self) -> Stamp | None:
        """The newest save with its mark."""
        return max((stamp for stamp, save in self._saves.items() if save.committed), default=None)

    def raise_fence(self, epoch: int) -> None:
        """A run of this epoch is here; 0 for one that does not know its epoch yet.

        Raises:
            CheckpointError: if a later run has been here.
        """
        if epoch:
            self._check(epoch)
            self.fence = epoch

    def reserve(self, stamp: Stamp, rank: int, size: int) -> list[Stamp]:
        """Promises space for a rank's data. A run's saves come one after the other, so older ones without
        their mark have failed; they go where their space is needed, if nobody has said so before.

        Raises:
            CheckpointError: if the save is not newer than what is committed or was given up, or its run was
                replaced.
            NoSpace: if it would not fit beside the newest committed save.
        """
        self._check(stamp.epoch)
        self._refuse_given_up(stamp)
        if (newest := self.newest()) is not None and newest >= stamp:
            raise CheckpointError(f"a save as new as step {stamp.step} is committed already")
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
                f"the keeper's limit of {self.limit_bytes} bytes has no room for {size} bytes of rank {rank} "
                f"beside {self.used_bytes}: raise the limit, or leave the memory tier out"
            )
        self._reserved[stamp, rank] = size
        return dropped

    def release(self, stamp: Stamp, rank: int) -> None:
        """Takes a promise back; nothing if it was kept."""
        self._reserved.pop((stamp, rank), None)

    def hold(self, stamp: Stamp, world: int, rank: int) -> None:
        """The promised space is filled with the rank's data.

        Raises:
            CheckpointError: if the run was replaced meanwhile, or the rank has put its data twice at once.
        """
        self._check(stamp.epoch)
        size = self._reserved.pop((stamp, rank), None)
        if size is None:
            raise CheckpointError(f"rank {rank} was promised no space for step {stamp.step}")
        self._refuse_given_up(stamp)
        self._save(stamp, world).sizes[rank] = size

    def place(self, stamp: Stamp, world: int, rank: int, error: str) -> None:
        """A rank says that its data is where it belongs, or why it is not."""
        self._check(stamp.epoch)
        self._save(stamp, world).placed[rank] = error

    def missing(self, stamp: Stamp, world: int) -> list[int]:
        """The ranks that have not said anything yet.

        Raises:
            CheckpointError: if one has said that it failed, or the save was given up.
        """
        save = self._saves.get(stamp)
        placed = {} if save is None else save.placed
        for rank, error in sorted(placed.items()):
            if error:
                raise CheckpointError(f"rank {rank} has no replica: {error}")
        return [rank for rank in range(world) if rank not in placed]

    def decided(self, stamp: Stamp) -> bool | None:
        """Whether a save that this keeper has held is committed; None while that is open."""
        save = self._saves.get(stamp)
        return False if save is None else save.committed or None

    def commit(self, stamp: Stamp, world: int) -> list[Stamp]:
        """All data is in place: the save has its mark, everything older goes. Nothing if a newer one has it.

        Raises:
            CheckpointError: if the run was replaced.
        """
        self._check(stamp.epoch)
        return self._mark(stamp, world)

    def settle(self, stamp: Stamp | None, world: int) -> list[Stamp]:
        """A new run has agreed that `stamp` is the newest complete save (None: there is none): it gets
        its mark if it lacks it, and what has no mark goes."""
        dropped = [] if stamp is None else self._mark(stamp, world)
        unmarked = [other for other, save in self._saves.items() if not save.committed]
        self._drop(unmarked)
        return dropped + unmarked

    def abort(self, stamp: Stamp) -> list[Stamp]:
        """The save has failed, or was found damaged."""
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
            raise CheckpointError("rank 0 gave it up, and says why")

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
                f"a later run (epoch {self.fence}) owns the memory tier; one of epoch {epoch} may not use it"
            )
