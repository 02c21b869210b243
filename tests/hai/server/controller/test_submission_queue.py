"""Tasks that arrive together: one transaction, one answer each."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.hai.server.fake_server import FakeEngine

from fireflyer.errors import ConfigError, NoSpace, TaskError
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.submission_queue import GROUP
from fireflyer.hai.database import schema
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.store import Store
from fireflyer.hai.home import Home
from fireflyer.hai.model import TaskSpec, TaskView
from fireflyer.hai.model.identity import Identity

MakeSpec = Callable[..., TaskSpec]

ADA = Identity(user="ada", token="x", scope="submit")


class FullOnce(Store):
    """Once has no room for the events of tasks that arrive; their rows, written before, go with them."""

    full = False

    def _note(self, connection: sa.Connection, events: list[dict[str, Any]]) -> None:
        super()._note(connection, events)
        if self.full and events[0]["kind"] == "submitted":
            self.full = False
            raise NoSpace("the disk of the database is full")


@pytest.fixture
def controller(tmp_path: Path, database: Database) -> Controller:
    """One that has no node free and plans nothing: only what comes in is written."""
    home = Home(tmp_path / "home")
    home.create()
    made = Controller(home, FullOnce(database), FakeEngine(2, home.path / "engine"))
    made._draining = True
    return made


@contextmanager
def commits(database: Database) -> Iterator[list[int]]:
    """How many there were so far: the number of entries."""
    found: list[int] = []

    def committed(_connection: sa.Connection) -> None:
        found.append(1)

    sa.event.listen(database.connection, "commit", committed)
    yield found
    sa.event.remove(database.connection, "commit", committed)


async def submit_all(controller: Controller, specs: list[TaskSpec]) -> list[TaskView | Exception]:
    trail = AuditLog(controller._store.database)

    async def one(spec: TaskSpec) -> TaskView:
        with trail.refusals(ADA, "submit") as line:
            row = await controller.submissions.submit(spec, "ada", line)
            return controller.submitted(row)

    found = await asyncio.gather(*map(one, specs), return_exceptions=True)
    return [answer for answer in found if isinstance(answer, TaskView | Exception)]


def test_what_arrives_together_is_one_transaction_in_order(
    controller: Controller, database: Database, spec: MakeSpec
) -> None:
    specs = [spec("hold", str(number)) for number in range(40)]
    with commits(database) as found:
        views = asyncio.run(submit_all(controller, specs))
    assert len(found) == 1
    assert [view.id for view in views if isinstance(view, TaskView)] == [
        f"t{number}" for number in range(1, 41)
    ]
    assert [row.spec for row in controller._store.rows(live=True)] == specs
    events = controller._store.events(0, None, 1000)
    assert [(event.task, event.kind) for event in events] == [
        (f"t{number}", kind) for number in range(1, 41) for kind in ("submitted", "queued")
    ]
    lines = AuditLog(database).entries(0, 1000)
    assert [(line.object, line.outcome) for line in lines] == [
        (f"t{number}", "ok") for number in range(1, 41)
    ]
    assert list(controller._tasks) == [f"t{number}" for number in range(1, 41)]


def test_a_group_has_a_limit(controller: Controller, database: Database, spec: MakeSpec) -> None:
    with commits(database) as found:
        views = asyncio.run(submit_all(controller, [spec("hold")] * (2 * GROUP + 1)))
    assert len(found) == 3
    assert len({view.id for view in views if isinstance(view, TaskView)}) == 2 * GROUP + 1


def test_who_is_refused_keeps_nobody_out(
    controller: Controller, database: Database, spec: MakeSpec
) -> None:
    specs = [spec("hold"), spec(script="/nowhere"), spec("hold"), spec(nodes=3), spec("hold")]
    with commits(database) as found:
        answers = asyncio.run(submit_all(controller, specs))
    assert [type(answer) for answer in answers] == [
        TaskView, ConfigError, TaskView, TaskError, TaskView,
    ]  # fmt: skip
    assert len(found) == 3, "those that were taken in, and a line for each that was refused"
    lines = [(line.object, line.outcome) for line in AuditLog(database).entries(0, 10)]
    assert sorted(lines) == [
        ("", "ConfigError"), ("", "TaskError"), ("t1", "ok"), ("t2", "ok"), ("t3", "ok"),
    ]  # fmt: skip


def test_a_transaction_that_fails_takes_in_none_and_the_next_one_is_whole(
    controller: Controller, database: Database, spec: MakeSpec
) -> None:
    store = controller._store
    assert isinstance(store, FullOnce)
    store.full = True
    answers = asyncio.run(submit_all(controller, [spec("hold")] * 3))
    assert [type(answer) for answer in answers] == [NoSpace] * 3
    assert (store.rows(live=False), store.events(0, None, 10)) == ([], [])
    assert not controller._tasks
    assert not controller.dispatch.cluster.jobs
    answers = asyncio.run(submit_all(controller, [spec("hold")] * 2))
    assert [type(answer) for answer in answers] == [TaskView] * 2
    assert [row.state for row in store.rows(live=True)] == ["queued"] * 2
    with database.reading() as connection:
        outcomes = connection.execute(sa.select(schema.audit.c.outcome)).scalars().all()
    assert outcomes == ["NoSpace"] * 3 + ["ok"] * 2


def test_who_has_gone_changes_nothing_for_the_others(
    controller: Controller, spec: MakeSpec
) -> None:
    async def run() -> TaskView:
        gone = asyncio.create_task(controller.submit(spec("hold", "gone")))
        stays = asyncio.create_task(controller.submit(spec("hold", "stays")))
        await asyncio.sleep(0)
        gone.cancel()
        return await stays

    view = asyncio.run(run())
    assert view.spec.args == ("hold", "stays")
    assert [row.spec.args[1] for row in controller._store.rows(live=True)] == ["gone", "stays"]
