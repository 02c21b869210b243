"""CheckpointManager: what a training script sees."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fireflyer.checkpoint.catalog import Catalog
from fireflyer.checkpoint.claims import Claims, identity
from fireflyer.checkpoint.load import load_newest
from fireflyer.checkpoint.manifest import Generation
from fireflyer.checkpoint.ranks import from_first, rank_and_world
from fireflyer.checkpoint.save import Committer, Job, Layout
from fireflyer.checkpoint.staging import Arena
from fireflyer.checkpoint.tree import flatten
from fireflyer.checkpoint.when import When
from fireflyer.clock import Clock, SystemClock
from fireflyer.errors import CheckpointError, ConfigError
from fireflyer.storage import Storage, open_storage

COMMIT_DEADLINE_S = 600.0


class SaveHandle:
    """One save on its way."""

    def __init__(self, step: int, future: Future[None], stall_s: float) -> None:
        self.step = step
        self.stall_s = stall_s
        """Seconds that `save` kept its caller: waiting for the save before, and the copy."""
        self._future = future
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether the save has been committed or has failed."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns when the checkpoint is durable and whole.

        Raises:
            CheckpointError, StorageError: why it is not.
            TimeoutError: if `timeout_s` passes first; the save goes on.
        """
        try:
            self._future.result(timeout_s)
        finally:
            self._reported = self._future.done()

    def settle(self) -> None:
        """Waits, without an error."""
        self._future.exception()

    def raise_unreported(self) -> None:
        """`wait`, unless an earlier `wait` has told how it ended."""
        if not self._reported:
            self.wait()


