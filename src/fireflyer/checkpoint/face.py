"""CheckpointManager: what a training script sees."""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex

import numpy as np
import torch

from fireflyer import pulse
from fireflyer.checkpoint.catalog import Catalog
from fireflyer.checkpoint.claims import Claims, identity
from fireflyer.checkpoint.control import Control, members_lost, rank_and_world
from fireflyer.checkpoint.datafile import Written
from fireflyer.checkpoint.guard import OneAtATime
from fireflyer.checkpoint.handle import SaveHandle
from fireflyer.checkpoint.inmemory import Copies, InMemory
from fireflyer.checkpoint.load import load_newest, read_tensors
from fireflyer.checkpoint.manifest import Generation
from fireflyer.checkpoint.options import check_flag, check_seconds
from fireflyer.checkpoint.prepare import Preparer, whole_number
from fireflyer.checkpoint.retention import Keep
from fireflyer.checkpoint.save import Committer, Job
from fireflyer.checkpoint.staging import Stager, Table
from fireflyer.checkpoint.stepping import hook_optimizers
from fireflyer.checkpoint.when import When
from fireflyer.clock import Clock, SystemClock
from fireflyer.errors import CheckpointError, ConfigError
from fireflyer.log import get_logger
from fireflyer.storage import Storage, open_storage

_log = get_logger("checkpoint")

COMMIT_DEADLINE_S = 600.0


