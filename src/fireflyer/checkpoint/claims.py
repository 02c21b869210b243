"""Fencing: who may save into a directory. A run claims it in `claims/<epoch>.json`; the highest epoch owns.

A save bears its run's epoch in the names of all its files, so runs never write over one another,
and a newer run's checkpoints sort before an older run's whatever their steps. Rank 0 looks at the
claims before it commits and again after: a commit counts only if no newer claim was there by then.
"""

import os
import time
from collections.abc import Callable

from fireflyer.checkpoint.catalog import newest_epoch
from fireflyer.checkpoint.manifest import Claim, decode, encode
from fireflyer.checkpoint.schedule import Run
from fireflyer.errors import CheckpointError, ConfigError, Corrupted, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

_DIRECTORY = "claims"
_log = get_logger("checkpoint")


def identity() -> Claim:
    """This process's run, from FIREFLYER_TASK and FIREFLYER_ATTEMPT.

    Raises:
        ConfigError: if the attempt is not a whole number.
    """
    attempt = os.environ.get("FIREFLYER_ATTEMPT")
    if attempt is not None and not attempt.isdecimal():
        raise ConfigError(
            f"FIREFLYER_ATTEMPT={attempt!r} is not a whole number: unset it or set one"
        )
    task = os.environ.get("FIREFLYER_TASK", "")
    return Claim(task=task, attempt=None if attempt is None else int(attempt))


class Claims:
    """The claims of one directory, seen by one run. Used by rank 0 alone."""

    def __init__(self, storage: Storage, me: Claim, wall: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._wall = wall
        self.me = me
        self._epoch: int | None = None
        self._process = 0
        """Which has claimed the epoch."""

    @property
    def epoch(self) -> int | None:
        """The run's own epoch once it has one; a forked child has not, or its saves would bear the names of
        its parent's."""
        return self._epoch if self._process == os.getpid() else None

    def newest(self) -> int:
        """The highest epoch claimed; 0 if there is none."""
        return max(self._epochs(), default=0)

    def first(self) -> bytes | None:
        """The directory's first claim as it lies there, None if there is none; nobody ever changes it."""
        epochs = self._epochs()
        return self._storage.read(f"{_DIRECTORY}/{epochs[0]:06d}.json") if epochs else None

    def succeeds(self) -> bool:
        """Whether this run is a later attempt of the task that owns the directory (or nobody does), so
        that it can take over at once. Any other run may be here only to read."""
        epochs = self._epochs()
        if self.me.attempt is None or not epochs:
            return self.me.attempt is not None
        owner = self._read(epochs[-1])
        return (
            owner.task == self.me.task
            and owner.attempt is not None
            and owner.attempt < self.me.attempt
        )

    def take(self) -> int:
        """Makes this run the owner, fencing all older ones off; returns its epoch. Repeatable.

        Raises:
            CheckpointError: if a later attempt of this task has been here; or in a child forked after the
                claim, which would fence off its parent.
        """
        if self._process not in (0, os.getpid()):
            raise CheckpointError(
                f"process {self._process}, which this one was forked from, saves to {self._storage} with "
                "this manager: make a manager of your own in the child"
            )
        while (mine := self.epoch) is None:
            epochs = self._epochs()
            for epoch in epochs:
                self._refuse_if_later(epoch)
            # Claims may be lost, or left behind when saves are copied; a new save is newer than all there.
            candidate = max([*epochs, newest_epoch(self._storage)]) + 1
            if self._storage.create(f"{_DIRECTORY}/{candidate:06d}.json", self._dated()):
                self._epoch, self._process = candidate, os.getpid()
        return mine

    def check(self) -> None:
        """
        Raises:
            CheckpointError: if a newer run owns the directory.
        """
        newest = self.newest()
        if self.epoch is not None and newest > self.epoch:
            claim = self._read(newest)
            raise CheckpointError(
                f"{self._storage} belongs to {_who(claim)} now; {_who(self.me)} may not save there any more"
            )

    def history(self) -> list[Run]:
        """The runs of this task (or outside the platform) that saved or may save here, up to this one."""
        runs = []
        for epoch in self._epochs():
            claim = self._read(epoch)
            if claim.task != self.me.task or claim.created == 0:
                continue
            left = _left_name(epoch)
            if self._storage.size(left) is None:
                runs.append(Run(claim.created, None))
            else:
                runs.append(Run(claim.created, self._read_file(left).created))
        return runs if self.epoch is not None else [*runs, Run(self._wall(), None)]

    def leave(self) -> None:
        """Notes that this run leaves because it was asked to, so that its end is not taken for a failure."""
        if self.epoch is not None:
            try:
                self._storage.write(_left_name(self.epoch), [self._dated()])
            except StorageError as error:
                _log.warning("the end of this run will be taken for a failure: %s", error)

    def _dated(self) -> bytes:
        me = self.me
        return encode(Claim(task=me.task, attempt=me.attempt, created=self._wall()))

    def _refuse_if_later(self, epoch: int) -> None:
        claim = self._read(epoch)
        if self.me.attempt is None or claim.attempt is None or claim.task != self.me.task:
            return
        if claim.attempt > self.me.attempt:
            raise CheckpointError(
                f"{self._storage} belongs to {_who(claim)}; {_who(self.me)} came too late to save there"
            )

    def _epochs(self) -> list[int]:
        stems = (name.removesuffix(".json") for name in self._storage.list(_DIRECTORY))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _read(self, epoch: int) -> Claim:
        return self._read_file(f"{_DIRECTORY}/{epoch:06d}.json")

    def _read_file(self, name: str) -> Claim:
        try:
            return decode(self._storage.read(name), Claim, f"{self._storage}/{name}")
        except Corrupted as error:
            _log.warning("%s; it is taken for that of a run outside the platform", error)
            return Claim(task="", attempt=None)


def _left_name(epoch: int) -> str:
    return f"{_DIRECTORY}/{epoch:06d}.left.json"


def _who(claim: Claim) -> str:
    if claim.attempt is None:
        return "a run outside the platform"
    return (
        f"attempt {claim.attempt} of task {claim.task}"
        if claim.task
        else f"attempt {claim.attempt}"
    )
