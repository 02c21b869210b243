"""The dashboard's ledger is the ledger, whatever was read when; and a page asks the database few times."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from tests.hai.server.http.test_access import NoEngine

from fireflyer.hai import lifecycle
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.dashboard import ledger_cache
from fireflyer.hai.dashboard.ledger_cache import LedgerCache
from fireflyer.hai.dashboard.page_queries import PageQueries
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.history_queries import HistoryQueries
from fireflyer.hai.database.store import Moment, NewTask, Store
from fireflyer.hai.home import Home
from fireflyer.hai.ledger import Shape, account
from fireflyer.hai.lifecycle import Note, Task
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.identity import Identity

WHO = Identity(user="ada", token="home", scope="admin")
GPUS = {f"n{i}": 0 for i in range(4)}


class Past:
    """A database whose history a test writes."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.home = Home(folder / "home")
        self.home.create()
        self.store = Store(database)
        self.browsing = HistoryQueries(self.store.database)
        self.now = time.time() - 3000
        self.shapes: list[Shape] = []

    def submit(self, user: str = "ada", nodes: int = 1) -> str:
        fresh = Task(id="", order=0, nodes=nodes, world=nodes, max_restarts=0)
        step = lifecycle.admit(fresh)
        spec = TaskSpec(script="/x.py", cwd="/", nodes=nodes, ranks_per_node=2)
        when = Moment(0, self.now)
        (row,) = self.store.add([NewTask(spec=spec, secret="", step=step, when=when, user=user)])
        name = row.task
        self.shapes.append(Shape(task=name, nodes=nodes, ranks_per_node=2))
        return name

    def note(self, task: str, attempt: int, kind: str, after: float = 0.0, **detail: Any) -> None:
        self.now += after
        self.store.note(task, attempt, (Note(kind, detail),), Moment(0, self.now))

    def run(self, task: str, attempt: int, nodes: list[str], outcome: str) -> None:
        self.note(task, attempt, "starting", 5, nodes=nodes)
        for rank in range(3):
            self.note(task, attempt, "rank_started", rank=rank, node="n0", pid=1)
        self.note(task, attempt, "running", 5)
        self.note(task, attempt, "gang_ended", 50, outcome=outcome, reason="")

    def over(self, task: str) -> None:
        self.note(task, 1, "finished")
        with self.store.database.writing() as connection:
            at = sa.text("UPDATE task SET state = 'finished' WHERE id = :id")
            connection.execute(at, {"id": int(task[1:])})


@pytest.fixture
def past(tmp_path: Path, database: Database) -> Past:
    return Past(tmp_path, database)


def check(past: Past, keeper: LedgerCache, window_s: float) -> None:
    """The dashboard's sums are those of `fireflyer ledger` at the same moment."""
    found = asyncio.run(keeper.ledger(window_s, GPUS))
    assert found is not None
    events = past.store.events(0, None, 100_000)
    expected = account(
        past.shapes, events, gpus=GPUS, until=found.made, since=found.made - window_s
    )
    assert found.accounting == expected
    whole = {user: one.whole for user, one in found.users.items()}
    assert sum(whole.values()) == expected.total.whole
    assert list(whole.values()) == sorted(whole.values(), reverse=True)


def test_it_is_the_ledger_however_it_was_read(past: Past, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_cache, "FRESH_S", 0.0)
    monkeypatch.setattr(ledger_cache, "PIECE", 7)
    keeper = LedgerCache(past.browsing)
    first, second = past.submit(), past.submit("bob", 2)
    past.run(first, 1, ["n0"], "failed")
    past.note(first, 1, "restarting")
    past.note(first, 1, "queued")
    past.note(second, 1, "starting", 3, nodes=["n1", "n2"])
    check(past, keeper, 86_400)
    past.note(second, 1, "running", 20)
    lost = {"rank": 1, "node": "n1", "code": None, "signal": 9, "suspended": False, "lost": True}
    past.note(second, 1, "rank_exited", 10, **lost)
    check(past, keeper, 86_400)
    past.note(second, 1, "rank_joined", 10, rank=1, node="n1")
    past.run(first, 2, ["n0"], "finished")
    past.over(first)
    check(past, keeper, 86_400)
    check(past, keeper, 3600)
    check(past, keeper, 30)
    past.note(second, 1, "gang_ended", 9, outcome="failed", reason="")
    check(past, keeper, 86_400)
    check(past, LedgerCache(past.browsing), 86_400)


def test_what_was_over_before_the_window_is_not_read(
    past: Past, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_cache, "LONGEST_S", 1000.0)
    past.now -= 5000
    old, long, waiting = past.submit(), past.submit(), past.submit()
    past.run(old, 1, ["n0"], "finished")
    past.over(old)
    past.note(long, 1, "starting", 1, nodes=["n1"])
    past.note(long, 1, "running", 1)
    past.now = time.time() - 20
    past.note(long, 1, "suspending")
    found = asyncio.run(LedgerCache(past.browsing).ledger(1000.0, GPUS))
    assert found is not None
    assert set(found.accounting.tasks) == {long, waiting}
    assert found.accounting.tasks[long].whole == pytest.approx(1000e6, abs=5)
    parts = found.accounting.tasks[long].parts
    assert parts["useful"] + parts["suspended"] == found.accounting.tasks[long].whole


def test_the_first_event_since_a_moment_is_found(past: Past) -> None:
    assert past.browsing.first_since(0.0) == 1
    task = past.submit()
    begun = past.now
    for _ in range(20):
        past.note(task, 1, "observed", 10)
    assert past.browsing.first_since(0.0) == 1
    assert past.browsing.first_since(begun + 1) == 3
    assert past.browsing.first_since(begun + 10) == 3
    assert past.browsing.first_since(begun + 10.5) == 4
    assert past.browsing.first_since(begun + 1e6) == 23


class Nodes(NoEngine):
    def nodes(self) -> list[Any]:
        from fireflyer.hai.model.engine import Node

        return [Node(name=name) for name in GPUS]


@pytest.mark.parametrize("tasks", [5, 300])
def test_the_overview_asks_the_database_as_often_for_many_tasks(past: Past, tasks: int) -> None:
    controller = Controller(past.home, past.store, Nodes())
    for _ in range(tasks):
        name = past.submit()
        task = Task(id=name, order=int(name[1:]), nodes=1, world=1, max_restarts=0, user="ada")
        controller.dispatch.submit(task, past.store.row(name).spec)
    looks = PageQueries(controller, past.store)
    asked: list[str] = []

    async def overview() -> None:
        sa.event.listen(
            past.store.database.connection, "before_cursor_execute",
            lambda _c, _cursor, statement, *_rest: asked.append(statement),
        )  # fmt: skip
        waiting, count = await looks.queue(WHO, 0, 5)
        assert (len(waiting), count) == (5, tasks)
        looks.counts(WHO)
        looks.tasks(WHO, ("running",), "", None, 10)
        looks.occupancy(looks.nodes(WHO))
        looks.faults(WHO, 8)

    asyncio.run(overview())
    queries = [statement for statement in asked if statement.startswith("SELECT")]
    assert len(queries) == 4, queries