class CheckpointManager:
    """Saves and loads the state of a training run in one directory; docs/checkpoint.md draws the format.

    Under an initialised torch.distributed, `save`, `load` and `should_save` are collective: all
    ranks call them, in one order, with the same step. Without it they serve one process. Not for
    several threads: `save`, `load`, `should_save`, `before_step` and `wait` raise CheckpointError when one
    is called while another is at work. Handles may be waited for from any thread.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        every: str | int | None = None,
        keep: int | Keep | None = None,
        *,
        overlap: bool = False,
        incremental: bool = False,
        memory: bool | InMemory = False,
        should_suspend: Callable[[], bool] | None = None,
        commit_deadline_s: float = COMMIT_DEADLINE_S,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            directory: a path, an fsspec URL, or a storage; shared by all ranks.
            every: what `should_save` goes by: a duration ("5min", "30s"), a number of steps (at their
                multiples, not at 0), or "auto": what loses least by the measured cost of saves and rate of
                failures, 1 min to 1 h.
            keep: how many of the newest checkpoints stay, or a `Keep` with more rules; None keeps all.
            overlap: `save` returns while large tensors are still being copied; `before_step` must be called
                before they change other than by the step of a torch optimizer, which calls it.
            incremental: tensors whose bytes have not changed since the save before are not written again.
            memory: each save is held in the memory of two nodes, too, before it is on storage, and loaded
                from there after a restart if it is the newest; an `InMemory` has options. The constructor
                is collective then: after init_process_group, on all ranks.
            should_suspend: whether this rank was asked to leave, e.g. `hai.suspend_requested`; asked on
                all ranks at the same steps, at most 1 s apart at the recent pace. Once it says yes on
                any rank, `should_save` and `suspending` are true on all.
            commit_deadline_s: how long the ranks wait for one another, in `save` and in the background.
            clock: for tests.

        Raises:
            ConfigError: for an option, FIREFLYER_ATTEMPT or path that cannot work.
            TypeError: if the directory is nothing of the kind.
            StorageError: if the directory cannot be used.
        """
        check_flag("overlap", overlap)
        check_flag("incremental", incremental)
        check_seconds("commit_deadline_s", commit_deadline_s)
        _check(memory, should_suspend)
        storage = _storage_of(directory)
        self._catalog = Catalog(storage)
        self._claims = Claims(storage, identity())
        self._control = Control(commit_deadline_s)
        self._copies: Copies | None = None
        if memory:
            options = memory if isinstance(memory, InMemory) else InMemory()
            self._copies = Copies(
                options, self._control, self._claims, str(storage), commit_deadline_s
            )
        self._committer = Committer(
            self._catalog, self._claims, Keep.of(keep), commit_deadline_s, self._copies
        )
        self._when = When(
            every,
            should_suspend,
            clock or SystemClock(),
            self._control,
            self._claims.history,
            self._claims.leave,
        )
        self._stager = Stager()
        self._preparer = Preparer(self._control, self._stager)
        self._overlap, self._incremental = overlap, incremental
        if overlap:
            hook_optimizers()
        self._number = 0
        self._last: SaveHandle | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._pool_process = 0
        self._before: Written | None = None
        """What the last save wrote, of an incremental series."""
        self._loaded_per_rank: Any | None = None
        self._alone = OneAtATime()
        if self._copies is not None and self._is_formed():
            self._copies.join(self._take_over)
        elif self._is_first():
            self._take_over()

    @staticmethod
    def _is_first() -> bool:
        rank, world = rank_and_world()
        return rank == 0 and (world > 1 or os.environ.get("RANK", "0") == "0")

    @staticmethod
    def _is_formed() -> bool:
        """Whether all ranks are known; else `save` and `load` will find them. Those of a newcomer's job are
        once all `fence`."""
        if "FIREFLYER_JOIN" in os.environ:
            return False
        return rank_and_world()[1] > 1 or os.environ.get("WORLD_SIZE", "1") == "1"

    def _take_over(self) -> None:
        if self._claims.succeeds():
            self._claims.take()

    def fence(self, generation: int) -> None:
        """The members of the job have changed, and the default group was formed anew: called on all members
        of now, newcomers too, before the next save, load or should_save.

        A save under way is abandoned: it is committed if all of its parts are there, and else fails, with a
        warning. From now on saves are those of this generation of the attempt. When rank 0 has returned, no
        manager of an earlier one (of a part that was left behind) can commit any more.

        Args:
            generation: counts the changes of membership; larger each time.

        Raises:
            CheckpointError: on rank 0, if a later generation or attempt owns the directory.
            StorageError: on rank 0, if it cannot claim the directory.
            ValueError: if the generation is not later than the one before.
        """
        with self._alone:
            self._claims.fence(generation)
            self._committer.abandon()
            self._give_up_last()
            for part in (self._control, self._preparer, self._when):
                part.forget()
            if rank_and_world()[0] == 0:
                self._claims.take()

    def _look_for_lost(self) -> None:
        if members_lost():
            self._committer.abandon()

    def _give_up_last(self) -> None:
        last, self._last = self._last, None
        if last is None or not last.is_of_this_process():
            return
        last.settle(self._committer.abandon)
        if (error := last.failure()) is not None:
            _log.warning("the save of step %d has failed: %s", last.step, error)

    def should_save(self, step: SupportsIndex, *, leave: bool = False) -> bool:
        """Whether to save after this step, by `every` or to leave; the same on all ranks.

        Args:
            leave: the ranks have agreed to leave by other means than `should_suspend`, e.g. HaiScale's
                `model.suspending`; alike on all ranks.

        Raises:
            TypeError: for a step that is no whole number.
        """
        number = whole_number(step)
        with self._alone:
            pulse.beat()
            return self._when.ask(number, leave)

    @property
    def suspending(self) -> bool:
        """Whether any rank was asked to leave, seen by all alike: save, wait for it and leave."""
        return self._when.suspending

    def save(
        self,
        step: SupportsIndex,
        state: Any,
        *,
        per_rank: Any | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Saves `state` as of now; returns once it is copied, and writes it in the background.

        Waits first for the save before. The states of all ranks are merged: a key may be on some only,
        a plain tensor or array is the same on every rank that has it, one that lies over several ranks
        is a DTensor or a `Shard`; a plain value is that of the lowest rank that has it. `per_rank` is
        this rank's own. Both hold dicts, lists and tuples of torch tensors, numpy arrays, int, float,
        bool, str, bytes and None; dict keys are str or int.

        Args:
            step: a whole number from 0 on.
            metrics: numbers by name, by which retention may choose; rank 0's count.

        Raises:
            CheckpointError: naming the key path of what cannot be saved; or if a newer run owns
                the directory. What fails on one rank fails on all.
            TypeError, ValueError: on a rank where the step or a metric is no number; a CheckpointError on
                the others.
            FireflyerError: the unreported failure of the save before; nothing is saved then.
        """
        with self._alone:
            return self._save(step, state, per_rank, metrics)

    def _save(
        self,
        step: SupportsIndex,
        state: Any,
        per_rank: Any | None,
        metrics: Mapping[str, float] | None,
    ) -> SaveHandle:
        start = time.perf_counter()
        rank, world = rank_and_world()
        ready = self._preparer.prepare(step, state, per_rank, metrics, self._claim)
        before, self._before = self._known_contents(ready.table), None
        try:
            if self._copies is not None:
                if ready.rejoin:
                    self._copies.join()
                self._copies.fence(ready.generation.epoch)
            staged = self._stager.stage(
                ready.table,
                ready.leaves,
                ready.locals,
                ready.names,
                overlap=self._overlap,
                compare=before is not None,
            )
            job = Job(
                generation=ready.generation,
                rank=rank,
                world=world,
                plan=ready.plan,
                values=ready.values,
                own=ready.own,
                table=ready.table,
                boxes=ready.boxes,
                staged=staged,
                before=before,
                metrics=ready.metrics,
                in_memory=Future(),
            )
            if not self._overlap:
                staged.release()
            future = self._run_in_background(job)
        except BaseException as error:
            self._committer.report_failure(ready.generation, rank, world, error)
            if self._copies is not None:
                self._copies.give_up(ready.generation, error)
            raise
        self._last = handle = SaveHandle(
            ready.generation.step, future, staged, job.in_memory, self._look_for_lost
        )
        handle.stall_s = time.perf_counter() - start
        self._when.saved(handle)
        return handle

    def before_step(self) -> None:
        """With `overlap=True`: to be called before whatever changes the state, unless it is the step of a
        torch.optim.Optimizer. Waits for what is not yet copied."""
        with self._alone:
            if self._last is not None and self._last.is_of_this_process():
                self._last.release()

    def _claim(self) -> tuple[int, int, bool]:
        """Rank 0's epoch and the number of the save, once the save before is over; whether the memory tier
        wants to be joined."""
        self._number += 1
        self._finish_last()
        epoch = self._claims.take() if rank_and_world()[0] == 0 else 0
        return epoch, self._number, self._copies is not None and self._copies.wanting

    def _known_contents(self, table: Table) -> Written | None:
        """What the last save wrote, if the arena still holds just that in the places of `table`."""
        before = self._before
        if before is None or before.table is not table or before.filling != self._stager.filling:
            return None
        return before

    def _run_in_background(self, job: Job) -> Future[Written]:
        taken = time.time()

        def run() -> Written:
            try:
                job.staged.wait_for_cores()  # what training waits for comes first
                written = self._committer.run(job)
                pulse.saved(job.generation.step, taken)
                return written
            finally:
                job.staged.forget()

        # An executor finishes its work before the interpreter ends, and hands a job over without a
        # wait for its thread. Threads do not cross a fork.
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(1, "fireflyer-checkpoint")
            self._pool_process = os.getpid()
        return self._pool.submit(run)

    def load(
        self, step: SupportsIndex | None = None, into: Any | None = None, *, rest: bool = True
    ) -> Any:
        """The state of the newest good checkpoint, or of `step`.

        What is found damaged is moved to damaged/ with a warning, and the next older one is used
        (with `step`: an older save of that step). With `into`, a state like the saved one, its
        tensors are filled in place and returned in the state: whole ones, and this rank's boxes of
        DTensors and `Shard`s, however the saved ones were cut. What they hold after an error is
        undefined.

        Args:
            rest: whether what `into` lacks is loaded too, tensors whole; else the state returned has
                only what `into` has.

        Raises:
            CheckpointError: if there is no good one, or `into` does not fit it.
            StorageError: if the directory cannot be read.
            TypeError: for a step that is no whole number.
        """
        number = None if step is None else whole_number(step)
        with self._alone:
            if self._last is not None and self._last.is_of_this_process():
                self._last.settle()
            self._before = None
            with self._copies.opened() if self._copies is not None else _nothing() as held:
                loaded = load_newest([*held, self._catalog], number, into, rest, self._control)
            if self._copies is not None:
                self._copies.loaded(loaded.generation, number)
            self._loaded_per_rank = loaded.per_rank
            return loaded.state

    def loaded_per_rank(self) -> Any | None:
        """What this rank gave as `per_rank` to the save that the last `load` returned; None if nothing."""
        return self._loaded_per_rank

    def load_tensors(
        self, patterns: str | Sequence[str], step: SupportsIndex | None = None
    ) -> dict[str, torch.Tensor | np.ndarray[Any, Any]]:
        """Tensors of the newest good checkpoint (or of `step`) by name, whole, reading nothing else.

        Not collective. A damaged checkpoint is passed over with a warning and stays where it is.

        Args:
            patterns: names like "model.wte.weight" or "optimizer.state[0].exp_avg", or shell patterns of
                them like "model.*".

        Raises:
            CheckpointError: if there is no good one, or no tensor matches or no pattern is given.
            StorageError: if the directory cannot be read.
        """
        number = None if step is None else whole_number(step)
        chosen = [patterns] if isinstance(patterns, str) else list(patterns)
        if not chosen:
            raise CheckpointError("load_tensors was given no name and no pattern")
        with self._copies.glimpsed() if self._copies is not None else _nothing() as held:
            return read_tensors([*held, self._catalog], chosen, number)

    def latest(self) -> int | None:
        """Step of the newest checkpoint whose manifest is undamaged and whose files have the right size, or
        that was in memory when the ranks last agreed."""
        stored = (generation for generation, _ in itertools.islice(self._catalog.whole(), 1))
        newest = max([*stored, *self._held()], default=None)
        return None if newest is None else newest.step

    def steps(self) -> list[int]:
        """Steps of all such checkpoints, ascending."""
        whole = [generation for generation, _ in self._catalog.whole()]
        return sorted({generation.step for generation in [*whole, *self._held()]})

    def _held(self) -> list[Generation]:
        known = self._copies.known if self._copies is not None else None
        return [] if known is None else [known]

    def wait(self) -> None:
        """Returns when the last save is durable and whole.

        Raises:
            CheckpointError, StorageError: why it is not, unless its handle has said so already.
        """
        with self._alone:
            self._finish_last()

    def _finish_last(self) -> None:
        last, self._last = self._last, None
        if last is not None and last.is_of_this_process():
            last.raise_unreported()
            self._before = last.written() if self._incremental else None


def _nothing() -> AbstractContextManager[list[Catalog]]:
    return nullcontext([])


def _check(memory: object, should_suspend: object) -> None:
    if not isinstance(memory, bool | InMemory):
        raise ConfigError(f"memory={memory!r}: write True, False or an InMemory(...)")
    if should_suspend is not None and not callable(should_suspend):
        raise ConfigError(f"should_suspend={should_suspend!r}: give a function, or None")


def _storage_of(directory: str | os.PathLike[str] | Storage) -> Storage:
    if isinstance(directory, str | os.PathLike):
        if not os.fspath(directory):
            raise ConfigError('the directory is "": name one, "." is the current one')
        if "\0" in os.fspath(directory):
            raise ConfigError(f"the directory is {os.fspath(directory)!r}: no path has a NUL in it")
        return open_storage(directory)
    if not callable(getattr(directory, "read_checked", None)):
        raise TypeError(f"the directory {directory!r} is neither a path, a URL nor a Storage")
    return directory
