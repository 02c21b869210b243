"""HTTP server of a process: `GET /metrics` for Prometheus and `GET /healthz`.

One loop in a thread answers one request per connection. The server rejects request heads above 8
KiB, clients slower than 5 s, and more than 32 connections at a time. No answer contains a secret.
"""

import asyncio
import errno
import http
from collections.abc import Callable

import msgspec
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from fireflyer import __version__
from fireflyer.errors import ConfigError
from fireflyer.log import get_logger
from fireflyer.rpc.address import Address
from fireflyer.rpc.loop import LoopThread
from fireflyer.rpc.proof import Secret

HEAD_LIMIT = 8 << 10
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS = 32
Check = Callable[[], str]
"""Callback that returns the fault of a role of this process (for example "manager"), or ""."""


class PortTaken(ConfigError):
    """The port of the address belongs to another process."""


class Exporter:
    """HTTP server that runs from the constructor to `close`. Thread-safe.

    Attributes:
        address: host:port at which the server listens.
    """

    def __init__(self, address: str, token: Secret, *, unguarded: bool = False) -> None:
        """Starts to listen.

        Args:
            address: host:port; port 0: any free port.
            token: bearer token that clients must send; empty: none.
            unguarded: True if clients on other machines need no token.

        Raises:
            PortTaken: another process listens there.
            ConfigError: the address is not available, or lets other machines read without a token.
        """
        wanted = Address.parse(address)
        if wanted.path:
            raise ConfigError(f"invalid metrics {wanted}: expected host:port")
        if not (token or wanted.is_local or unguarded):
            raise ConfigError(
                f"metrics at {wanted} can be read by other machines: set metrics_token_file, or set "
                "metrics_open = true"
            )
        self._token = token
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        build = Info("fireflyer_build", "version of this process", registry=self._registry)
        build.info({"version": __version__})
        self._checks: dict[str, Check] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = LoopThread("fs3-metrics")
        try:
            self._server, port = self._loop.run(self._listen(wanted))
        except BaseException:
            self._loop.close()
            raise
        self.address = str(Address(wanted.host, port))

    @property
    def url(self) -> str:
        return f"http://{self.address}/metrics"

    def add(self, role: str, registry: CollectorRegistry, check: Check) -> None:
        """Adds a role of this process, with its metrics and its check, until `remove`."""

        async def on_loop() -> None:
            self._registry.register(registry)
            self._checks[role] = check

        self._loop.run(on_loop())

    def remove(self, role: str, registry: CollectorRegistry) -> None:
        """Removes a role; afterwards the role's metrics and check are no longer in use."""

        async def on_loop() -> None:
            self._registry.unregister(registry)
            del self._checks[role]

        self._loop.run(on_loop())

    def close(self) -> None:
        self._loop.run(self._stop())
        self._loop.close()

    async def _listen(self, wanted: Address) -> tuple[asyncio.Server, int]:
        try:
            server = await asyncio.start_server(
                self._accept, wanted.host, wanted.port, limit=HEAD_LIMIT
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(f"another process listens at {wanted}") from None
            raise ConfigError(
                f"cannot serve metrics at {wanted}: {error.strerror or error}"
            ) from None
        return server, server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                try:
                    head = await reader.readuntil(b"\r\n\r\n")
                    answer = self._answer(head)
                except asyncio.LimitOverrunError:
                    answer = _response(400, "the head of the request is too long\n")
                writer.write(answer)
                await writer.drain()
                writer.write_eof()
                # Closing with unread data would reset the connection, and lose the answer.
                await reader.read(HEAD_LIMIT)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return
        finally:
            writer.transport.abort()

    def _answer(self, head: bytes) -> bytes:
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, "expected an HTTP/1 request\n")
        method, path, _ = words
        if method not in ("GET", "HEAD"):
            return _response(405, "only GET\n", "Allow: GET, HEAD\r\n")
        if self._token and not self._is_authorized(lines[1:]):
            return _response(
                401,
                "a bearer token is needed: metrics_token_file\n",
                "WWW-Authenticate: Bearer\r\n",
            )
        answer = self._get(path.partition("?")[0])
        return answer if method == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _is_authorized(self, lines: list[str]) -> bool:
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() == "authorization":
                kind, _, given = value.strip().partition(" ")
                return kind.lower() == "bearer" and self._token.is_same(given.strip().encode())
        return False

    def _get(self, path: str) -> bytes:
        if path == "/metrics":
            try:
                text = generate_latest(self._registry).decode()
            except Exception:  # noqa: BLE001  # a role may be closing
                get_logger("fs3").exception("the metrics could not be collected")
                return _response(500, "the metrics could not be collected\n")
            return _response(200, text, f"Content-Type: {CONTENT_TYPE_LATEST}\r\n")
        if path == "/healthz":
            wrong = {role: trouble for role, check in self._checks.items() if (trouble := check())}
            health = {"status": "ill" if wrong else "ok", "version": __version__, "wrong": wrong}
            body = msgspec.json.encode({**health, "roles": sorted(self._checks)}).decode() + "\n"
            return _response(503 if wrong else 200, body, "Content-Type: application/json\r\n")
        return _response(404, "not found: expected /metrics or /healthz\n")


def _response(code: int, body: str, more: str = "") -> bytes:
    content = body.encode()
    if "Content-Type" not in more:
        more += "Content-Type: text/plain; charset=utf-8\r\n"
    head = f"HTTP/1.1 {code} {http.HTTPStatus(code).phrase}\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content
