"""The routes of workspaces and environments. `api.py` hooks them in."""

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse

from fireflyer.errors import Corrupted, FireflyerError, WorkspaceError
from fireflyer.hai.workspaces import manifest
from fireflyer.hai.workspaces.depot import hours_ago
from fireflyer.hai.workspaces.tasks import Workspaces
from fireflyer.hai.workspaces.venvs import MAX_LOCK_BYTES


def nobody(_request: Request) -> str:
    """Whose request it is where the server has no users."""
    return ""


def routes(workspaces: Workspaces, user_of: Callable[[Request], str] = nobody) -> APIRouter:
    """The calls of `shipping.py`.

    Args:
        workspaces: of the home.
        user_of: whose request it is; a workspace belongs to that user.
    """
    router = APIRouter()
    depot = workspaces.depot

    @router.post("/workspaces")
    async def offer(request: Request) -> Response:
        data = await _body(request, manifest.MAX_MANIFEST_BYTES)
        user = user_of(request)
        return _json(await asyncio.to_thread(lambda: depot.offer(manifest.decode(data), user)))

    @router.post("/workspaces/blobs")
    async def upload(request: Request) -> Response:
        receiver = depot.receive(user_of(request))
        body = request.stream()
        try:
            async for piece in body:
                await asyncio.to_thread(receiver.feed, piece)
            await asyncio.to_thread(receiver.finish)
        except FireflyerError:
            await _drain(body)
            raise
        finally:
            receiver.close()
        return _json({})

    @router.get("/workspaces")
    async def views(request: Request) -> Response:
        return _json(await asyncio.to_thread(depot.views, user_of(request)))

    @router.get("/workspaces/{name}")
    async def show(request: Request, name: str) -> Response:
        found = await asyncio.to_thread(depot.manifest, name, user_of(request))
        return Response(manifest.encode(found), media_type="application/json")

    @router.get("/workspaces/{name}/blobs/{sha256}")
    async def blob(request: Request, name: str, sha256: str) -> Response:
        found = await asyncio.to_thread(depot.manifest, name, user_of(request))
        if sha256 not in found.blobs():
            raise WorkspaceError(f"workspace {name[:12]} has no blob {sha256[:12]!a}")
        path = depot.blob(sha256)
        if not path.exists():
            raise Corrupted(f"the home has lost the blob {sha256[:12]}; ship the folder again")
        return FileResponse(path, media_type="application/octet-stream")

    @router.post("/workspaces/prune")
    async def prune(older_than_h: float = 24.0) -> Response:
        keep = workspaces.in_use()
        before = hours_ago(max(older_than_h, 0.0))
        return _json(await asyncio.to_thread(workspaces.prune, before, keep))

    @router.post("/venvs")
    async def lock(request: Request) -> Response:
        data = await _body(request, MAX_LOCK_BYTES)
        return _json({"id": await asyncio.to_thread(workspaces.venvs.take, data)})

    return router


async def _body(request: Request, limit: int) -> bytes:
    """All of it, as long as it is not longer than it may be."""
    data = bytearray()
    body = request.stream()
    async for piece in body:
        data += piece
        if len(data) > limit:
            await _drain(body)
            raise WorkspaceError(f"the request has more than {limit >> 20} MiB")
    return bytes(data)


async def _drain(body: AsyncIterator[bytes]) -> None:
    """The client sends all of it before it looks at the answer."""
    async for _ in body:
        pass


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
