"""CheckpointManager: the public interface for training scripts."""

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex

import numpy as np
import torch

from fireflyer import heartbeat
from fireflyer.checkpoint.control_group import ControlGroup, members_lost, rank_and_world
from fireflyer.checkpoint.directory.catalog import Catalog
from fireflyer.checkpoint.directory.claims import Claims, identity
from fireflyer.checkpoint.directory.manifest import Generation
from fireflyer.checkpoint.handle import SaveHandle
from fireflyer.checkpoint.load.restore import load_newest, read_tensors
from fireflyer.checkpoint.memory.manager_tier import Copies, InMemory
from fireflyer.checkpoint.options import check_flag, check_seconds
from fireflyer.checkpoint.reentrancy import ReentrancyGuard
from fireflyer.checkpoint.retention import Keep
from fireflyer.checkpoint.save.background_copies import hook_optimizers
from fireflyer.checkpoint.save.committer import Committer, Job
from fireflyer.checkpoint.save.data_file import Written
from fireflyer.checkpoint.save.prepare import Preparer, whole_number
from fireflyer.checkpoint.save.staging import Stager, Table
from fireflyer.checkpoint.triggers import SaveTriggers
from fireflyer.clock import Clock, SystemClock
from fireflyer.errors import CheckpointError, ConfigError
from fireflyer.log import get_logger
from fireflyer.storage import Storage, open_storage

_log = get_logger("checkpoint")

COMMIT_DEADLINE_S = 600.0


