"""Fencing: decides which run may save into a directory.

A run claims the directory in `claims/<epoch>.json`; the run with the highest epoch owns it.

The names of a save's files contain its run's epoch. So runs never overwrite one another's files,
and a newer run's checkpoints sort after an older run's, regardless of their steps. Rank 0 checks
the claims before and after it commits. A commit counts only if neither check finds a newer claim.

A run whose members change continues under a new epoch, as a later generation of its attempt
(`fence`). The rules between attempts also hold between (attempt, generation) pairs.

An older attempt that claims after a newer attempt is rejected by file names alone, so a damaged
claim cannot admit it. To this end an attempt marks the directory (`claims/attempt-...json`) before
it claims an epoch, and no claim or mark is ever removed. The contents of these files serve only
messages, `history`, and the decision to take over without a save.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable

import msgspec

from fireflyer.checkpoint.directory.catalog import newest_epoch
from fireflyer.checkpoint.directory.manifest import Claim, decode, encode
from fireflyer.checkpoint.schedule import Run
from fireflyer.errors import CheckpointError, ConfigError, StorageError
from fireflyer.log import get_logger
from fireflyer.storage import Storage

CLAIMS = "claims"
_MARK = re.compile(r"attempt-(\d{6,})(?:-(\d{6,}))?-([0-9a-f]{16})\.json")
_log = get_logger("checkpoint")


def identity() -> Claim:
    """Returns this process's run, from FIREFLYER_TASK and FIREFLYER_ATTEMPT.

    Raises:
        ConfigError: if the attempt is not a whole number.
    """
    attempt = os.environ.get("FIREFLYER_ATTEMPT")
    if attempt is not None and not attempt.isdecimal():
        raise ConfigError(f"invalid FIREFLYER_ATTEMPT {attempt!r}: expected a whole number")
    task = os.environ.get("FIREFLYER_TASK", "")
    return Claim(task=task, attempt=None if attempt is None else int(attempt))


class Claims:
    """Claims of one directory, as one run sees them. Only rank 0 claims."""

    def __init__(self, storage: Storage, me: Claim, wall: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._wall = wall
        self.me = me
        self._epoch: int | None = None
        self._process = 0
        """Process that claimed the epoch."""
        self._warned: set[str] = set()
        """Unreadable files whose warning was already logged."""

    @property
    def epoch(self) -> int | None:
        """Epoch of this run. None before the run has an epoch, and in a forked child, because the
        child's files would have the names of its parent's files."""
        return self._epoch if self._process == os.getpid() else None

    def newest(self) -> int:
        """Returns the highest claimed epoch; 0 if there is none."""
        return max(self._epochs(), default=0)

    def first(self) -> bytes | None:
        """Returns the bytes of the directory's first claim, which never changes.

        The result is b"" if the claim cannot be read, and None if there is no claim.
        """
        epochs = self._epochs()
        if not epochs:
            return None
        try:
            return self._storage.read(_name(epochs[0]))
        except StorageError as error:
            self._warn(_name(epochs[0]), error)
            return b""

    def succeeds(self) -> bool:
        """Returns True if this run may take over at once.

        The run must be a later attempt of the owner's task, or a task's attempt in a directory
        without an owner. The result is False for any other run, because that run may only want to
        read. It is also False if the owner's claim cannot be read.
        """
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
        """Records a membership change: the next `take` claims for a later generation of this run.

        Raises:
            ValueError: if the generation is not later than the run's.
        """
        if generation <= self.me.generation:
            raise ValueError(
                f"generation {generation} is not newer than {self.me.generation}, which saves here now"
            )
        self.me = msgspec.structs.replace(self.me, generation=generation)
        self._epoch = None

    def take(self) -> int:
        """Makes this run the owner, fences off all older runs and returns its epoch. Idempotent.

        Raises:
            CheckpointError: if a later attempt of this task has marked the directory. Also if this
                process was forked after its parent claimed, because it would fence off its parent.
        """
        if self._process not in (0, os.getpid()):
            raise CheckpointError(
                f"the parent, process {self._process}, saves to {self._storage} with this manager: create "
                "another manager in the child"
            )
        if self.epoch is None and self.me.attempt is not None:
            self._refuse_if_late()
            self._storage.create(f"{CLAIMS}/{_mark(self.me)}", self._dated())
        while (mine := self.epoch) is None:
            # Claims may be missing or left over if saves were copied; a new save must be newer than
            # all saves in the directory.
            candidate = max([*self._epochs(), newest_epoch(self._storage)]) + 1
            # Checked last: an attempt marks the directory before it claims an epoch, so the marks of
            # all attempts whose epochs were read above are visible now.
            self._refuse_if_late()
            if self._storage.create(_name(candidate), self._dated()):
                self._epoch, self._process = candidate, os.getpid()
        return mine

    def check(self, epoch: int) -> None:
        """Checks that no newer run owns the directory.

        Args:
            epoch: this run's epoch, on any rank.

        Raises:
            CheckpointError: if a newer run owns the directory.
        """
        newest = self.newest()
        if newest > epoch:
            claim = self._read(_name(newest))
            raise CheckpointError(
                f"{self._storage} now belongs to {_who(claim)}, which took it over from this run "
                f"({_who(self.me)}): this run can no longer save there; end one of the two runs, or give "
                "each a directory of its own"
            )

    def history(self) -> list[Run]:
        """Returns the runs of this task (or those outside the platform) in this directory, up to
        this run.

        All generations of an attempt count as one run, because an attempt continues when its
        members change.
        """
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
        """Records that this run leaves on request, so that its end does not count as a failure."""
        if self.epoch is not None:
            try:
                self._storage.write(_left_name(self.epoch), [self._dated()])
            except StorageError as error:
                _log.warning("the end of this run will count as a failure: %s", error)

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
                f"{self._storage} belongs to {_who(owner)}; {_who(self.me)} is older and cannot save there"
            )

    def _epochs(self) -> list[int]:
        stems = (name.removesuffix(".json") for name in self._storage.list(CLAIMS))
        return sorted(int(stem) for stem in stems if stem.isdecimal())

    def _read(self, name: str) -> Claim | None:
        """Decodes a claim. Logs an unreadable claim once and returns None; its name still
        counts."""
        try:
            return decode(self._storage.read(name), Claim, f"{self._storage}/{name}")
        except StorageError as error:
            self._warn(name, error)
            return None

    def _warn(self, name: str, error: StorageError) -> None:
        if error.retryable:
            raise error  # the storage does not answer, which is no evidence about one file
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("cannot read a claim; its name still counts: %s", error)


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
