"""The platform's one writer: takes requests and engine events, and has their effects carried out.

Every transition is synchronous on the event loop: the scheduler's step, one transaction, the new
value in memory; then the engine calls, in order for each task, beside the loop's other work. What
was written and not yet carried out when a server dies is carried out by the next one: attempts are
recovered, and pending stops, suspends and releases are asked for again.
"""

import asyncio
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.errors import FireflyerError, TaskError
from fireflyer.hai import scheduler
from fireflyer.hai.admission import RESERVED, check
from fireflyer.hai.engines import Engine, EngineEvent, Gang, GangEnded, NodesChanged
from fireflyer.hai.home import Home
from fireflyer.hai.logs import MAX_WAIT_S, LogPiece, Logs
from fireflyer.hai.meters import Gauges, Meters
from fireflyer.hai.model import TERMINAL, Event, LeaseRequest, RankView, TaskSpec, TaskView
from fireflyer.hai.scheduler import (
    Action,
    Launch,
    Release,
    State,
    Step,
    StopGang,
    SuspendGang,
    Task,
)
from fireflyer.hai.store import Moment, Row, Store, unknown
from fireflyer.log import get_logger

EVENTS_PER_ANSWER = 1000

_log = get_logger("hai")


class Controller:
    """Tasks of one home on one engine. All methods run on the event loop of `run`."""

    def __init__(self, home: Home, store: Store, engine: Engine) -> None:
        self._home = home
        self._store = store
        self._engine = engine
        self._nodes: tuple[str, ...] = ()
        self._usable: tuple[str, ...] = ()
        self._look_at_nodes()
        self._tasks: dict[str, Task] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None
        self._news = asyncio.Event()
        self.logs = Logs(home, store, self._writing)
        self.meters = Meters()
        self.meters.gauges = self._gauges
        self._draining = False
        self._closing = False

    # -- life --------------------------------------------------------------------------------------

    async def run(self, ready: Callable[[], None]) -> None:
        """Takes up what an earlier server left, calls `ready`, then serves until cancelled or failed."""
        self._failed = asyncio.get_running_loop().create_future()
        self._take_up()
        ready()
        reader = asyncio.create_task(self._read_engine())
        try:
            await asyncio.wait({reader, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for done in (reader, self._failed):
                if done.done():
                    done.result()
        finally:
            reader.cancel()
            self._failed.cancel()

    async def close(self) -> None:
        """Wakes every waiting request and lets go of the engine; attempts run on."""
        self._closing = True
        self._tell()
        self.logs.end()
        for call in list(self._calls.values()):
            await asyncio.wait({call})
        await self._engine.close()
        self.logs.close()

    def _take_up(self) -> None:
        for task in self._store.load():
            if task.state not in TERMINAL:
                self._tasks[task.id] = task
            if task.placement:
                self._call(task.id, partial(self._recover, task))
                if task.stopping:
                    self._call(task.id, partial(self._perform, StopGang(task.id, task.attempt)))
                elif task.state == "suspending":
                    self._call(task.id, partial(self._perform, SuspendGang(task.id, task.attempt)))
            elif task.previous and (task.state in TERMINAL or task.state == "suspended"):
                self._call(task.id, partial(self._perform, Release(task.id, task.attempt)))
        self._schedule()

    async def stop_all(self, *, at_once: bool = False) -> None:
        """Stops every task that is not over, except suspended ones, and waits until they are.

        Args:
            at_once: give running ranks no grace.
        """
        self._draining = True
        for task in list(self._tasks.values()):
            if task.state == "suspended":
                continue
            step = scheduler.request(task, "stop")
            if step.notes:
                self._apply(step, now())
            if at_once and task.placement:
                await self._engine.stop(task.id, task.attempt, 0.0)
        while any(task.placement for task in self._tasks.values()):
            await self._news.wait()

    # -- requests ----------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """Each node's name and the task on it, or None."""
        holder = {node: task.id for task in self._tasks.values() for node in task.placement}
        return [{"name": node, "task": holder.get(node)} for node in self._nodes]

    def submit(self, spec: TaskSpec, user: str = "") -> TaskView:
        """Takes a user's task in; it is on disk when this returns.

        Raises:
            ConfigError: a field of the spec cannot work.
            TaskError: it asks for more nodes than there are.
        """
        check(spec)
        if self._draining:
            raise TaskError("the server is shutting down and takes no more tasks")
        fresh = Task(
            id="", order=0, nodes=spec.nodes, world=spec.nodes * spec.ranks_per_node,
            max_restarts=spec.max_restarts,
        )  # fmt: skip
        step = scheduler.admit(fresh, len(self._nodes))
        when = now()
        name = self._store.add(spec, secrets.token_hex(32), step, when, user)
        self._tasks[name] = msgspec.structs.replace(step.task, id=name, order=int(name[1:]))
        self.meters.step(self._tasks[name], step.notes, when.wall)
        self._schedule()
        self._tell()
        return self.view(name)

    def request(self, name: str, what: scheduler.Request) -> TaskView:
        """Stops, suspends or resumes a task.

        Raises:
            TaskError: no such task, or its state does not allow it.
        """
        task = self._tasks.get(name)
        if task is None:
            row = self._store.row(name)
            task = Task(id=name, order=0, nodes=0, world=0, max_restarts=0, state=row.state)
        step = scheduler.request(task, what)
        if step.notes:
            self._apply(step, now())
        return self.view(name)

    def lease(self, name: str, asked: LeaseRequest) -> bool:
        """Whether the part that asks may go on with the attempt; it is on disk when this returns true.

        Raises:
            TaskError: no such task.
        """
        task = self._tasks.get(name)
        if task is None:
            self._store.row(name)
            return False
        step = scheduler.grant(task, asked)
        if step is None:
            _log.info(
                "%s attempt %d: refused generation %d to %s, which come from %d",
                *(name, asked.attempt, asked.lease.generation, asked.lease.members, asked.held),
            )
            return False
        if step.notes:
            self._apply(step, now())
        return True

    def view(self, name: str) -> TaskView:
        """A task as of now.

        Raises:
            TaskError: no such task.
        """
        return self._view(self._store.row(name))

    def views(self, *, live: bool, user: str | None = None) -> list[TaskView]:
        """All tasks in order of submission, or only those that are not over, or of one user."""
        return [self._view(row) for row in self._store.rows(live=live, user=user)]

    def check_owner(self, name: str, user: str | None) -> None:
        """Refuses a task that is not of this user; None: any user's will do.

        Raises:
            NoSuchTask: it belongs to another, or to nobody.
        """
        if user is not None and self._store.row(name).user != user:
            raise unknown(name)

    @property
    def closing(self) -> bool:
        """Whether the server ends, and every waiting request is to be answered."""
        return self._closing

    def last_seq(self) -> int:
        """Seq of the newest event."""
        return self._store.last_seq()

    async def events(
        self, after: int, name: str | None, wait_s: float, user: str | None = None
    ) -> list[Event]:
        """Events above `after`, of one task or one user's tasks when named; waits up to `wait_s` for the
        first.

        Raises:
            TaskError: no such task.
        """
        if name is not None:
            self._store.row(name)
        found: list[Event] = []

        def look() -> bool:
            found[:] = self._store.events(after, name, EVENTS_PER_ANSWER, user)
            return bool(found) or self._closing

        await self._wait(look, wait_s)
        return found

    async def log(
        self, name: str, rank: int, offset: int, attempt: int | None, wait_s: float
    ) -> LogPiece:
        """Bytes of a rank's log from `offset`; waits up to `wait_s` for the first while the attempt runs.

        Raises:
            TaskError: no such task, attempt or rank.
        """
        return await self.logs.read(self.logs.find(name, rank, attempt), offset, wait_s)

    def _gauges(self) -> Gauges:
        found = Gauges()
        held = {node for task in self._tasks.values() for node in task.placement}
        found.tasks = dict(Counter(task.state for task in self._tasks.values()))
        found.queued = {"normal": found.tasks.get("queued", 0)}  # the one priority there is
        found.nodes = {"busy": 0, "free": 0}
        found.nodes |= Counter(
            "busy" if node in held else "free" if node in self._usable else "unusable"
            for node in self._nodes
        )
        return found

    def _writing(self, name: str, attempt: int) -> bool:
        """Whether processes of this attempt may still write to its logs."""
        task = self._tasks.get(name)
        return task is not None and bool(task.placement) and task.attempt == attempt

    async def _wait(self, look: Callable[[], bool], wait_s: float) -> None:
        """Looks after every piece of news until `look` is content or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                while not (look() or wait_s <= 0):
                    await self._news.wait()

    # -- transitions -------------------------------------------------------------------------------

    def _apply(self, step: Step, when: Moment) -> None:
        """Writes a step, then lets it take effect; then plans, for nodes may be free now."""
        self._commit(step, when)
        self._schedule()
        self._tell()

    def _commit(self, step: Step, when: Moment) -> None:
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
        if self._draining:
            return
        state = State(tasks=self._tasks, nodes=self._usable)
        with self.meters.plan_s.time():
            actions = scheduler.plan(state, time.monotonic())
        for action in actions:
            self._commit(scheduler.decide(self._tasks[action.task], action), now())

    def _tell(self) -> None:
        """Wakes whoever waits for news."""
        self._news.set()
        self._news = asyncio.Event()

    # -- the engine --------------------------------------------------------------------------------

    async def _read_engine(self) -> None:
        async for event in self._engine.events():
            if isinstance(event, NodesChanged):
                self._look_at_nodes()
                self._schedule()
                self._tell()
            else:
                self._observe(event)

    def _look_at_nodes(self) -> None:
        nodes = self._engine.nodes()
        self._nodes = tuple(node.name for node in nodes)
        self._usable = tuple(node.name for node in nodes if node.state == "up")

    def _observe(self, event: EngineEvent) -> None:
        task = self._tasks.get(event.task)
        if task is None:
            return
        step = scheduler.observe(task, event)
        if step.notes:
            self._apply(step, Moment(event.monotonic_ns, event.wall))

    def _call(self, name: str, call: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs an engine call after the earlier ones of the same task."""
        before = self._calls.get(name)

        async def run() -> None:
            if before is not None:
                await asyncio.wait({before})
            self._store.database.alive()
            await call()

        task = asyncio.create_task(run())
        self._calls[name] = task
        task.add_done_callback(lambda done: self._called(name, done))

    def _called(self, name: str, done: asyncio.Task[None]) -> None:
        if self._calls.get(name) is done:
            del self._calls[name]
        error = None if done.cancelled() else done.exception()
        if error is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # marks it as seen, should another error end `run` first

    async def _perform(self, action: Action) -> None:
        match action:
            case Launch():
                await self._launch(action)
            case SuspendGang():
                await self._engine.suspend(action.task, action.attempt, self._grace(action.task))
            case StopGang():
                await self._engine.stop(action.task, action.attempt, self._grace(action.task))
            case Release():
                await self._engine.release(action.task)
                self._store.released(action.task, action.attempt)

    async def _launch(self, action: Launch) -> None:
        gang = self._gang(action.task, action.attempt, action.nodes)
        try:
            gang.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._home.tasks / action.task / "output").mkdir(mode=0o700, exist_ok=True)
            await self._engine.launch(gang)
        except (FireflyerError, OSError) as error:
            when = now()
            ended = GangEnded(
                task=action.task,
                attempt=action.attempt,
                outcome="failed",
                reason=f"cannot start: {error}",
                monotonic_ns=when.monotonic_ns,
                wall=when.wall,
            )
            self._observe(ended)
            return
        self._store.launched(action.task, action.attempt)

    async def _recover(self, task: Task) -> None:
        await self._engine.recover(self._gang(task.id, task.attempt, task.placement))

    def _gang(self, name: str, attempt: int, nodes: tuple[str, ...]) -> Gang:
        row = self._store.row(name)
        spec = row.spec
        return Gang(
            task=name,
            attempt=attempt,
            script=spec.script,
            args=spec.args,
            cwd=spec.cwd,
            env={k: v for k, v in os.environ.items() if k not in RESERVED} | spec.env,
            nodes=nodes,
            ranks_per_node=spec.ranks_per_node,
            start=spec.start,
            secret=self._store.secret(name),
            directory=self._directory(name, attempt),
            elastic=spec.elastic,
            rejoins=spec.max_restarts - row.restarts,
        )

    def _grace(self, name: str) -> float:
        return self._store.row(name).spec.grace_s

    def _directory(self, name: str, attempt: int) -> Path:
        return self._home.tasks / name / str(attempt)

    # -- views -------------------------------------------------------------------------------------

    def _view(self, row: Row) -> TaskView:
        reason = row.reason
        task = self._tasks.get(row.task)
        if task is not None and task.state == "queued" and not reason:
            reason = scheduler.waiting_for(State(tasks=self._tasks, nodes=self._usable), task)
        lease = self._store.lease(row.task, row.attempt) if row.attempt else None
        return TaskView(
            id=row.task,
            spec=row.spec,
            state=row.state,
            reason=reason,
            attempt=row.attempt,
            generation=0 if lease is None else lease.generation,
            members=() if lease is None else lease.members,
            restarts=row.restarts,
            ranks=self._ranks(row),
            directory=str(self._home.tasks / row.task),
            created=row.created,
            user=row.user,
        )

    def _ranks(self, row: Row) -> tuple[RankView, ...]:
        attempt = self._store.attempt(row.task, row.attempt) if row.attempt else None
        if attempt is None:
            return ()
        pids: dict[int, int] = {}
        ends: dict[int, str] = {}
        incarnations: dict[int, int] = {}
        outside: set[int] = set()
        for event in self._store.rank_events(row.task, row.attempt):
            rank, incarnation = event.detail["rank"], event.detail.get("incarnation", 0)
            if event.kind == "rank_started":
                pids[rank], incarnations[rank] = event.detail["pid"], incarnation
                ends.pop(rank, None)
                outside |= {rank} if incarnation else set()
            elif event.kind == "rank_joined":
                outside.discard(rank)
            elif incarnation >= incarnations.get(rank, 0):
                ends[rank] = describe_exit(event.detail)
        over = "lost" if attempt.outcome is not None else None
        directory = self._directory(row.task, row.attempt)
        return tuple(
            RankView(
                rank=rank,
                node=attempt.nodes[rank // row.spec.ranks_per_node],
                pid=pids.get(rank),
                ended=ends.get(rank, over),
                log=str(directory / f"{rank}.log"),
                incarnation=incarnations.get(rank, 0),
                member=rank not in outside,
            )
            for rank in range(row.spec.nodes * row.spec.ranks_per_node)
        )


def now() -> Moment:
    """This moment on both clocks."""
    return Moment(time.monotonic_ns(), time.time())


def describe_exit(detail: dict[str, Any]) -> str:
    """How a rank ended, e.g. "exit 0", "SIGKILL", "suspended" or "lost", with its node."""
    if detail["suspended"]:
        return "suspended"
    if detail["signal"] is None:
        return "lost" if detail["code"] is None else f"exit {detail['code']}"
    try:
        return signal.Signals(detail["signal"]).name
    except ValueError:
        return f"signal {detail['signal']}"
