"""Server-sent events: a rank's log by byte offset, the history of tasks by sequence number.

The `id:` of a message is the position to continue from: a client that reconnects with Last-Event-ID
misses no message and gets none twice. Log:

    id: 2:1536            attempt, and offset of the byte after the text
    event: log            or `end` if no text follows
    data: "one line\\n"    JSON string on one line

History: `id` is the sequence number, `event` the kind, and `data` the Event as JSON.
"""

import re
from collections.abc import AsyncIterator, Callable
from typing import Annotated

import msgspec
from fastapi import Depends, Header, Query
from fastapi.responses import StreamingResponse

from fireflyer.errors import ConfigError
from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.logs import IDLE_S, LogFile
from fireflyer.hai.model.identity import Identity

MEDIA = "text/event-stream"

Number = Annotated[int, Query(ge=0, lt=1 << 62)]
"""Byte offset, seq or attempt number in a query."""
LastId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=40)]

_LOG_ID = re.compile(r"([1-9][0-9]{0,8}):([0-9]{1,18})", re.ASCII)
_EVENT_ID = re.compile(r"[0-9]{1,18}", re.ASCII)
_IDLE = b": nothing new\n\n"


def log_place(last_id: str | None, attempt: int | None, offset: int) -> tuple[int | None, int]:
    """Returns the attempt and the offset to continue from.

    Raises:
        ConfigError: Last-Event-ID does not come from a log stream.
    """
    if not last_id:
        return attempt, offset
    found = _LOG_ID.fullmatch(last_id)
    if found is None:
        raise ConfigError(f"Last-Event-ID {last_id!a}: not from the stream of a log")
    return int(found[1]), int(found[2])


class LogPlace(msgspec.Struct, frozen=True):
    """Start of a stream of a rank's output."""

    task: str
    rank: int
    attempt: int | None
    """None: the newest attempt."""
    offset: int


def _asked(
    task: str,
    rank: int,
    offset: Number = 0,
    attempt: Number | None = None,
    last_id: LastId = None,
) -> LogPlace:
    return LogPlace(task, rank, *log_place(last_id, attempt, offset))


AskedLog = Annotated[LogPlace, Depends(_asked)]
"""Start of a log stream, from the path, the query and Last-Event-ID."""


def event_place(last_id: str | None, after: int) -> int:
    """Returns the seq to continue from.

    Raises:
        ConfigError: Last-Event-ID does not come from an event stream.
    """
    if not last_id:
        return after
    if not _EVENT_ID.fullmatch(last_id):
        raise ConfigError(f"Last-Event-ID {last_id!a}: not from the stream of events")
    return int(last_id)


def answer(messages: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(messages, media_type=MEDIA, headers=headers)


def follow_log(
    controller: Controller, at: LogPlace, who: Identity, allowed: Callable[[], bool]
) -> StreamingResponse:
    """Streams a log until its attempt is over, the server shuts down, or `allowed` returns
    False."""
    controller.check_owner(at.task, who.only)
    file = controller.logs.find(at.task, at.rank, at.attempt)
    return answer(_log_messages(controller, file, at.offset, allowed))


async def _log_messages(
    controller: Controller, file: LogFile, offset: int, allowed: Callable[[], bool]
) -> AsyncIterator[bytes]:
    controller.meters.followers["log"] += 1
    try:
        async for piece in controller.logs.follow(file, offset):
            if not allowed():
                return
            if piece is None:
                yield _IDLE
            else:
                text, offset = piece
                yield _message(f"{file.attempt}:{offset}", "log", text)
        if not controller.closing:
            yield _message(f"{file.attempt}:{offset}", "end", {"attempt": file.attempt})
    finally:
        controller.meters.followers["log"] -= 1


async def event_messages(
    controller: Controller, after: int, task: str | None, user: str | None,
    allowed: Callable[[], bool],
) -> AsyncIterator[bytes]:  # fmt: skip
    """Yields the history until the server shuts down or `allowed` returns False."""
    controller.meters.followers["events"] += 1
    try:
        while not controller.closing:
            found = await controller.events(after, task, IDLE_S, user)
            if not allowed():
                return
            if not found and not controller.closing:
                yield _IDLE
            for event in found:
                after = event.seq
                yield _message(str(after), event.kind, event)
    finally:
        controller.meters.followers["events"] -= 1


def _message(id: str, kind: str, data: object) -> bytes:
    return f"id: {id}\nevent: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"
