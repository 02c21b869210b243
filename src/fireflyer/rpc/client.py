"""Synchronous client of control connections; `rpc.aclient` is its asyncio version.

A client has one connection, made when it is first needed and again when it is lost. Calls of many
threads share it: each thread sends its own request. One thread of the connection reads and wakes
the callers.
"""

import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from fireflyer.clock import Clock, SystemClock
from fireflyer.errors import DeadlineExceeded, FireflyerError, NotPrimary, PeerLost
from fireflyer.errors import ProtocolMismatch as Mismatch
from fireflyer.rpc.address import Address
from fireflyer.rpc.exchange import Exchange, Push
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.messages import parse_body
from fireflyer.rpc.policy import Attempts, Policy
from fireflyer.rpc.proof import Secret
from fireflyer.rpc.servers import Servers

T = TypeVar("T")
READ = 1 << 18


class Client:
    """Client of one server, or of several equal ones. Thread-safe. Close it, or use it as a context
    manager.

    It belongs to its process: a forked child shares the connection and the numbers of calls with
    its parent, so that it would take the parent's answers. In a child, `close` releases only the
    child's part.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        secret: Secret,
        role: int,
        *,
        policy: Policy | None = None,
        pushes: Mapping[str, Push] | None = None,
        unexpected_roles: Mapping[int, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Connects at the first call.

        Args:
            addresses: of servers that are equal, or of which one is primary.
            pushes: by topic, the callback that takes the body of a push. The connection's thread
                runs it; it must neither wait nor call this client.
            unexpected_roles: by role, servers that cannot be meant, and the message for such an address: a
                ProtocolMismatch.
        """
        self._process = os.getpid()
        self._servers = Servers(addresses)
        self._secret, self._role = secret, role
        self._policy = policy or Policy()
        self._pushes = dict(pushes or {})
        self._unexpected_roles = dict(unexpected_roles or {})
        self._clock = clock or SystemClock()
        self._chance = random.Random()
        self._lock = threading.Lock()
        self._line: _Line | None = None
        self._closed = threading.Event()

    def call(
        self,
        method: str,
        body: Any = None,
        result: type[T] | None = None,
        *,
        again: Any = None,
        deadline_s: float = 30.0,
    ) -> T:
        """Calls a method and returns the server's answer, as `result` (None: no value is expected).

        Retries errors that may pass until the deadline: a call that must not be executed twice
        needs an idempotency key in its body. `again`: body from the second attempt on, when copies
        of the first may still be in flight; None: the same.

        Raises:
            DeadlineExceeded, PeerLost, ProtocolMismatch: of the connection.
            FireflyerError: raised by the server.
            ValueError: in a forked child.
        """
        self.check_process()
        now = self._clock.monotonic
        attempts = Attempts(self._policy, method, now(), deadline_s, self._chance)
        while True:
            limit_s = attempts.time_for_one(now())
            try:
                answer = self._attempt(method, body, limit_s)
                return parse_body(answer, result or type(None))  # type: ignore[return-value]
            except FireflyerError as error:
                pause = attempts.pause_after(error, now())
                if self._closed.wait(pause):
                    raise
                body = body if again is None else again

    def close(self) -> None:
        """Closes the client. Calls in flight raise PeerLost."""
        if not self.here:  # no thread here can release a lock held at the fork
            if self._line:
                self._line.let_go()
            return
        self._closed.set()
        with self._lock:
            line, self._line = self._line, None
        if line:
            line.close(PeerLost("this client was closed"))

    @property
    def here(self) -> bool:
        """True in the process that made the client."""
        return self._process == os.getpid()

    def check_process(self) -> None:
        """Raises ValueError in a forked child."""
        if not self.here:
            raise ValueError(
                f"this client belongs to process {self._process}: connect again in a forked child"
            )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _attempt(self, method: str, body: Any, limit_s: float) -> msgspec.Raw:
        until = self._clock.monotonic() + limit_s
        line = self._connected(limit_s)
        before = line.exchange.received
        try:
            return line.ask(method, body, max(until - self._clock.monotonic(), 0.001))
        except NotPrimary as error:
            self._leave(line, error)
            raise
        except DeadlineExceeded as error:
            if line.exchange.received == before:  # not slow but silent
                self._leave(line, error)
            raise

    def _connected(self, limit_s: float) -> "_Line":
        """Returns the connection; other threads wait while it is being made."""
        with self._lock:
            if self._closed.is_set():
                raise _final(PeerLost("this client was closed"))
            if self._line and not self._line.broken:
                return self._line
            address = self._servers.current
            try:
                self._line = _Line(
                    *(
                        address,
                        self._secret,
                        self._role,
                        self._pushes,
                        self._unexpected_roles,
                        limit_s,
                    )
                )
            except FireflyerError as error:
                self._line = None
                self._servers.leave(address, error)
                raise
            return self._line

    def _leave(self, line: "_Line", error: FireflyerError) -> None:
        with self._lock:
            self._servers.leave(line.address, error)
            if self._line is line:
                self._line = None
        line.close(PeerLost(f"dropped the connection to {line.address}: {error}"))


