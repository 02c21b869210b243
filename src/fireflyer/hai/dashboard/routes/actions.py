"""Routes that change state: forms of the session's own pages, with the API's scopes and audit
log."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.responses import RedirectResponse

from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.dashboard import pages
from fireflyer.hai.dashboard.auth_middleware import ROOT
from fireflyer.hai.dashboard.routes.forms import checked_form
from fireflyer.hai.dashboard.routes.refusal_log import RefusalLog
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.node_marks import Mark
from fireflyer.hai.http.auth import needing
from fireflyer.hai.lifecycle import Request as Wish
from fireflyer.hai.model.identity import Identity


def acting_routes(
    app: FastAPI, controller: Controller, trail: AuditLog, refusals: RefusalLog
) -> None:
    """Adds these routes to the application."""
    needs = needing(trail)

    def steering(what: Wish) -> Callable[..., Coroutine[Any, Any, Response]]:
        async def steer(request: Request, task: str, who: Identity = needs("submit")) -> Response:
            await checked_form(request, refusals)
            with trail.change(who, what, task[:20]):
                controller.check_owner(task, who.only)
                controller.request(task, what)
            return RedirectResponse(f"{ROOT}/tasks/{task}", 303)

        steer.__name__ = what
        return steer

    for what in ("stop", "suspend", "resume"):
        app.post(f"{ROOT}/tasks/{{task}}/{what}")(steering(what))

    @app.get(f"{ROOT}/tasks/{{task}}/stop")
    async def ask_to_stop(request: Request, task: str, who: Identity = needs("submit")) -> Response:
        """Ask for confirmation before stopping a task."""
        controller.check_owner(task, who.only)
        return await pages.page(request, "stop", view=controller.view(task))

    @app.post(f"{ROOT}/nodes/{{node}}/drain")
    async def drain(request: Request, node: str, who: Identity = needs("operate")) -> Response:
        """Drain a node: no new task starts there. With `evict` its tasks continue on other
        nodes."""
        form = await checked_form(request, refusals)
        with trail.change(who, "drain", f"node {node[:63]}"):
            mark = Mark(health="drained", reason=form.get("reason", "").strip())
            controller.drain(node, mark, evict=form.get("evict") == "1")
        return RedirectResponse(f"{ROOT}/nodes/{node}", 303)

    @app.post(f"{ROOT}/nodes/{{node}}/undrain")
    async def undrain(request: Request, node: str, who: Identity = needs("operate")) -> Response:
        """Undrain a node: use it again."""
        await checked_form(request, refusals)
        with trail.change(who, "undrain", f"node {node[:63]}"):
            controller.unmark(node)
        await controller.undrain_engine(node)
        return RedirectResponse(f"{ROOT}/nodes/{node}", 303)
