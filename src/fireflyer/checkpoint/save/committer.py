"""Saving: the background work between the copy into the arena and the commit."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.claims import Claims
from fireflyer.checkpoint.directory.manifest import (
    VERSION,
    Generation,
    Manifest,
    Metrics,
    Part,
    decode,
    encode,
)
from fireflyer.checkpoint.memory.manager_tier import Copies, blocks_of
from fireflyer.checkpoint.memory.messages import Block
from fireflyer.checkpoint.retention import Candidate, Keep, retired
from fireflyer.checkpoint.save.data_file import Image, Written
from fireflyer.checkpoint.save.plan import Plan
from fireflyer.checkpoint.save.staging import Staged, Table
from fireflyer.checkpoint.state.boxes import Box
from fireflyer.checkpoint.state.layout import Slot, TensorSlot, ValueSlot
from fireflyer.checkpoint.state.tree import Container, Node, Path, Piece, Tensor, Value
from fireflyer.errors import CheckpointError, Corrupted, StorageError
from fireflyer.log import get_logger

_log = get_logger("checkpoint")
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.25


class Job(msgspec.Struct, kw_only=True):
    """One rank's share of one save."""

    generation: Generation
    rank: int
    world: int
    plan: Plan
    values: list[Value]
    """Plain values of the state that this rank provides."""
    own: Sequence[Slot | Value] | None
    """State that this rank passed as `per_rank`."""
    table: Table
    """Sections of this rank's shares in the plan, then of the tensors in `own`."""
    boxes: list[Box]
    """Boxes of the table's sections, in whole-tensor coordinates."""
    staged: Staged
    """Bytes of the table. They lie in the arena, so they are valid only until the job ends."""
    before: Written | None
    """Result of the last save of the same table, if the arena still held the bytes of that save;
    else None."""
    metrics: Metrics
    in_memory: Future[bool]
    """Result: True if the memory tier holds the complete save."""