class _Line:
    """Authenticated connection and its reader thread."""

    def __init__(
        self,
        address: Address,
        secret: Secret,
        role: int,
        pushes: Mapping[str, Push],
        unexpected_roles: Mapping[int, str],
        limit_s: float,
    ) -> None:
        """Connects. Raises PeerLost, DeadlineExceeded, ProtocolMismatch."""
        self.address = address
        self.broken: FireflyerError | None = None
        self.exchange = Exchange(pushes)
        self._lock = threading.Lock()  # guards the exchange and `broken`
        self._sending = threading.Lock()
        try:
            self._socket = address.connect(limit_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no connection to {address} within {limit_s:g} s") from None
        except OSError as error:
            raise PeerLost(f"no connection to {address}: {error.strerror or error}") from None
        try:
            first = self._prove(secret, role, unexpected_roles)
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise
        name = f"rpc {address}"
        self._reader = threading.Thread(target=self._read, args=(first,), name=name, daemon=True)
        self._reader.start()

    def ask(self, method: str, body: Any, limit_s: float) -> msgspec.Raw:
        waiting = _Waiting()
        with self._lock:
            if self.broken:
                raise type(self.broken)(str(self.broken))
            number, out = self.exchange.request(method, body, limit_s, waiting.take)
        self._send(out, limit_s)
        try:
            return waiting.get(limit_s)
        except DeadlineExceeded:
            with self._lock:
                self.exchange.forget(number)
            raise DeadlineExceeded(
                f"{method}: {self.address} did not answer within {limit_s:.3g} s"
            ) from None

    def close(self, error: FireflyerError) -> None:
        """Fails every waiting call with the error. By any thread, any number of times."""
        with self._lock:
            if self.broken:
                return
            self.broken = error
            calls = self.exchange.lost(error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes
        _call_all(calls)

    def let_go(self) -> None:
        """Closes a forked child's copy; the connection stays the parent's."""
        self._socket.close()

    def _prove(self, secret: Secret, role: int, unexpected_roles: Mapping[int, str]) -> bytes:
        handshake = Handshake("client", secret, role)
        try:
            self._socket.sendall(handshake.opening)
            while not handshake.done:
                data = self._socket.recv(READ)
                if not data:
                    raise PeerLost(f"{self.address} closed the connection in the handshake")
                self._socket.sendall(handshake.feed(data))
        except Mismatch as error:
            raise Mismatch(f"{self.address}: {error}") from None
        except TimeoutError:
            raise DeadlineExceeded(f"{self.address} does not answer the handshake") from None
        except OSError as error:
            raise PeerLost(f"{self.address}: {error.strerror or error}") from None
        if said := unexpected_roles.get(handshake.peer_role):
            raise Mismatch(f"{self.address} {said}")
        return handshake.rest

    def _send(self, out: bytearray, limit_s: float) -> None:
        """Sends a whole frame. A frame that could not be sent whole ends the connection."""
        if not self._sending.acquire(timeout=limit_s):
            error: FireflyerError = DeadlineExceeded(f"{self.address} does not read its requests")
            self.close(PeerLost(str(error)))
            raise error
        try:
            whole, rest = int(limit_s), int(limit_s % 1 * 1e6) or 1
            self._socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", whole, rest)
            )
            self._socket.sendall(out)
        except OSError as failed:
            error = PeerLost(f"{self.address}: {failed.strerror or failed}")
            self.close(error)
            raise PeerLost(str(error)) from None
        finally:
            self._sending.release()

    def _read(self, data: bytes) -> None:
        error: FireflyerError = PeerLost(f"{self.address} closed the connection")
        try:
            while True:
                with self._lock:
                    calls = self.exchange.feed(data)
                _call_all(calls)
                data = self._socket.recv(READ)
                if not data:
                    break
        except Mismatch as mismatch:
            error = Mismatch(f"{self.address}: {mismatch}")
        except OSError as failed:
            error = PeerLost(f"{self.address}: {failed.strerror or failed}")
        self.close(error)
        self._socket.close()


class _Waiting:
    """Caller that waits for its answer."""

    __slots__ = ("_lock", "_outcome")

    def __init__(self) -> None:
        self._outcome: msgspec.Raw | FireflyerError | None = None
        self._lock = threading.Lock()
        self._lock.acquire()

    def take(self, outcome: msgspec.Raw | FireflyerError) -> None:
        self._outcome = outcome
        self._lock.release()

    def get(self, limit_s: float) -> msgspec.Raw:
        if not self._lock.acquire(timeout=limit_s) or self._outcome is None:
            raise DeadlineExceeded("no answer")
        if isinstance(self._outcome, FireflyerError):
            raise self._outcome
        return self._outcome


def _final(error: FireflyerError) -> FireflyerError:
    """Makes an error final, so that no policy retries it."""
    error.retryable = False
    return error


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
