"""Asyncio version of `rpc.client`: the same calls, errors and retries on the caller's loop."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fireflyer.errors import DeadlineExceeded, FireflyerError, NotPrimary, PeerLost
from fireflyer.errors import ProtocolMismatch as Mismatch
from fireflyer.rpc.address import Address, tune
from fireflyer.rpc.exchange import Exchange, Push
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.messages import parse_body
from fireflyer.rpc.policy import Attempts, Policy
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.servers import Servers

T = TypeVar("T")


class AsyncClient:
    """Client for one asyncio loop. It connects at the first call and again after a loss."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        secret: Secret,
        role: int,
        *,
        policy: Policy | None = None,
        pushes: Mapping[str, Push] | None = None,
    ) -> None:
        """Takes the arguments of `Client`; callbacks for pushes run on the loop."""
        self._servers = Servers(addresses)
        self._secret, self._role = secret, role
        self._policy = policy or Policy()
        self._pushes = dict(pushes or {})
        self._chance = random.Random()
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._closed = False

    async def call(
        self,
        method: str,
        body: Any = None,
        result: type[T] | None = None,
        *,
        deadline_s: float = 30.0,
    ) -> T:
        """Calls a method, like `Client.call`."""
        now = asyncio.get_running_loop().time
        attempts = Attempts(self._policy, method, now(), deadline_s, self._chance)
        while True:
            limit_s = attempts.attempt_timeout(now())
            try:
                answer = await self._attempt(method, body, limit_s)
                return parse_body(answer, result or type(None))  # type: ignore[return-value]
            except FireflyerError as error:
                pause = attempts.pause_after(error, now())
                if self._closed:
                    raise
                await asyncio.sleep(pause)

    async def close(self) -> None:
        """Closes the client. Calls in flight raise PeerLost."""
        self._closed = True
        if self._connection:
            self._connection.end(PeerLost("this client was closed"))

    async def _attempt(self, method: str, body: Any, limit_s: float) -> msgspec.Raw:
        line: _Connection | None = None
        before = 0
        try:
            async with asyncio.timeout(limit_s):
                line = await self._connected()
                before = line.exchange.received
                return await line.ask(method, body, limit_s)
        except NotPrimary as error:
            self._drop(line, error)
            raise
        except TimeoutError:
            address = line.address if line else self._servers.current
            late = DeadlineExceeded(f"{method}: {address} did not answer within {limit_s:.3g} s")
            if line is None:
                self._servers.fail_over(address, late)
            elif line.exchange.received == before:  # the server is silent, not slow
                self._drop(line, late)
            raise late from None

    async def _connected(self) -> "_Connection":
        async with self._connecting:
            if self._closed:
                raise PeerLost("this client was closed")
            if self._connection and not self._connection.broken:
                return self._connection
            address = self._servers.current
            try:
                self._connection = await _connect(address, self._secret, self._role, self._pushes)
            except FireflyerError as error:
                self._servers.fail_over(address, error)
                raise
            return self._connection

    def _drop(self, line: "_Connection | None", error: FireflyerError) -> None:
        if line is None:
            return
        self._servers.fail_over(line.address, error)
        line.end(PeerLost(f"dropped the connection to {line.address}: {error}"))


async def _connect(
    address: Address, secret: Secret, role: int, pushes: Mapping[str, Push]
) -> "_Connection":
    """Returns an authenticated connection. Raises PeerLost, ProtocolMismatch."""
    loop = asyncio.get_running_loop()
    handshake = Handshake("client", secret, role)

    def make() -> _Connection:
        return _Connection(address, handshake, pushes)

    try:
        if address.path:
            _, line = await loop.create_unix_connection(make, address.path)
        else:
            _, line = await loop.create_connection(make, address.host, address.port)
    except OSError as error:
        raise PeerLost(f"no connection to {address}: {error.strerror or error}") from None
    try:
        await line.proved
    except BaseException:
        line.end(PeerLost("dropped the connection"))
        raise
    return line


class _Connection(asyncio.Protocol):
    """Connection to a server.

    Attributes:
        proved: future that is done when the handshake is complete.
    """

    def __init__(self, address: Address, handshake: Handshake, pushes: Mapping[str, Push]) -> None:
        self.address = address
        self.exchange = Exchange(pushes)
        self.broken: FireflyerError | None = None
        self.proved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handshake = handshake
        self._transport: asyncio.Transport | None = None

    async def ask(self, method: str, body: Any, limit_s: float) -> msgspec.Raw:
        if self.broken:
            raise type(self.broken)(str(self.broken))
        assert self._transport
        waiting: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

        def take(outcome: msgspec.Raw | FireflyerError) -> None:
            if waiting.done():
                return
            if isinstance(outcome, FireflyerError):
                waiting.set_exception(outcome)
            else:
                waiting.set_result(outcome)

        number, out = self.exchange.request(method, body, limit_s, take)
        self._transport.write(out)
        try:
            return await waiting
        finally:
            self.exchange.forget(number)

    def end(self, error: FireflyerError) -> None:
        """Fails all pending calls with the error. Idempotent."""
        if self.broken:
            return
        self.broken = error
        if not self.proved.done():
            self.proved.set_exception(error)
        for call in self.exchange.lost(error):
            call()
        if self._transport:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        line = transport.get_extra_info("socket")
        if line is not None:
            tune(line)
        transport.write(self._handshake.opening)

    def data_received(self, data: bytes) -> None:
        assert self._transport
        try:
            for call in self.exchange.feed(self._after_handshake(data)):
                call()
        except Mismatch as error:
            self.end(Mismatch(f"{self.address}: {error}"))

    def _after_handshake(self, data: bytes) -> bytes:
        assert self._transport
        if self.proved.done():
            return data
        self._transport.write(self._handshake.feed(data))
        if self._handshake.done:
            self.proved.set_result(None)
        return self._handshake.rest

    def connection_lost(self, exc: Exception | None) -> None:
        when = "" if self._handshake.done else " in the handshake"
        self.end(PeerLost(f"{self.address} closed the connection{when}"))
