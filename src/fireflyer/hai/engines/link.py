"""The engine's connection to the supervisor of one task on one node, and the start of a supervisor.

The engine binds and listens. The supervisor inherits the listening socket, so an early connection
waits in its backlog. Only the supervisor and its guard, which kills the task's processes if the
supervisor dies, hold that socket. A connection that is refused, or closed without an answer,
therefore proves that no process of the task is left on the node.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from fireflyer.errors import WireError
from fireflyer.hai.supervisor.messages import (
    Attach,
    Attached,
    Frozen,
    Launched,
    Leave,
    Record,
    Reply,
    Request,
)
from fireflyer.log import get_logger
from fireflyer.rpc import frame
from fireflyer.rpc.streams import read_frame

_log = get_logger("hai")

Answer = TypeVar("Answer", Launched, Attached, Frozen)


@contextlib.contextmanager
def _address(directory: Path, node: str) -> Iterator[str]:
    """Yields a short path of the node's socket, because a socket address holds at most 108 bytes
    and a path may be longer."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{node}.sock"
    finally:
        os.close(descriptor)


def connect(directory: Path, node: str) -> socket.socket | None:
    """Returns a connection, or None if no process listens.

    Raises:
        OSError: the state of the socket is unknown.
    """
    stream = socket.socket(socket.AF_UNIX)
    stream.setblocking(False)
    try:
        with _address(directory, node) as address:
            stream.connect(address)
    except (ConnectionRefusedError, FileNotFoundError):
        stream.close()
        return None
    except BaseException:
        stream.close()
        raise
    return stream


@contextlib.contextmanager
def open_descriptors(directory: Path, node: str) -> Iterator[tuple[int, int, int]]:
    """Opens and yields the descriptors that guard and supervisor inherit: /dev/null, the log and a
    listening socket.

    Raises:
        OSError: the socket or the log cannot be created.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        with _address(directory, node) as address:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            listener.bind(address)
        listener.listen(64)
        log = os.open(
            directory / f"{node}.supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        stack.callback(os.close, log)
        null = os.open("/dev/null", os.O_RDONLY)
        stack.callback(os.close, null)
        yield null, log, listener.fileno()


def spawn(task: str, directory: Path, node: str) -> int:
    """Starts guard and supervisor in a session of their own; returns the guard's pid.

    Raises:
        OSError: the guard cannot be started.
    """
    with open_descriptors(directory, node) as (null, log, listener):
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-P", "-m", "fireflyer.hai.supervisor", task, node],
            {**os.environ, "FIREFLYER_TASK": task},
            # Descriptors 0 to 2 are open in every server, so `null`, `log` and `listener` have
            # higher numbers. Descriptor 3 is overwritten last, because it may be `null` or `log`.
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
                (os.POSIX_SPAWN_DUP2, listener, 3),
            ],
            setsid=True,
        )


class Link:
    """Connection that passes records to `on_record`. Calls `on_gone` once, when no process of the
    task is left on the node."""

    def __init__(
        self,
        stream: socket.socket,
        directory: Path,
        node: str,
        on_record: Callable[[str, Record], None],
        on_gone: Callable[[], None],
    ) -> None:
        self.node = node
        self.directory = directory
        self.attempt = 0
        """Attempt whose records this link follows, also after a reconnect."""
        self.gone = asyncio.Event()
        self._on_record = on_record
        self._on_gone = on_gone
        self._waiting: dict[tuple[type, int], list[asyncio.Future[Reply | None]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = bytearray()
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply | Attached)
        self._reader = asyncio.create_task(self._serve(stream))

    @property
    def connected(self) -> bool:
        return self._writer is not None

    def send(self, request: Request) -> None:
        """Sends a request without waiting for an answer; no effect if the supervisor is gone."""
        data = frame(msgspec.msgpack.encode(request))
        if self._writer is None:
            self._unsent += data
        else:
            self._writer.write(data)

    async def ask(self, request: Request, attempt: int, kind: type[Answer]) -> Answer | None:
        """Sends a request and returns the answer of this kind about the attempt; None if the
        connection ends before the answer."""
        if self.gone.is_set():
            return None
        future: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((kind, attempt), []).append(future)
        self.send(request)
        answer = await future
        return answer if isinstance(answer, kind) else None

    async def leave(self) -> None:
        """Ends the supervisor and all its processes; returns when no process is left, or this link
        is closed."""
        self.send(Leave())
        await asyncio.wait({self._reader})

    async def close(self) -> None:
        """Closes the link; the supervisor keeps running."""
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader

    async def _serve(self, first: socket.socket) -> None:
        stream: socket.socket | None = first
        while stream is not None:
            try:
                reader, writer = await asyncio.open_connection(sock=stream)
            except BaseException:
                stream.close()
                raise
            writer.write(bytes(self._unsent))
            self._unsent.clear()
            self._writer = writer
            try:
                await self._read(reader)
            finally:
                self._writer = None
                self._answer_waiting_with_none()
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            stream = await self._reconnect()
            if stream is not None and self.attempt:
                self.send(Attach(attempt=self.attempt))
        self.gone.set()
        self._answer_waiting_with_none()
        self._on_gone()

    async def _reconnect(self) -> socket.socket | None:
        """Reconnects after the connection ended. Returns None if no process is left on the node, or
        if the task's folder is gone and its processes cannot be reached."""
        with contextlib.suppress(FileNotFoundError):
            return connect(self.directory, self.node)
        return None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (payload := await read_frame(reader)) is not None:
                self._dispatch(self._decoder.decode(payload))
        except (WireError, msgspec.MsgspecError) as error:
            _log.debug("supervisor of %s: %s", self.node, error)

    def _dispatch(self, reply: Reply) -> None:
        if isinstance(reply, Record):
            self._on_record(self.node, reply)
            return
        for future in self._waiting.pop((type(reply), reply.attempt), ()):
            if not future.done():
                future.set_result(reply)

    def _answer_waiting_with_none(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in (f for futures in waiting.values() for f in futures):
            if not future.done():
                future.set_result(None)
