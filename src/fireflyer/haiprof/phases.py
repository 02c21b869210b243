"""Phases of training steps: a pure function of events.

A step lasts from the end of the last optimizer of one round to the end of the last optimizer of the
next: several optimizers (a GAN) make one step together. Inside a phase, time belongs to the innermost
open phase, with one exception: a forward inside a backward is recomputation, and stays backward.

Time between phases belongs to the phase that it prepares or completes:

    forward → backward      forward      the loss
    forward → forward       forward      a loss module, a second model
    backward → forward      forward      preparation of the next micro-batch
    backward → optimizer    optimizer    clipping, unscaling
    optimizer → optimizer   optimizer    zero_grad, schedulers
    data → next phase       data         the batch goes to its device
    optimizer → forward     data         if no loader was seen in the step: the script makes its batch
    everything else         other        logging, callbacks

`Row.between` tells how much of each phase was attributed by this table.
"""

from collections.abc import Iterable, Iterator

import msgspec

from fireflyer.haiprof.events import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DATA,
    FORWARD,
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
_INTERRUPTIONS = (COMMUNICATION, CHECKPOINT)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One training step of one rank."""

    step: int
    """Count of steps since the session began."""
    begin_ns: int
    """Monotonic time since the start of the session."""
    seconds: float
    phases: dict[str, float]
    """Seconds by phase name; the sum is `seconds`."""
    between: dict[str, float]
    """Part of `phases` that lies between phases, by phase name."""


class PhaseAccountant:
    """Turns the events of one process into rows. Events of one thread must come in order.

    An event of phase OTHER is a report: its time is how long the gradient reducer of torch DDP
    waited in native code during the backward of this step. It moves from backward to communication.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self._open: list[tuple[int, int]] = []
        self._last = OTHER
        self._at = 0
        self._begun: int | None = None
        self._spent = [0] * len(PHASES)
        self._between = [0] * len(PHASES)
        self._pending = 0
        self._loaded = False
        self._updated: set[int] = set()
        self._round: set[int] = set()
        self._kept: list[tuple[int, list[int], list[int]]] = []
        self._reported = 0
        self.rows = 0

    def feed(self, events: Iterable[Event]) -> Iterator[Row]:
        """Yields the steps that these events complete."""
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
        if (event.phase, event.label) not in self._open:
            return  # began before the session
        if phase not in _INTERRUPTIONS:
            self._settle(phase)
            self._last = phase
        while self._open.pop() != (event.phase, event.label):
            pass  # phases inside it that ended with an exception
        if event.phase == UPDATE and all(kind != UPDATE for kind, _ in self._open):
            yield from self._update_ended(event.label)

    def _pass_time(self, now: int) -> None:
        """Counts the time since the last event for the innermost phase, or as pending."""
        passed, self._at = now - self._at, now
        top = self._phase_now()
        if top is None:
            self._pending += passed
        else:
            self._spent[top] += passed

    def _phase_now(self) -> int | None:
        """Returns the phase of the innermost open event; None between phases.

        An optimizer that runs a closure is between phases, too: its forward and backward are inside.
        """
        if not self._open:
            return None
        top = self._open[-1][0]
        if top == FORWARD and any(kind == BACKWARD for kind, _ in self._open):
            return BACKWARD
        return None if top == UPDATE else top

    def _settle(self, following: int) -> None:
        """Attributes pending time, now that the phase after it is known."""
        if not self._pending:
            return
        own = bool(self._open) and self._open[-1][0] == UPDATE
        if own and self._last == OPTIMIZER:
            phase = OPTIMIZER
        elif (self._last, following) == (OPTIMIZER, FORWARD):
            within_a_round = bool(self._updated) and len(self._round) > 1
            phase = FORWARD if within_a_round else OTHER if self._loaded else DATA
        else:
            phase = _AFTER.get((self._last, following), OTHER)
        self._spent[phase] += self._pending
        if not (own and phase == OPTIMIZER):
            self._between[phase] += self._pending
        self._pending = 0

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
        """Sets aside the time up to this optimizer's end."""
        spent = self._spent
        if self._reported:
            moved = min(self._reported, spent[BACKWARD])
            spent[BACKWARD] -= moved
            spent[COMMUNICATION] += moved
        self._kept.append((self._at, spent, self._between))
        self._spent, self._between = [0] * len(PHASES), [0] * len(PHASES)
        self._reported = 0

    def _close_kept(self) -> Iterator[Row]:
        """Makes a row of what was set aside; the first one is incomplete, and dropped."""
        if not self._kept:
            return
        self._loaded = False
        end = self._kept[-1][0]
        begin, self._begun = self._begun, end
        parts, self._kept = self._kept, []
        if begin is None:
            return
        spent = [sum(part[1][n] for part in parts) for n in range(len(PHASES))]
        between = [sum(part[2][n] for part in parts) for n in range(len(PHASES))]
        yield Row(
            step=self.rows,
            begin_ns=begin,
            seconds=(end - begin) / 1e9,
            phases={name: ns / 1e9 for name, ns in zip(PHASES, spent, strict=True)},
            between={name: ns / 1e9 for name, ns in zip(PHASES, between, strict=True) if ns},
        )
        self.rows += 1
