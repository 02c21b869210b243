"""The HTTP routes of nodes, windows and the queue."""

from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from fireflyer.errors import ConfigError
from fireflyer.hai.controller import Controller
from fireflyer.hai.marks import Mark
from fireflyer.hai.model import DrainRequest, WindowView

Body = TypeVar("Body")


def cluster_routes(app: FastAPI, controller: Controller) -> None:
    """Adds them to the application."""
    dispatch = controller.dispatch

    @app.get("/nodes")
    async def nodes() -> Response:
        return _json(dispatch.nodes())

    @app.post("/nodes/{node}/drain")
    async def drain(node: str, request: Request) -> Response:
        asked = await _body(request, DrainRequest)
        controller.drain(node, Mark(health="drained", reason=asked.reason, until=asked.until))
        return _json({})

    @app.post("/nodes/{node}/undrain")
    async def undrain(node: str) -> Response:
        await controller.undrain(node)
        return _json({})

    @app.get("/windows")
    async def windows() -> Response:
        return _json(dispatch.windows())

    @app.post("/windows")
    async def add_window(request: Request) -> Response:
        window = dispatch.add_window(await _body(request, WindowView))
        controller.replan()
        return _json(window)

    @app.delete("/windows/{window}")
    async def remove_window(window: str) -> Response:
        dispatch.remove_window(window)
        controller.replan()
        return _json({})

    @app.get("/tasks/{task}/why")
    async def why(task: str) -> Response:
        return _json(controller.why(task))


async def _body(request: Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the request cannot be read: {error}") from None


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
