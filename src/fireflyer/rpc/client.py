"""Synchronous client of control connections.

A client has one connection, which it opens at the first call and again after a loss. Calls of many
threads share the connection. Each thread sends its own request, and reads its own answer if no
other thread is reading.
"""

import contextlib
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Maximum bytes of one read from the socket."""
IDLE_S = 1.0
"""Minimum seconds without a call after which the connection's own thread reads."""


class Client:
    """Client of one server, or of several equal servers. Thread-safe; a context manager.

    A client belongs to its process: a forked child would share the connection and the call numbers,
    and take its parent's answers. In a child, `close` closes only the child's copy of the socket.
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
            addresses: addresses of equal servers, or of servers of which one is primary.
            pushes: callbacks for the bodies of pushes, by topic. The connection's thread runs them;
                a callback must neither block nor call this client.
            unexpected_roles: roles of servers that this client cannot use, each with the message of
                the ProtocolMismatch that such a server causes.
        """
        self._process = os.getpid()
        self._servers = Servers(addresses)
        self._secret, self._role = secret, role
        self._policy = policy or Policy()
        self._pushes = dict(pushes or {})
        self._unexpected_roles = dict(unexpected_roles or {})
        self._clock = clock or SystemClock()
        self._random = random.Random()
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
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

        Retries transient errors until the deadline. A call that must not be executed twice needs an
        idempotency key in its body.

        Args:
            again: body from the second attempt on, when copies of the first request may be in
                flight; None: the same body.

        Raises:
            DeadlineExceeded, PeerLost, ProtocolMismatch: the connection failed.
            FireflyerError: the server raised it.
            ValueError: this process is a forked child of the client's process.
        """
        self.check_process()
        now = self._clock.monotonic
        attempts = Attempts(self._policy, method, now(), deadline_s, self._random)
        while True:
            limit_s = attempts.attempt_timeout(now())
            try:
                answer = self._attempt(method, body, limit_s)
                return parse_body(answer, result or type(None))  # type: ignore[return-value]
            except FireflyerError as error:
                pause = attempts.pause_after(error, now())
                if self._closed.wait(pause):
                    raise
                if self._policy.before_retry:
                    self._policy.before_retry()
                body = body if again is None else again

    def close(self) -> None:
        """Closes the client. Calls in flight raise PeerLost."""
        if not self.here:  # no thread here can release a lock held at the fork
            if self._connection:
                self._connection.release_copy()
            return
        self._closed.set()
        with self._lock:
            connection, self._connection = self._connection, None
        if connection:
            connection.close(PeerLost("this client was closed"))

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
        connection = self._connected(limit_s)
        before = connection.exchange.received
        try:
            return connection.ask(method, body, max(until - self._clock.monotonic(), 0.001))
        except NotPrimary as error:
            self._drop(connection, error)
            raise
        except DeadlineExceeded as error:
            if connection.exchange.received == before:  # the server is silent, not slow
                self._drop(connection, error)
            raise

    def _connected(self, limit_s: float) -> "_Connection":
        """Returns the connection; other threads wait while it is being made."""
        with self._lock:
            if self._closed.is_set():
                raise _final(PeerLost("this client was closed"))
            if self._connection and not self._connection.broken:
                return self._connection
            address = self._servers.current
            try:
                self._connection = _Connection(
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
                self._connection = None
                self._servers.fail_over(address, error)
                raise
            return self._connection

    def _drop(self, connection: "_Connection", error: FireflyerError) -> None:
        with self._lock:
            self._servers.fail_over(connection.address, error)
            if self._connection is connection:
                self._connection = None
        connection.close(PeerLost(f"dropped the connection to {connection.address}: {error}"))


class _Connection:
    """Authenticated connection.

    One waiting caller at a time reads the connection, so its own answer wakes no other thread. The
    reader passes on the other callers' answers. Once it has its own answer, another waiting caller
    becomes the reader. While there are no callers, the connection's thread reads pushes and notices
    a lost connection. If pushes have callbacks, only that thread reads.
    """

    def __init__(
        self,
        address: Address,
        secret: Secret,
        role: int,
        pushes: Mapping[str, Push],
        unexpected_roles: Mapping[int, str],
        limit_s: float,
    ) -> None:
        """Connects and authenticates. Raises PeerLost, DeadlineExceeded, ProtocolMismatch."""
        self.address = address
        self.broken: FireflyerError | None = None
        self.exchange = Exchange(pushes)
        self._only_thread = bool(pushes)
        self._lock = threading.Lock()  # guards the exchange and the attributes below
        self._begun = 0  # requests begun
        self._sent = 0  # requests whose frames were sent
        self._has_reader = True  # a thread reads, or was told to
        self._waiters: dict[_Waiting, None] = {}  # callers that wait while another thread reads
        self._sending = threading.Lock()
        self._ended = threading.Event()
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
        self._readable = select.poll()
        self._readable.register(self._socket, select.POLLIN)
        name = f"rpc {address}"
        threading.Thread(target=self._read_idle, args=(first,), name=name, daemon=True).start()

    def ask(self, method: str, body: Any, limit_s: float) -> msgspec.Raw:
        waiting = _Waiting()
        until = time.monotonic() + limit_s
        with self._lock:
            if self.broken:
                raise type(self.broken)(str(self.broken))
            number, out = self.exchange.request(method, body, limit_s, waiting.take)
            self._begun += 1
        try:
            self._send(out, limit_s)
        finally:
            with self._lock:
                self._sent += 1
            self._close_socket()
        if not self._wait(waiting, until):
            with self._lock:
                self.exchange.forget(number)
                if self.broken:  # set by a thread that has not called `take` yet
                    raise type(self.broken)(str(self.broken))
            raise DeadlineExceeded(
                f"{method}: {self.address} did not answer within {limit_s:.3g} s"
            )
        return waiting.result()

    def close(self, error: FireflyerError) -> None:
        """Fails all pending calls with the error. Idempotent; any thread may call it."""
        with self._lock:
            if self.broken:
                return
            self.broken = error
            calls = self.exchange.lost(error)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._ended.set()
        _call_all(calls)
        self._close_socket()

    def release_copy(self) -> None:
        """Closes the copy of a forked child; the parent keeps its connection."""
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
        if message := unexpected_roles.get(handshake.peer_role):
            raise Mismatch(f"{self.address} {message}")
        return handshake.rest

    def _send(self, out: bytearray, limit_s: float) -> None:
        """Sends a frame; closes the connection if only a part of the frame can be sent."""
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

    def _wait(self, waiting: "_Waiting", until: float) -> bool:
        """Waits for an answer, and reads if no other thread does; returns False after a timeout."""
        with self._lock:
            reads = not self._has_reader and waiting.outcome is None
            if reads:
                self._has_reader = True
            else:
                self._waiters[waiting] = None
        if not reads:
            try:
                waiting.sleep(until)
            except BaseException:
                if self._stop_waiting(waiting):
                    self._pass_reading()
                raise
            reads = self._stop_waiting(waiting)
        if reads:
            self._read(waiting, until)
        return waiting.outcome is not None

    def _stop_waiting(self, waiting: "_Waiting") -> bool:
        """Removes a caller from the waiting ones; returns True if it must become the reader."""
        with self._lock:
            self._waiters.pop(waiting, None)
            return waiting.reads

    def _read(self, waiting: "_Waiting", until: float) -> None:
        """Reads until the caller's answer has arrived, or until a timeout."""
        try:
            with self._closing_on_errors():
                while waiting.outcome is None and (left_s := until - time.monotonic()) > 0:
                    if self._readable.poll(left_s * 1000):
                        self._take(self._receive())
        finally:
            self._pass_reading()

    def _read_idle(self, data: bytes) -> None:
        """Reads while there are no callers: immediately at the start, later after `IDLE_S`."""
        reads, before = True, 0
        while True:
            if reads:
                with self._closing_on_errors():
                    while not self._take(data) or self._only_thread:
                        data = self._receive()
                data = b""
                self._pass_reading()
            self._ended.wait(IDLE_S)
            with self._lock:
                if self.broken:
                    break
                reads = not self._has_reader and self._begun == before
                self._has_reader |= reads
                before = self._begun
        self._close_socket()

    def _receive(self) -> bytes:
        data = self._socket.recv(READ)
        if not data:
            raise PeerLost(f"{self.address} closed the connection")
        return data

    def _take(self, data: bytes) -> int:
        """Calls the callbacks for received bytes; returns the number of callbacks."""
        with self._lock:
            calls = self.exchange.feed(data)
        _call_all(calls)
        return len(calls)

    @contextlib.contextmanager
    def _closing_on_errors(self) -> Iterator[None]:
        """Closes the connection if a read fails or is interrupted, because bytes may be lost."""
        try:
            yield
        except Mismatch as error:
            self.close(Mismatch(f"{self.address}: {error}"))
        except PeerLost as error:
            self.close(error)
        except OSError as error:
            self.close(PeerLost(f"{self.address}: {error.strerror or error}"))
        except BaseException:
            self.close(PeerLost(f"a call to {self.address} was interrupted"))
            raise

    def _pass_reading(self) -> None:
        """Ends this thread's role as the reader; a waiting caller takes it."""
        with self._lock:
            waiting = [each for each in self._waiters if each.outcome is None]
            following = waiting[0] if waiting else None
            self._has_reader = following is not None
            if following is not None:
                del self._waiters[following]
                following.reads = True
        if following is not None:
            following.wake()
        self._close_socket()

    def _close_socket(self) -> None:
        """Closes the socket of a failed connection once no thread uses it."""
        if self.broken is None:
            return
        with self._lock:
            used = self._has_reader or self._sent < self._begun
        if not used:
            self._socket.close()


class _Waiting:
    """Caller that waits for its answer or for its turn to read.

    Attributes:
        reads: True if this caller must become the reader; guarded by the connection's lock.
    """

    __slots__ = ("_lock", "outcome", "reads")

    def __init__(self) -> None:
        self.outcome: msgspec.Raw | FireflyerError | None = None
        self.reads = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def take(self, outcome: msgspec.Raw | FireflyerError) -> None:
        self.outcome = outcome
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # released before
            self._lock.release()

    def sleep(self, until: float) -> None:
        """Sleeps until `wake` is called, or until a timeout."""
        self._lock.acquire(timeout=max(0.0, until - time.monotonic()))

    def result(self) -> msgspec.Raw:
        assert self.outcome is not None
        if isinstance(self.outcome, FireflyerError):
            raise self.outcome
        return self.outcome


def _final(error: FireflyerError) -> FireflyerError:
    """Makes an error final, so that no policy retries it."""
    error.retryable = False
    return error


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
