"""Training that goes on without the ranks it loses, in the same processes, and takes in newcomers.

`Elastic` runs the steps of one wrapper of a model; docs/haiscale-elastic.md has the whole of it. It knows of
the model only what `Wrapper` says, and who is there from `group.reform` (hfreduce).

A rank's *progress* is 2k behind k steps, and 2k+1 from the return of optimizer.step() to the end of the step.
Behind each forming all have that of the highest, and its states: a step has happened if any rank of those who
go on has updated its parameters.
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
from fireflyer.haiscale.agreement import description_of, difference, digest_of
from fireflyer.haiscale.states import describe, share
from fireflyer.haiscale.weighing import Weighing
from fireflyer.hfreduce import ProcessGroupHFReduce, joining
from fireflyer.hfreduce.membership import has_quorum
from fireflyer.log import get_logger

_log = get_logger("haiscale")
_NEWCOMER = -1

Permit = Callable[[int, tuple[str, ...], bool], bool]
"""(generation, members, minority) -> whether these may go on. Asked by the first rank alone. `members` name
processes (HOST:PORT), alike in all generations; `minority`: they are too few to go on without being asked."""


class Stateful(Protocol):
    """What can be carried."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> object: ...


class Wrapper(Protocol):
    """What Elastic asks of a wrapper of a model, which averages gradients with a `Weighing`.

    What a wrapper knows of the group's size and ranks is old behind a forming until `reformed`.
    """

    def described(self) -> list[str]:
        """What must be alike on all ranks, a line each."""

    def keep(self) -> None:
        """A step begins: gradients are dropped, and what else a backward may change is kept for `void`."""

    def void(self) -> None:
        """The step did not happen: all but parameters and optimizer is as it was kept. Local; what is under
        way, over a group that has failed, counts no more."""

    lost: ShardsLost | None
    """Why parameters have no values, where members died with them: a checkpoint is needed."""

    def drop(self) -> None:
        """The group is about to be formed anew: ends what is under way on all ranks. Waits for nobody."""

    def align(self, progress: Sequence[int], leader: int) -> Callable[[], None]:
        """Behind each forming. Brings the states (parameters, buffers, optimizer) of rank `leader`, or of all
        with its progress, to the ranks whose progress is less. Collective. Where it fails, everybody has a
        whole state still: what it returns, which cannot fail, puts the new one in place."""

    def restored(self) -> None:
        """Parameters have values again."""

    def reformed(self) -> None:
        """The group has other members: what was made for the old ones is made anew. Local."""


