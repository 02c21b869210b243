"""Server of control connections, on an asyncio loop (`rpc.loop` makes one for synchronous callers).

Everything here runs on the loop's thread, except blocking and batch handlers.
"""

import asyncio
import contextlib
import inspect
import os
import socket
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fireflyer.errors import ConfigError, DeadlineExceeded, FireflyerError, WireError
from fireflyer.errors import ProtocolMismatch as Mismatch
from fireflyer.log import get_logger
from fireflyer.rpc.address import Address, tune
from fireflyer.rpc.batching import Batcher
from fireflyer.rpc.frames import FrameBuffer
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.messages import Request, failure, framed, parse_body, parse_request
from fireflyer.rpc.proof import Secret

log = get_logger("rpc")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of what one server accepts."""

    unauthenticated: int = 128
    """Maximum number of unauthenticated connections; at the limit, a new one closes the oldest."""
    handshake_s: float = 5.0
    """Timeout of a handshake, in seconds."""
    requests: int = 1024
    """Maximum number of requests in flight on a connection; at this number the server stops reading
    the connection."""
    unsent_bytes: int = 64 << 20
    """Maximum number of bytes that wait to be sent to a client; beyond it the server closes the
    connection."""
    threads: int = 8
    """Threads for blocking handlers."""
    lane_threads: int = 2
    """Threads for each lane (queue) of a batch handler: while one thread waits for a disk, another
    can work."""


@dataclass(slots=True)
class Call:
    """Context of a request, without its body."""

    connection: "Connection"
    method: str
    deadline: float
    """Deadline on the loop's clock."""


@dataclass(slots=True)
class _Method:
    handler: Callable[..., Any]
    body: type
    mode: str  # "plain", "async", "blocking" or "many"
    lane: Callable[[Any], Hashable] | None = None


@dataclass(slots=True, eq=False)
class _BatchedRequest:
    """Request that waits for a batch handler."""

    call: Call
    method: _Method
    number: int
    body: Any

    def cancel(self) -> None:
        """Does nothing: the server executes the request although its client has disconnected."""


