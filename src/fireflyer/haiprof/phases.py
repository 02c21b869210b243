"""Phases of training steps: a pure function of events.

In a round, each optimizer steps once; a GAN, for example, has several optimizers. A step lasts from
the end of one round to the end of the next round. Inside a phase, time counts for the innermost
open phase. The exception is a forward inside a backward: it is recomputation, and counts as
backward. Time between phases counts for the phase that it prepares or completes:

    forward → backward      forward      the loss
    forward → forward       forward      a loss module, a second model
    backward → forward      forward      preparation of the next micro-batch
    backward → optimizer    optimizer    clipping, unscaling
    optimizer → optimizer   optimizer    zero_grad, schedulers
    data → next phase       data         the batch goes to its device
    optimizer → forward     data         if no loader was seen in the step: the script makes its batch
    everything else         framework    inside the loop of a Trainer
                            other        elsewhere: logging, what the script does between steps

`Row.between` has the part of each phase that this table attributed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from fireflyer.haiprof.events import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
    FRAMEWORK,
    OPTIMIZER,
    OTHER,
    PHASES,
    UPDATE,
    Event,
)

_AFTER = {
    (FORWARD, BACKWARD): FORWARD,
    (FORWARD, FORWARD): FORWARD,
    (FORWARD, OPTIMIZER): OPTIMIZER,
    (BACKWARD, BACKWARD): BACKWARD,
    (BACKWARD, FORWARD): FORWARD,
    (BACKWARD, OPTIMIZER): OPTIMIZER,
    (OPTIMIZER, OPTIMIZER): OPTIMIZER,
    (OPTIMIZER, BACKWARD): FORWARD,
    (DATA, DATA): DATA,
    (DATA, FORWARD): DATA,
    (DATA, BACKWARD): FORWARD,
    (DATA, OPTIMIZER): DATA,
}
_INTERRUPTIONS = (COMMUNICATION, CHECKPOINT, CALLBACKS, FRAMEWORK)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one rank."""

    step: int
    """Number of steps since the start of the session."""
    begin_ns: int
    """Monotonic time since the start of the session."""
    seconds: float
    phases: dict[str, float]
    """Seconds by phase name; the sum is `seconds`."""
    between: dict[str, float]
    """Part of `phases` that lies between phases, by phase name."""
    callbacks: dict[str, float] = {}
    """Seconds of the phase `callbacks` by callback."""


class _Part(NamedTuple):
    """Time in nanoseconds up to the end of one optimizer's step."""

    end: int
    spent: list[int]
    between: list[int]
    by_callback: Counter[int]


