"""The dashboard's application: signing in and out, files that all pages share, and error pages."""

from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

from fireflyer import errors
from fireflyer.errors import PermissionDenied, Unauthenticated
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.dashboard import pages
from fireflyer.hai.dashboard.auth_middleware import ROOT, SIGN_IN, AuthMiddleware, next_page
from fireflyer.hai.dashboard.page_queries import PageQueries
from fireflyer.hai.dashboard.routes.actions import acting_routes
from fireflyer.hai.dashboard.routes.forms import ELSEWHERE, checked_form, read_form, same_origin
from fireflyer.hai.dashboard.routes.live import live_routes
from fireflyer.hai.dashboard.routes.pages import page_routes
from fireflyer.hai.dashboard.routes.refusal_log import RefusalLog
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.store import Store
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.request_times import Timed
from fireflyer.hai.http.responses import status_of
from fireflyer.hai.http.throttle import Throttle
from fireflyer.hai.model.identity import Identity

FOREVER = "public, max-age=31536000, immutable"
"""Cache-Control of the style sheet and the script. Their URLs contain a version, so a changed file
gets another URL."""


def build(
    controller: Controller, store: Store, accounts: Accounts, sessions: Sessions, throttle: Throttle
) -> FastAPI:
    """Builds the pages, without their `AuthMiddleware`.

    Args:
        controller: state that the pages show and change.
        store: store of the same server.
        accounts: accounts of the same server.
        sessions: sessions of the same server.
        throttle: delays the answers to wrong tokens.
    """
    trail = AuditLog(store.database)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(errors.FireflyerError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    queries = PageQueries(controller, store)
    refusals = RefusalLog(trail, accounts)
    _sign_in_routes(app, accounts, sessions, trail, refusals, throttle)
    _static_routes(app)
    page_routes(app, queries, accounts, store, trail)
    acting_routes(app, controller, trail, refusals)
    live_routes(app, controller, sessions, trail)
    app.add_middleware(Timed, meters=controller.meters)
    return app


def _sign_in_routes(
    app: FastAPI, accounts: Accounts, sessions: Sessions, trail: AuditLog, refusals: RefusalLog,
    throttle: Throttle,
) -> None:  # fmt: skip
    needs = needing(trail)

    @app.get(SIGN_IN)
    async def sign_in_page(
        request: Request, next: Annotated[str, Query(max_length=500)] = ""
    ) -> Response:
        """Ask for a token or a code."""
        return await pages.page(request, "sign_in", next=next_page(next), message="")

    @app.post(SIGN_IN)
    async def sign_in(request: Request) -> Response:
        """Sign in: begin a session."""
        if not same_origin(request):
            elsewhere = PermissionDenied(ELSEWHERE)
            refusals.sign_in(request, "", elsewhere)
            raise elsewhere
        form = await read_form(request)
        target = next_page(form.get("next", ""))
        text = form.get("token", "").strip()
        try:
            who = _identify(text, request, accounts, sessions)
        except Unauthenticated as error:
            refusals.sign_in(request, text, error)
            address = request.client.host if request.client is not None else ""
            refusal = await throttle.refused(address, error)
            return await pages.page(
                request, "sign_in", status_of(refusal), next=target, message=str(refusal)
            )
        with trail.change(who, "sign_in", ""):
            secret = sessions.begin(who)
        answer = RedirectResponse(target, 303)
        auth: AuthMiddleware = request.state.auth
        auth.set_cookie(answer, request.scope, secret)
        return answer

    @app.post(f"{ROOT}/sign-out")
    async def sign_out(request: Request, who: Identity = needs("read")) -> Response:
        """Sign out: end the session."""
        del who
        await checked_form(request, refusals)
        sessions.end(request.state.secret)
        answer = RedirectResponse(SIGN_IN, 303)
        request.state.auth.set_cookie(answer, request.scope, "")
        return answer


def _identify(text: str, request: Request, accounts: Accounts, sessions: Sessions) -> Identity:
    address = request.client.host if request.client is not None else ""
    if text.startswith("hai_"):
        return accounts.identify(text, address)
    who = sessions.redeem(text, request.state.auth.admits)
    if who is None:
        raise Unauthenticated(
            "invalid token or code: a code works once, within a minute; the code of the home's own user "
            "works only on the server's own machine"
        )
    return who


def _static_routes(app: FastAPI) -> None:
    async def script() -> Response:
        data = pages.static("dashboard.js")
        return Response(data, media_type="text/javascript", headers={"Cache-Control": FOREVER})

    async def style() -> Response:
        data = pages.static("dashboard.css")
        return Response(data, media_type="text/css", headers={"Cache-Control": FOREVER})

    app.get(f"{ROOT}/static/dashboard.js")(script)
    app.get(f"{ROOT}/static/dashboard.css")(style)


# -- refusals --------------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    return await _error_page(request, str(error), status_of(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return await _error_page(request, f"{first['loc'][-1]}: {first['msg']}", 400)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _error_page(request, f"no such page: {error.detail}", error.status_code)


async def _error_page(request: Request, text: str, status: int) -> Response:
    return await pages.page(request, "error", status, text=text, code=status)
