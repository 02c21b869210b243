"""The server dies at every point where it writes or calls the engine; nothing acknowledged is lost and
nothing is launched twice."""

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.draws import full
from tests.hai.server.conftest import POSTGRESQL
from tests.hai.server.database.postgres import Postgres
from tests.hai.server.fake_server import FakeEngine
from tests.waiting import LIMIT_S

from fireflyer.errors import FireflyerError, NoSpace, TaskError
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.database.connection import Database, PostgreSQL
from fireflyer.hai.database.store import Moment, Store
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import Step
from fireflyer.hai.model import (
    TERMINAL,
    Event,
    Lease,
    LeaseRequest,
    Listing,
    TaskSpec,
    TaskView,
)

MakeSpec = Callable[..., TaskSpec]

SOAK = os.environ.get("FIREFLYER_SOAK", "") not in ("", "0")


class Crash(Exception):
    """Stands for SIGKILL: nothing after it happens."""


class Countdown:
    """Counts the points passed and crashes at one of them."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.dead = False

    def point(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.dead = True
        if self.dead:
            raise Crash


class DyingStore(Store):
    """Crashes with the transaction open, or right after it was committed."""

    def __init__(self, database: Database, countdown: Countdown) -> None:
        super().__init__(database)
        if not database.shared:
            driver = database.connection.connection.driver_connection
            assert driver is not None
            driver.execute("PRAGMA synchronous=OFF")  # the machine does not die here
        self._countdown = countdown

    def _note(self, *arguments: Any) -> None:
        super()._note(*arguments)
        self._countdown.point()

    def add(self, *arguments: Any) -> Any:
        found = super().add(*arguments)
        self._countdown.point()
        return found

    def write(self, *arguments: Any) -> None:
        super().write(*arguments)
        self._countdown.point()

    def launched(self, *arguments: Any) -> None:
        self._countdown.point()
        super().launched(*arguments)
        self._countdown.point()

    def released(self, *arguments: Any) -> None:
        self._countdown.point()
        super().released(*arguments)
        self._countdown.point()


class User:
    """Does a list of things once each, going on after a crash with the first not acknowledged."""

    def __init__(self, spec: MakeSpec) -> None:
        self.spec = spec
        self.done = 0
        self.acknowledged: dict[str, TaskSpec] = {}
        self.steered: dict[str, str] = {}
        self.main = ""

    async def act(self, controller: Controller) -> None:
        """Goes on until everything is acknowledged and every task is over."""
        things: list[Callable[[], Any]] = [
            lambda: self.submit(controller, "hold"),
            lambda: self.submit(controller, "fail", "1"),
            lambda: self.submit(controller, "lose", "1", nodes=2),
            lambda: self.ask_for_lease(controller),
            lambda: self.steer(controller, "suspend", {"running"}),
            lambda: self.steer(controller, "resume", {"suspended"}),
            lambda: self.submit_together(controller),
            lambda: self.steer(controller, "stop", {"running", "starting"}),
        ]
        while self.done < len(things):
            await things[self.done]()
            self.done += 1
        for view in controller.views(Listing(live=True)):
            if view.spec.args == ("hold",):
                controller.request(view.id, "stop")
        await until(controller, lambda: not controller.views(Listing(live=True)))

    async def submit(self, controller: Controller, *args: str, nodes: int = 1) -> None:
        spec = self.spec(*args, nodes=nodes)
        view = await controller.submit(spec)
        self.acknowledged[view.id] = spec
        self.main = self.main or view.id

    async def submit_together(self, controller: Controller) -> None:
        """Two, which are one transaction: both are there or neither."""
        before = len(controller.views(Listing(live=False)))
        try:
            await asyncio.gather(
                self.submit(controller, "finish"), self.submit(controller, "finish")
            )
        finally:
            assert len(controller.views(Listing(live=False))) in (before, before + 2)

    async def ask_for_lease(self, controller: Controller) -> None:
        """Of two parts; the first one's question may have been asked before the crash, too."""
        await until(controller, lambda: controller.view(self.main).state == "running")
        attempt = controller.view(self.main).attempt

        def ask(token: str) -> bool:
            lease = Lease(generation=1, members=(token,), token=token)
            return controller.lease(self.main, LeaseRequest(attempt=attempt, held=0, lease=lease))

        assert ask("first")
        assert not ask("second")

    async def steer(self, controller: Controller, what: Any, states: set[str]) -> None:
        after = {
            "suspend": {"suspending", "suspended"},
            "resume": {"queued", "starting", "running"},
        }
        over = after.get(what, TERMINAL)
        await until(controller, lambda: controller.view(self.main).state in states | over)
        try:
            controller.request(self.main, what)
        except TaskError:
            assert (
                controller.view(self.main).state in over
            )  # done before the crash, not acknowledged
        self.steered[self.main] = what