class CheckpointManager:
    """Saves and loads the state of a training run in one directory; docs/checkpoint.md draws the format.

    Under an initialised torch.distributed, `save`, `load` and `should_save` are collective: all
    ranks call them, in one order, with the same step. Without it they serve one process. Not safe
    for several threads.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        every: str | int | None = None,
        keep: int | None = None,
        *,
        should_suspend: Callable[[], bool] | None = None,
        commit_deadline_s: float = COMMIT_DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            directory: a path, an fsspec URL, or a storage; shared by all ranks.
            every: what `should_save` goes by: a duration ("5min", "30s"), a number of steps, or "auto":
                what loses least by the measured cost of saves and rate of failures, 1 min to 1 h.
            keep: how many of the newest checkpoints stay; None keeps all.
            should_suspend: whether this rank was asked to leave, e.g. `hai.suspend_requested`; asked on
                all ranks at the same steps, at most 1 s apart at the recent pace. Once it says yes on
                any rank, `should_save` and `suspending` are true on all.
            commit_deadline_s: how long the ranks wait for one another's parts in the background.
            clock: for tests.

        Raises:
            ConfigError: for an `every`, `keep` or FIREFLYER_ATTEMPT that cannot work.
            StorageError: if the directory cannot be used.
        """
        if keep is not None and keep < 1:
            raise ConfigError(f"keep={keep}: keep at least 1 checkpoint, or None for all")
        storage = open_storage(directory) if isinstance(directory, str | os.PathLike) else directory
        self._catalog = Catalog(storage)
        self._claims = Claims(storage, identity())
        self._when = When(
            every, should_suspend, clock or SystemClock(), self._claims.history, self._claims.leave
        )
        self._committer = Committer(self._catalog, self._claims, keep, commit_deadline_s)
        self._arena = Arena()
        self._epoch = 0
        self._number = 0
        self._last: SaveHandle | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0
        self._loaded_per_rank: Any | None = None
        if self._is_first() and self._claims.succeeds():
            self._claims.take()

    @staticmethod
    def _is_first() -> bool:
        rank, world = rank_and_world()
        return rank == 0 and (world > 1 or os.environ.get("RANK", "0") == "0")

    def should_save(self, step: int) -> bool:
        """Whether to save after this step, by `every` or to leave; the same on all ranks."""
        return self._when.ask(step)

    @property
    def suspending(self) -> bool:
        """Whether any rank was asked to leave, seen by all alike: save, wait for it and leave."""
        return self._when.suspending

    def save(self, step: int, state: Any, *, per_rank: Any | None = None) -> SaveHandle:
        """Saves `state` as of now; returns once it is copied, and writes it in the background.

        Waits first for the save before. `state` is the same on every rank and written by rank 0;
        `per_rank` is this rank's own. Dicts, lists and tuples of torch tensors, numpy arrays, int,
        float, bool, str, bytes and None; dict keys are str or int.

        Raises:
            CheckpointError: naming the key path of what cannot be saved; or if a newer run owns
                the directory.
            FireflyerError: the unreported failure of the save before; nothing is saved then.
        """
        start = time.perf_counter()
        if step < 0:
            raise ValueError(f"step {step} is below 0")
        self._number += 1
        self._finish_last()
        rank, world = rank_and_world()
        generation = Generation(epoch=self._owned_epoch(rank), number=self._number, step=step)
        try:
            job = self._stage(generation, rank, world, state, per_rank)
        except BaseException as error:
            self._committer.report_failure(generation, rank, world, error)
            raise
        future = self._background().submit(self._committer.run, job)
        self._last = SaveHandle(step, future, time.perf_counter() - start)
        self._when.saved(self._last)
        return self._last

    def _stage(
        self, generation: Generation, rank: int, world: int, state: Any, per_rank: Any | None
    ) -> Job:
        layout = Layout(generation.data(rank).rsplit("/", 1)[1])
        items = list(flatten(state))  # on every rank, so that all refuse what cannot be saved
        nodes = layout.place(items) if rank == 0 else None
        own = None if per_rank is None else layout.place(flatten(per_rank))
        data = self._arena.fill(layout.leaves)
        return Job(
            generation=generation, rank=rank, world=world, data=data, state=nodes, per_rank=own
        )

    def load(self, step: int | None = None, into: Any | None = None) -> Any:
        """The state of the newest good checkpoint, or of `step`.

        What is found damaged is moved to damaged/ with a warning, and the next older one is used
        (with `step`: an older save of that step). With `into`, a state like the saved one, its
        tensors are filled in place and returned in the state; what they hold after an error is
        undefined.

        Raises:
            CheckpointError: if there is no good one, or `into` does not fit it.
            StorageError: if the directory cannot be read.
        """
        if self._last is not None:
            self._last.settle()
        loaded = load_newest(self._catalog, step, into)
        self._loaded_per_rank = loaded.per_rank
        return loaded.state

    def loaded_per_rank(self) -> Any | None:
        """What this rank gave as `per_rank` to the save that the last `load` returned; None if nothing."""
        return self._loaded_per_rank

    def latest(self) -> int | None:
        """Step of the newest checkpoint whose manifest is undamaged and whose files have the right size."""
        newest = next(self._catalog.whole(), None)
        return None if newest is None else newest.step

    def steps(self) -> list[int]:
        """Steps of all such checkpoints, ascending."""
        return sorted({generation.step for generation in self._catalog.whole()})

    def wait(self) -> None:
        """Returns when the last save is durable and whole.

        Raises:
            CheckpointError, StorageError: why it is not, unless its handle has said so already.
        """
        self._finish_last()

    def _finish_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.raise_unreported()

    def _owned_epoch(self, rank: int) -> int:
        """The epoch that rank 0 claimed; collective the first time."""
        if self._epoch == 0:
            claimed = 0
            try:
                if rank == 0:
                    claimed = self._claims.take()
            finally:
                self._epoch = from_first([claimed])[0]
            if self._epoch == 0:
                raise CheckpointError("rank 0 may not save here; its own error says why")
        return self._epoch

    def _background(self) -> ThreadPoolExecutor:
        # An executor finishes its work before the interpreter ends. Threads do not cross a fork.
        if self._pool is None or self._pool_pid != os.getpid():
            self._pool = ThreadPoolExecutor(1, "fireflyer-checkpoint")
            self._pool_pid = os.getpid()
        return self._pool
