"""Decision to save now: the schedule and the suspend request, agreed among the ranks."""

import math
from collections.abc import Callable
from typing import Protocol

from fireflyer.checkpoint.control_group import ControlGroup, rank_and_world
from fireflyer.checkpoint.schedule import (
    AUTO,
    SHORTEST_S,
    Interval,
    Run,
    SaveCost,
    auto_interval,
    check_steps,
    failures_seen,
    parse_duration,
)
from fireflyer.clock import Clock
from fireflyer.errors import CheckpointError, ConfigError
from fireflyer.log import get_logger

SUSPEND_LOOK_S = 1.0
"""Maximum number of seconds between exchanges among the ranks (see SaveTriggers), if there is a
`should_suspend`. The steps' recent pace is used to keep this limit."""

_NO, _YES, _FAILED = range(3)
_log = get_logger("checkpoint")


class Saving(Protocol):
    """Part of SaveHandle that the schedule uses."""

    stall_s: float

    @property
    def done(self) -> bool: ...


class SaveTriggers:
    """Answers of `should_save`, equal on all ranks.

    Rank 0 decides by its clock, every rank calls its own `should_suspend`, and one exchange shares
    the answers. The exchange also names the step of the next exchange; between exchanges no rank
    communicates.
    """

    def __init__(
        self,
        every: str | int | None,
        should_suspend: Callable[[], bool] | None,
        clock: Clock,
        control: ControlGroup,
        history: Callable[[], list[Run]],
        leave: Callable[[], None],
    ) -> None:
        """
        Args:
            every: the manager's option.
            should_suspend: called on each rank at each exchange, until one of the calls returns
                True.
            clock: this rank's clock.
            control: the group over which the ranks agree.
            history: on rank 0, returns the runs in this directory up to this run; called once, for
                "auto".
            leave: called on rank 0 when the ranks agree to suspend.

        Raises:
            ConfigError: if `every` is invalid.
        """
        self._clock, self._control = clock, control
        self._should_suspend = should_suspend
        self._history, self._leave = history, leave
        if isinstance(every, bool) or not isinstance(every, str | int | None):
            raise ConfigError(
                f'invalid every {every!r}: expected a duration like "5min", "auto", a number of steps or None'
            )
        self._steps = check_steps(every) if isinstance(every, int) else None
        self._cost = SaveCost() if every == AUTO else None
        interval_s = math.inf
        if isinstance(every, str):
            interval_s = SHORTEST_S if every == AUTO else parse_duration(every)
        asks = should_suspend is not None or isinstance(every, str)
        self._interval = Interval(interval_s, clock.monotonic()) if asks else None
        self._ask_at = 0
        self._seen: tuple[int, float, float] | None = None
        self._last: Saving | None = None
        self.suspending = False
        """True once the ranks have agreed to leave."""

    def ask(self, step: int, leave: bool) -> bool:
        """Returns True if a save is due after `step`; collective at the step named by the last
        exchange.

        Args:
            leave: True if all ranks know without an exchange that they leave.
        """
        if self._cost is not None:
            saving = self._last is not None and not self._last.done
            self._cost.note(step, self._clock.monotonic(), saving)
        if leave and not self.suspending:
            self._suspend(f"step {step}: the ranks leave")
        due = self._steps is not None and step > 0 and step % self._steps == 0
        if self._interval is None or self.suspending or step < self._ask_at:
            return due or self.suspending
        by_time, self._ask_at = self._agree(step, self._interval)
        return due or by_time or self.suspending

    def saved(self, save: Saving) -> None:
        """Records the start of a save, due or not."""
        self._last = save
        if self._cost is not None:
            self._cost.began(save.stall_s)

    def forget(self) -> None:
        """Forces an exchange at the next step after a membership change; resets `suspending`."""
        self._ask_at = 0
        self.suspending = False

    def _agree(self, step: int, interval: Interval) -> tuple[bool, int]:
        rank, _ = rank_and_world()
        suspend, failure = _NO, None
        try:
            if self._should_suspend is not None and self._should_suspend():
                suspend = _YES
        except BaseException as error:  # noqa: BLE001 - raised below, once the other ranks know
            suspend, failure = _FAILED, error
        decision = (False, 0)
        if rank == 0:
            decision = self._decide(step, interval)
        rows = self._control.numbers([suspend, int(decision[0]), decision[1]])
        if failure is not None:
            raise failure
        answers = [row[0] for row in rows]
        if _FAILED in answers:
            raise CheckpointError(
                f"rank {answers.index(_FAILED)} failed in should_suspend; see its error"
            )
        if _YES in answers:
            self._suspend(f"step {step}: rank {answers.index(_YES)} was asked to leave")
        due, ask_at = bool(rows[0][1]), rows[0][2]
        if due and rank != 0:
            interval.saved(self._clock.monotonic())  # this rank may become rank 0
        return due, ask_at

    def _suspend(self, why: str) -> None:
        self.suspending = True
        if rank_and_world()[0] == 0:
            _log.info("%s", why)
            self._leave()

    def _decide(self, step: int, interval: Interval) -> tuple[bool, int]:
        now = self._clock.monotonic()
        if self._cost is not None:
            if self._seen is None:
                self._seen = (*failures_seen(self._history(), self._clock.wall()), now)
            failures, before_s, since = self._seen
            interval.interval_s = auto_interval(self._cost.cost_s, failures, before_s + now - since)
        within_s = math.inf if self._should_suspend is None else SUSPEND_LOOK_S
        return interval.decide(step, now, within_s)
