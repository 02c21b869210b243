"""What the pages cost with 2,000 nodes and 5,000 tasks (`--nodes`, `--tasks`): `python -m
tests.hai.dashboard.measure`.

The database has a year of samples of 200 of the nodes, of 40 users and of the cluster, and of 20,000 tasks
of that year (`--plain`: neither). The median CPU time of the process for a page, and the longest time in
which nobody else of the server's thread had a turn.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from tests.hai.server.http.test_access import NoEngine

from fireflyer.hai import lifecycle
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.dashboard import app as dashboard
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.schema import event as event_table
from fireflyer.hai.database.schema import sample
from fireflyer.hai.database.schema import task as task_table
from fireflyer.hai.database.store import Moment, NewTask, Store
from fireflyer.hai.home import Home
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.throttle import Throttle
from fireflyer.hai.lifecycle import Launch, Task
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.engine import Node
from fireflyer.hai.model.identity import Identity, Scope
from fireflyer.hai.sampling.series import (
    KEPT_S,
    LEVELS,
    METRICS,
    POINTS,
    chunk_begin,
    pack,
    point,
)

ROUNDS = 5

PAGES = (
    "", "/map", "/queue", "/tasks", "/tasks?state=over", "/tasks?state=failed&user=user1", "/nodes",
    "/ledger", "/ledger?window=7d", "/nodes/n7", "/tasks/{mine}", "/tasks/{mine}/stop", "/validations",
    "/validations/n7", "/users", "/use?window=6h", "/use?window=24h", "/use?window=7d", "/use?window=30d",
    "/use?window=1y", "/use?window=1y&scope=node:n7", "/use?window=1y&scope=user:user1",
)  # fmt: skip

SAMPLED_NODES, SAMPLED_USERS = 200, 40
YEAR_S = 365 * 86_400
PAST_TASKS, PAST_FAULTS, PAST_RANKS = 20_000, 100, 8


class Nodes(NoEngine):
    def __init__(self, count: int) -> None:
        self._count = count

    def nodes(self) -> list[Any]:
        return [Node(name=f"n{i}", gpus=8, leaf=f"leaf{i // 32}") for i in range(self._count)]


def fill(controller: Controller, store: Store, count: int) -> int:
    """Tasks in the queue, as many started as there is room for; how many those are."""
    chance = random.Random(1)
    wanted = []
    for number in range(count):
        nodes, user = chance.choice([1, 1, 1, 2, 2, 4, 8]), f"user{number % 40}"
        spec = TaskSpec(script="/train.py", cwd="/", nodes=nodes, gpus=8, name=f"job-{number}")
        task = Task(id="", order=0, user=user, nodes=nodes, world=nodes, max_restarts=0)
        when = Moment(0, time.time() - 3600)
        fresh = NewTask(spec=spec, secret="", step=lifecycle.admit(task), when=when, user=user)
        wanted.append(fresh)
    tasks: dict[str, Task] = {}
    for number, (row, fresh) in enumerate(zip(store.add(wanted), wanted, strict=True)):
        tasks[row.task] = msgspec.structs.replace(fresh.step.task, id=row.task, order=number)
        controller.dispatch.submit(tasks[row.task], row.spec)
    started = 0
    while actions := controller.dispatch.plan():
        for action in actions:
            assert isinstance(action, Launch)
            step = lifecycle.decide(tasks[action.task], action)
            store.write(step, Moment(0, time.time() - 600))
            controller.dispatch.apply(action)
            started += 1
    return started


def fill_year(database: Database) -> int:
    """Writes chunks of the last year at each level, as long as it is kept; how many those are."""
    draw = random.Random(1)
    scopes = ["cluster", *(f"node:n{number}" for number in range(SAMPLED_NODES))]
    scopes += [f"user:user{number}" for number in range(SAMPLED_USERS)]
    made = []
    for _ in range(20):  # different enough; packing each would take minutes
        points = [point(**{name: draw.random() * 8 for name in METRICS}) for _ in range(POINTS)]
        made.append(pack(points))
    now, count = time.time(), 0
    for level in LEVELS:
        kept = KEPT_S.get(level, YEAR_S)
        begins = range(chunk_begin(now - kept, level), int(now) + 1, level * POINTS)
        rows = [
            {"scope": scope, "level": level, "begin": begin, "data": draw.choice(made)}
            for scope in scopes
            for begin in begins
        ]
        with database.writing() as connection:
            connection.execute(sample.insert(), rows)
        count += len(rows)
    return count


def fill_history(database: Database) -> int:
    """Writes the tasks of a year that are over, with their events; how many events those are."""
    draw, now = random.Random(2), time.time()
    tasks: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def note(kind: str, wall: float, /, **detail: Any) -> None:
        text = msgspec.json.encode(detail).decode()
        attempt = int(kind not in ("submitted", "queued"))
        events.append({
            "task": len(tasks), "attempt": attempt, "kind": kind, "detail": text, "monotonic_ns": 0,
            "wall": wall,
        })  # fmt: skip

    for number in range(1, PAST_TASKS + 1):
        user, node = f"user{number % 40}", f"n{draw.randrange(SAMPLED_NODES)}"
        begin = now - YEAR_S + (YEAR_S - 90_000) * number / PAST_TASKS
        end = begin + draw.uniform(600, 80_000)
        state = draw.choice(["finished", "finished", "finished", "failed", "stopped"])
        spec = TaskSpec(script="/train.py", cwd="/", ranks_per_node=PAST_RANKS, gpus=8)
        tasks.append({
            "id": number, "spec": msgspec.json.encode(spec).decode(), "secret": "", "state": state,
            "reason": "", "attempt": 1, "restarts": 0, "stopping": False, "warm": False,
            "created": begin, "user": user,
        })  # fmt: skip
        note("submitted", begin, user=user)
        note("queued", begin)
        note("starting", begin + 60, nodes=[node])
        for rank in range(PAST_RANKS):
            note("rank_started", begin + 61, rank=rank, node=node, pid=1000 + rank)
        note("running", begin + 62)
        if number % (PAST_TASKS // PAST_FAULTS) == 0:
            note("observed", end, what="oom", node=node, wall=end, pid=1, text="out of memory")
            note("acted", end, action="restart", rule="out-of-memory", node=node)
        for rank in range(PAST_RANKS):
            note(
                "rank_exited", end, rank=rank, node=node, code=0, signal=None, suspended=False,
            )  # fmt: skip
        note("gang_ended", end, outcome=state, reason="")
        note(state, end)
    with database.writing() as connection:
        connection.execute(task_table.insert(), tasks)
        connection.execute(event_table.insert(), sorted(events, key=lambda event: event["wall"]))
    return len(events)


async def ask(app: FastAPI, path: str, scope: Scope) -> int:
    """One page, without its session; how many bytes it has."""
    who = Identity(user="user1", token="home", scope=scope)
    size = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal size
        assert message.get("status", 200) == 200
        size += len(message.get("body", b""))

    await app(
        {
            "type": "http", "method": "GET", "path": f"/dashboard{path.partition('?')[0]}",
            "query_string": path.partition("?")[2].encode(),
            "headers": [], "http_version": "1.1", "scheme": "http", "root_path": "",
            "state": {"who": who, "csrf": "x", "secret": "x"},
        },
        receive, send,
    )  # fmt: skip
    return size


async def measured(page: Callable[[], Awaitable[int]]) -> tuple[float, float, int]:
    """Milliseconds of CPU of a page, of the longest turn of another of its kind, and its bytes."""
    begun = time.process_time()
    size = await page()
    spent = time.process_time() - begun
    longest, over = 0.0, False

    async def others() -> None:
        nonlocal longest
        last = time.thread_time()
        while not over:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(others())
    await asyncio.sleep(0)
    await page()
    over = True
    await ticking
    return spent * 1e3, longest * 1e3, size


async def measure(app: FastAPI, mine: str) -> None:
    """Measures all pages. `mine`: a task of user1."""
    for path in (page.format(mine=mine) for page in PAGES):
        scopes: tuple[Scope, ...] = ("admin",) if path == "/users" else ("operate", "submit")
        for scope in scopes:
            page = partial(ask, app, path, scope)
            first = await measured(page)
            rounds = [await measured(page) for _ in range(ROUNDS)]
            spent, longest, size = (statistics.median(each[i] for each in rounds) for i in range(3))
            sys.stdout.write(
                f"{path or '/':32} {scope:8} {spent:6.1f} ms, longest turn {longest:5.1f} ms, "
                f"{size:.0f} bytes; the first one {first[0]:.0f} ms\n"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--tasks", type=int, default=5000)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    nodes, tasks, plain = options.nodes, options.tasks, options.plain
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        home.create()
        store = Store(home.database)
        if not plain:
            sys.stdout.write(f"{fill_history(store.database)} events of {PAST_TASKS} tasks\n")
        controller = Controller(home, store, Nodes(nodes), "timeshare")
        started = fill(controller, store, tasks)
        sys.stdout.write(f"{nodes} nodes; {started} tasks run, {tasks - started} wait\n")
        if not plain:
            sys.stdout.write(f"{fill_year(store.database)} chunks of samples\n")
        accounts = Accounts(store.database)
        app = dashboard.build(controller, store, accounts, Sessions(accounts), Throttle())
        asyncio.run(measure(app, f"t{2 if plain else PAST_TASKS + 2}"))
        store.close()


if __name__ == "__main__":
    main()