class PhaseAccountant:
    """Turns the events of one process into rows. The events of each thread must be in order.

    An event of phase OTHER is a report. Its time is the native wait of torch DDP's gradient reducer
    in the backward of this step; that time moves from backward to communication.

    An event of phase FRAMEWORK marks the loop of a Trainer. Phases inside the loop count as usual.

    Args:
        name_of: returns the name of a label.
    """

    def __init__(self, name_of: Callable[[int], str] = str) -> None:
        self._name_of = name_of
        self.thread: int | None = None
        self._open: list[tuple[int, int]] = []
        self._last = OTHER
        self._at = 0
        self._begun: int | None = None
        self._spent = [0] * len(PHASES)
        self._between = [0] * len(PHASES)
        self._pending = 0
        self._pending_in_loop = 0
        self._loaded = False
        self._updated: set[int] = set()
        self._round: set[int] = set()
        self._by_callback: Counter[int] = Counter()
        self._kept: list[_Part] = []
        self._reported = 0
        self.rows = 0

    def feed(self, events: Iterable[Event]) -> Iterator[Row]:
        """Yields a row for each step that these events complete."""
        for event in events:
            if self.thread is None and event.phase == UPDATE:
                self.thread = event.thread  # the thread that trains
            if self.thread is None or event.thread != self.thread:
                continue
            yield from self._step(event)

    def _step(self, event: Event) -> Iterator[Row]:
        if event.phase == OTHER:
            self._reported = event.time_ns
            return
        self._pass_time(event.time_ns)
        phase = OPTIMIZER if event.phase == UPDATE else event.phase
        if event.begin:
            if phase not in _INTERRUPTIONS:
                self._settle(phase)
                self._loaded |= phase == DATA
            self._open.append((event.phase, event.label))
            if event.phase == UPDATE:
                self._last = OPTIMIZER
            return
        if (event.phase, event.label) not in self._open:  # the phase began before the session
            if phase == FRAMEWORK:
                self._pending_in_loop = self._pending
            return
        if phase not in _INTERRUPTIONS:
            self._settle(phase)
            self._last = phase
        while self._open.pop() != (event.phase, event.label):
            pass  # phases inside this phase that ended with an exception
        if event.phase == UPDATE and all(kind != UPDATE for kind, _ in self._open):
            yield from self._update_ended(event.label)

    def _pass_time(self, now: int) -> None:
        """Counts the time since the last event for the innermost phase, or as pending."""
        passed, self._at = now - self._at, now
        top, label = self._innermost()
        if top == FORWARD and any(kind == BACKWARD for kind, _ in self._open):
            top = BACKWARD
        if top is None or top == UPDATE:  # an optimizer may run a closure: forward and backward
            self._pending += passed
            if any(kind == FRAMEWORK for kind, _ in self._open):
                self._pending_in_loop += passed
            return
        self._spent[top] += passed
        if top == CALLBACKS:
            self._by_callback[label] += passed

    def _innermost(self) -> tuple[int | None, int]:
        """Returns phase and label of the innermost open event; (None, 0) between phases."""
        for phase, label in reversed(self._open):
            if phase != FRAMEWORK:
                return phase, label
        return None, 0

    def _settle(self, following: int) -> None:
        """Attributes pending time, now that the phase after it is known."""
        if not self._pending:
            return
        own = self._innermost()[0] == UPDATE
        if own and self._last == OPTIMIZER:
            phase = OPTIMIZER
        elif (self._last, following) == (OPTIMIZER, FORWARD):
            within_a_round = bool(self._updated) and len(self._round) > 1
            phase = FORWARD if within_a_round else OTHER if self._loaded else DATA
        else:
            phase = _AFTER.get((self._last, following), OTHER)
        if phase == OTHER:
            self._spent[FRAMEWORK] += self._pending_in_loop
            self._between[FRAMEWORK] += self._pending_in_loop
            self._pending -= self._pending_in_loop
        self._spent[phase] += self._pending
        if not (own and phase == OPTIMIZER):
            self._between[phase] += self._pending
        self._pending = self._pending_in_loop = 0

    def _update_ended(self, optimizer: int) -> Iterator[Row]:
        """Ends a step if all optimizers of a round have stepped."""
        if optimizer in self._updated:
            self._round = self._updated
            yield from self._close_kept()
            self._updated = set()
        self._updated.add(optimizer)
        self._keep()
        if self._round and self._updated >= self._round:
            yield from self._close_kept()
            self._updated = set()

    def _keep(self) -> None:
        """Stores the time up to this optimizer's end until the step ends."""
        spent = self._spent
        if self._reported:
            moved = min(self._reported, spent[BACKWARD])
            spent[BACKWARD] -= moved
            spent[COMMUNICATION] += moved
        self._kept.append(_Part(self._at, spent, self._between, self._by_callback))
        self._spent, self._between = [0] * len(PHASES), [0] * len(PHASES)
        self._by_callback = Counter()
        self._reported = 0

    def _close_kept(self) -> Iterator[Row]:
        """Returns a row of the stored times; drops the first row, which is incomplete."""
        if not self._kept:
            return
        self._loaded = False
        end = self._kept[-1].end
        begin, self._begun = self._begun, end
        parts, self._kept = self._kept, []
        if begin is None:
            return
        spent = [sum(part.spent[n] for part in parts) for n in range(len(PHASES))]
        between = [sum(part.between[n] for part in parts) for n in range(len(PHASES))]
        callbacks = sum((part.by_callback for part in parts), Counter[int]())
        yield Row(
            step=self.rows,
            begin_ns=begin,
            seconds=(end - begin) / 1e9,
            phases={name: ns / 1e9 for name, ns in zip(PHASES, spent, strict=True)},
            between={name: ns / 1e9 for name, ns in zip(PHASES, between, strict=True) if ns},
            callbacks={self._name_of(label): ns / 1e9 for label, ns in callbacks.items()},
        )
        self.rows += 1
