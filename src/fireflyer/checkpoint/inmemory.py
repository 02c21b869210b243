"""A manager's memory tier: when it is joined, fenced and joined again, and its newest save as a catalog."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from fireflyer.checkpoint.catalog import Catalog
from fireflyer.checkpoint.claims import Claims
from fireflyer.checkpoint.control import Control, rank_and_world
from fireflyer.checkpoint.manifest import CRC_BYTES, Generation
from fireflyer.checkpoint.memory import LINGER_S, PLACE_DEADLINE_S, START_S, MemoryTier
from fireflyer.checkpoint.options import check_seconds
from fireflyer.checkpoint.replica import ReplicaStorage
from fireflyer.checkpoint.tiers import Complete
from fireflyer.checkpoint.tierwire import Block
from fireflyer.checkpoint.tree import Piece
from fireflyer.errors import CheckpointError, ConfigError, FireflyerError, StorageError, WireError
from fireflyer.log import get_logger

_log = get_logger("checkpoint")


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    """How the nodes hold the newest save in memory; docs/checkpoint-tiers.md."""

    limit_bytes: int | None = None
    """What a node may hold; None: half of the memory available, shared by the job's nodes on the machine."""
    linger_s: float = LINGER_S
    """How long a keeper outside the platform stays when no rank is there."""
    deadline_s: float = PLACE_DEADLINE_S
    """How long a rank waits for keepers and for other ranks' replicas, in one save; at most half of the
    manager's `commit_deadline_s`.

    Raises:
        ConfigError: for a number that cannot work.
    """

    def __post_init__(self) -> None:
        limit = self.limit_bytes
        if limit is not None and (
            not isinstance(limit, int) or isinstance(limit, bool) or limit < 1
        ):
            raise ConfigError(
                f"InMemory(limit_bytes={limit!r}): write a whole number of bytes from 1 on, or None"
            )
        check_seconds("InMemory linger_s", self.linger_s, zero=True)
        check_seconds("InMemory deadline_s", self.deadline_s)


class _Origin(msgspec.Struct, frozen=True):
    """What rank 0 tells before all join."""

    place: str = ""
    """"" while nobody has claimed the directory: nothing of it can be in memory."""
    epoch: int = 0
    error: str = ""


class ReplicaCatalog(Catalog):
    """One save in memory as a catalog."""

    def __init__(self, storage: ReplicaStorage, tier: MemoryTier) -> None:
        super().__init__(storage)
        self._tier = tier

    @property
    def fate(self) -> str:
        return "dropping it from memory"

    def set_aside(self, generation: Generation) -> None:
        """Has the keepers let go of it: there is nothing to inspect that storage would not show better."""
        self._tier.discard(generation)


