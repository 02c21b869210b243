"""HTTP routes. Bodies are JSON of the structs in `model` and `identity`; /openapi.json describes
them.

Every request carries a bearer token (`auth.py`). An error is `{"error": class, "message": text}`.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request, Response

from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.metrics import CONTENT_TYPE
from fireflyer.hai.dashboard.sessions import CODE_S, Sessions
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.store import Store
from fireflyer.hai.http import responses, streams
from fireflyer.hai.http.access import Accounts
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.request_times import Timed
from fireflyer.hai.http.responses import Granted, documented, json, read
from fireflyer.hai.http.streams import AskedLog, LastId, Number
from fireflyer.hai.model import (
    Event,
    LeaseRequest,
    Listing,
    TaskLine,
    TaskSpec,
    TaskState,
    TaskView,
    job_file,
)
from fireflyer.hai.model.admission import check_labels
from fireflyer.hai.model.identity import HOME_TOKEN, Identity, SignInCode
from fireflyer.hai.server.routes.accounts import account_routes
from fireflyer.hai.server.routes.cluster import cluster_routes
from fireflyer.hai.server.routes.ledger import ledger_routes
from fireflyer.hai.server.routes.series import series_routes
from fireflyer.hai.server.routes.workspaces import workspace_routes

ATTEMPT_HEADER = "X-Fireflyer-Attempt"
NEXT_HEADER = "X-Fireflyer-Next"
END_HEADER = "X-Fireflyer-End"
SEQ_HEADER = "X-Fireflyer-Seq"

BYTES = "application/octet-stream"
TOML = "application/toml"

States = Annotated[Sequence[TaskState], Query()]
Texts = Annotated[Sequence[str], Query()]
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False)]


def build(
    controller: Controller, store: Store, accounts: Accounts, sessions: Sessions,
    shut_down: Callable[[bool], None],
) -> FastAPI:  # fmt: skip
    """Builds the application without its `Authenticator`.

    Args:
        controller: called by the routes.
        store: store of the same server.
        accounts: accounts of the same server.
        sessions: sessions of the same server's dashboard.
        shut_down: starts the shutdown; the argument is True if tasks keep running.
    """
    trail = AuditLog(store.database)
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False)
    responses.add_refusals(app)
    responses.describe(app)
    _task_routes(app, controller, store, accounts, trail)
    _stream_routes(app, controller, accounts, trail)
    _server_routes(app, controller, trail, shut_down)
    _code_route(app, sessions, trail)
    cluster_routes(app, controller, store, accounts, trail)
    ledger_routes(app, controller, store, accounts, trail)
    series_routes(app, controller, Samples(store.database), trail)
    workspace_routes(app, controller.workspaces, trail)
    account_routes(app, accounts, store, trail, controller.read_quotas)
    app.add_middleware(Timed, meters=controller.meters)
    return app


def _task_routes(
    app: FastAPI, controller: Controller, store: Store, accounts: Accounts, trail: AuditLog
) -> None:
    needs = needing(trail)

    @app.post("/tasks", **documented(TaskView, TaskSpec))
    async def submit(request: Request, who: Identity = needs("submit")) -> Response:
        """Submit a task; the task is on disk when the response is sent. With content type
        application/toml the body is a job file."""
        if request.headers.get("content-type", "").partition(";")[0].strip() == TOML:
            spec = job_file.from_request(await responses.body(request, responses.MAX_BODY_BYTES))
        else:
            spec = await read(request, TaskSpec, "task")
        with trail.refusals(who, "submit") as line:
            accounts.check_group(who, spec.group)
            check_labels(spec)
            row = await controller.submissions.submit(spec, who.user, line)
            return json(controller.submitted(row))

    async def listing(
        live: bool = False,
        user: str | None = None,
        state: States = (),
        label: Texts = (),
        who: Identity = needs("read"),
    ) -> Listing | None:
        """Returns the choice of tasks of a request; None: `who` may not see the requested user's
        tasks."""
        if who.only is not None and user not in (None, who.only):
            return None
        named = dict(text.partition("=")[::2] for text in label)
        return Listing(live=live, user=who.only or user, states=tuple(state), labels=named)

    asked = Depends(listing)

    @app.get("/tasks", **documented(list[TaskView]))
    async def tasks(after: str = "", chosen: Listing | None = asked) -> Response:
        """List at most 1000 tasks after `after`, in order of submission: your own tasks, or all
        tasks for an operator. `label`: NAME or NAME=VALUE."""
        return json([] if chosen is None else controller.views(chosen, after))

    @app.get("/task-lines", **documented(list[TaskLine]))
    async def task_lines(after: str = "", chosen: Listing | None = asked) -> Response:
        """List at most 5000 tasks as GET /tasks does, but without ranks, arguments and
        environment."""
        return json([] if chosen is None else controller.lines(chosen, after))

    @app.get("/tasks/{task}", **documented(TaskView))
    async def show(task: str, who: Identity = needs("read")) -> Response:
        controller.check_owner(task, who.only)
        response = json(controller.view(task))
        response.headers[SEQ_HEADER] = str(store.last_seq())
        return response

    def steering(what: Any) -> None:
        async def steer(task: str, who: Identity = needs("submit")) -> Response:
            with trail.change(who, what, task[:20]):
                controller.check_owner(task, who.only)
                return json(controller.request(task, what))

        steer.__name__ = what
        app.post(f"/tasks/{{task}}/{what}", **documented(TaskView))(steer)

    for what in ("stop", "suspend", "resume"):
        steering(what)

    @app.post("/tasks/{task}/lease", **documented(Granted, LeaseRequest))
    async def lease(task: str, request: Request, who: Identity = needs("submit")) -> Response:
        """Ask whether one partition of an attempt may continue after its ranks lost contact."""
        asked = await read(request, LeaseRequest, "lease")
        controller.check_owner(task, who.only)
        return json(Granted(granted=controller.lease(task, asked)))


def _stream_routes(
    app: FastAPI, controller: Controller, accounts: Accounts, trail: AuditLog
) -> None:
    needs = needing(trail)

    def allowed(who: Identity) -> Callable[[], bool]:
        return lambda: who.token == HOME_TOKEN or accounts.valid(who.token)

    @app.get("/tasks/{task}/log/{rank}", **documented(bytes, media=BYTES))
    async def log(
        task: str,
        rank: int,
        offset: Number = 0,
        attempt: Number | None = None,
        wait_s: Wait = 0.0,
        who: Identity = needs("read"),
    ) -> Response:
        """Read at most 1 MiB of a rank's output from a byte offset; a header has the offset to
        continue from."""
        controller.check_owner(task, who.only)
        piece = await controller.log(task, rank, offset, attempt, wait_s)
        headers = {
            ATTEMPT_HEADER: str(piece.attempt),
            NEXT_HEADER: str(piece.next),
            END_HEADER: "1" if piece.end else "0",
        }
        return Response(piece.data, media_type=BYTES, headers=headers)

    @app.get("/tasks/{task}/log/{rank}/stream", **documented(str, media=streams.MEDIA))
    async def log_stream(at: AskedLog, who: Identity = needs("read")) -> Response:
        """Follow a rank's output as server-sent events until the attempt is over; id:
        ATTEMPT:OFFSET."""
        return streams.follow_log(controller, at, who, allowed(who))

    @app.get("/events", **documented(list[Event]))
    async def events(
        after: Number = 0,
        task: str | None = None,
        wait_s: Wait = 0.0,
        who: Identity = needs("read"),
    ) -> Response:
        """Read at most 1000 events of the history; wait up to `wait_s` for the first."""
        if task is not None:
            controller.check_owner(task, who.only)
        return json(await controller.events(after, task, wait_s, who.only))

    @app.get("/events/stream", **documented(str, media=streams.MEDIA))
    async def event_stream(
        after: Number = 0,
        task: str | None = None,
        last_id: LastId = None,
        who: Identity = needs("read"),
    ) -> Response:
        """Follow the history as server-sent events; id: the seq."""
        if task is not None:
            controller.view(task)
            controller.check_owner(task, who.only)
        after = streams.event_place(last_id, after)
        messages = streams.event_messages(controller, after, task, who.only, allowed(who))
        return streams.answer(messages)


def _server_routes(
    app: FastAPI, controller: Controller, trail: AuditLog, shut_down: Callable[[bool], None]
) -> None:
    needs = needing(trail)

    @app.get("/metrics", **documented(str, media=CONTENT_TYPE))
    async def metrics(who: Identity = needs("operate")) -> Response:
        """Read the metrics in the Prometheus format."""
        del who
        return Response(controller.meters.text(), media_type=CONTENT_TYPE)

    @app.post("/shutdown", **documented(dict))
    async def shutdown(keep: bool = False, who: Identity = needs("admin")) -> Response:
        """Shut the server down: stop its tasks first, or keep them."""
        with trail.change(who, "shutdown", "keep" if keep else ""):
            shut_down(keep)
        return json({})


def _code_route(app: FastAPI, sessions: Sessions, trail: AuditLog) -> None:
    needs = needing(trail)

    @app.post("/sign-in-codes", **documented(SignInCode))
    async def sign_in_code(who: Identity = needs("read")) -> Response:
        """Create a code that signs one browser in to the dashboard, once, as the token's user."""
        return json(SignInCode(code=sessions.code(who), seconds=CODE_S))
