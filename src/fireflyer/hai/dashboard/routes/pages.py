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
    app: FastAPI, looks: PageQueries, accounts: Accounts, store: Store, trail: AuditLog
) -> None:
    """Adds these routes to the application."""
    _cluster_pages(app, looks, trail)
    _task_pages(app, looks, trail)
    _node_pages(app, looks, trail)
    validation_pages(app, looks, trail)
    needs = needing(trail)

    @app.get(f"{ROOT}/ledger")
    async def ledger(
        request: Request, window: Window = "24h", who: Identity = needs("read")
    ) -> Response:
        """Show the time of your own tasks by cause; for an operator, of the cluster and every
        user."""
        found = await looks.ledger(window)
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
            *(f"node:{each.name}" for each in looks.nodes(who)),
        ]
        return await pages.page(
            request, "use", drawn=looks.use(scope, window, who), scope=scope, window=window,
            windows=list(USE_WINDOWS), scopes=scopes[:50],
        )  # fmt: skip

    @app.get(f"{ROOT}/users")
    async def users(request: Request, who: Identity = needs("admin")) -> Response:
        """Show the users, their groups and tokens, and the quotas."""
        tokens = Counter(view.user for view in accounts.tokens(None) if accounts.taken(view.id))
        return await pages.page(
            request, "users", users=accounts.users(), tokens=tokens, quotas=store.quotas()
        )


def _cluster_pages(app: FastAPI, looks: PageQueries, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get(ROOT)
    async def overview(request: Request, who: Identity = needs("read")) -> Response:
        """Show the current state at a glance."""
        waiting, queued = await looks.queue(who, 0, 5)
        ledger = await looks.ledger("24h")
        running = looks.tasks(who, HOLDING, "", None, 10)
        return await pages.page(
            request, "overview", occupancy=looks.occupancy(looks.nodes(who)), counts=looks.counts(who),
            waiting=waiting, queued=queued, ledger=ledger, running=running,
            faults=looks.faults(who, 8), causes=(*CAUSES, IDLE),
            drawn=looks.use("cluster", "24h", who, ("Occupancy", "Queue")),
        )  # fmt: skip

    @app.get(f"{ROOT}/map")
    async def cluster_map(
        request: Request, leaf: Text | None = None, who: Identity = needs("read")
    ) -> Response:
        """Show the zones, leaves and nodes."""
        nodes = looks.nodes(who)
        zones = clustermap.zones(nodes, looks.own(who), leaf)
        return await pages.page(
            request, "map", zones=zones, leaf=leaf, occupancy=looks.occupancy(nodes),
            columns=clustermap.COLUMNS, cell=clustermap.CELL, letters=clustermap.LETTERS,
        )  # fmt: skip

    @app.get(f"{ROOT}/queue")
    async def queue(request: Request, page: Number = 0, who: Identity = needs("read")) -> Response:
        """Show the queue: its tasks, their reasons and waiting times."""
        first = page * QUEUED_PER_PAGE
        waiting, count = await looks.queue(who, first, QUEUED_PER_PAGE)
        last = (count - 1) // QUEUED_PER_PAGE if count else 0
        return await pages.page(
            request, "queue", waiting=waiting, count=count, page=page, last=last
        )


def _task_pages(app: FastAPI, looks: PageQueries, trail: AuditLog) -> None:
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
        found = looks.tasks(who, STATES[state], user, before, PER_PAGE + 1)
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
        looks.check_owner(task, who)
        found = await looks.task(task, rank, attempt)
        return await pages.page(
            request, "task", task=found, rank=rank, attempt=attempt, causes=CAUSES,
            drawn=looks.use_of_task(found),
        )  # fmt: skip

    @app.get(f"{ROOT}/tasks/{{task}}/profile/{{attempt}}/{{name}}")
    async def profile(
        task: str,
        attempt: Annotated[int, Path(ge=1, lt=1 << 31)],
        name: Literal["report.html", "trace.json"],
        who: Identity = needs("read"),
    ) -> Response:
        """Show the report of a profiled attempt, or download its trace."""
        looks.check_owner(task, who)
        path = looks.profile_file(task, attempt, name)
        if name == profiles.REPORT:
            headers = {"Content-Security-Policy": profiles.REPORT_POLICY}
            return FileResponse(path, media_type="text/html; charset=utf-8", headers=headers)
        return FileResponse(
            path, media_type="application/json", filename=f"{task}-{attempt}-{name}"
        )


def _node_pages(app: FastAPI, looks: PageQueries, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get(f"{ROOT}/nodes")
    async def nodes(
        request: Request,
        state: Literal["all", "free", "partly", "full", "suspect", "drained", "down"] = "all",
        page: Number = 0,
        who: Identity = needs("read"),
    ) -> Response:
        """List the nodes and their problems."""
        found = looks.nodes(who)
        occupancy = looks.occupancy(found)
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
        found = next((each for each in looks.nodes(who) if each.name == node), None)
        if found is None:
            raise NoSuchNode(f"no node {node[:63]!a} here")
        return await pages.page(
            request, "node", node=found, state=clustermap.state_of(found),
            lines=looks.named(found.tasks), faults=looks.faults(who, 30, node),
            drawn=looks.use(f"node:{node}", "24h", who),
        )  # fmt: skip
