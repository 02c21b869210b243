"""Decision on the demo's actions and their timing: a state machine without I/O or clock.

    training -> killed -> recovered -> suspending -> suspended -> resumed -> over
       kill at half        suspend at three quarters    resume

`observe` takes observations; `next_action` returns each due action once. The caller carries out the
action and then calls `did` with the time (CLOCK_MONOTONIC, in seconds).
"""

from typing import Literal

import msgspec

from fireflyer.demo.metrics import MetricsRecord
from fireflyer.hai.model import TERMINAL, Event

Phase = Literal["training", "killed", "recovered", "suspending", "suspended", "resumed", "over"]

KILL_AT = 0.5
"""Share of the training time after which the demo kills a rank."""
SUSPEND_AT = 0.75
"""Share of the training time after which the demo suspends the task."""


class Kill(msgspec.Struct, frozen=True):
    """Action: send SIGKILL to one rank."""

    rank: int
    pid: int


class Suspend(msgspec.Struct, frozen=True):
    """Action: ask the platform to suspend the task."""


class Resume(msgspec.Struct, frozen=True):
    """Action: ask the platform to resume the task."""


Action = Kill | Suspend | Resume


class CompletedAction(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a completed action."""

    action: Action
    at: float
    """CLOCK_MONOTONIC in seconds, taken just before the action."""
    attempt: int
    """Attempt that the action affected."""


class Story:
    """State machine of the demo for one task.

    Args:
        seconds: training time of the task.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.phase: Phase = "training"
        self.lines: list[MetricsRecord] = []
        self.events: list[Event] = []
        self.completed: list[CompletedAction] = []
        self.state = "queued"
        """Task state according to its events."""
        self._pids: dict[int, int] = {}
        self._attempt = 0

    def observe(self, lines: list[MetricsRecord], events: list[Event]) -> None:
        """Processes new metrics lines and new events of the task, each once and in order."""
        for event in events:
            self.events.append(event)
            self._observe_event(event)
        for line in lines:
            self.lines.append(line)
            fresh = bool(self.completed) and line.attempt > self.completed[-1].attempt
            if self.phase == "killed" and fresh:
                self.phase = "recovered"

    def _observe_event(self, event: Event) -> None:
        if event.attempt > self._attempt:
            self._attempt = event.attempt
            self._pids.clear()
        if event.kind == "rank_started":
            self._pids[int(event.detail["rank"])] = int(event.detail["pid"])
        elif event.kind == "rank_exited":
            self._pids.pop(int(event.detail["rank"]), None)
        elif event.kind in TERMINAL:
            self.phase = "over"
        elif event.kind == "suspended" and self.phase == "suspending":
            self.phase = "suspended"
        if event.kind in _STATES:
            self.state = _STATES[event.kind]

    def next_action(self) -> Action | None:
        """Returns the action that is due now, if any."""
        if self.phase == "suspended":
            return Resume()
        if not self.lines or self.lines[-1].attempt != self._attempt:
            return None
        done = self.lines[-1].trained_s / self.seconds
        if self.phase == "training" and done >= KILL_AT and self._pids:
            victim = max(self._pids)
            return Kill(victim, self._pids[victim])
        if self.phase == "recovered" and done >= SUSPEND_AT:
            return Suspend()
        return None

    def did(self, action: Action, at: float) -> None:
        """Records that `action` was carried out at time `at`."""
        self.completed.append(CompletedAction(action=action, at=at, attempt=self._attempt))
        if self.phase != "over":
            self.phase = _AFTER[type(action)]


_AFTER: dict[type[Action], Phase] = {Kill: "killed", Suspend: "suspending", Resume: "resumed"}

_STATES = {
    "queued": "queued",
    "starting": "starting",
    "restarting": "restarting",
    "running": "running",
    "suspending": "suspending",
    "suspended": "suspended",
    "resumed": "starting",
    "stopping": "stopping",
    "finished": "finished",
    "failed": "failed",
    "stopped": "stopped",
}
