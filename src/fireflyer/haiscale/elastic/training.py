"""Elastic training: if ranks are lost, the others continue in the same processes; new ranks may join.

`Elastic` runs the steps of one model wrapper; docs/guide/training/haiscale-elastic.md describes the
class in full. `Elastic` accesses the model only through `Wrapper`, and the members only through
`group.reform` (hfreduce).

A rank's *progress* is 2k after k steps, and 2k+1 from the return of optimizer.step() to the end of
the step. After each reform all ranks have the highest progress, with the states of that progress.
So a step counts as done if any surviving rank has updated its parameters.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fireflyer.errors import (
    CollectiveError,
    ConfigError,
    RankFailed,
    ShardsLost,
    Stale,
    WireError,
)
from fireflyer.haiscale.consistency import description_of, difference, digest_of
from fireflyer.haiscale.elastic.state_transfer import describe, share
from fireflyer.haiscale.gradients.sample_weights import SampleWeights
from fireflyer.hfreduce import ProcessGroupHFReduce
from fireflyer.hfreduce.reform import join
from fireflyer.hfreduce.reform.membership import has_quorum
from fireflyer.log import get_logger

_log = get_logger("haiscale")
_NEWCOMER = -1

Permit = Callable[[int, tuple[str, ...], bool], bool]
"""Function (generation, members, minority) -> True if these members may continue.

Only the first rank calls the function. `members` names processes (HOST:PORT), the same in all
generations. `minority` is True if the members are too few to continue without a permit.
"""


class Stateful(Protocol):
    """Object whose state can be transferred."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> object: ...


class Wrapper(Protocol):
    """Methods of a model wrapper that Elastic needs. The wrapper averages gradients with a
    `SampleWeights`.

    After a reform, the wrapper's data about the group's size and ranks is outdated until the call
    of `reformed`.
    """

    def described(self) -> list[str]:
        """Returns lines that describe everything that must be equal on all ranks."""

    def keep(self) -> None:
        """Begins a step: drops gradients, and saves other state that a backward may change."""

    def void(self) -> None:
        """Undoes the step: restores the state that `keep` saved. Parameters and optimizer stay.
        Local.

        Results of operations that were in flight on a failed group are discarded.
        """

    lost: ShardsLost | None
    """Error to raise if dead members held the only copy of some parameters; else None.

    After this error a checkpoint must be loaded.
    """

    def drop(self) -> None:
        """Ends operations in flight on all ranks before a reform. Waits for no other rank."""

    def align(self, progress: Sequence[int], leader: int) -> Callable[[], None]:
        """Brings lagging ranks to the state of rank `leader`: parameters, buffers and optimizer.

        If the state is sharded, all ranks with the leader's progress send their shards. Called after
        each reform. Collective. The returned function installs the new state and cannot fail. If
        `align` fails, every rank still has a complete state.
        """

    def restored(self) -> None:
        """Records that parameters have values again."""

    def reformed(self) -> None:
        """Rebuilds everything that depends on the members, after the members have changed.
        Local."""


