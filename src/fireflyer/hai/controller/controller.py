"""The platform's only writer: accepts requests and engine events and carries out their effects.

Every transition is synchronous on the event loop: `lifecycle.py` computes the step, one transaction
writes the step, and memory gets the task's new value. The engine calls follow, in order for each
task, while the loop does other work. If a server dies between the write and the calls, the next
server carries out the calls: it recovers attempts and repeats pending stops, suspends and releases.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.errors import FireflyerError
from fireflyer.hai import lifecycle
from fireflyer.hai.controller.dispatch import RECALLED, Dispatch
from fireflyer.hai.controller.gangs import gang_of
from fireflyer.hai.controller.logs import MAX_WAIT_S, LogPiece, Logs
from fireflyer.hai.controller.metrics import Gauges, Metrics
from fireflyer.hai.controller.recorder import Recorder
from fireflyer.hai.controller.submission_queue import SubmissionQueue
from fireflyer.hai.controller.views import Views
from fireflyer.hai.database.node_marks import Mark, Marks
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.store import Moment, NewTask, Row, Store, unknown
from fireflyer.hai.faults.monitor import FaultMonitor
from fireflyer.hai.faults.rules import Decision, load
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import (
    Action,
    Launch,
    Note,
    Preempt,
    Release,
    Step,
    StopGang,
    SuspendGang,
    Task,
    Verdict,
)
from fireflyer.hai.model import (
    PER_ANSWER,
    TERMINAL,
    Event,
    LeaseRequest,
    Listing,
    TaskSpec,
    TaskView,
    WhyView,
)
from fireflyer.hai.model.admission import check_drain
from fireflyer.hai.model.engine import (
    Engine,
    EngineEvent,
    Gang,
    GangEnded,
    NodeObserved,
    NodesChanged,
    Outcome,
)
from fireflyer.hai.model.observations import Validator
from fireflyer.hai.scheduling.policies import DEFAULT
from fireflyer.hai.validation.monitor import ValidationMonitor
from fireflyer.hai.workspaces.tasks import Workspaces, finish_unless
from fireflyer.log import get_logger

LONGEST_SLEEP_S = 3600.0

_log = get_logger("hai")


class Controller:
    """Tasks of one home on one engine. All methods run on the event loop of `run`.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(self, home: Home, store: Store, engine: Engine, policy: str = DEFAULT) -> None:
        self._home = home
        self._store = store
        self._engine = engine
        self.workspaces = Workspaces(home, self._live_specs)
        self.dispatch = Dispatch(policy, Marks(store.database))
        self.dispatch.set_quotas(store.quotas())
        self._refresh_nodes()
        self._tasks: dict[str, Task] = {}
        self.submissions = SubmissionQueue(store, self.workspaces, self.dispatch, self._committed)
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None
        self._news = asyncio.Event()
        self._changes = 0
        self.logs = Logs(home, store, self._writing)
        self.meters = Metrics()
        self.meters.gauges = self._gauges
        self._draining = False
        self._closing = False
        tables = (load(home.path), store, engine, self._tasks)
        self.faults = FaultMonitor(*tables, self._directory, self._call, self._notify, self.drain)
        where = (home.path, home.tasks)
        self.validation = ValidationMonitor(*where, self, self.dispatch.nodes, store.row)
        self.faults.suspected = self.validation.suspected
        samples = Samples(store.database)
        self.recorder = Recorder(self.dispatch.cluster, self._tasks, self._directory, samples)
        self.meters.latest = lambda: self.recorder.latest.get("cluster", {})
        self._replan_timer: asyncio.TimerHandle | None = None
        self._views = Views(home, store, self._tasks, self.dispatch, self.faults.classifier)
        self.writing, self.lines = self._views.writing, self._views.lines

    # -- start and end -----------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        """Recovers an earlier server's tasks, calls `ready`, serves until cancelled or failed."""
        self._failed = asyncio.get_running_loop().create_future()
        self.workspaces.store.open()
        self._recover_tasks()
        ready()
        reader = asyncio.create_task(self._read_engine())
        watcher = asyncio.create_task(self.faults.watch())
        validator = asyncio.create_task(self.validation.watch())
        recorder = asyncio.create_task(self.recorder.watch())
        parts: set[asyncio.Future[None]] = {reader, watcher, validator, recorder, self._failed}
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for done in parts:
                if done.done():
                    done.result()
        finally:
            for part in parts:
                part.cancel()

    async def close(self) -> None:
        """Wakes every waiting request and closes the engine; attempts keep running."""
        self._closing = True
        if self._replan_timer is not None:
            self._replan_timer.cancel()
        self._notify()
        self.logs.end()
        for call in list(self._calls.values()):
            await asyncio.wait({call})
        await self._engine.close()
        self.logs.close()

    async def abandon(self) -> None:
        """Ends all processes of all tasks without writing to disk, because the home is gone or
        cannot be written."""
        tasks = list(self._tasks)
        self._tasks.clear()  # events find no task from now on
        await asyncio.gather(*(self._engine.release(id, self._home.tasks / id) for id in tasks))

    def _recover_tasks(self) -> None:
        histories = self._store.of_live(RECALLED)
        for task, spec in self._store.load():
            if task.state not in TERMINAL:
                self._tasks[task.id] = task
                self.dispatch.recover(task, spec, histories.get(task.id, []))
            if task.placement:
                gang = self._gang(task.id, task.attempt, task.placement, task.devices)
                self._call(task.id, partial(self._engine.recover, gang))
                if task.stopping:
                    self._call(task.id, partial(self._perform, StopGang(task.id, task.attempt)))
                elif task.state == "suspending":
                    self._call(task.id, partial(self._perform, SuspendGang(task.id, task.attempt)))
            elif task.previous and (task.state in TERMINAL or task.state == "suspended"):
                self._call(task.id, partial(self._perform, Release(task.id, task.attempt)))
        self._schedule()

    async def stop_all(self, *, at_once: bool = False) -> None:
        """Stops every unfinished task except suspended ones, and waits until no task holds nodes.

        Args:
            at_once: stop running ranks with a grace period of 0 s.
        """
        self._draining = self.submissions.closed = True
        for task in list(self._tasks.values()):
            if task.state == "suspended":
                continue
            step = lifecycle.request(task, "stop")
            if step.notes:
                self._apply(step, now())
            if at_once and task.placement:
                await self._engine.stop(task.id, task.attempt, 0.0)
        while any(task.placement for task in self._tasks.values()):
            await self._news.wait()

    # -- requests ----------------------------------------------------------------------------------

    def observed(self, found: Validator) -> Decision:
        """Records the result of a node check; the actions of the fault rules are done on return.

        Raises:
            TaskError: no such node.
        """
        return self.faults.observed(found)

    async def submit(self, spec: TaskSpec) -> TaskView:
        """Submits a task without a user; see `SubmissionQueue.submit`."""
        return self.submitted(await self.submissions.submit(spec, "", None))

    def submitted(self, row: Row) -> TaskView:
        """Returns the current view of a task that was just submitted."""
        task = self._tasks.get(row.task)
        if task is None or task.attempt or task.state != row.state:
            return self.view(row.task)
        return self._views.task(row)

    def _committed(self, tasks: Sequence[tuple[NewTask, Row]]) -> None:
        for fresh, row in tasks:
            order = int(row.task[1:])
            task = msgspec.structs.replace(fresh.step.task, id=row.task, order=order)
            self._tasks[row.task] = task
            self.meters.step(task, fresh.step.notes, fresh.when.wall)
            self.dispatch.submit(task, fresh.spec)
        self._schedule()
        self._notify()

    def request(self, name: str, what: lifecycle.Request) -> TaskView:
        """Stops, suspends or resumes a task.

        Raises:
            TaskError: no such task, or its state does not allow the request.
        """
        task = self._tasks.get(name)
        if task is None:
            row = self._store.row(name)
            task = Task(id=name, order=0, nodes=0, world=0, max_restarts=0, state=row.state)
        step = lifecycle.request(task, what)
        if step.notes:
            self._apply(step, now())
        return self.view(name)

    def lease(self, name: str, asked: LeaseRequest) -> bool:
        """Returns whether the requesting partition may continue the attempt; a granted lease is on
        disk on return.

        Raises:
            TaskError: no such task.
        """
        task = self._tasks.get(name)
        if task is None:
            self._store.row(name)
            return False
        step = lifecycle.grant(task, asked)
        if step is None:
            _log.info(
                "%s attempt %d: refused the lease of generation %d for %s, whose generation is %d",
                *(name, asked.attempt, asked.lease.generation, asked.lease.members, asked.held),
            )
            return False
        if step.notes:
            self._apply(step, now())
        return True

    def view(self, name: str) -> TaskView:
        """Returns the current view of a task.

        Raises:
            TaskError: no such task.
        """
        return self._views.task(self._store.row(name))

    def why(self, name: str) -> WhyView:
        """Explains what a task waits for, or why it is in its state.

        Raises:
            TaskError: no such task.
        """
        row = self._store.row(name)
        return self.dispatch.why(name, row.state, row.reason)

    def views(self, listing: Listing, after: str = "") -> list[TaskView]:
        """Returns at most PER_ANSWER tasks of a list, in order of submission, from the first task
        after `after` on; "": from the first of all."""
        return self._views.chosen(listing, after)

    def check_owner(self, name: str, user: str | None) -> None:
        """Rejects a task that does not belong to this user; None accepts every owner.

        Raises:
            NoSuchTask: the task does not exist, or does not belong to this user.
        """
        if user is not None and self._store.row(name).user != user:
            raise unknown(name)

    @property
    def closing(self) -> bool:
        """True if the server is shutting down and must answer every waiting request."""
        return self._closing

    async def events(
        self, after: int, name: str | None, wait_s: float, user: str | None = None
    ) -> list[Event]:
        """Returns events with a seq above `after`, only of one task or user if given. Waits up to
        `wait_s` for the first event.

        Raises:
            TaskError: no such task.
        """
        if name is not None:
            self._store.row(name)
        found: list[Event] = []

        def look() -> bool:
            found[:] = self._store.events(after, name, PER_ANSWER, user)
            return bool(found) or self._closing

        await self._wait(look, wait_s)
        return found

    async def news(self, known: int, wait_s: float) -> int:
        """Returns the number of changes so far; waits up to `wait_s` until it exceeds `known`."""
        await self._wait(lambda: self._changes > known or self._closing, wait_s)
        return self._changes

    async def log(
        self, name: str, rank: int, offset: int, attempt: int | None, wait_s: float
    ) -> LogPiece:
        """Returns bytes of a rank's log from `offset`; waits up to `wait_s` while the attempt runs.

        Raises:
            TaskError: no such task, attempt or rank.
        """
        return await self.logs.read(self.logs.find(name, rank, attempt), offset, wait_s)

    def _gauges(self) -> Gauges:
        found = self.dispatch.gauges()
        found.tasks = dict(Counter(task.state for task in self._tasks.values()))
        return found

    def _writing(self, name: str, attempt: int) -> bool:
        """Returns whether processes of this attempt may still write to its logs."""
        task = self._tasks.get(name)
        return task is not None and bool(task.placement) and task.attempt == attempt

    async def _wait(self, look: Callable[[], bool], wait_s: float) -> None:
        """Calls `look` after every change until it returns true or `wait_s` is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                while not (look() or wait_s <= 0):
                    await self._news.wait()

    # -- transitions -------------------------------------------------------------------------------

    def _apply(self, step: Step, when: Moment) -> None:
        """Writes a step and applies its effects, then plans, because nodes may be free now."""
        before = self._tasks.get(step.task.id)
        self._commit(step, when)
        if before is not None:
            self.dispatch.follow(before, step.task)
        self._schedule()
        self._notify()

    def _commit(self, step: Step, when: Moment) -> None:
        """Writes a step and applies its effects, except for the update of the planner's cluster."""
        self._store.write(step, when)
        task = step.task
        before = self._tasks.get(task.id)
        self._tasks[task.id] = task
        self.meters.step(task, step.notes, when.wall)
        if before is not None and before.placement and not task.placement:
            self.logs.wake(task.id, task.attempt)
        for note in step.notes:
            _log.info("%s attempt %d: %s %s", task.id, task.attempt, note.kind, note.detail or "")
        for action in step.actions:
            self._call(task.id, partial(self._perform, action))
        if task.state in TERMINAL:
            del self._tasks[task.id]

    def _schedule(self) -> None:
        """Plans. An error ends the server, because no request would report the error."""
        if self._draining or self._closing:
            return
        try:
            self._plan()
        except Exception as error:  # noqa: BLE001  # `run` raises every error
            self._fail(error)

    def _plan(self) -> None:
        """Plans until no action is due, then sets a timer if time alone may cause the next plan."""
        wait_s: float | None = 0.0
        while wait_s == 0.0:
            with self.meters.plan_s.time():
                actions = self.dispatch.plan()
            for action in actions:
                step = lifecycle.decide(self._tasks[action.task], action)
                self._commit(step, now())
                self.dispatch.apply(action)
            wait_s = self.dispatch.wait_s()
        if self._replan_timer is not None:
            self._replan_timer.cancel()
            self._replan_timer = None
        if wait_s is not None:
            later = min(wait_s, LONGEST_SLEEP_S)
            self._replan_timer = asyncio.get_running_loop().call_later(later, self.replan)

    def drain(self, node: str, mark: Mark, *, evict: bool = False) -> None:
        """Drains a node, so that no new task starts there; the mark is on disk on return. A drain
        without an end time is also passed to the engine. With `evict` the next plan preempts the
        tasks on the node.

        Raises:
            TaskError: no such node.
            ConfigError: the reason is not one line, or `mark.until` is in the past.
        """
        check_drain(mark.reason, mark.until, self.dispatch.now())
        self.dispatch.mark(node, mark)
        if evict:
            self.dispatch.cluster.evict(node, f"{node} is drained: {mark.reason}")
        if mark.until is None:
            self._call(f"drain {node}", partial(self._drain_engine, node, mark.reason))
        self.replan()

    async def _drain_engine(self, node: str, reason: str) -> None:
        try:
            await self._engine.drain(node, reason)
        except FireflyerError as error:
            _log.warning("the engine could not drain %s: %s", node, error)

    def unmark(self, node: str) -> None:
        """Removes a node's mark; the change is on disk on return.

        Raises:
            TaskError: no such node.
        """
        self.dispatch.mark(node, None)
        self.replan()

    async def undrain_engine(self, node: str) -> None:
        """Makes the engine use a node that the engine had drained.

        Raises:
            TaskError: the engine does not allow the change.
        """
        if any(found.name == node and found.state == "drained" for found in self._engine.nodes()):
            await self._engine.undrain(node)
            self._refresh_nodes()
            self.replan()

    def read_quotas(self) -> None:
        """Reads changed quotas; they apply to tasks that start from now on."""
        self.dispatch.set_quotas(self._store.quotas())
        self.replan()

    def replan(self) -> None:
        """Plans again because nodes, windows, quotas or the time have changed."""
        self._schedule()
        self._notify()

    def _notify(self) -> None:
        """Wakes all requests that wait for a change."""
        self._changes += 1
        self._news.set()
        self._news = asyncio.Event()

    # -- the engine --------------------------------------------------------------------------------

    async def _read_engine(self) -> None:
        async for event in self._engine.events():
            if isinstance(event, NodesChanged):
                self._refresh_nodes()
                self._schedule()
                self._notify()
            else:
                self._observe(event)

    def _refresh_nodes(self) -> None:
        self.dispatch.set_nodes(self._engine.nodes())

    def _observe(self, event: EngineEvent) -> None:
        task = self._tasks.get(event.task)
        if task is None:
            return
        if isinstance(event, NodeObserved):
            self.faults.node_observed(event)
            return
        verdict = Verdict()
        notes: tuple[Note, ...] = ()
        if isinstance(event, GangEnded):
            verdict, notes = self.faults.ended(task, event)
        step = lifecycle.observe(task, event, verdict)
        if not step.notes:
            return
        more, act = self.faults.lost(event)
        step = msgspec.structs.replace(step, notes=(*notes, *step.notes, *more))
        self._apply(step, Moment(event.monotonic_ns, event.wall))
        act()

    def _call(self, name: str, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Queues an engine call behind the earlier calls of the same task."""
        before = self._calls.get(name)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            self._store.database.alive()
            await call()

        task = asyncio.create_task(run())
        self._calls[name] = task
        task.add_done_callback(lambda done: self._call_done(name, done))

    def _call_done(self, name: str, done: asyncio.Task[None]) -> None:
        if self._calls.get(name) is done:
            del self._calls[name]
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Makes `run` raise this error, unless `run` has failed already."""
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # marks the error as retrieved, in case `run` ends first

    async def _perform(self, action: Action) -> None:
        match action:
            case Launch():
                await self._launch(action)
            case SuspendGang():
                await self._engine.suspend(action.task, action.attempt, self._grace(action.task))
            case StopGang():
                await self._engine.stop(action.task, action.attempt, self._grace(action.task))
            case Preempt():
                raise AssertionError("a preemption is carried out as a suspend")
            case Release():
                await self._engine.release(action.task, self._home.tasks / action.task)
                self._store.released(action.task, action.attempt)

    async def _launch(self, action: Launch) -> None:
        gang = self._gang(action.task, action.attempt, action.nodes, action.devices)
        try:
            gang.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._home.tasks / action.task / "output").mkdir(mode=0o700, exist_ok=True)
            if not await self._prepared(action, gang):
                return
            await self._engine.launch(gang)
        except (FireflyerError, OSError) as error:
            self._never_started(action, "failed", f"cannot start: {error}")
            return
        self._store.launched(action.task, action.attempt)

    async def _prepared(self, action: Launch, gang: Gang) -> bool:
        """Prepares the attempt; returns False if the attempt must no longer start."""
        row = self._store.row(action.task)

        async def prepare() -> None:
            if row.spec.workspace or row.spec.venv:
                where = gang.directory / "0.log"
                await self.workspaces.prepare(action.task, row.spec, where, row.user)
            await self._engine.prepare(gang)

        def unwanted() -> bool:
            task = self._tasks[action.task]
            return self._closing or task.stopping or task.state == "suspending"

        if await finish_unless(prepare(), unwanted, lambda: self._news.wait()):
            return True
        if not self._closing:  # otherwise the next server reports the attempt as lost
            outcome: Outcome = "stopped" if self._tasks[action.task].stopping else "suspended"
            self._never_started(action, outcome, "before its ranks were started")
        return False

    def _never_started(self, launch: Launch, outcome: Outcome, reason: str) -> None:
        when = now()
        ended = GangEnded(
            task=launch.task, attempt=launch.attempt, outcome=outcome, reason=reason,
            monotonic_ns=when.monotonic_ns, wall=when.wall,
        )  # fmt: skip
        self._observe(ended)

    def _live_specs(self) -> list[TaskSpec]:
        return [row.spec for row in self._store.rows(live=True)]

    def _gang(
        self, name: str, attempt: int, nodes: tuple[str, ...], devices: tuple[tuple[int, ...], ...]
    ) -> Gang:
        row = self._store.row(name)
        paths = self.workspaces.paths(name, row.spec)
        directory = self._directory(name, attempt)
        return gang_of(row, self._store.secret(name), paths, directory, nodes, devices)

    def _grace(self, name: str) -> float:
        return self._store.row(name).spec.grace_s

    def _directory(self, name: str, attempt: int) -> Path:
        return self._home.tasks / name / str(attempt)


def now() -> Moment:
    """Returns the current time on the monotonic and the wall clock."""
    return Moment(time.monotonic_ns(), time.time())
