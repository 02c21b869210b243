"""Saving: what happens in the background between the copy into the arena and the commit."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from fireflyer._native import crc32
from fireflyer.checkpoint.catalog import Catalog, surplus
from fireflyer.checkpoint.claims import Claims
from fireflyer.checkpoint.manifest import VERSION, Generation, Manifest, Part, decode, encode
from fireflyer.checkpoint.tree import (
    Container,
    Leaf,
    Node,
    Path,
    Tensor,
    Value,
    leaf_dtype,
    leaf_kind,
)
from fireflyer.errors import CheckpointError, StorageError
from fireflyer.log import get_logger

_log = get_logger("checkpoint")
_CHUNK_BYTES = 8 << 20
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.25


class Layout:
    """Where the tensors of one rank go in its data file."""

    def __init__(self, file: str) -> None:
        self.leaves: list[Leaf] = []
        self._file = file
        self._length = 0

    def place(self, items: Iterable[tuple[Path, Container | Value | Leaf]]) -> tuple[Node, ...]:
        """The items as nodes, tensors back to back after those placed before; their CRCs are still 0."""
        return tuple(self._node(path, item) for path, item in items)

    def _node(self, path: Path, item: Container | Value | Leaf) -> Node:
        if isinstance(item, Container | Value):
            return item
        node = Tensor(
            path=path,
            kind=leaf_kind(item),
            dtype=leaf_dtype(item),
            shape=tuple(item.shape),
            file=self._file,
            offset=self._length,
            length=item.nbytes,
            crc32=0,
        )
        self.leaves.append(item)
        self._length += item.nbytes
        return node


class Job(msgspec.Struct, kw_only=True):
    """One rank's share of one save."""

    generation: Generation
    rank: int
    world: int
    data: memoryview
    """The bytes of the rank's data file; the arena's, so only until the job is over."""
    state: tuple[Node, ...] | None
    """Rank 0's only."""
    per_rank: tuple[Node, ...] | None


class Committer:
    """Runs jobs, one at a time, in whatever thread calls `run`."""

    def __init__(
        self, catalog: Catalog, claims: Claims, keep: int | None, deadline_s: float
    ) -> None:
        self._catalog = catalog
        self._storage = catalog.storage
        self._claims = claims
        self._keep = keep
        self._deadline_s = deadline_s
        self._swept = False
        self._never = threading.Event()

    def run(self, job: Job) -> None:
        """Writes this rank's file and returns when the checkpoint is committed.

        Raises:
            CheckpointError: if another rank failed or did not answer in time, or a newer run owns
                the directory.
            StorageError: if this rank's bytes could not be written.
        """
        promised = False
        try:
            part = self._write_data(job)
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
            self._tidy(job.generation, job.world)

    def report_failure(
        self, generation: Generation, rank: int, world: int, error: BaseException
    ) -> None:
        """Lets waiting ranks know, as far as the storage still takes a few bytes."""
        if world == 1:
            return
        name = generation.failed if rank == 0 else generation.part(rank)
        try:
            self._storage.write(
                name, [encode(Part(rank=rank, error=f"{type(error).__name__}: {error}"))]
            )
        except StorageError as second:
            _log.warning("the other ranks cannot be told of a failed save: %s", second)

    def _write_data(self, job: Job) -> Part:
        def checked(nodes: tuple[Node, ...] | None) -> tuple[Node, ...] | None:
            return None if nodes is None else tuple(_with_crc(node, job.data) for node in nodes)

        part = Part(rank=job.rank, state=checked(job.state), per_rank=checked(job.per_rank))
        if len(job.data):
            self._storage.write(job.generation.data(job.rank), _chunks(job.data))
        return part

    def _commit(self, job: Job, own: Part) -> None:
        parts = [own, *self._collect(job)]
        manifest = Manifest(
            version=VERSION,
            step=job.generation.step,
            task=self._claims.me.task,
            attempt=self._claims.me.attempt or 0,
            world_size=job.world,
            created=time.time(),
            state=own.state or (),
            per_rank={str(part.rank): part.per_rank for part in parts if part.per_rank is not None},
        )
        self._claims.check()
        self._storage.write(job.generation.manifest, [encode(manifest)])
        # A newer run that claimed before the manifest was there may not have seen it.
        self._claims.check()

    def _collect(self, job: Job) -> list[Part]:
        """The parts of all other ranks, in order."""
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
        generation = job.generation

        def decided() -> bool:
            if self._storage.size(generation.failed) is not None:
                failure = decode(self._storage.read(generation.failed), Part, generation.failed)
                raise CheckpointError(f"step {generation.step} is not saved: {failure.error}")
            return self._storage.size(generation.manifest) is not None

        if not self._wait_until(decided):
            raise CheckpointError(
                f"step {generation.step} is not saved: rank 0 did not commit it within {self._deadline_s:g} s"
            )

    def _wait_until(self, reached: Callable[[], bool]) -> bool:
        """Looks ever less often, so that many waiting ranks do not load the storage."""
        end = time.monotonic() + self._deadline_s
        pause = _FIRST_LOOK_S
        while not reached():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._never.wait(min(pause, left))
            pause = min(2 * pause, _LONGEST_LOOK_S)
        return True

    def _undo(self, job: Job, promised: bool) -> None:
        """Gives the space of a failed save back, unless its manifest came to be, or still may: rank 0 commits
        what was promised to it until it says that it has failed."""
        generation = job.generation
        self._swept = False
        try:
            may_come = promised and self._storage.size(generation.failed) is None
            if not may_come and self._storage.size(generation.manifest) is None:
                self._storage.delete(generation.data(job.rank))
                self._storage.delete(generation.directory)
        except StorageError as error:
            _log.warning("a failed save keeps its space until a later one succeeds: %s", error)

    def _tidy(self, generation: Generation, world: int) -> None:
        try:
            for rank in range(1, world):
                self._storage.delete(generation.part(rank))
            if not self._swept:
                self._catalog.sweep(generation)
                self._swept = True
            if self._keep is not None:
                # What a newer run saved is not ours to count, still less to delete.
                ours = [old for old in self._catalog.whole() if old <= generation]
                for old in surplus(ours, self._keep):
                    self._catalog.delete(old)
        except StorageError as error:
            _log.warning(
                "step %d is saved, but older files could not be removed: %s", generation.step, error
            )


def _with_crc(node: Node, data: memoryview) -> Node:
    if not isinstance(node, Tensor):
        return node
    content = data[node.offset : node.offset + node.length]
    return msgspec.structs.replace(node, crc32=crc32(content))


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