class Elastic:
    """The steps of a model that is trained by a changing number of ranks.

    Args:
        wrapper: of the model. If this process has joined a running group, its states come from a member in
            the first `step`, else they are alike on all ranks.
        optimizer: of the wrapper's parameters; steps once in each `step`.
        redivide: is called with the new rank and world behind each forming.
        doors: a file with the addresses of members, which the first rank keeps up to date; default: what
            FIREFLYER_DOORS names.

    Attributes:
        weighing: has the weight of the step; the wrapper scales gradients by it.
        permit: who of a cut network may go on; None: more than half of the ranks, or half with the lowest.
        fenced: called with the new generation behind each forming, before anything else goes on.
        begun: called at the begin of each step with the generation and how many steps have begun in it, this
            one counted: alike on all members.
        patience_s: how long a rank that is not known to be dead may be busy before it learns that the others
            form anew; without it they go on.
        forming_s: how long the others are looked for until there is a quorum.
        restore: loads the newest checkpoint into the model, the optimizer and what is carried, and returns
            its steps; called on all ranks where lost ranks had shards that nobody else has. None: then
            `step` raises ShardsLost.
    """

    def __init__(
        self,
        wrapper: Wrapper,
        optimizer: Optimizer,
        group: ProcessGroupHFReduce,
        *,
        redivide: Callable[[int, int], object] | None = None,
        doors: str | os.PathLike[str] | None = None,
    ) -> None:
        self.weighing = Weighing(group)
        self.weighing.reset(lambda: group.newcomers_wait)
        self.permit: Permit | None = None
        self.fenced: list[Callable[[int], None]] = []
        self.begun: list[Callable[[int, int], None]] = []
        self.patience_s = 30.0
        self.forming_s = 120.0
        self.restore: Callable[[], int] | None = None
        self._wrapper, self._optimizer, self._group = wrapper, optimizer, group
        self._redivide, self._doors = redivide, doors or os.environ.get("FIREFLYER_DOORS")
        self._carried: list[Stateful] = []
        self._kept: list[Any] = []
        self._progress = _NEWCOMER if group.joined else 0
        self._steps = 0
        self._entered = 0  # in this generation, also steps that did not happen
        self._inside = False
        self._runs = False  # the body of a step
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)
        if not group.joined:
            self._show_doors()

    @property
    def steps(self) -> int:
        """Updates of the parameters so far, alike on all ranks; 0 in a newcomer before its first step."""
        return self._steps

    @property
    def generation(self) -> int:
        """Of the membership; grows with each forming."""
        return self._group.epoch

    @property
    def whole(self) -> bool:
        """Whether no rank is known to be lost: else the next step forms anew."""
        return not self._is_loss(self._group.errored())

    def carry(self, *things: Stateful) -> None:
        """What is taken back with a step that did not happen, and given to newcomers: loaders, schedulers,
        scalers, ... The same ones in the same order on all ranks, before the first step.

        Raises:
            ConfigError: a state that ranks cannot give one another, or steps have begun.
        """
        if self._inside or self._progress > 0:
            raise ConfigError("elastic.carry() comes before the first step")
        for thing in things:
            describe(thing.state_dict())
        self._carried += things

    @contextlib.contextmanager
    def step(self, weight: int | None = None) -> Iterator[Weighing]:
        """A step: `with` it, exactly one optimizer.step(), or none, and all that communicates. If a rank is
        lost, the body ends there, the others form anew, and the loop finds the step done (`steps`) or not.

        Args:
            weight: this rank's number of samples, where parts are of unequal size; alike given or not given
                on all ranks. Where `redivide` changes it, set it within the step, before the backward:
                what `with` gives has it as an attribute.

        Raises:
            ShardsLost: lost ranks had what no other has, and there is no `restore`.
            RankFailed, DeadlineExceeded: this rank is not among those who go on, or there is no quorum.
            Stale: another part of the job has been permitted to go on.
            ConfigError: this process joined with another model; or wrong use.
        """
        if self._inside:
            raise ConfigError("an elastic step within an elastic step")
        self._form_if_needed()
        self._entered += 1
        for tell in self.begun:
            tell(self.generation, self._entered)
        self.weighing.weight = 1 if weight is None else weight
        self._wrapper.keep()
        self._kept = [copy.deepcopy(thing.state_dict()) for thing in self._carried]
        self._inside = self._runs = True
        try:
            yield self.weighing
        except Exception as error:
            self._runs = False
            if not self._is_loss(error):
                self._progress += self._progress % 2
                raise
            _log.warning("%s: the ranks form anew", error)
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
                "with elastic=True, optimizer.step() comes once in each elastic.step()"
            )

    def _only_makes_state(self) -> bool:
        """Torch's `get_state_dict` steps an optimizer without state, with rates of 0."""
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return not self._runs and not any(rates)

    def _after_update(self, *_: object) -> None:
        if self._only_makes_state():
            return
        self._progress += 1
        self._steps += 1

    def _take_back(self) -> None:
        self._wrapper.void()
        for thing, state in zip(self._carried, self._kept, strict=True):
            thing.load_state_dict(state)

    def _is_loss(self, error: BaseException | None) -> bool:
        """Whether a new membership mends it."""
        broken = isinstance(self._group.errored(), RankFailed)
        while error is not None:
            ours = isinstance(error, CollectiveError | WireError)
            if isinstance(error, RankFailed) or (broken and ours):
                return True
            error = error.__cause__
        return False

    # Forming

    def _form_if_needed(self) -> None:
        if self._progress == _NEWCOMER:
            self._form(reform=False)
        elif self._is_loss(self._group.errored()):
            self._form()
        elif self.weighing.newcomers:
            try:
                dist.barrier(self._group)  # so that nobody is waited for in vain
            except (CollectiveError, WireError) as error:
                if not self._is_loss(error):
                    raise
            self._form()

    def _form(self, reform: bool = True) -> None:
        """Until those who are there are alike and have a state. `reform`: False where this process has just
        joined."""
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
            quorum = (self._group.size() - refused) // 2 + 1  # who is refused has no vote

    def _begin_generation(self) -> None:
        self.weighing.reset(lambda: self._group.newcomers_wait)
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
        self._show_doors()

    def _reform(self, quorum: int | None) -> bool:
        """Agrees on the members; whether they are too few to go on without a permit."""
        world = self._group.size()
        self._wrapper.drop()
        before = self._group.reform(
            timedelta(seconds=self.forming_s),
            quorum=quorum if self.permit is None else 1,
            grace=timedelta(seconds=self.patience_s),
        )
        return not has_quorum([rank for rank in before if rank >= 0], world)

    def _show_doors(self) -> None:
        if self._doors is not None and self._group.rank() == 0:
            joining.write_doors(self._doors, self._group.join_addresses)

    def _align(self, minority: bool) -> int:
        """Brings all to the highest progress. Collective among the members.

        Returns:
            How many newcomers were refused; nothing is aligned then.
        """
        permitted, reason = self._permitted(minority)
        lines = self._described()
        mine = torch.tensor([self._progress, self._steps, permitted, *digest_of(lines)])
        rows = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(rows, mine, self._group)
        if not rows[0][2]:
            raise Stale(
                f"generation {self.generation} was not permitted to these {len(rows)} ranks: "
                "another part of the job goes on, or it could not be asked"
            ) from reason
        progress = [int(row[0]) for row in rows]
        highest = max(progress)
        if highest < 0:
            raise ConfigError("all members have just joined: nobody has the job's state any more")
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
            _log.warning(
                "what comes behind optimizer.step() in step %d did not run to its end", self._steps
            )
        self._progress = highest + highest % 2
        return 0

    def _permitted(self, minority: bool) -> tuple[bool, Exception | None]:
        """Whether these members may go on, and why it could not be asked. The first rank's answer counts."""
        if self.permit is None or self._group.rank() != 0:
            return True, None
        members = tuple(address.partition("/")[0] for address in self._group.join_addresses)
        try:
            return self.permit(self.generation, members, minority), None
        except Exception as error:  # noqa: BLE001  # the others wait for an answer
            return False, error

    def _described(self) -> list[str]:
        groups = [len(group["params"]) for group in self._optimizer.param_groups]
        carried = [type(thing).__name__ for thing in self._carried]
        return [
            *self._wrapper.described(),
            f"optimizer {type(self._optimizer).__name__} {groups}",
            f"carried {carried}",
        ]

    def _refuse(self, refused: Sequence[int], leader: int, lines: list[str]) -> None:
        """Newcomers with another model leave, with a reason; the others go on."""
        ours = description_of(leader, lines, self._group)
        me = self._group.rank()
        if me in refused:
            self._group.shutdown()
            reason = difference(ours, lines, me, leader)
            raise ConfigError(f"this process joined a job with another model: {reason}")
        _log.warning("newcomers with another model were refused: ranks %s", list(refused))

    def _follow(self, progress: Sequence[int], leader: int, steps: int) -> None:
        """Who is behind gets what the leader has. Collective; nothing is changed until all has come."""
        behind = progress[self._group.rank()] < progress[leader]
        leads = self._group.rank() == leader
        put = self._wrapper.align(progress, leader)
        if min(progress) == progress[leader]:
            put()
            return
        states = [thing.state_dict() for thing in self._carried] if leads else None
        carried = share(states, leader, self._group, takes=behind)
        put()
        if behind:
            for thing, state in zip(self._carried, carried, strict=True):
                thing.load_state_dict(state)
            self._steps = steps
