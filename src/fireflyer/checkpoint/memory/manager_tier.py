"""A manager's memory tier: when to join, fence and rejoin it, and its newest save as a catalog."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from fireflyer.checkpoint.control_group import ControlGroup, rank_and_world
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.claims import Claims
from fireflyer.checkpoint.directory.manifest import CRC_BYTES, Generation
from fireflyer.checkpoint.memory.inventory import Complete
from fireflyer.checkpoint.memory.messages import Block
from fireflyer.checkpoint.memory.replica import ReplicaStorage
from fireflyer.checkpoint.memory.tier import LINGER_S, PLACE_DEADLINE_S, START_S, MemoryTier
from fireflyer.checkpoint.options import check_seconds
from fireflyer.checkpoint.state.tree import Piece
from fireflyer.errors import CheckpointError, ConfigError, FireflyerError, StorageError, WireError
from fireflyer.log import get_logger

_log = get_logger("checkpoint")


class InMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tier that holds the newest save in the nodes' memory.

    docs/internals/checkpoint-tiers.md describes the tier.

    Raises:
        ConfigError: if a number is invalid.
    """

    limit_bytes: int | None = None
    """Maximum number of bytes that a node may hold; None: half of the available memory, divided
    among the job's nodes on the machine."""
    linger_s: float = LINGER_S
    """Seconds that a keeper continues without a connected rank, unless the platform started it."""
    deadline_s: float = PLACE_DEADLINE_S
    """Maximum number of seconds that a rank waits, in one save, for keepers and other ranks'
    replicas. At most half of the manager's `commit_deadline_s` applies."""

    def __post_init__(self) -> None:
        limit = self.limit_bytes
        if limit is not None and (
            not isinstance(limit, int) or isinstance(limit, bool) or limit < 1
        ):
            raise ConfigError(
                f"invalid InMemory limit_bytes {limit!r}: expected at least 1 byte, a whole number, or None"
            )
        check_seconds("InMemory linger_s", self.linger_s, zero=True)
        check_seconds("InMemory deadline_s", self.deadline_s)


class _Origin(msgspec.Struct, frozen=True):
    """Message of rank 0 before all ranks join."""

    place: str = ""
    """Identity of the directory. "" if the directory has no claim yet; then memory cannot hold a
    save of the directory."""
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
        """Discards the save from the keepers; an inspection can use the copy on storage."""
        self._tier.discard(generation)


class Copies:
    """The memory tier of one manager. `join` and `opened` are collective.

    The replicas are identified by the storage's name and its first claim, which lasts as long as
    the directory. So a directory that is deleted and created again does not find old replicas.
    """

    def __init__(
        self,
        options: InMemory,
        control: ControlGroup,
        claims: Claims,
        storage: str,
        commit_deadline_s: float,
    ) -> None:
        self._options = options
        # Limits a rank's waits for its keeper, because the other ranks wait for that rank.
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
        """Newest save that was in memory when the ranks last agreed; None if a later save has
        replaced it."""
        return None if self._complete is None else _generation(self._complete)

    @property
    def _complete(self) -> Complete | None:
        return self._found if self._made_for == _here() else None

    @property
    def wanting(self) -> bool:
        """True if this rank needs a `join` before its next save or load."""
        tier = self._tier
        return tier is None or not tier.healthy or self._made_for != _here()

    def join(self, first: Callable[[], None] = lambda: None) -> None:
        """Agrees with the other ranks on the contents of memory. Collective; not during a save.

        Args:
            first: called on rank 0 before it reads the claims.

        Raises:
            CheckpointError, FireflyerError: on all ranks, if `first` fails or rank 0 cannot read
                the claims.
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
        """Ends the waits of a `replicate` in another thread; its save does not reach memory.

        All ranks join again before the next save or load.
        """
        if self._tier is not None:
            self._tier.abandon()
        self._made_for = (0, 0, 0)

    def close(self) -> None:
        """Closes the connections to the keepers, which keep their replicas."""
        if self._tier is not None:
            self._tier.close()
        self._tier = None

    # -- saving ------------------------------------------------------------------------------------

    def fence(self, epoch: int) -> None:
        """Sets the run's epoch: from now on this rank's keeper rejects older runs."""
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
        """Calls `MemoryTier.replicate`; returns False if there is no tier."""
        if self._tier is None or not self._tier.replicate(generation, data, describe, merge):
            return False
        self._found = None  # the keepers have replaced the found save by this one
        return True

    def give_up(self, generation: Generation, error: BaseException) -> None:
        """Reports that this rank will not `replicate` a save in which the other ranks take part."""
        if self._tier is not None:
            self._tier.give_up(generation, f"{type(error).__name__}: {error}")

    # -- loading -----------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[list[Catalog]]:
        """Yields a catalog of the newest complete save in memory, or an empty list. Collective;
        equal on all ranks."""
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
        """Records that a `load` of `step` (None: of the newest step) used `generation`.

        If memory held a newer generation of that step, the load skipped it because it was damaged,
        so `known` forgets it.
        """
        known = self.known
        if known is not None and known > generation and step in (None, known.step):
            self._found = None

    @contextmanager
    def opened_locally(self) -> Iterator[list[Catalog]]:
        """Yields the same as `opened`, but from this rank's knowledge alone; not collective."""
        tier, found = self._tier, self._complete
        storage = None if tier is None or found is None else _open(tier, found)
        try:
            yield [] if tier is None or storage is None else [ReplicaCatalog(storage, tier)]
        finally:
            if storage is not None:
                storage.close()


def blocks_of(pieces: Iterable[Piece]) -> list[Block]:
    """Returns the checksums of pieces as blocks.

    REQUIRES: the pieces are ordered by their offsets in the file.
    """
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
        _log.warning("cannot reach the checkpoint in memory: %s", error)
        return None


def _generation(complete: Complete) -> Generation:
    stamp = complete.stamp
    return Generation(stamp.epoch, stamp.number, stamp.step)


def _here() -> tuple[int, int, int]:
    """Returns (process id, rank, world size). A tier made for other values cannot be used: this
    process is a forked child, or the ranks have changed."""
    return (os.getpid(), *rank_and_world())