class Committer:
    """Runs jobs, one at a time, in the thread that calls `run`."""

    def __init__(
        self,
        catalog: Catalog,
        claims: Claims,
        keep: Keep | None,
        deadline_s: float,
        copies: Copies | None,
    ) -> None:
        self._catalog = catalog
        self._storage = catalog.storage
        self._claims = claims
        self._keep = keep
        # Adds the memory tier's deadline, because other ranks may first wait that long for keepers.
        self._deadline_s = deadline_s + (copies.deadline_s if copies is not None else 0.0)
        self._copies = copies
        self._swept = False
        self._abandoned = threading.Event()

    def run(self, job: Job) -> Written:
        """Writes this rank's file; returns the places of the file's pieces once the save is
        committed.

        Raises:
            CheckpointError: if another rank failed or missed the deadline, a tensor changed while
                it was copied, or a newer run owns the directory.
            StorageError: if this rank's bytes could not be written.
        """
        promised = False
        self._abandoned.clear()
        try:
            self._replicate(job)
            written = self._write_data(job)
            part = _part(job, written)
            if job.rank == 0:
                self._commit(job, part)
            else:
                self._storage.write(job.generation.part(job.rank), [encode(part)])
                promised = True
                self._await_commit(job)
        except BaseException as error:
            if not promised:
                self.report_failure(job.generation, job.rank, job.world, error)
            self._undo(job, promised)
            raise
        if job.rank == 0:
            self._tidy(job.generation)
        return written

    def abandon(self) -> None:
        """Stops the job's waits after a loss of ranks; the job fails unless all parts exist.

        Called from a thread other than that of `run`. The call does not affect later jobs.
        """
        self._abandoned.set()
        self._swept = False
        if self._copies is not None:
            self._copies.abandon()

    def report_failure(
        self, generation: Generation, rank: int, world: int, error: BaseException
    ) -> None:
        """Reports a failure to the waiting ranks by a small file, if the storage accepts it."""
        if world == 1:
            return
        name = generation.failed if rank == 0 else generation.part(rank)
        try:
            self._storage.write(
                name, [encode(Part(rank=rank, error=f"{type(error).__name__}: {error}"))]
            )
        except StorageError as second:
            _log.warning("cannot report a failed save to the other ranks: %s", second)

    def _replicate(self, job: Job) -> None:
        """Saves to the memory tier, completely even if the storage save is incremental.

        The call waits for all ranks.
        """
        if self._copies is None:
            job.in_memory.set_result(False)
            return
        image = Image(job.table, job.staged, job.generation.data(job.rank), None)

        def describe() -> tuple[bytes, Sequence[Block]]:
            job.staged.check()
            written = image.written(job.boxes)
            return encode(_part(job, written)), blocks_of(written.pieces)

        def merge(parts: list[bytes]) -> bytes:
            self._claims.check(job.generation.epoch)
            return encode(self._manifest(job, [decode(part, Part, "a part") for part in parts]))

        held = False
        try:
            held = self._copies.replicate(job.generation, image.chunks(), describe, merge)
        finally:
            job.in_memory.set_result(held)

    def _write_data(self, job: Job) -> Written:
        image = Image(job.table, job.staged, job.generation.data(job.rank), job.before)
        if image.size:
            self._storage.write(image.file, image.chunks())
        job.staged.check()
        return image.written(job.boxes)

    def _commit(self, job: Job, own: Part) -> None:
        manifest = self._manifest(job, [own, *self._collect(job)])
        self._check_older_files(manifest, job.generation)
        generation = job.generation
        self._claims.check(generation.epoch)
        self._storage.write(generation.manifest, [encode(manifest)])
        # A newer run that made its claim before the manifest existed may not have seen the
        # manifest.
        self._claims.check(generation.epoch)
        for rank in range(1, job.world):
            self._storage.rename(generation.part(rank), generation.done(rank))

    def _manifest(self, job: Job, parts: Sequence[Part]) -> Manifest:
        pieces: list[list[Piece]] = [[] for _ in job.plan.tensors]
        values: dict[Path, Value] = {}
        files: dict[str, int] = {}
        for part, shares in zip(parts, job.plan.shares, strict=True):
            values.update((value.path, value) for value in part.values)
            files.update(part.files)
            for share, piece in zip(shares, part.pieces, strict=True):
                pieces[share.tensor].append(piece)
        return Manifest(
            version=VERSION,
            step=job.generation.step,
            task=self._claims.me.task,
            attempt=self._claims.me.attempt or 0,
            world_size=job.world,
            created=time.time(),
            metrics=job.metrics,
            files=files,
            state=_nodes(job.plan.nodes, pieces, values),
            per_rank={str(part.rank): part.per_rank for part in parts if part.per_rank is not None},
        )

    def _check_older_files(self, manifest: Manifest, generation: Generation) -> None:
        """Fails if an older file to which an incremental save refers was set aside or pruned."""
        own = f"{generation.directory}/data-{generation.epoch:06d}-{generation.number:06d}-"
        older = {file: size for file, size in manifest.files.items() if not file.startswith(own)}
        try:
            self._catalog.check_files(older)
        except Corrupted as error:
            raise CheckpointError(
                f"step {generation.step} is not saved: {error}; the next save writes everything"
            ) from error

    def _collect(self, job: Job) -> list[Part]:
        """Returns the parts of all other ranks, in order."""
        missing = set(range(1, job.world))
        parts: list[Part] = []

        def all_there() -> bool:
            for rank in sorted(missing):
                name = job.generation.part(rank)
                if self._storage.size(name) is not None:
                    part = decode(self._storage.read(name), Part, f"{self._storage}/{name}")
                    if part.error is not None:
                        raise CheckpointError(f"rank {rank} could not save its part: {part.error}")
                    parts.append(part)
                    missing.discard(rank)
            return not missing

        if not self._wait_until(all_there):
            names = ", ".join(str(rank) for rank in sorted(missing))
            raise CheckpointError(
                f"step {job.generation.step} is not saved: no part from rank(s) {names} "
                f"within {self._deadline_s:g} s"
            )
        return sorted(parts, key=lambda part: part.rank)

    def _await_commit(self, job: Job) -> None:
        """Waits until rank 0 has renamed this rank's part, which confirms the commit.

        The manifest's existence alone proves neither that the manifest is durable, nor that rank
        0's second check of the claims passed.
        """
        generation, storage = job.generation, self._storage
        part, done = generation.part(job.rank), generation.done(job.rank)

        def decided() -> bool:
            if storage.size(generation.failed) is not None:
                failure = decode(storage.read(generation.failed), Part, generation.failed)
                raise CheckpointError(f"step {generation.step} is not saved: {failure.error}")
            return storage.size(done) is not None or storage.size(part) is None

        if not self._wait_until(decided):
            raise CheckpointError(
                f"step {generation.step} is not saved: rank 0 did not commit it within {self._deadline_s:g} s"
            )
        if storage.size(done) is not None:
            try:
                storage.delete(done)
            except StorageError as error:
                _log.warning(
                    "step %d is saved, but cannot remove %s: %s", generation.step, done, error
                )
            return
        # The part is gone without a confirmation. If a newer run removed it, `check` raises,
        # although the save may have been committed.
        self._claims.check(generation.epoch)
        raise CheckpointError(
            f"step {generation.step} is not saved: another process removed {part}"
        )

    def _wait_until(self, reached: Callable[[], bool]) -> bool:
        """Polls `reached` with growing pauses, so that many waiting ranks do not load the storage.

        Raises:
            CheckpointError: if the save was abandoned meanwhile.
        """
        end = time.monotonic() + self._deadline_s
        pause = _FIRST_LOOK_S
        while not reached():
            left = end - time.monotonic()
            if left <= 0:
                return False
            if self._abandoned.wait(min(pause, left)):
                raise CheckpointError("the save was abandoned: the members of the job have changed")
            pause = min(2 * pause, _LONGEST_LOOK_S)
        return True

    def _undo(self, job: Job, promised: bool) -> None:
        """Frees the space of a failed save, unless its manifest exists or may still appear.

        Rank 0 may still commit a save whose part this rank has written, unless rank 0 reports a
        failure.
        """
        generation = job.generation
        self._swept = False
        try:
            may_come = promised and self._storage.size(generation.failed) is None
            if not may_come and self._storage.size(generation.manifest) is None:
                self._storage.delete(generation.data(job.rank))
                self._storage.delete(generation.directory)
        except StorageError as error:
            _log.warning(
                "cannot remove a failed save; the next successful save removes it: %s", error
            )

    def _tidy(self, generation: Generation) -> None:
        try:
            if not self._swept:
                self._catalog.sweep(generation)
                self._swept = True
            if self._keep is not None:
                # The saves of a newer run are neither counted nor deleted here.
                ours = [
                    Candidate(old, old.step, manifest.measured())
                    for old, manifest in self._catalog.whole()
                    if old <= generation
                ]
                self._catalog.delete([old.generation for old in retired(ours, self._keep)])
        except StorageError as error:
            _log.warning(
                "step %d is saved, but cannot remove older files: %s", generation.step, error
            )