class CheckpointManager:
    """Saves and loads the state of a training run in one directory.

    docs/internals/checkpoint.md describes the format. Under an initialised torch.distributed, `save`,
    `load` and `should_save` are collective: all ranks call them in the same order with the same
    step. Without torch.distributed the manager serves one process. The manager is not thread-safe:
    `save`, `load`, `should_save`, `before_step` and `wait` raise CheckpointError while another of
    these calls is in progress. Any thread may wait for a handle.
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
            directory: a path, an fsspec URL or a storage; shared by all ranks.
            every: the schedule of `should_save`: a duration ("5min", "30s"), a number of steps n
                (each multiple of n except 0), or "auto". "auto" picks the interval of 1 min to 1 h
                that loses the least time, given the measured save cost and the failure rate.
            keep: the number of newest checkpoints to keep, or a `Keep` with more rules; None: all.
            overlap: `save` returns while large tensors are still being copied. Call `before_step`
                before these tensors change. The step of a torch optimizer calls `before_step`.
            incremental: do not write tensors again whose bytes equal those of the last save.
            memory: hold each save in the memory of two nodes before it is on storage. After a
                restart, `load` reads the newest save from there if it can. An `InMemory` sets
                options. The constructor is then collective: call it after init_process_group.
            should_suspend: returns True if this rank is asked to leave, e.g.
                `hai.suspend_requested`. All ranks call it at the same steps. These steps are chosen
                from the recent step times, so that two calls are at most about 1 s apart. Once it
                returns true on any rank, `should_save` and `suspending` are true on all ranks.
            commit_deadline_s: maximum time that ranks wait for one another, also in background.
            clock: for tests.

        Raises:
            ConfigError: if an option, FIREFLYER_ATTEMPT or the path is invalid.
            TypeError: if the directory is neither a path, a URL nor a storage.
            StorageError: if the directory cannot be used.
        """
        check_flag("overlap", overlap)
        check_flag("incremental", incremental)
        check_seconds("commit_deadline_s", commit_deadline_s)
        _check(memory, should_suspend)
        storage = _storage_of(directory)
        self._catalog = Catalog(storage)
        self._claims = Claims(storage, identity())
        self._control = ControlGroup(commit_deadline_s)
        self._copies: Copies | None = None
        if memory:
            options = memory if isinstance(memory, InMemory) else InMemory()
            self._copies = Copies(
                options, self._control, self._claims, str(storage), commit_deadline_s
            )
        self._committer = Committer(
            self._catalog, self._claims, Keep.of(keep), commit_deadline_s, self._copies
        )
        self._when = SaveTriggers(
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
        """Result of the last save in an incremental series."""
        self._loaded_per_rank: Any | None = None
        self._alone = ReentrancyGuard()
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
        """Returns True if all ranks are known; if not, `save` or `load` joins the memory tier
        later.

        The ranks of a job with a newcomer are known once all of them call `fence`.
        """
        if "FIREFLYER_JOIN" in os.environ:
            return False
        return rank_and_world()[1] > 1 or os.environ.get("WORLD_SIZE", "1") == "1"

    def _take_over(self) -> None:
        if self._claims.succeeds():
            self._claims.take()

    def fence(self, generation: int) -> None:
        """Adopts the new members of the job after the default group is formed anew.

        All current members call it, including newcomers, before the next save, load or should_save.
        A save in flight is abandoned: it is committed if all of its parts exist; otherwise it fails
        with a warning. Later saves belong to this generation of the attempt. Once rank 0 returns,
        no manager of an earlier generation (on a rank left behind) can commit.

        Args:
            generation: a counter of membership changes; must increase with each call.

        Raises:
            CheckpointError: on rank 0, if a later generation or attempt owns the directory.
            StorageError: on rank 0, if it cannot claim the directory.
            ValueError: if the generation is not later than the previous one.
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
        """Returns True if `every` or a request to leave calls for a save after this step.

        The answer is the same on all ranks.

        Args:
            leave: True if the ranks agreed to leave by other means than `should_suspend`, e.g. by
                HaiScale's `model.suspending`; must be the same on all ranks.

        Raises:
            TypeError: if the step is not a whole number.
        """
        number = whole_number(step)
        with self._alone:
            heartbeat.beat()
            return self._when.ask(number, leave)

    @property
    def suspending(self) -> bool:
        """True if any rank was asked to leave; equal on all ranks: save, wait and leave."""
        return self._when.suspending

    def save(
        self,
        step: SupportsIndex,
        state: Any,
        *,
        per_rank: Any | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Copies the current `state` and returns; writes the copy in the background.

        The call first waits for the previous save. The states of all ranks are merged. A key may
        exist on some ranks only. A plain tensor or array must be the same on every rank that has
        it; a tensor that is distributed over several ranks is a DTensor or a `Shard`. A plain value
        is taken from the lowest rank that has it. `per_rank` belongs to this rank alone. Both
        states may hold dicts, lists and tuples of torch tensors, numpy arrays, int, float, bool,
        str, bytes and None; dict keys are str or int.

        Args:
            step: a whole number of at least 0.
            metrics: numbers by name, by which retention may choose; those of rank 0 are used.

        Raises:
            CheckpointError: if an item cannot be saved (the error names its key path), or if a
                newer run owns the directory. A failure on one rank fails the save on all ranks.
            TypeError, ValueError: on the rank whose step or metric is not a number; the other ranks
                get a CheckpointError.
            FireflyerError: the unreported failure of the previous save; then nothing is saved.
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
        """Waits, with `overlap=True`, until the whole state is copied, so that it may change.

        Call it before any change of the state other than the step of a torch.optim.Optimizer.
        """
        with self._alone:
            if self._last is not None and self._last.is_of_this_process():
                self._last.release()

    def _claim(self) -> tuple[int, int, bool]:
        """Returns rank 0's epoch, the save's number, and True if the memory tier needs a join.

        The call first waits for the previous save. The epoch is 0 on other ranks.
        """
        self._number += 1
        self._finish_last()
        epoch = self._claims.take() if rank_and_world()[0] == 0 else 0
        return epoch, self._number, self._copies is not None and self._copies.wanting

    def _known_contents(self, table: Table) -> Written | None:
        """Returns the last save's result if the arena still holds that save's bytes in the places
        of `table`."""
        before = self._before
        if before is None or before.table is not table or before.filling != self._stager.filling:
            return None
        return before

    def _run_in_background(self, job: Job) -> Future[Written]:
        taken = time.time()

        def run() -> Written:
            try:
                job.staged.wait_for_cores()  # training waits for the copies, so they come first
                written = self._committer.run(job)
                heartbeat.saved(job.generation.step, taken)
                return written
            finally:
                job.staged.forget()

        # An executor finishes its work before the interpreter ends, and takes a job without
        # waiting for its thread to start. Threads do not survive a fork.
        if self._pool is None or self._pool_process != os.getpid():
            self._pool = ThreadPoolExecutor(1, "fireflyer-checkpoint")
            self._pool_process = os.getpid()
        return self._pool.submit(run)

    def load(
        self, step: SupportsIndex | None = None, into: Any | None = None, *, rest: bool = True
    ) -> Any:
        """Returns the state of the newest good checkpoint, or of `step`.

        A damaged checkpoint is moved to damaged/ with a warning, and the next older checkpoint is
        used (with `step`: an older save of that step).

        If `into` is given, it must be a state like the saved one. Its tensors are filled in place
        and returned in the state: whole tensors, and this rank's boxes of DTensors and `Shard`s,
        regardless of how the saved tensors were cut. After an error their contents are undefined.

        Args:
            rest: also load the items that `into` lacks, with whole tensors. If False, the returned
                state has only the items of `into`.

        Raises:
            CheckpointError: if there is no good checkpoint, or the checkpoint does not fit `into`.
            StorageError: if the directory cannot be read.
            TypeError: if the step is not a whole number.
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
        """Returns this rank's `per_rank` state of the checkpoint last loaded, or None."""
        return self._loaded_per_rank

    def load_tensors(
        self, patterns: str | Sequence[str], step: SupportsIndex | None = None
    ) -> dict[str, torch.Tensor | np.ndarray[Any, Any]]:
        """Returns tensors of the newest good checkpoint (or of `step`) by name; reads only them.

        The tensors are whole. Not collective. A damaged checkpoint is skipped with a warning and
        stays in place.

        Args:
            patterns: names like "model.wte.weight" or "optimizer.state[0].exp_avg", or shell
                patterns of names like "model.*".

        Raises:
            CheckpointError: if there is no good checkpoint, no tensor matches or no pattern is
                given.
            StorageError: if the directory cannot be read.
        """
        number = None if step is None else whole_number(step)
        chosen = [patterns] if isinstance(patterns, str) else list(patterns)
        if not chosen:
            raise CheckpointError("load_tensors needs a name or a pattern")
        with self._copies.opened_locally() if self._copies is not None else _nothing() as held:
            return read_tensors([*held, self._catalog], chosen, number)

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint on storage or in memory, or None.

        A checkpoint on storage counts if its manifest is undamaged and its files have the right
        size. A checkpoint in memory counts if the ranks last agreed that it is complete.
        """
        stored = (generation for generation, _ in itertools.islice(self._catalog.whole(), 1))
        newest = max([*stored, *self._held()], default=None)
        return None if newest is None else newest.step

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints that count for `latest`, ascending."""
        whole = [generation for generation, _ in self._catalog.whole()]
        return sorted({generation.step for generation in [*whole, *self._held()]})

    def _held(self) -> list[Generation]:
        known = self._copies.known if self._copies is not None else None
        return [] if known is None else [known]

    def wait(self) -> None:
        """Waits until the last save is durable and complete.

        Raises:
            CheckpointError, StorageError: if the save failed and no call has reported it yet.
        """
        with self._alone:
            self._finish_last()

    # Orbax's names.
    restore, latest_step, all_steps, wait_until_finished = load, latest, steps, wait

    def _finish_last(self) -> None:
        last, self._last = self._last, None
        if last is not None and last.is_of_this_process():
            last.raise_unreported()
            self._before = last.written() if self._incremental else None


def _nothing() -> AbstractContextManager[list[Catalog]]:
    return nullcontext([])


def _check(memory: object, should_suspend: object) -> None:
    if not isinstance(memory, bool | InMemory):
        raise ConfigError(f"invalid memory {memory!r}: expected True, False or an InMemory(...)")
    if should_suspend is not None and not callable(should_suspend):
        raise ConfigError(f"invalid should_suspend {should_suspend!r}: expected a function or None")


def _storage_of(directory: str | os.PathLike[str] | Storage) -> Storage:
    if isinstance(directory, str | os.PathLike):
        if not os.fspath(directory):
            raise ConfigError("invalid directory '': expected a path, e.g. '.' for the current one")
        if "\0" in os.fspath(directory):
            raise ConfigError(
                f"invalid directory {os.fspath(directory)!r}: expected a path without NUL bytes"
            )
        return open_storage(directory)
    if not callable(getattr(directory, "read_checked", None)):
        raise TypeError(f"invalid directory {directory!r}: expected a path, a URL or a Storage")
    return directory
