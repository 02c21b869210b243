"""Routes of workspaces and environments, for `client.py`. A workspace belongs to the user that
shipped it."""

import asyncio
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import FileResponse

from fireflyer.errors import Corrupted, FireflyerError, WorkspaceError
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.responses import body, documented, drain, json
from fireflyer.hai.model.identity import Identity
from fireflyer.hai.workspaces import manifest
from fireflyer.hai.workspaces.blob_store import Offer, Pruned, WorkspaceView, hours_ago
from fireflyer.hai.workspaces.manifest import Manifest
from fireflyer.hai.workspaces.tasks import Workspaces
from fireflyer.hai.workspaces.venvs import MAX_LOCK_BYTES

BYTES = "application/octet-stream"

Hours = Annotated[float, Query(ge=0, allow_inf_nan=False)]


def workspace_routes(app: FastAPI, workspaces: Workspaces, trail: AuditLog) -> None:
    """Adds these routes to the application."""
    needs = needing(trail)
    store = workspaces.store
    _upload_routes(app, workspaces, trail)

    @app.get("/workspaces", **documented(list[WorkspaceView]))
    async def views(who: Identity = needs("read")) -> Response:
        """List your own workspaces, or all workspaces for an operator."""
        return json(await asyncio.to_thread(store.views, who.only))

    @app.get("/workspaces/{name}", **documented(Manifest))
    async def show_workspace(name: str, who: Identity = needs("read")) -> Response:
        """Show the manifest of one of your own workspaces."""
        return json(await asyncio.to_thread(store.manifest, name, who.user))

    @app.get("/workspaces/{name}/blobs/{sha256}", **documented(bytes, media=BYTES))
    async def blob(name: str, sha256: str, who: Identity = needs("read")) -> Response:
        """Read the bytes of a file of one of your own workspaces."""
        found = await asyncio.to_thread(store.manifest, name, who.user)
        if sha256 not in found.blobs():
            raise WorkspaceError(f"workspace {name[:12]} has no blob {sha256[:12]!a}")
        path = store.blob(sha256)
        if not path.exists():
            raise Corrupted(f"the home has lost the blob {sha256[:12]}; ship the folder again")
        return FileResponse(path, media_type=BYTES)

    @app.post("/workspaces/prune", **documented(Pruned))
    async def prune(older_than_h: Hours = 24.0, who: Identity = needs("operate")) -> Response:
        """Remove all users' workspaces and environments that were not used for `older_than_h`
        hours."""
        keep = workspaces.in_use()
        with trail.change(who, "workspace.prune", ""):
            before = hours_ago(older_than_h)
        return json(await asyncio.to_thread(workspaces.prune, before, keep))


def _upload_routes(app: FastAPI, workspaces: Workspaces, trail: AuditLog) -> None:
    needs = needing(trail)
    store = workspaces.store

    @app.post("/workspaces", **documented(Offer, Manifest))
    async def offer(request: Request, who: Identity = needs("submit")) -> Response:
        """Create a workspace if the server has all its blobs; else list the missing blobs."""
        data = await body(request, manifest.MAX_MANIFEST_BYTES)
        found = await asyncio.to_thread(lambda: store.offer(manifest.decode(data), who.user))
        if not found.missing:
            with trail.change(who, "workspace.ship", f"workspace {found.id[:12]}"):
                return json(found)
        return json(found)

    @app.post("/workspaces/blobs", **documented(dict))
    async def upload(request: Request, who: Identity = needs("submit")) -> Response:
        """Upload blobs in the format of `stream.py`; the blobs are on disk when the response is
        sent."""
        receiver = store.receive(who.user)
        pieces = request.stream()
        try:
            async for piece in pieces:
                await asyncio.to_thread(receiver.feed, piece)
            await asyncio.to_thread(receiver.finish)
        except FireflyerError:
            await drain(pieces)
            raise
        finally:
            receiver.close()
        return json({})

    @app.post("/venvs", **documented(dict))
    async def lock(request: Request, who: Identity = needs("submit")) -> Response:
        """Store a lock file, to which tasks refer by its id."""
        data = await body(request, MAX_LOCK_BYTES)
        id = await asyncio.to_thread(workspaces.venvs.take, data)
        with trail.change(who, "venv.ship", f"venv {id[:12]}"):
            return json({"id": id})