class Server:
    """Listener that authenticates connections and dispatches requests. An instance listens once."""

    def __init__(self, secret: Secret, role: int, limits: Limits | None = None) -> None:
        self._secret, self._role = secret, role
        self.limits = limits or Limits()
        self._methods: dict[str, _Method] = {}
        self._listeners: list[asyncio.Server] = []
        self._unauthenticated: dict[Connection, None] = {}  # in the order of arrival
        self._authenticated: set[Connection] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._batchers: dict[tuple[str, Hashable], Batcher[_BatchedRequest]] = {}
        self._paths: list[str] = []
        self.on_close: Callable[[Connection], None] | None = None

    def on(
        self,
        method: str,
        body: type[T],
        handler: Callable[[Call, T], Any],
        *,
        blocking: bool = False,
    ) -> None:
        """Answers `method` with the result of `handler(call, body)`.

        A coroutine function runs as a task that is cancelled at the deadline. A blocking handler
        runs in a thread. Any other handler runs on the loop and must not block. The caller gets
        each FireflyerError unchanged.
        """
        plain = "blocking" if blocking else "plain"
        mode = "async" if inspect.iscoroutinefunction(handler) else plain
        self._methods[method] = _Method(handler, body, mode)

    def on_many(
        self,
        method: str,
        body: type[T],
        handler: Callable[[Sequence[T]], Sequence[Any]],
        lane: Callable[[T], Hashable],
    ) -> None:
        """Answers `method` in batches: `handler(bodies)` returns a result or an error per body.

        `lane(body)` returns the key of the queue (lane) that the request joins. The handler runs in
        a thread. A batch holds all requests of a lane that arrived while the previous batch of that
        lane was handled. If the handler raises anything but a FireflyerError, it is called again
        with each body alone.
        """
        self._methods[method] = _Method(handler, body, "many", lane)

    async def listen(self, address: str) -> Address:
        """Starts to listen; returns the address, with the chosen port if port 0 was requested.

        Raises:
            ConfigError: the address is not available, or other machines can reach it without a
                secret.
        """
        wanted = Address.parse(address)
        if not self._secret and not wanted.is_local:
            raise ConfigError(
                f"cannot listen on {wanted} without a secret, because other machines can reach it: give "
                "a secret file, or listen on 127.0.0.1"
            )
        loop = asyncio.get_running_loop()
        try:
            if wanted.path:
                listener = await loop.create_unix_server(lambda: Connection(self), wanted.path)
                os.chmod(wanted.path, 0o600)
                self._paths.append(wanted.path)
            else:
                listener = await loop.create_server(
                    lambda: Connection(self), wanted.host, wanted.port, backlog=512
                )
        except OSError as error:
            raise ConfigError(f"cannot listen on {wanted}: {error.strerror or error}") from error
        self._listeners.append(listener)
        if wanted.path:
            return wanted
        return Address(wanted.host, listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening and closes all connections; handlers in flight are cancelled."""
        for listener in self._listeners:
            listener.close()
        for connection in [*self._unauthenticated, *self._authenticated]:
            connection.abort()
        for listener in self._listeners:
            await listener.wait_closed()
        for path in self._paths:
            if os.path.exists(path):
                os.unlink(path)
        for batcher in self._batchers.values():
            batcher.close()
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def push(self, topic: str, body: Any) -> None:
        """Sends a push to every authenticated connection."""
        out = framed((0, topic, body))
        for connection in list(self._authenticated):
            connection.send(out)

    @property
    def connections(self) -> "frozenset[Connection]":
        """Authenticated connections."""
        return frozenset(self._authenticated)

    # Connections call these methods.

    def handshake(self) -> Handshake:
        return Handshake("server", self._secret, self._role)

    def method(self, name: str) -> _Method:
        found = self._methods.get(name)
        if found is None:
            raise Mismatch(f"this server has no method {name[:80]!r}")
        return found

    def threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.limits.threads, "rpc")
        return self._pool

    def enqueue(self, item: _BatchedRequest) -> None:
        """Passes a request to a lane of its method."""
        assert item.method.lane is not None
        key = (item.call.method, item.method.lane(item.body))
        batcher = self._batchers.get(key)
        if batcher is None:
            loop = asyncio.get_running_loop()
            batcher = self._batchers[key] = Batcher(
                lambda items: _handle_many(loop, items), self.limits.lane_threads, f"rpc {key[0]}"
            )
        batcher.add(item)

    def opened(self, connection: "Connection") -> None:
        self._unauthenticated[connection] = None
        if len(self._unauthenticated) > self.limits.unauthenticated:
            next(iter(self._unauthenticated)).abort()

    def proved(self, connection: "Connection") -> None:
        self._unauthenticated.pop(connection, None)
        self._authenticated.add(connection)

    def closed(self, connection: "Connection") -> None:
        self._unauthenticated.pop(connection, None)
        if connection in self._authenticated:
            self._authenticated.discard(connection)
            if self.on_close:
                self.on_close(connection)


class Connection(asyncio.Protocol):
    """Connection of a client.

    Attributes:
        role: role of the client, once it has proved the secret.
        state: the handlers' own data, for example the connection's owner.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = server.handshake()
        self._timer: asyncio.TimerHandle | None = None
        self._frames = FrameBuffer()
        self._running: dict[int, asyncio.Future[Any] | _BatchedRequest] = {}
        self._out: list[bytes | bytearray] = []
        self._full = False  # the transport's buffer is over its limit
        self.role = 0
        self.state: Any = None

    def push(self, topic: str, body: Any) -> None:
        """Sends a push to this client only; does nothing if the client has disconnected."""
        self.send(framed((0, topic, body)))

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()
        self._server.closed(self)

    def send(self, out: bytes | bytearray) -> None:
        """Queues bytes; all bytes of one turn of the loop are sent together."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > self._server.limits.unsent_bytes:
            log.warning("closed the connection of a client that does not read its answers")
            self.abort()
            return
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(out)

    def _flush(self) -> None:
        out, self._out = self._out, []
        if self._transport and not self._transport.is_closing():
            self._transport.write(b"".join(out))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None:
            tune(sock)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._server.limits.handshake_s, self.abort)
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        assert self._transport
        try:
            if self._handshake:
                data = self._prove(data)
            if not self._handshake and data:
                for payload in self._frames.feed(data):
                    self._begin(parse_request(payload))
        except Mismatch as error:
            log.info("closed a connection: %s", error)
            if self._handshake:
                self._transport.write(self._handshake.refusal())
            self._transport.close()
            self._server.closed(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        for work in self._running.values():
            work.cancel()
        self._running.clear()
        self._transport = None
        self._server.closed(self)

    def pause_writing(self) -> None:
        self._full = True
        self._pace()

    def resume_writing(self) -> None:
        self._full = False
        self._pace()

    # Requests

    def _prove(self, data: bytes) -> bytes:
        """Continues the handshake; returns the bytes that follow it once it is complete."""
        handshake = self._handshake
        assert handshake
        assert self._transport
        answer = handshake.feed(data)
        if answer:
            self._transport.write(answer)
        if not handshake.done:
            return b""
        self.role, self._handshake = handshake.peer_role, None
        if self._timer:
            self._timer.cancel()
        self._server.proved(self)
        return handshake.rest

    def _begin(self, request: Request) -> None:
        if request.id in self._running:
            raise Mismatch("two requests in flight have the same number")
        loop = asyncio.get_running_loop()
        limit_s = request.deadline_ms / 1000
        call = Call(self, request.method, loop.time() + limit_s)
        try:
            method = self._server.method(request.method)
            body: Any = parse_body(request.body, method.body)
        except FireflyerError as error:
            self._answer(request.id, error)
            return
        if method.mode == "plain":
            self._answer(request.id, _outcome(call, method, body))
            return
        if method.mode == "many":
            item = self._running[request.id] = _BatchedRequest(call, method, request.id, body)
            self._server.enqueue(item)
            self._pace()
            return
        if method.mode == "async":
            work: asyncio.Future[Any] = loop.create_task(_bounded(call, method, body, limit_s))
        else:
            pool = self._server.threads()
            work = loop.run_in_executor(pool, _in_time, loop.time, call, method, body)
        self._running[request.id] = work
        self._pace()
        work.add_done_callback(lambda work: self._finish(request.id, work))

    def _finish(self, number: int, work: asyncio.Future[Any]) -> None:
        if self._running.pop(number, None) is not None and not work.cancelled():
            self._answer(number, work.result())
        self._pace()

    def send_batched(self, number: int, frame: bytes | bytearray) -> None:
        """Sends the answer of a batch handler to one request."""
        if self._running.pop(number, None) is not None:
            self.send(frame)
        self._pace()

    def _answer(self, number: int, outcome: Any) -> None:
        self.send(_reply(number, outcome))

    def _pace(self) -> None:
        """Pauses reading while the client has too many requests in flight or reads no answers."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._full or len(self._running) >= self._server.limits.requests:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()


def _reply(number: int, outcome: Any) -> bytearray:
    """Encodes the frame of an answer or an error."""
    try:
        if not isinstance(outcome, FireflyerError):
            return framed((number, True, outcome))
    except FireflyerError as error:
        outcome = error
    except TypeError:
        log.exception("an answer cannot be encoded")
        outcome = WireError("the server failed: its answer cannot be encoded")
    return framed((number, False, failure(outcome)))


def _handle_many(loop: asyncio.AbstractEventLoop, items: Sequence[_BatchedRequest]) -> None:
    """Handles a batch in a batcher's thread; skips requests past their deadline."""
    now = loop.time()
    late = [item for item in items if now >= item.call.deadline]
    timely = [item for item in items if now < item.call.deadline] if late else items
    error = DeadlineExceeded("the deadline passed before the server began the request")
    frames = [(item, _reply(item.number, error)) for item in late]
    frames += [
        (item, _reply(item.number, outcome))
        for item, outcome in zip(timely, _outcomes(timely), strict=True)
    ]
    with contextlib.suppress(RuntimeError):  # the loop has ended, and so have all connections
        loop.call_soon_threadsafe(_send_all, frames)


def _send_all(frames: Sequence[tuple[_BatchedRequest, bytearray]]) -> None:
    for item, frame in frames:
        item.call.connection.send_batched(item.number, frame)


def _outcomes(items: Sequence[_BatchedRequest]) -> Sequence[Any]:
    """Returns the handler's result for each request, or the error for its client."""
    if not items:
        return []
    first = items[0]
    try:
        outcomes: Sequence[Any] = first.method.handler([item.body for item in items])
        return outcomes
    except FireflyerError as error:
        return [error] * len(items)
    except Exception as error:  # noqa: BLE001  # the client needs an answer
        if len(items) == 1:
            return [_fault(first.call, error)]
    return [outcome for item in items for outcome in _outcomes([item])]


def _outcome(call: Call, method: _Method, body: Any) -> Any:
    """Returns the handler's result, or the error for the client."""
    try:
        return method.handler(call, body)
    except FireflyerError as error:
        return error
    except Exception as error:  # noqa: BLE001  # the client needs an answer
        return _fault(call, error)


def _in_time(now: Callable[[], float], call: Call, method: _Method, body: Any) -> Any:
    """Runs a handler in a thread; rejects a request past its deadline."""
    if now() >= call.deadline:
        return DeadlineExceeded(
            f"{call.method}: the deadline passed before the server began the request"
        )
    return _outcome(call, method, body)


async def _bounded(call: Call, method: _Method, body: Any, limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await method.handler(call, body)
    except TimeoutError:
        return DeadlineExceeded(f"{call.method}: not done within {limit_s:g} s")
    except FireflyerError as error:
        return error
    except Exception as error:  # noqa: BLE001  # the client needs an answer
        return _fault(call, error)


def _fault(call: Call, error: Exception) -> WireError:
    log.error("the handler of %s failed", call.method, exc_info=error)
    return WireError(f"the server failed in {call.method}: {type(error).__name__}")