class Elastic:
    """Steps of a model that a changing number of ranks trains.

    Args:
        wrapper: wrapper of the model. If this process has joined a running group, a member sends
            the states in the first `step`. Otherwise all ranks must already have the same states.
        optimizer: optimizer of the wrapper's parameters; steps once in each `step`.
        redivide: called with the new rank and world size after each reform.
        members_file: file with the members' addresses, which the first rank keeps up to date; default: the
            file that FIREFLYER_DOORS names.

    Attributes:
        sample_weights: weights of the step; the wrapper scales gradients by them.
        permit: decides which part of a partitioned network may continue; None: the part with more
            than half of the ranks, or with half of them and the lowest rank.
        fenced: functions called with the new generation after each reform, before other work
            continues.
        begun: functions called at the beginning of each step with the generation and the number of
            steps begun in that generation, including this step. Both are the same on all members.
        patience_s: seconds that the other ranks wait in a reform for a rank that is not known to be
            dead; then they continue without that rank.
        forming_s: time limit in seconds to reach a quorum.
        restore: loads the newest checkpoint into the model, the optimizer and the carried objects,
            and returns its number of steps. Called on all ranks if lost ranks had shards that no
            other rank has. None: `step` then raises ShardsLost.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        optimizer: Optimizer,
        group: ProcessGroupHFReduce,
        *,
        redivide: Callable[[int, int], object] | None = None,
        members_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.sample_weights = SampleWeights(group)
        self.sample_weights.reset(lambda: group.newcomers_wait)
        self.permit: Permit | None = None
        self.fenced: list[Callable[[int], None]] = []
        self.begun: list[Callable[[int, int], None]] = []
        self.patience_s = 30.0
        self.forming_s = 120.0
        self.restore: Callable[[], int] | None = None
        self._wrapper, self._optimizer, self._group = wrapper, optimizer, group
        self._redivide, self._members_file = (
            redivide,
            members_file or os.environ.get("FIREFLYER_DOORS"),
        )
        self._carried: list[Stateful] = []
        self._kept: list[Any] = []
        self._progress = _NEWCOMER if group.joined else 0
        self._steps = 0
        self._entered = 0  # steps begun in this generation, including undone ones
        self._inside = False
        self._runs = False  # True within the body of a step
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)
        if not group.joined:
            self._write_members()

    @property
    def steps(self) -> int:
        """Number of updates so far, equal on all ranks; 0 in a newcomer before its first step."""
        return self._steps

    @property
    def generation(self) -> int:
        """Number of the membership; increases with each reform."""
        return self._group.epoch

    @property
    def whole(self) -> bool:
        """True if no rank is known to be lost; otherwise the next step reforms the group."""
        return not self._is_loss(self._group.errored())

    def carry(self, *objects: Stateful) -> None:
        """Registers state that is restored with an undone step and sent to newcomers.

        Examples are loaders, schedulers and scalers. All ranks register the same objects in the
        same order, before the first step.

        Raises:
            ConfigError: ranks cannot exchange such a state, or the first step has begun.
        """
        if self._inside or self._progress > 0:
            raise ConfigError("call elastic.carry() before the first step")
        for each in objects:
            describe(each.state_dict())
        self._carried += objects

    @contextlib.contextmanager
    def step(self, weight: int | None = None) -> Iterator[SampleWeights]:
        """Runs a step as a context: at most one optimizer.step(), and all its communication.

        If a rank is lost, the waiting operation raises an error, which ends the body. The context
        handles the error: the other ranks reform. After that, `steps` tells the loop if the step
        was done.

        Args:
            weight: this rank's number of samples, if ranks have unequal parts of the batch; given
                on all ranks or on none. If `redivide` changes the weight, set the attribute
                `weight` of the context's value within the step, before the backward.

        Raises:
            ShardsLost: lost ranks had values that no other rank has, and `restore` is None.
            RankFailed, DeadlineExceeded: this rank is not among the continuing ranks, or there is
            no quorum.
            Stale: another part of the job has the permit to continue.
            ConfigError: this process joined with another model, or the call is wrong.
        """
        if self._inside:
            raise ConfigError("elastic.step() cannot be nested")
        self._form_if_needed()
        self._entered += 1
        for tell in self.begun:
            tell(self.generation, self._entered)
        self.sample_weights.weight = 1 if weight is None else weight
        self._wrapper.keep()
        self._kept = [copy.deepcopy(each.state_dict()) for each in self._carried]
        self._inside = self._runs = True
        try:
            yield self.sample_weights
        except Exception as error:
            self._runs = False
            if not self._is_loss(error):
                self._progress += self._progress % 2
                raise
            _log.warning("%s: the ranks reform the group", error)
            if self._progress % 2 == 0:
                self._take_back()
            self._form()
        else:
            self._progress += 2 - self._progress % 2
        finally:
            self._inside = self._runs = False

    def _before_update(self, *_: object) -> None:
        if self._only_makes_state():
            return
        if not self._runs or self._progress % 2:
            raise ConfigError(
                "with elastic=True, call optimizer.step() once within each elastic.step()"
            )

    def _only_makes_state(self) -> bool:
        """Returns True if torch, not the script, makes this optimizer step.

        `get_state_dict` sets learning rates to 0 and steps once, so that the optimizer makes its state.
        """
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return not self._runs and not any(rates)

    def _after_update(self, *_: object) -> None:
        if self._only_makes_state():
            return
        self._progress += 1
        self._steps += 1

    def _take_back(self) -> None:
        self._wrapper.void()
        for each, state in zip(self._carried, self._kept, strict=True):
            each.load_state_dict(state)

    def _is_loss(self, error: BaseException | None) -> bool:
        """Returns True if a new membership repairs the error."""
        broken = isinstance(self._group.errored(), RankFailed)
        while error is not None:
            ours = isinstance(error, CollectiveError | WireError)
            if isinstance(error, RankFailed) or (broken and ours):
                return True
            error = error.__cause__
        return False

    # Forming the group

    def _form_if_needed(self) -> None:
        if self._progress == _NEWCOMER:
            self._form(reform=False)
        elif self._is_loss(self._group.errored()):
            self._form()
        elif self.sample_weights.newcomers:
            # A reform closes the group and leaves out late ranks, so no rank begins it before all
            # ranks are here.
            try:
                dist.barrier(self._group)
            except (CollectiveError, WireError) as error:
                if not self._is_loss(error):
                    raise
            self._form()

    def _form(self, reform: bool = True) -> None:
        """Reforms until all present ranks agree and have a state.

        Args:
            reform: False if this process has just joined.
        """
        while True:
            self._come_together(reform)
            reform = True
            try:
                self._begin_generation()
                return
            except Exception as error:
                if not self._is_loss(error):
                    raise

    def _come_together(self, reform: bool) -> None:
        quorum = None
        while True:
            minority = self._reform(quorum) if reform else False
            reform = True
            try:
                refused = self._align(minority)
            except (CollectiveError, WireError) as error:
                if isinstance(error, Stale) or not self._is_loss(error):
                    raise
                quorum = None
                continue
            if not refused:
                return
            quorum = (self._group.size() - refused) // 2 + 1  # refused ranks have no vote

    def _begin_generation(self) -> None:
        self.sample_weights.reset(lambda: self._group.newcomers_wait)
        self._wrapper.reformed()
        self._entered = 0
        rank, world = self._group.rank(), self._group.size()
        _log.info(
            "generation %d: rank %d of %d, %d steps", self.generation, rank, world, self.steps
        )
        for fence in self.fenced:
            fence(self.generation)
        if self._wrapper.lost is not None:
            if self.restore is None:
                raise self._wrapper.lost
            self._steps = self.restore()
            self._wrapper.restored()
        if self._redivide is not None:
            self._redivide(rank, world)
        self._write_members()

    def _reform(self, quorum: int | None) -> bool:
        """Agrees on the members; returns True if they are too few to continue without a permit."""
        world = self._group.size()
        self._wrapper.drop()
        before = self._group.reform(
            timedelta(seconds=self.forming_s),
            quorum=quorum if self.permit is None else 1,
            grace=timedelta(seconds=self.patience_s),
        )
        return not has_quorum([rank for rank in before if rank >= 0], world)

    def _write_members(self) -> None:
        if self._members_file is not None and self._group.rank() == 0:
            join.write_members(self._members_file, self._group.join_addresses)

    def _align(self, minority: bool) -> int:
        """Brings all ranks to the highest progress. Collective among the members.

        Returns:
            Number of newcomers that were refused; if not 0, nothing was aligned.
        """
        permitted, reason = self._permitted(minority)
        lines = self._described()
        mine = torch.tensor([self._progress, self._steps, permitted, *digest_of(lines)])
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(rows, mine, self._group)
        if not rows[0][2]:
            raise Stale(
                f"these {len(rows)} ranks got no permit for generation {self.generation}: another "
                "part of the job continues, or the permit could not be requested"
            ) from reason
        progress = [int(row[0]) for row in rows]
        highest = max(progress)
        if highest < 0:
            raise ConfigError("all members have just joined: no rank has the job's state")
        leader = progress.index(highest)
        refused = [
            rank
            for rank, row in enumerate(rows)
            if progress[rank] < 0 and not torch.equal(row[3:], rows[leader][3:])
        ]
        if refused:
            self._refuse(refused, leader, lines)
            return len(refused)
        self._follow(progress, leader, int(rows[leader][1]))
        if highest % 2:
            _log.warning("the code after optimizer.step() in step %d did not complete", self._steps)
        self._progress = highest + highest % 2
        return 0

    def _permitted(self, minority: bool) -> tuple[bool, Exception | None]:
        """Returns True if these members may continue, and the error of the call of `permit`. Rank 0
        decides."""
        if self.permit is None or self._group.rank() != 0:
            return True, None
        members = tuple(address.partition("/")[0] for address in self._group.join_addresses)
        try:
            return self.permit(self.generation, members, minority), None
        except Exception as error:  # noqa: BLE001  # the other ranks wait for an answer
            return False, error

    def _described(self) -> list[str]:
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        carried = [type(each).__name__ for each in self._carried]
        return [
            *self._wrapper.described(),
            f"optimizer {type(self._optimizer).__name__} {groups}",
            f"carried {carried}",
        ]

    def _refuse(self, refused: Sequence[int], leader: int, lines: list[str]) -> None:
        """Makes newcomers with another model leave, with a reason; the other ranks continue."""
        ours = description_of(leader, lines, self._group)
        me = self._group.rank()
        if me in refused:
            self._group.shutdown()
            reason = difference(ours, lines, me, leader)
            raise ConfigError(f"this process joined a job with another model: {reason}")
        _log.warning("rejected newcomers with another model: ranks %s", list(refused))

    def _follow(self, progress: Sequence[int], leader: int, steps: int) -> None:
        """Sends the leader's states to lagging ranks, and installs them at the end. Collective."""
        behind = progress[self._group.rank()] < progress[leader]
        leads = self._group.rank() == leader
        put = self._wrapper.align(progress, leader)
        if min(progress) == progress[leader]:
            put()
            return
        states = [each.state_dict() for each in self._carried] if leads else None
        carried = share(states, leader, self._group, takes=behind)
        put()
        if behind:
            for each, state in zip(self._carried, carried, strict=True):
                each.load_state_dict(state)
            self._steps = steps
