"""The HTTP route of the goodput ledger."""

import asyncio
import time
from typing import Annotated

from fastapi import FastAPI, Query, Response

from fireflyer.errors import ConfigError
from fireflyer.hai import ledger
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.store import Row, Store
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.responses import documented, json
from fireflyer.hai.ledger import Accounting, Shape
from fireflyer.hai.model import PINNED, Event
from fireflyer.hai.model.identity import Identity

AT_A_TIME = 1000
"""Maximum rows or events that are read before other coroutines run."""

Moment = Annotated[float, Query(ge=0, le=1e12, allow_inf_nan=False)]


def ledger_routes(
    app: FastAPI, controller: Controller, store: Store, accounts: Accounts, trail: AuditLog
) -> None:
    """Adds the ledger's route to the application."""
    needs = needing(trail)

    @app.get("/ledger", **documented(ledger.LedgerView))
    async def read_ledger(
        task: str | None = None,
        user: str | None = None,
        group: str | None = None,
        since: Moment = 0.0,
        until: Moment | None = None,
        cluster: bool = False,
        who: Identity = needs("read"),
    ) -> Response:
        """Read the time of your own tasks, by cause.

        An operator may also read another user's tasks, all tasks and the cluster. `task`, `user`
        and `group` select tasks. `since` and `until` are wall-clock times.
        """
        if cluster or user not in (None, who.user):
            who.require("operate")
        if task is not None:
            controller.check_owner(task, who.only)
        now = time.time()
        end = now if until is None else min(until, now)
        if end <= since:
            raise ConfigError("invalid until: expected a time later than since")
        owner = who.user if who.only is not None else user
        rows = await _rows(store)
        wanted = {
            row.task
            for row in rows
            if task in (None, row.task)
            and owner in (None, row.user)
            and group in (None, row.spec.group)
        }
        if task is not None and not wanted:
            store.row(task)
        elif not wanted:
            accounts.check_whose(who, user or "", group or "")
        accounting = await _accounting(controller, store, rows, since, end)
        tasks = {name: one for name, one in accounting.tasks.items() if name in wanted}
        view = ledger.LedgerView(
            since=accounting.since / 1e6,
            until=accounting.until / 1e6,
            unit=accounting.unit,
            tasks=tasks,
            total=ledger.total(tasks.values()),
            cluster=accounting.cluster if cluster else None,
        )
        return json(view)


async def _rows(store: Store) -> list[Row]:
    """Reads all tasks."""
    rows: list[Row] = []
    after = ""
    while more := store.rows(live=False, after=after, limit=AT_A_TIME):
        rows += more
        after = more[-1].task
        await asyncio.sleep(0)
    return rows


async def _accounting(
    controller: Controller, store: Store, rows: list[Row], since: float, until: float
) -> Accounting:
    """Computes the ledger of all tasks, even if the request names one task: the cause of a task's
    wait depends on the nodes that other tasks used."""
    gpus = {node.name: node.gpus for node in controller.dispatch.nodes()}
    events: list[Event] = []
    while more := store.events(events[-1].seq if events else 0, None, AT_A_TIME):
        events += more
        await asyncio.sleep(0)
    shapes = [
        Shape(
            task=row.task,
            nodes=row.spec.nodes,
            ranks_per_node=row.spec.ranks_per_node,
            gpus=row.spec.gpus,
            validation=PINNED in row.spec.labels,
        )
        for row in rows
    ]
    return await asyncio.to_thread(
        ledger.account, shapes, events, gpus=gpus, until=until, since=since
    )
