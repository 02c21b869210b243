"""The HTTP routes of nodes, windows (maintenance windows and reservations), the queue, and
faults."""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response

from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.dispatch import masked
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.node_marks import Mark
from fireflyer.hai.database.store import Store
from fireflyer.hai.faults.rules import Decision, Faults
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.responses import documented, json, read
from fireflyer.hai.model import DrainRequest, NodeView, WhyView, WindowView
from fireflyer.hai.model.admission import MAX_NAME, MAX_REASON, check_line
from fireflyer.hai.model.identity import Identity
from fireflyer.hai.model.observations import Validator
from fireflyer.hai.model.validations import NodeHistory

VALIDATIONS = 200
"""Maximum number of entries of a node's journal in an answer."""

Limit = Annotated[int, Query(ge=1, le=1000)]


def cluster_routes(
    app: FastAPI, controller: Controller, store: Store, accounts: Accounts, trail: AuditLog
) -> None:
    """Adds these routes to the application."""
    needs = needing(trail)
    _node_routes(app, controller, store, trail)
    _window_routes(app, controller, accounts, trail)

    @app.get("/tasks/{task}/why", **documented(WhyView))
    async def why(task: str, who: Identity = needs("read")) -> Response:
        """Explain what a task waits for."""
        controller.check_owner(task, who.only)
        return json(controller.why(task))

    @app.get("/faults", **documented(Faults))
    async def faults(limit: Limit = 100, who: Identity = needs("read")) -> Response:
        """Read the rules in force and the newest observations: of your own tasks, or of all tasks
        for an operator."""
        return json(controller.faults.recent(limit, who.only))

    @app.post("/observations", **documented(Decision, Validator))
    async def observed(request: Request, who: Identity = needs("operate")) -> Response:
        """Record the result of a node check and apply the fault rules."""
        found = await read(request, Validator, "observation")
        check_line("the check", found.check, MAX_NAME)
        check_line("the result", found.result, MAX_REASON)
        with trail.change(who, "observe", f"node {found.node}"):
            return json(controller.observed(found))


def _node_routes(app: FastAPI, controller: Controller, store: Store, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.get("/nodes", **documented(list[NodeView]))
    async def nodes(who: Identity = needs("read")) -> Response:
        """List the nodes and the tasks on them; another user's task is "*"."""
        found = controller.dispatch.nodes()
        if who.only is not None:
            own = {row.task for row in store.rows(live=True, user=who.only)}
            found = [masked(node, own.__contains__) for node in found]
        return json(found)

    @app.post("/nodes/{node}/drain", **documented(dict, DrainRequest))
    async def drain(node: str, request: Request, who: Identity = needs("operate")) -> Response:
        """Drain a node: no new task starts there. With `evict` its tasks save, exit and continue on
        other nodes. The drain is on disk when the response is sent."""
        asked = await read(request, DrainRequest, "request")
        with trail.change(who, "drain", f"node {node[:63]}"):
            mark = Mark(health="drained", reason=asked.reason, until=asked.until)
            controller.drain(node, mark, evict=asked.evict)
        return json({})

    @app.post("/nodes/{node}/undrain", **documented(dict))
    async def undrain(node: str, who: Identity = needs("operate")) -> Response:
        """Undrain a node: use it again."""
        with trail.change(who, "undrain", f"node {node[:63]}"):
            controller.unmark(node)
        await controller.undrain_engine(node)
        return json({})

    @app.post("/nodes/{node}/validate", **documented(dict))
    async def validate(node: str, who: Identity = needs("operate")) -> Response:
        """Validate a node as soon as the node is idle. A node that a fault rule drained returns to
        service if the validation passes."""
        with trail.change(who, "validate", f"node {node[:63]}"):
            controller.validation.request(node)
        controller.replan()
        return json({})

    @app.get("/nodes/{node}/validations", **documented(NodeHistory))
    async def validations(node: str, who: Identity = needs("read")) -> Response:
        """Read the newest entries of a node's validation journal: validations, faults, and returns
        to service."""
        del who
        found = await asyncio.to_thread(controller.validation.history, node, VALIDATIONS)
        return json(NodeHistory(entries=tuple(found)))


def _window_routes(
    app: FastAPI, controller: Controller, accounts: Accounts, trail: AuditLog
) -> None:
    needs = needing(trail)
    dispatch = controller.dispatch

    @app.get("/windows", **documented(list[WindowView]))
    async def windows(who: Identity = needs("read")) -> Response:
        """List the maintenance windows and reservations that are not over."""
        del who
        return json(dispatch.windows())

    @app.post("/windows", **documented(WindowView, WindowView))
    async def add_window(request: Request, who: Identity = needs("operate")) -> Response:
        """Add a window; the window is on disk when the response is sent."""
        asked = await read(request, WindowView, "window")
        check_line("the reason", asked.reason, MAX_REASON)
        with trail.change(who, "window.add", ""):
            accounts.check_whose(who, asked.user, asked.group)
            window = dispatch.add_window(asked)
        controller.replan()
        return json(window)

    @app.delete("/windows/{window}", **documented(dict))
    async def remove_window(window: str, who: Identity = needs("operate")) -> Response:
        """Remove a window."""
        with trail.change(who, "window.remove", f"window {window[:20]}"):
            dispatch.remove_window(window)
        controller.replan()
        return json({})
