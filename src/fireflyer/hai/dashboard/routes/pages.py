"""The read-only pages."""

from collections import Counter
from typing import Annotated, Literal

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.responses import FileResponse

from fireflyer.errors import NoSuchNode
from fireflyer.hai.dashboard import pages, profiles
from fireflyer.hai.dashboard.auth_middleware import ROOT
from fireflyer.hai.dashboard.charts import cluster_map as clustermap
from fireflyer.hai.dashboard.page_queries import (
    NODES_PER_PAGE,
    PER_PAGE,
    QUEUED_PER_PAGE,
    USE_WINDOWS,
    WINDOWS,
    PageQueries,
)
from fireflyer.hai.dashboard.routes.parameters import Number, Text
from fireflyer.hai.dashboard.routes.validation import validation_pages
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.store import Store
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import needing
from fireflyer.hai.ledger import CAUSES, IDLE
from fireflyer.hai.model import TERMINAL, TaskState
from fireflyer.hai.model.identity import Identity

Window = Literal["1h", "24h", "7d"]
UseWindow = Literal["6h", "24h", "7d", "30d", "1y"]

HOLDING: tuple[TaskState, ...] = ("starting", "running", "suspending")

STATES: dict[str, tuple[str, ...]] = {
    "all": (),
    "queued": ("queued",),
    "running": HOLDING,
    "suspended": ("suspended",),
    "over": tuple(sorted(TERMINAL)),
    "failed": ("failed",),
}


def page_routes(
    app: FastAPI, queries: PageQueries, accounts: Accounts, store: Store, trail: AuditLog
) -> None:
    """Adds these routes to the application."""
    _cluster_pages(app, queries, trail)
    _task_pages(app, queries, trail)
    _node_pages(app, queries, trail)
    validation_pages(app, queries, trail)
    needs = needing(trail)

    @app.get(f"{ROOT}/ledger")
    async def ledger(
        request: Request, window: Window = "24h", who: Identity = needs("read")
    ) -> Response:
        """Show the time of your own tasks by cause; for an operator, of the cluster and every
        user."""
        found = await queries.ledger(window)
        return await pages.page(
            request, "ledger", ledger=found, window=window, windows=list(WINDOWS),
            causes=(*CAUSES, IDLE),
        )  # fmt: skip

    @app.get(f"{ROOT}/use")
    async def use(
        request: Request, scope: Text = "cluster", window: UseWindow = "24h",
        who: Identity = needs("read"),
    ) -> Response:  # fmt: skip
        """Show occupancy, queue, goodput and utilisation over time: of the cluster, a node, a user,
        a task or a rank."""
        scope = scope or "cluster"
        scopes = [
            "cluster",
            f"user:{who.user}",
            *(f"node:{each.name}" for each in queries.nodes(who)),
        ]
        return await pages.page(
            request, "use", drawn=queries.use(scope, window, who), scope=scope, window=window,
            windows=list(USE_WINDOWS), scopes=scopes[:50],
        )  # fmt: skip

    @app.get(f"{ROOT}/users")
    async def users(request: Request, who: Identity = needs("admin")) -> Response:
        """Show the users, their groups and tokens, and the quotas."""
        tokens = Counter(view.user for view in accounts.tokens(None) if accounts.valid(view.id))
        return await pages.page(
            request, "users", users=accounts.users(), tokens=tokens, quotas=store.quotas()
        )