class Copies:
    """The memory tier of one manager. `join`, `opened` and the constructor's caller are collective.

    The place of the replicas is the storage's name and its first claim, which stays as long as the
    directory does: what a removed directory held is never found again under its name.
    """

    def __init__(
        self,
        options: InMemory,
        control: Control,
        claims: Claims,
        storage: str,
        commit_deadline_s: float,
    ) -> None:
        self._options = options
        # While one rank waits for its keeper, the others wait for it, so long at most.
        self._most_s = commit_deadline_s / 2
        self.deadline_s = min(options.deadline_s, self._most_s)
        self._control = control
        self._claims = claims
        self._storage = storage
        self._tier: MemoryTier | None = None
        self._made_for = (0, 0, 0)
        self._epoch = 0
        self._found: Complete | None = None

    @property
    def known(self) -> Generation | None:
        """The newest save that was in memory when the ranks last agreed, if no newer one has replaced it."""
        return None if self._complete is None else _generation(self._complete)

    @property
    def _complete(self) -> Complete | None:
        return self._found if self._made_for == _here() else None

    @property
    def wanting(self) -> bool:
        """Whether this rank needs a `join` before its next save or load."""
        tier = self._tier
        return tier is None or not tier.healthy or self._made_for != _here()

    def join(self, first: Callable[[], None] = lambda: None) -> None:
        """Agrees with the other ranks on what is in memory. Collective; not while a save goes on.

        Args:
            first: done by rank 0 before; what it raises, all hear.

        Raises:
            CheckpointError, FireflyerError: if rank 0 cannot read the claims, on all.
        """
        rank, world = rank_and_world()
        mine, failure = _Origin(), None
        if rank == 0:
            try:
                first()
                mine = self._origin()
            except FireflyerError as error:
                mine, failure = _Origin(error=str(error)), error
        origin = msgspec.msgpack.decode(
            self._control.blobs(msgspec.msgpack.encode(mine))[0], type=_Origin
        )
        if failure is not None:
            raise failure
        if origin.error:
            raise CheckpointError(f"rank 0 cannot use the directory: {origin.error}")
        if not origin.place:
            return
        self._epoch = origin.epoch
        if self._tier is not None and self._made_for == _here():
            self._tier.join(origin.epoch)
        else:
            self.close()
            options = self._options
            self._tier = MemoryTier(
                self._control,
                rank,
                world,
                origin.place,
                epoch=origin.epoch,
                limit_bytes=options.limit_bytes,
                linger_s=options.linger_s,
                deadline_s=self.deadline_s,
                start_s=min(START_S, self._most_s),
            )
            self._made_for = _here()
        self._found = self._tier.found

    def _origin(self) -> _Origin:
        first = self._claims.first()
        if first is None:
            return _Origin()
        name = hashlib.sha256(first).hexdigest()[:16]
        return _Origin(place=f"{self._storage}#{name}", epoch=self._claims.epoch or 0)

    def abandon(self) -> None:
        """From another thread than `replicate`'s: that waits for nobody any more, and the save is not in
        memory. All join anew before the next save or load."""
        if self._tier is not None:
            self._tier.abandon()
        self._made_for = (0, 0, 0)

    def close(self) -> None:
        """Lets go of the keepers, which keep what they hold."""
        if self._tier is not None:
            self._tier.close()
        self._tier = None

    # -- saving ------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> None:
        """The run saves with this epoch: older ones are shut out, on every node whose ranks say so."""
        if self._tier is not None and epoch != self._epoch:
            self._epoch = epoch
            self._tier.fence(epoch)

    def replicate(
        self,
        generation: Generation,
        data: Iterable[bytes | memoryview],
        describe: Callable[[], tuple[bytes, Sequence[Block]]],
        merge: Callable[[list[bytes]], bytes],
    ) -> bool:
        """As `MemoryTier.replicate`; False, too, where there is no tier."""
        if self._tier is None or not self._tier.replicate(generation, data, describe, merge):
            return False
        self._found = None  # the keepers have let go of it
        return True

    def give_up(self, generation: Generation, error: BaseException) -> None:
        """This rank will not `replicate` a save that the others do."""
        if self._tier is not None:
            self._tier.give_up(generation, f"{type(error).__name__}: {error}")

    # -- loading -----------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[list[Catalog]]:
        """The newest complete save in memory, if there is one. Collective; the same on all ranks."""
        if any(row[0] for row in self._control.numbers([self.wanting])):
            self.join()
        tier = self._tier
        complete = tier.newest() if tier is not None else None
        self._found = complete
        if tier is None or complete is None:
            yield []
            return
        storage = _open(tier, complete)
        try:
            reached = self._control.numbers([storage is not None])
            if storage is None or not all(row[0] for row in reached):
                self._found = None
                yield []
            else:
                yield [ReplicaCatalog(storage, tier)]
        finally:
            if storage is not None:
                storage.close()

    def loaded(self, generation: Generation, step: int | None) -> None:
        """`load` has found this one the newest that is good (of a step): a newer one in memory was not."""
        known = self.known
        if known is not None and known > generation and step in (None, known.step):
            self._found = None

    @contextmanager
    def glimpsed(self) -> Iterator[list[Catalog]]:
        """As `opened`, by what this rank knows; local."""
        tier, found = self._tier, self._complete
        storage = None if tier is None or found is None else _open(tier, found)
        try:
            yield [] if tier is None or storage is None else [ReplicaCatalog(storage, tier)]
        finally:
            if storage is not None:
                storage.close()


def blocks_of(pieces: Iterable[Piece]) -> list[Block]:
    """The checksums of pieces, by their places in the file that they lie in."""
    return [
        Block(
            piece.offset + index * CRC_BYTES,
            min(CRC_BYTES, piece.length - index * CRC_BYTES),
            crc,
        )
        for piece in pieces
        for index, crc in enumerate(piece.crc32)
    ]


def _open(tier: MemoryTier, complete: Complete) -> ReplicaStorage | None:
    try:
        return tier.open(complete)
    except (StorageError, WireError) as error:
        _log.warning("the checkpoint in memory cannot be reached: %s", error)
        return None


def _generation(complete: Complete) -> Generation:
    stamp = complete.stamp
    return Generation(stamp.epoch, stamp.number, stamp.step)


def _here() -> tuple[int, int, int]:
    """What a tier is made for: it serves no forked child and no other world."""
    return (os.getpid(), *rank_and_world())
