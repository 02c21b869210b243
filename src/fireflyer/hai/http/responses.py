"""Format of responses: JSON of msgspec structs, errors as `{"error": class, "message": text}`, and
both in the OpenAPI document."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from fireflyer import __version__, errors
from fireflyer.hai import ledger, model
from fireflyer.hai.faults.rules import Decision, Faults
from fireflyer.hai.model import identity
from fireflyer.hai.model.observations import Validator
from fireflyer.hai.model.validations import NodeHistory
from fireflyer.hai.workspaces.blob_store import Offer, Pruned, WorkspaceView
from fireflyer.hai.workspaces.manifest import Manifest

T = TypeVar("T")

MAX_BODY_BYTES = 4 << 20
"""Maximum bytes of a request's body, except for workspaces and lock files."""

_STATUS: list[tuple[type[Exception], int]] = [
    (errors.Unauthenticated, 401),
    (errors.Throttled, 429),
    (errors.PermissionDenied, 403),
    (errors.NoSuchTask, 404),
    (errors.NoSuchNode, 404),
    (errors.ConfigError, 400),
    (errors.WorkspaceError, 400),
    (errors.TaskError, 409),
    (errors.NoSpace, 507),
    (errors.Unavailable, 503),
    (errors.Stale, 503),
    (errors.FireflyerError, 500),
]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every response other than 200."""

    error: str
    """Name of a class of fireflyer.errors."""
    message: str


class Granted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a LeaseRequest."""

    granted: bool


SHOWN: list[Any] = [
    model.TaskSpec, model.TaskView, model.TaskLine, model.Event, model.LeaseRequest, model.NodeView,
    model.WhyView, model.WindowView, model.DrainRequest, model.SeriesView, Granted, Refusal,
    Faults, Decision, Validator, Manifest, Offer, Pruned, WorkspaceView, ledger.LedgerView,
    identity.User, identity.UserRequest, identity.Group, identity.GroupRequest, identity.TokenView,
    identity.TokenRequest, identity.NewToken, identity.Quota, identity.AuditEntry, identity.Identity,
    identity.SignInCode, NodeHistory,
]  # fmt: skip
"""Types of request and response bodies, for the OpenAPI document."""


def json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def read(request: Request, kind: type[T], what: str) -> T:
    """Reads and decodes a request's JSON body.

    Raises:
        ConfigError: the body is not JSON of type `kind`, or is longer than MAX_BODY_BYTES.
    """
    data = await body(request, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.ConfigError(f"the {what} cannot be read: {error}") from None


async def body(request: Request, limit: int) -> bytes:
    """Reads all of a request's body.

    Raises:
        ConfigError: the body has more than `limit` bytes; the excess is read and dropped.
    """
    data = bytearray()
    pieces = request.stream()
    async for piece in pieces:
        data += piece
        if len(data) > limit:
            await drain(pieces)
            raise errors.ConfigError(f"the request has more than {limit >> 20} MiB")
    return bytes(data)


async def drain(pieces: AsyncIterator[bytes]) -> None:
    """Reads and drops the rest of a body, because a client sends the complete body before it reads
    the response."""
    async for _ in pieces:
        pass


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error."""
    return next(code for kind, code in _STATUS if isinstance(error, kind))


def refuse(error: Exception) -> Response:
    return _refusal(type(error).__name__, str(error), status_of(error))


def add_refusals(app: FastAPI) -> None:
    app.add_exception_handler(errors.FireflyerError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)


def _refusal(name: str, message: str, status: int) -> Response:
    response = json({"error": name, "message": message})
    response.status_code = status
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _refused(_request: Request, error: Exception) -> Response:
    return refuse(error)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _refusal("ConfigError", f"{first['loc'][-1]}: {first['msg']}", 400)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal("ConfigError", f"no such call: {error.detail}", error.status_code)


# -- OpenAPI ---------------------------------------------------------------------------------------


def documented(answer: Any, body: Any = None, media: str = "application/json") -> dict[str, Any]:
    """Returns arguments for a route's decorator that document its response and its body."""
    refusal = {"description": "refused", "content": _content(Refusal, "application/json")}
    found: dict[str, Any] = {
        "response_class": Response,
        "responses": {
            200: {"description": "done", "content": _content(answer, media)},
            **dict.fromkeys((400, 401, 403, 404, 409), refusal),
        },
    }
    if body is not None:
        content = _content(body, "application/json")
        found["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return found


def _content(kind: Any, media: str) -> dict[str, Any]:
    if kind is dict:
        return {media: {"schema": {"type": "object"}}}
    if media != "application/json":
        return {media: {"schema": {"type": "string"}}}
    if get_origin(kind) is list:
        return {media: {"schema": {"type": "array", "items": _reference(get_args(kind)[0])}}}
    return {media: {"schema": _reference(kind)}}


def _reference(kind: Any) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def describe(app: FastAPI) -> None:
    """Serves the OpenAPI document at /openapi.json, which needs a token like every route."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title="Fireflyer", version=__version__, routes=app.routes)
            template = "#/components/schemas/{name}"
            _, shown = msgspec.json.schema_components(SHOWN, ref_template=template)
            parts = found.setdefault("components", {})
            parts.setdefault("schemas", {}).update(shown)
            parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            found["security"] = [{"token": []}]
            app.openapi_schema = found
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def route_scopes(app: FastAPI) -> Iterator[tuple[str, str, Sequence[Callable[..., Any]]]]:
    """Yields the method, path and all direct and indirect dependencies of every documented
    route."""
    from fastapi.routing import APIRoute

    for route in app.routes:
        if isinstance(route, APIRoute):
            parts = list(route.dependant.dependencies)
            for part in parts:
                parts += part.dependencies
            calls = [part.call for part in parts if part.call is not None]
            for method in sorted(route.methods or ()):
                yield method, route.path, calls