def _cluster_pages(app: FastAPI, queries: PageQueries, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get(ROOT)
    async def overview(request: Request, who: Identity = needs("read")) -> Response:
        """Show the current state at a glance."""
        waiting, queued = await queries.queue(who, 0, 5)
        ledger = await queries.ledger("24h")
        running = queries.tasks(who, HOLDING, "", None, 10)
        return await pages.page(
            request, "overview", occupancy=queries.occupancy(queries.nodes(who)), counts=queries.counts(who),
            waiting=waiting, queued=queued, ledger=ledger, running=running,
            faults=queries.faults(who, 8), causes=(*CAUSES, IDLE),
            drawn=queries.use("cluster", "24h", who, ("Occupancy", "Queue")),
        )  # fmt: skip

    @app.get(f"{ROOT}/map")
    async def cluster_map(
        request: Request, leaf: Text | None = None, who: Identity = needs("read")
    ) -> Response:
        """Show the zones, leaves and nodes."""
        nodes = queries.nodes(who)
        zones = clustermap.zones(nodes, queries.own(who), leaf)
        return await pages.page(
            request, "map", zones=zones, leaf=leaf, occupancy=queries.occupancy(nodes),
            columns=clustermap.COLUMNS, cell=clustermap.CELL, letters=clustermap.LETTERS,
        )  # fmt: skip

    @app.get(f"{ROOT}/queue")
    async def queue(request: Request, page: Number = 0, who: Identity = needs("read")) -> Response:
        """Show the queue: its tasks, their reasons and waiting times."""
        first = page * QUEUED_PER_PAGE
        waiting, count = await queries.queue(who, first, QUEUED_PER_PAGE)
        last = (count - 1) // QUEUED_PER_PAGE if count else 0
        return await pages.page(
            request, "queue", waiting=waiting, count=count, page=page, last=last
        )


def _task_pages(app: FastAPI, queries: PageQueries, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get(f"{ROOT}/tasks")
    async def tasks(
        request: Request,
        state: Literal["all", "queued", "running", "suspended", "over", "failed"] = "all",
        user: Text = "",
        before: Number | None = None,
        who: Identity = needs("read"),
    ) -> Response:
        """List the tasks, newest first."""
        found = queries.tasks(who, STATES[state], user, before, PER_PAGE + 1)
        more = found[PER_PAGE - 1].task[1:] if len(found) > PER_PAGE else None
        return await pages.page(
            request, "tasks", tasks=found[:PER_PAGE], state=state, states=list(STATES), user=user,
            before=before, more=more,
        )  # fmt: skip

    @app.get(f"{ROOT}/tasks/{{task}}")
    async def show(
        request: Request,
        task: str,
        rank: Number = 0,
        attempt: Annotated[int | None, Query(ge=1, lt=1 << 31)] = None,
        who: Identity = needs("read"),
    ) -> Response:
        """Show one task: state, time, log, history."""
        queries.check_owner(task, who)
        found = await queries.task(task, rank, attempt)
        return await pages.page(
            request, "task", task=found, rank=rank, attempt=attempt, causes=CAUSES,
            drawn=queries.use_of_task(found),
        )  # fmt: skip

    @app.get(f"{ROOT}/tasks/{{task}}/profile/{{attempt}}/{{name}}")
    async def profile(
        task: str,
        attempt: Annotated[int, Path(ge=1, lt=1 << 31)],
        name: Literal["report.html", "trace.json"],
        who: Identity = needs("read"),
    ) -> Response:
        """Show the report of a profiled attempt, or download its trace."""
        queries.check_owner(task, who)
        path = queries.profile_file(task, attempt, name)
        if name == profiles.REPORT:
            headers = {"Content-Security-Policy": profiles.REPORT_POLICY}
            return FileResponse(path, media_type="text/html; charset=utf-8", headers=headers)
        return FileResponse(
            path, media_type="application/json", filename=f"{task}-{attempt}-{name}"
        )


def _node_pages(app: FastAPI, queries: PageQueries, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get(f"{ROOT}/nodes")
    async def nodes(
        request: Request,
        state: Literal["all", "free", "partly", "full", "suspect", "drained", "down"] = "all",
        page: Number = 0,
        who: Identity = needs("read"),
    ) -> Response:
        """List the nodes and their problems."""
        found = queries.nodes(who)
        occupancy = queries.occupancy(found)
        chosen = [node for node in found if state in ("all", clustermap.state_of(node))]
        first = page * NODES_PER_PAGE
        last = (len(chosen) - 1) // NODES_PER_PAGE if chosen else 0
        shown = [
            (node, clustermap.state_of(node)) for node in chosen[first : first + NODES_PER_PAGE]
        ]
        return await pages.page(
            request, "nodes", nodes=shown, count=len(chosen), state=state, page=page, last=last,
            occupancy=occupancy,
        )  # fmt: skip

    @app.get(f"{ROOT}/nodes/{{node}}")
    async def one(request: Request, node: str, who: Identity = needs("read")) -> Response:
        """Show one node: its tasks, its mark, the observations there."""
        found = next((each for each in queries.nodes(who) if each.name == node), None)
        if found is None:
            raise NoSuchNode(f"no node {node[:63]!a} here")
        return await pages.page(
            request, "node", node=found, state=clustermap.state_of(found),
            lines=queries.named(found.tasks), faults=queries.faults(who, 30, node),
            drawn=queries.use(f"node:{node}", "24h", who),
        )  # fmt: skip
