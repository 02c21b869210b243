"""Fencing: who may save into a directory. A run claims it in `claims/<epoch>.json`; the highest epoch owns.

A save bears its run's epoch in the names of all its files, so runs never write over one another,
and a newer run's checkpoints sort before an older run's whatever their steps. Rank 0 looks at the
claims before it commits and again after: a commit counts only if no newer claim was there by then.

A run whose members change goes on under a new epoch, as a later generation of its attempt (`fence`). What
holds between attempts holds between (attempt, generation)s.

Who comes too late is told by names alone, so that no damage to a claim lets a zombie in: an attempt marks
the directory (`claims/attempt-...json`) before it claims an epoch, and nothing is ever removed. What
is written in the files is for messages, for `history`, and for who may take over without a save.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable

import msgspec

from fireflyer.checkpoint.catalog import newest_epoch
from fireflyer.checkpoint.manifest import Claim, decode, encode
from fireflyer.checkpoint.schedule import Run
from fireflyer.errors import CheckpointError, ConfigError, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

CLAIMS = "claims"
_MARK = re.compile(r"attempt-(\d{6,})(?:-(\d{6,}))?-([0-9a-f]{16})\.json")
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
    """The claims of one directory, seen by one run. Rank 0 alone claims."""

    def __init__(self, storage: Storage, me: Claim, wall: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._wall = wall
        self.me = me
        self._epoch: int | None = None
        self._process = 0
        """Which has claimed the epoch."""
        self._warned: set[str] = set()
        """Files that it has said cannot be read."""

    @property
    def epoch(self) -> int | None:
        """The run's own epoch once it has one; a forked child has not, or its saves would bear the names of
        its parent's."""
        return self._epoch if self._process == os.getpid() else None

    def newest(self) -> int:
        """The highest epoch claimed; 0 if there is none."""
        return max(self._epochs(), default=0)

    def first(self) -> bytes | None:
        """The directory's first claim as it lies there, b"" if it cannot be read, None if there is none;
        nobody ever changes it."""
        epochs = self._epochs()
        if not epochs:
            return None
        try:
            return self._storage.read(_name(epochs[0]))
        except StorageError as error:
            self._warn(_name(epochs[0]), error)
            return b""

    def succeeds(self) -> bool:
        """Whether this run is a later attempt of the task that owns the directory (or nobody does), so
        that it can take over at once. Any other run may be here only to read, as may be one that cannot
        read whose the directory is."""
        epochs = self._epochs()
        if self.me.attempt is None or not epochs:
            return self.me.attempt is not None
        owner = self._read(_name(epochs[-1]))
        return (
            owner is not None
            and owner.task == self.me.task
            and owner.attempt is not None
            and (owner.attempt, owner.generation) < (self.me.attempt, self.me.generation)
        )

    def fence(self, generation: int) -> None:
        """The members of this run have changed: the next `take` makes a later generation of it the owner.

        Raises:
            ValueError: if the generation is not later than the run's.
        """
        if generation <= self.me.generation:
            raise ValueError(
                f"generation {generation} does not come after {self.me.generation}, which saves here now"
            )
        self.me = msgspec.structs.replace(self.me, generation=generation)
        self._epoch = None

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
        if self.epoch is None and self.me.attempt is not None:
            self._refuse_if_late()
            self._storage.create(f"{CLAIMS}/{_mark(self.me)}", self._dated())
        while (mine := self.epoch) is None:
            # Claims may be lost, or left behind when saves are copied; a new save is newer than all there.
            candidate = max([*self._epochs(), newest_epoch(self._storage)]) + 1
            # Looked at last: whoever made an epoch that counts above had left its mark before.
            self._refuse_if_late()
            if self._storage.create(_name(candidate), self._dated()):
                self._epoch, self._process = candidate, os.getpid()
        return mine

    def check(self, epoch: int) -> None:
        """
        Args:
            epoch: this run's, on any rank.

        Raises:
            CheckpointError: if a newer run owns the directory.
        """
        newest = self.newest()
        if newest > epoch:
            claim = self._read(_name(newest))
            raise CheckpointError(
                f"{self._storage} belongs to {_who(claim)} now; {_who(self.me)} may not save there any more"
            )

    def history(self) -> list[Run]:
        """The runs of this task (or outside the platform) that saved or may save here, up to this one. All
        generations of an attempt are one run: it goes on when its members change."""
        runs: list[Run] = []
        of_attempt: int | None = None
        names = {f"{CLAIMS}/{name}" for name in self._storage.list(CLAIMS)}
        for epoch in self._epochs():
            claim = self._read(_name(epoch))
            if claim is None or claim.task != self.me.task:
                continue
            end = None
            if _left_name(epoch) in names:
                left = self._read(_left_name(epoch))
                end = claim.created if left is None else left.created
            if claim.generation and runs and of_attempt == claim.attempt:
                runs[-1] = runs[-1]._replace(left=end)
            else:
                runs.append(Run(claim.created, end))
            of_attempt = claim.attempt
        return runs if self.epoch is not None else [*runs, Run(self._wall(), None)]

    def leave(self) -> None:
        """Notes that this run leaves because it was asked to, so that its end is not taken for a failure."""
        if self.epoch is not None:
            try:
                self._storage.write(_left_name(self.epoch), [self._dated()])
            except StorageError as error:
                _log.warning("the end of this run will be taken for a failure: %s", error)

    def _dated(self) -> bytes:
        return encode(msgspec.structs.replace(self.me, created=self._wall()))

    def _refuse_if_late(self) -> None:
        if self.me.attempt is None:
            return
        task = _task_hash(self.me.task)
        marks = map(_MARK.fullmatch, self._storage.list(CLAIMS))
        mine = (self.me.attempt, self.me.generation)
        found = [(int(mark[1]), int(mark[2] or 0)) for mark in marks if mark and mark[3] == task]
        latest = max(found, default=mine)
        if latest > mine:
            owner = Claim(task=self.me.task, attempt=latest[0], generation=latest[1])
            raise CheckpointError(
                f"{self._storage} belongs to {_who(owner)}; {_who(self.me)} came too late to save there"
            )

    def _epochs(self) -> list[int]:
        stems = (name.removesuffix(".json") for name in self._storage.list(CLAIMS))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _read(self, name: str) -> Claim | None:
        """None if it cannot be read. It is told once, and still counts by its name."""
        try:
            return decode(self._storage.read(name), Claim, f"{self._storage}/{name}")
        except StorageError as error:
            self._warn(name, error)
            return None

    def _warn(self, name: str, error: StorageError) -> None:
        if error.retryable:
            raise error  # the place does not answer, which says nothing about one file
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("a claim cannot be read, and counts by its name: %s", error)


def _name(epoch: int) -> str:
    return f"{CLAIMS}/{epoch:06d}.json"


def _mark(run: Claim) -> str:
    generation = f"-{run.generation:06d}" if run.generation else ""
    return f"attempt-{run.attempt:06d}{generation}-{_task_hash(run.task)}.json"


def _task_hash(task: str) -> str:
    return hashlib.blake2b(task.encode(), digest_size=8).hexdigest()


def _left_name(epoch: int) -> str:
    return f"{CLAIMS}/{epoch:06d}.left.json"


def _who(claim: Claim | None) -> str:
    if claim is None:
        return "a run whose claim cannot be read"
    who = f"generation {claim.generation} of " if claim.generation else ""
    if claim.attempt is None:
        return f"{who}a run outside the platform"
    who += f"attempt {claim.attempt}"
    return f"{who} of task {claim.task}" if claim.task else who
