"""Streams for open pages: change notifications, and the output of ranks."""

import asyncio
from collections.abc import AsyncIterator, Callable

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Send

from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.logs import IDLE_S, LogFile
from fireflyer.hai.dashboard.auth_middleware import ROOT
from fireflyer.hai.dashboard.sessions import Sessions
from fireflyer.hai.database.audit_log import AuditLog
from fireflyer.hai.http import streams
from fireflyer.hai.http.auth import needing
from fireflyer.hai.http.streams import AskedLog, Number
from fireflyer.hai.model.identity import Identity

PAUSE_S = 1.0
"""Minimum seconds between two change notifications."""


def live_routes(app: FastAPI, controller: Controller, sessions: Sessions, trail: AuditLog) -> None:
    """Adds these routes to the application."""
    needs = needing(trail)

    def allowed(request: Request) -> Callable[[], bool]:
        secret: str = request.state.secret
        return lambda: sessions.holds(secret)

    @app.get(f"{ROOT}/changes/stream")
    async def changes(request: Request, who: Identity = needs("read")) -> Response:
        """Notify the page of changes, at most once in PAUSE_S, without their content. The page
        reloads once after the head of this response, so it misses no change."""
        del who
        known = await controller.news(0, 0.0)
        return streams.answer(_changes(controller, known, allowed(request)))

    @app.get(f"{ROOT}/tasks/{{task}}/log/{{rank}}/stream")
    async def log(request: Request, at: AskedLog, who: Identity = needs("read")) -> Response:
        """Stream a rank's output, as the API does."""
        return streams.follow_log(controller, at, who, allowed(request))

    @app.get(f"{ROOT}/tasks/{{task}}/log/{{rank}}/text")
    async def download(
        request: Request,
        task: str,
        rank: int,
        attempt: Number | None = None,
        who: Identity = needs("read"),
    ) -> Response:
        """Download the complete current content of a log, unchanged, as a file."""
        controller.check_owner(task, who.only)
        file = controller.logs.find(task, rank, attempt)
        name = f"{file.task}-{file.attempt}-{rank}.log"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        answer = _Download(_all_of(controller, file), headers=headers, media_type="text/plain")
        answer.allowed = allowed(request)
        return answer


class _Download(StreamingResponse):
    """Response in chunks. Once `allowed` returns False, no chunk follows, not even the last, empty
    chunk. The server then closes the connection within the body, so that no client takes the
    truncated body for a complete one."""

    allowed: Callable[[], bool]

    async def stream_response(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self.body_iterator:
            if not self.allowed():
                return
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _changes(
    controller: Controller, known: int, allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    controller.meters.followers["changes"] += 1
    try:
        yield b": open\n\n"
        while not controller.closing:
            count = await controller.news(known, IDLE_S)
            if not allowed() or controller.closing:
                return
            yield b"event: change\ndata: \n\n" if count > known else b": nothing new\n\n"
            known = count
            await asyncio.sleep(PAUSE_S)
    finally:
        controller.meters.followers["changes"] -= 1


async def _all_of(controller: Controller, file: LogFile) -> AsyncIterator[bytes]:
    offset = 0
    size = file.path.stat().st_size if file.path.exists() else 0
    while offset < size:
        piece = await controller.logs.read(file, offset, 0.0)
        if not piece.data:
            return
        yield piece.data
        offset = piece.next
