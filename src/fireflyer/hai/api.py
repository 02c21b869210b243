"""The HTTP routes, only those that the command line needs. Bodies are JSON of the structs in `model`.

Every request carries the bearer token. A refusal is `{"error": <class of errors.py>, "message": ...}`.
"""

import hmac
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from fireflyer import errors
from fireflyer.hai.cluster_api import cluster_routes
from fireflyer.hai.controller import Controller
from fireflyer.hai.faults.observations import Validator
from fireflyer.hai.model import LeaseRequest, TaskSpec
from fireflyer.hai.workspaces.routes import routes

ATTEMPT_HEADER = "X-Fireflyer-Attempt"
NEXT_HEADER = "X-Fireflyer-Next"
END_HEADER = "X-Fireflyer-End"
SEQ_HEADER = "X-Fireflyer-Seq"

Seq = Annotated[int, Query(ge=0, lt=1 << 62)]
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False)]

_STATUS: list[tuple[type[Exception], int]] = [
    (errors.ConfigError, 400),
    (errors.WorkspaceError, 400),
    (errors.TaskError, 409),
    (errors.NoSpace, 507),
    (errors.FireflyerError, 500),
]


def build(controller: Controller, token: str, shut_down: Callable[[bool], None]) -> ASGIApp:
    """The application.

    Args:
        controller: what the routes call.
        token: bearer token that every request must carry.
        shut_down: begins the end of the server; its argument says whether tasks are kept running.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(errors.FireflyerError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    _task_routes(app, controller)
    app.include_router(routes(controller.workspaces))
    cluster_routes(app, controller)

    @app.get("/events")
    async def events(after: Seq = 0, task: str | None = None, wait_s: Wait = 0.0) -> Response:
        return _json(await controller.events(after, task, wait_s))

    @app.get("/faults")
    async def faults(limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
        return _json(controller.faults.recent(limit))

    @app.post("/observations")
    async def observed(request: Request) -> Response:
        try:
            found = msgspec.json.decode(await request.body(), type=Validator)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise errors.ConfigError(f"the observation cannot be read: {error}") from None
        return _json(controller.observed(found))

    @app.post("/shutdown")
    async def shutdown(keep: bool = False) -> Response:
        shut_down(keep)
        return _json({})

    return _Bearer(app, token)


def _task_routes(app: FastAPI, controller: Controller) -> None:
    @app.post("/tasks")
    async def submit(request: Request) -> Response:
        try:
            spec = msgspec.json.decode(await request.body(), type=TaskSpec)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise errors.ConfigError(f"the task cannot be read: {error}") from None
        return _json(controller.submit(spec))

    @app.get("/tasks")
    async def tasks(live: bool = False) -> Response:
        return _json(controller.views(live=live))

    @app.get("/tasks/{task}")
    async def show(task: str) -> Response:
        response = _json(controller.view(task))
        response.headers[SEQ_HEADER] = str(controller.last_seq())
        return response

    @app.post("/tasks/{task}/stop")
    async def stop(task: str) -> Response:
        return _json(controller.request(task, "stop"))

    @app.post("/tasks/{task}/suspend")
    async def suspend(task: str) -> Response:
        return _json(controller.request(task, "suspend"))

    @app.post("/tasks/{task}/resume")
    async def resume(task: str) -> Response:
        return _json(controller.request(task, "resume"))

    @app.post("/tasks/{task}/lease")
    async def lease(task: str, request: Request) -> Response:
        try:
            asked = msgspec.json.decode(await request.body(), type=LeaseRequest)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise errors.ConfigError(f"the lease cannot be read: {error}") from None
        return _json({"granted": controller.lease(task, asked)})

    @app.get("/tasks/{task}/log/{rank}")
    async def log(
        task: str,
        rank: int,
        offset: Seq = 0,
        attempt: Seq | None = None,
        wait_s: Wait = 0.0,
    ) -> Response:
        piece = await controller.log(task, rank, offset, attempt, wait_s)
        headers = {
            ATTEMPT_HEADER: str(piece.attempt),
            NEXT_HEADER: str(piece.next),
            END_HEADER: "1" if piece.end else "0",
        }
        return Response(piece.data, media_type="application/octet-stream", headers=headers)


class _Bearer:
    """Answers 401 to whatever does not carry the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = b"Bearer " + token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                refusal = _error("ConfigError", "the bearer token is missing or wrong", 401)
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _error(name: str, message: str, status: int) -> Response:
    response = _json({"error": name, "message": message})
    response.status_code = status
    return response


async def _refused(_request: Request, error: Exception) -> Response:
    status = next(code for kind, code in _STATUS if isinstance(error, kind))
    return _error(type(error).__name__, str(error), status)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _error("ConfigError", f"{first['loc'][-1]}: {first['msg']}", 400)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error("ConfigError", f"no such call: {error.detail}", error.status_code)