async def until(controller: Controller, holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        known = await controller.news(0, 0)
        while not holds():
            known = await controller.news(known, 30)


async def live(home: Home, where: Path | PostgreSQL, user: User, countdown: Countdown) -> bool:
    """One life of a server. Returns whether it crashed."""
    database = Database(where)
    store = DyingStore(database, countdown)
    engine = FakeEngine(2, home.path / "engine")
    controller = Controller(home, store, engine)
    serving = asyncio.create_task(controller.run(lambda: None))
    acting = asyncio.create_task(user.act(controller))
    try:
        done, pending = await asyncio.wait({serving, acting}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            if not countdown.dead:  # what a dead server's user saw last is no finding
                task.result()
    finally:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        database.close()
    return countdown.dead


def check_history(
    events: list[Event], views: list[TaskView], launches: list[str], *, gaps: bool
) -> None:
    """What must hold of the whole history once every task is over. A sequence of PostgreSQL leaves out the
    numbers of a transaction that came to nothing; `seq` only grows there."""
    seqs = [event.seq for event in events]
    assert seqs == (sorted(set(seqs)) if gaps else list(range(1, len(events) + 1)))
    for view in views:
        own = [event for event in events if event.task == view.id]
        assert view.state in TERMINAL
        assert own[-1].kind == view.state
        assert sum(event.kind in TERMINAL for event in own) == 1
        kinds = [event.kind for event in own if event.kind in ("starting", "gang_ended")]
        assert kinds == ["starting", "gang_ended"] * view.attempt
        starts = [event.attempt for event in own if event.kind == "starting"]
        assert starts == list(range(1, view.attempt + 1))
        for event in own:
            reason = event.detail.get("reason", "")
            assert "cannot start" not in reason, "launched twice"
            began = (
                reason != "before its ranks were started" and event.detail.get("outcome") != "lost"
            )
            if event.kind == "gang_ended" and began:
                assert f"{view.id}.{event.attempt}" in launches


NewTask = Callable[[Path], Path | PostgreSQL]


@pytest.fixture(params=["sqlite", POSTGRESQL])
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> NewTask:
    """Where a database without tasks is, for a home in this folder: a copy, for they are many."""
    if request.param == "sqlite":
        template = tmp_path / "template.sqlite"
        Database(template).close()

        def copy(folder: Path) -> Path:
            folder.mkdir(exist_ok=True)
            shutil.copy(template, Home(folder).database)
            return Home(folder).database

        return copy
    postgres: Postgres = request.getfixturevalue("postgres_of_session")
    first = tmp_path.name
    postgres.create(first)
    Database(PostgreSQL(url=postgres.url(first))).close()

    def create(folder: Path) -> PostgreSQL:
        postgres.create(f"{first}_{folder.name}", template=first)
        return PostgreSQL(url=postgres.url(f"{first}_{folder.name}"))

    return create


@pytest.mark.sample(1)
def test_a_crash_at_every_point(tmp_path: Path, spec: MakeSpec, fresh: NewTask) -> None:
    """`make test`: at each ninth point; `make test-all`: at each third one, on PostgreSQL at each
    eleventh; with FIREFLYER_SOAK at all of them."""
    sqlite = isinstance(fresh(tmp_path / "probe"), Path)
    step = 1 if SOAK else (3 if full() else 9) if sqlite else 11
    at = 0
    crashed = True
    while crashed:
        at += step
        home = Home(tmp_path / f"home{at}")
        home.create()
        where = fresh(home.path)
        user = User(spec)
        crashed = asyncio.run(live(home, where, user, Countdown(at)))
        if crashed:
            assert not asyncio.run(live(home, where, user, Countdown(10**9)))
        database = Database(where)
        store = Store(database)
        try:
            controller = Controller(home, store, FakeEngine(2, home.path / "engine"))
            views = controller.views(Listing(live=False))
            events = store.events(0, None, 10**6)
        finally:
            database.close()
        launches = [p.name for p in (home.path / "engine").iterdir()]
        check_history(events, views, launches, gaps=database.shared)
        by_id = {view.id: view for view in views}
        for name, wanted in user.acknowledged.items():
            assert by_id[name].spec == wanted
            outcome = {"hold": "stopped"}.get(wanted.args[0], "finished")
            assert by_id[name].state == outcome, (at, name, by_id[name])
        for name in by_id.keys() - user.acknowledged.keys():
            assert len(by_id) <= len(user.acknowledged) + 2, f"{name} was doubled"
        released = (home.path / "engine" / "released").read_text().split()
        assert {v.id for v in views if v.attempt} <= set(released)
    assert at > 80, "the walk passed few points; are they still instrumented?"


class Storm:
    """Clients that submit and steer until told to stop; they remember what was acknowledged."""

    def __init__(self, server: Any, spec: MakeSpec, seed: int) -> None:
        self._server = server
        self._spec = spec
        self._random = random.Random(seed)
        self.acknowledged: dict[str, TaskSpec] = {}
        self.stops: set[str] = set()
        self.calls = 0
        self._names = count()
        self.changed = threading.Condition()
        self.ending = False

    def reached(self, calls: int) -> bool:
        return self.calls >= calls

    def run(self) -> None:
        """One client; errors of a dying server are part of its life."""
        while not self.ending:
            try:
                self._act()
            except TaskError:
                pass
            except FireflyerError:
                with self.changed:
                    self.changed.wait(0.01)
                continue
            with self.changed:
                self.calls += 1
                self.changed.notify_all()

    def _act(self) -> None:
        client = self._server.client
        known = sorted(self.acknowledged)
        if not known or self._random.random() < 0.4:
            kind = self._random.choice([("hold",), ("finish",), ("fail", "1"), ("lose", "1")])
            spec = self._spec(
                *kind, nodes=self._random.choice([1, 1, 2]), name=f"n{next(self._names)}"
            )
            view = client.submit(spec)
            self.acknowledged[view.id] = spec
            return
        name = self._random.choice(known)
        what = self._random.choice(["stop", "suspend", "resume"])
        {"stop": client.stop, "suspend": client.suspend, "resume": client.resume}[what](name)
        if what == "stop":
            self.stops.add(name)

    def check(self, views: list[TaskView]) -> None:
        """What was acknowledged is known, under the id that was told; and nothing is there twice, whether its
        answer arrived or not."""
        by_id = {view.id: view for view in views}
        for name, wanted in self.acknowledged.items():
            assert by_id[name].spec == wanted
        for name in self.stops:
            assert by_id[name].state in ("stopped", "finished")
        names = [view.spec.name for view in views]
        assert len(set(names)) == len(names)


def settle(server: Any) -> tuple[list[TaskView], list[Event]]:
    """Every task, once all are over, and the whole history."""
    client = server.client
    for view in client.tasks(live=True):
        with suppress(TaskError):  # it ended in between
            client.stop(view.id)
    for view in client.tasks(live=True):
        client.wait(view.id, TERMINAL, LIMIT_S)
    events: list[Event] = []
    while more := client.events(after=events[-1].seq if events else 0):
        events += more
    return client.tasks(), events


@pytest.mark.parametrize("seed", [1])
def test_kill_nine_in_a_storm_of_requests(
    server: Any, spec: MakeSpec, seed: int, fresh: NewTask
) -> None:
    storm = Storm(server, spec, seed)
    options: dict[str, Any] = {}
    if isinstance(where := fresh(server.home), PostgreSQL):
        waiting = str(server.home.parent / "waiting")
        options = {"database": msgspec.to_builtins(where), "lease_s": 1.0, "stand_by": waiting}
    server.start(**options)
    clients = [threading.Thread(target=storm.run) for _ in range(3)]
    for client in clients:
        client.start()
    chance = random.Random(seed)
    try:
        for _ in range(12 if SOAK else 5):
            with storm.changed:
                goal = storm.calls + chance.randrange(5, 60)
                assert storm.changed.wait_for(partial(storm.reached, goal), 120)
            server.kill()
            server.start(**options)
    finally:
        storm.ending = True
        for client in clients:
            client.join()
    views, events = settle(server)
    check_history(events, views, server.launches(), gaps=bool(options))
    storm.check(views)


class FullStore(Store):
    """Has room for what users ask for, and none for a start."""

    def write(self, step: Step, when: Moment) -> None:
        if step.task.state == "starting":
            raise NoSpace("the disk of the database is full")
        super().write(step, when)


def test_a_start_that_cannot_be_written_ends_the_server(tmp_path: Path, spec: MakeSpec) -> None:
    """The task was acknowledged, and the next server starts it."""
    home = Home(tmp_path / "home")
    home.create()

    async def first() -> None:
        database = Database(home.database)
        controller = Controller(home, FullStore(database), FakeEngine(1, home.path / "engine"))
        ready = asyncio.Event()
        serving = asyncio.create_task(controller.run(ready.set))
        await ready.wait()
        assert (await controller.submit(spec("finish"))).state == "queued", "it is on disk"
        with pytest.raises(NoSpace, match="is full"):
            await serving
        await controller.close()
        database.close()

    async def second() -> None:
        database = Database(home.database)
        controller = Controller(home, Store(database), FakeEngine(1, home.path / "engine"))
        serving = asyncio.create_task(controller.run(lambda: None))
        await until(controller, lambda: controller.view("t1").state == "finished")
        serving.cancel()
        await controller.close()
        database.close()

    asyncio.run(first())
    asyncio.run(second())