def _part(job: Job, written: Written) -> Part:
    """Returns this rank's part of the manifest."""
    shared = len(job.plan.shares[job.rank])
    own = None
    if job.own is not None:
        pieces = [[piece] for piece in written.pieces[shared:]]
        own = _nodes(job.own, _by_tensor(job.own, pieces), {})
    return Part(
        rank=job.rank,
        pieces=tuple(written.pieces[:shared]),
        values=tuple(job.values),
        per_rank=own,
        files=written.files,
    )


def _by_tensor(slots: Sequence[Slot | Value], pieces: Sequence[list[Piece]]) -> list[list[Piece]]:
    """Returns the pieces for each tensor slot; a tensor without elements has no pieces."""
    rest = iter(pieces)
    tensors = (slot for slot in slots if isinstance(slot, TensorSlot))
    return [[] if slot.box is None else next(rest) for slot in tensors]


def _nodes(
    slots: Sequence[Slot | Value], pieces: Sequence[list[Piece]], values: Mapping[Path, Value]
) -> tuple[Node, ...]:
    """Returns the slots as manifest nodes; `pieces` has one list for each tensor slot."""
    rest = iter(pieces)
    nodes: list[Node] = []
    for slot in slots:
        if isinstance(slot, Container | Value):
            nodes.append(slot)
        elif isinstance(slot, ValueSlot):
            nodes.append(values[slot.path])
        else:
            nodes.append(
                Tensor(
                    path=slot.path,
                    kind=slot.kind,
                    dtype=slot.dtype,
                    shape=slot.shape,
                    pieces=tuple(next(rest)),
                )
            )
    return tuple(nodes)
