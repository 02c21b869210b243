"""Runs a plan on a task. One thread follows the history, one follows the output of rank 0, and one
injects the events."""

import contextlib
import threading
import time
from collections.abc import Callable

from fireflyer.errors import FireflyerError, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import TERMINAL, Event, TaskView
from fireflyer.hai.rehearsal.injector import Injector
from fireflyer.hai.rehearsal.plan import Moment, Planned, due
from fireflyer.hai.rehearsal.report import Made, Report, report
from fireflyer.hai.rehearsal.steps import AttemptSteps, StepReader

WAIT_S = 20.0


class Rehearsal:
    """A plan on a task that was just submitted.

    Args:
        client: the platform.
        task: view of the submitted task.
        plan: the events.
        tell: called with a line for users when an event is injected.
    """

    def __init__(
        self,
        client: Client,
        task: TaskView,
        plan: tuple[Planned, ...],
        tell: Callable[[str], None],
    ) -> None:
        self._client = client
        self._task = task
        self._plan = plan
        self._tell = tell
        self._injector = Injector(client, task.id)
        self._news = threading.Condition()
        self._history: list[Event] = []
        self._readers: dict[int, StepReader] = {}
        self._made: list[Made] = []
        self._ran_ns: int | None = None
        self._state = "queued"
        self._attempt = 0
        self._over = False
        self._error: Exception | None = None
        self._threads = [
            threading.Thread(target=self._guarded, args=(call,), daemon=True)
            for call in (self._follow_history, self._make_events)
        ]

    def start(self) -> None:
        """Starts the rehearsal; `finish` ends it."""
        for thread in [*self._threads]:  # a copy, because the first thread adds the output readers
            thread.start()

    def finish(self) -> Report:
        """Waits until the task is over; returns the report on the events.

        Raises:
            FireflyerError: the connection to the platform was lost.
        """
        for thread in self._threads:
            thread.join()
        self._injector.close()
        if self._error is not None:
            raise self._error
        steps = {attempt: reader.attempt_steps for attempt, reader in self._readers.items()}
        task = self._client.task(self._task.id)
        return report(self._plan, self._made, self._history, steps, task)

    def leave(self) -> None:
        """Stops the rehearsal: injects no more events and continues stopped processes. The task
        itself keeps running."""
        with self._news:
            self._over = True
            self._news.notify_all()
        self._injector.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001  # passed to the thread that calls `finish`
            with self._news:
                self._error = self._error or error
                self._over = True
                self._news.notify_all()

    # -- following the task --------------------------------------------------------------------------

    def _follow_history(self) -> None:
        after = 0
        while not self._over:
            for event in self._client.events(task=self._task.id, after=after, wait_s=WAIT_S):
                after = event.seq
                if event.kind == "starting":
                    self._follow_output(event.attempt)
                with self._news:
                    self._history.append(event)
                    self._observe(event)
                    self._news.notify_all()

    def _observe(self, event: Event) -> None:
        elastic = self._task.spec.elastic
        if event.kind in ("queued", "starting", "running", "suspending", "suspended", *TERMINAL):
            self._state = event.kind
        elif event.kind in ("gang_ended", "stopping") or (
            event.kind == "rank_exited" and not elastic
        ):
            self._state = "ending"
        self._attempt = event.attempt
        if event.kind == "running" and self._ran_ns is None:
            self._ran_ns = event.monotonic_ns
        self._over = self._over or event.kind in TERMINAL

    def _follow_output(self, attempt: int) -> None:
        self._readers[attempt] = StepReader()
        thread = threading.Thread(
            target=self._guarded, args=(lambda: self._read_output(attempt),), daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _read_output(self, attempt: int) -> None:
        offset, end = 0, False
        while not end:
            chunk = self._client.read_log_chunk(self._task.id, 0, offset, attempt, WAIT_S)
            offset, end = chunk.next_offset, chunk.end
            with self._news:
                self._readers[attempt].feed(chunk.data)
                self._news.notify_all()

    # -- injecting events ----------------------------------------------------------------------------

    def _make_events(self) -> None:
        pending = list(self._plan)
        resumed = 0
        while True:
            with self._news:
                if self._over:
                    return
                now = self._moment()
                ready = next((planned for planned in pending if due(planned, now)), None)
                resume = (
                    ready is None and now.suspended and resumed < self._attempt
                    and not any(planned.kind == "resume" for planned in pending)
                )  # fmt: skip
                if ready is None and not resume:
                    self._news.wait(self._until_next(pending, now))
                    continue
                attempt, step = self._attempt, self._attempt_steps().last
            if ready is None:
                resumed = attempt
                with contextlib.suppress(TaskError):  # another client has resumed the task
                    self._client.resume(self._task.id)
                continue
            if ready.kind == "resume":
                resumed = attempt
            pending.remove(ready)
            self._make(ready, attempt, step)

    def _make(self, planned: Planned, attempt: int, step: int | None) -> None:
        with self._news:
            seen = len(self._history)
        at, failed = time.monotonic_ns(), ""
        try:
            self._injector.make(planned)
        except FireflyerError as error:
            failed = str(error)
        made = Made(planned=planned, attempt=attempt, monotonic_ns=at, step=step, failed=failed)
        self._made.append(made)
        self._tell(f"rehearsal: {planned.text}" + (f": {failed}" if failed else ""))
        if not failed and planned.kind in ("suspend", "kill-rank", "kill-node"):
            self._await_effect(attempt, seen)

    def _await_effect(self, attempt: int, seen: int) -> None:
        """Waits until the history shows an effect of the injected event, because the plan expects
        the next event in the state after this effect."""
        with self._news:
            while not self._over and self._state == "running" and self._attempt == attempt:
                if len(self._history) > seen and self._task.spec.elastic:
                    return
                self._news.wait()

    def _attempt_steps(self) -> AttemptSteps:
        reader = self._readers.get(self._attempt)
        return AttemptSteps() if reader is None else reader.attempt_steps

    def _moment(self) -> Moment:
        ran_ns = self._ran_ns
        return Moment(
            ran_s=0.0 if ran_ns is None else (time.monotonic_ns() - ran_ns) / 1e9,
            running=self._state == "running",
            suspended=self._state == "suspended",
            step=self._attempt_steps().last,
        )

    def _until_next(self, pending: list[Planned], now: Moment) -> float | None:
        """Returns the seconds until an event is due by time alone; None if the history or the
        output must change first."""
        times = [planned.at_s - now.ran_s for planned in pending if planned.at_s is not None]
        ahead = [left for left in times if left > 0]
        return min(ahead) if ahead and self._ran_ns is not None else None
