"""Connection listener of a process, shared by all its groups from the first to the last.

Each member of a group has a `GroupEndpoint` here, registered under the group's 16-byte number and
the member's rank. A caller connects to a listener, names an endpoint and a purpose, and proves its
membership (`handshake`). Then the handler of that purpose receives the socket. One daemon thread,
the acceptor, accepts and admits connections. It never waits for a single caller, so unauthenticated
peers that send nothing delay no other caller. A dial succeeds even if the dialled process makes no
call, because that process's acceptor admits it.

Every socket of this module is guarded against forks, because a child's copy would hide its parent's
death.
"""

import contextlib
import itertools
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from fireflyer._native import hfreduce as native
from fireflyer.errors import DeadlineExceeded, PeerLost, ProtocolMismatch
from fireflyer.hfreduce import cores
from fireflyer.hfreduce.rendezvous import handshake
from fireflyer.hfreduce.rendezvous.handshake import Hello, Purpose
from fireflyer.hfreduce.topology import RankInfo, boot_id, host_key
from fireflyer.log import get_logger

Handler = Callable[[int, socket.socket], None]
"""Function that receives the caller's rank and the admitted socket, and then owns the socket.

It runs in the acceptor. For sockets that arrived before `serve`, it runs in the caller of `serve`.
"""

HANDSHAKE_S = 5.0
MOST_CALLERS = 256
"""Maximum number of handshakes at a time; at the limit the oldest caller is dropped."""
_LOOK_AROUND_S = 0.1
_BACKLOG = 1024
_CLOSED_ENDPOINTS = 1024


def give_away(sock: socket.socket) -> int:
    """Releases a socket's descriptor to a new owner, which must guard it against forks itself."""
    native.unguard_descriptor(sock.fileno())
    return sock.detach()


def discard(sock: socket.socket) -> None:
    """Closes a socket that this module has guarded."""
    if sock.fileno() >= 0:
        native.unguard_descriptor(sock.fileno())
        sock.close()


def process_of(sock: socket.socket) -> int:
    """Returns a pidfd of a Unix socket's peer; -1 if our PID namespace does not contain the peer."""
    pid = _credentials(sock)[0]
    return os.pidfd_open(pid) if pid > 0 else -1


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Returns process id and user id of a Unix socket's peer."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class GroupEndpoint:
    """A member's endpoint in a group: dials peers and receives their connections. Thread-safe.

    `ConnectionListener.endpoint` creates it.
    """

    def __init__(
        self, listener: "ConnectionListener", number: bytes, rank: int, key: bytes
    ) -> None:
        self.listener = listener
        self.number = number
        self.rank = rank
        self.key = key
        self._changed = threading.Condition()
        self._handlers: dict[Purpose, Handler] = {Purpose.PING: lambda _, sock: discard(sock)}
        self._waiting: dict[Purpose, list[tuple[int, socket.socket]]] = {}
        self._unproven: str | None = None
        self._closed = False

    def serve(self, purpose: Purpose, handler: Handler) -> None:
        """Passes all connections for `purpose` to `handler`, including those already waiting."""
        with self._changed:
            self._handlers[purpose] = handler
            waiting = self._waiting.pop(purpose, [])
        for rank, sock in waiting:
            handler(rank, sock)

    def take(
        self,
        purpose: Purpose,
        ranks: Collection[int],
        deadline: float,
        check: Callable[[], None] = lambda: None,
    ) -> tuple[int, socket.socket]:
        """Waits for a connection from one of `ranks`, for a purpose without a handler.

        Args:
            check: called ten times a second; raises if waiting is pointless.

        Raises:
            DeadlineExceeded: none of the ranks connected by `deadline` (monotonic).
            ProtocolMismatch: a caller of this endpoint failed to prove the secret.
        """
        while True:
            with self._changed:
                waiting = self._waiting.get(purpose, [])
                for i, (rank, sock) in enumerate(waiting):
                    if rank in ranks:
                        del waiting[i]
                        return rank, sock
                if self._unproven is not None:
                    raise ProtocolMismatch(self._unproven)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineExceeded(f"rendezvous: ranks {sorted(ranks)} did not connect")
                self._changed.wait(min(left, _LOOK_AROUND_S))
            check()

    def callers(self, purpose: Purpose) -> list[int]:
        """Returns the ranks whose connections wait for `purpose`, not yet served or taken."""
        with self._changed:
            return [rank for rank, _ in self._waiting.get(purpose, [])]

    def dial(self, rank: int, info: RankInfo, purpose: Purpose, timeout_s: float) -> socket.socket:
        """Opens a blocking connection to `rank`, whose endpoint of the same number must admit it.

        Args:
            rank: rank to reach; -1 for any rank that answers at the info's address.

        Raises:
            PeerLost: no process answers at the info's address, or it has no such endpoint.
            ProtocolMismatch: the peer failed to prove the secret, or rejects this process's proof.
            DeadlineExceeded: the peer did not answer within `timeout_s`.
        """
        who = f"rank {rank} at {info.address}:{info.port}"
        hello = Hello.make(self.number, purpose, self.rank, rank)
        local = info.host == self.listener.host
        family = socket.AF_UNIX if local else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        native.guard_descriptor(sock.fileno())
        try:
            deadline = time.monotonic() + timeout_s
            sock.settimeout(timeout_s)
            sock.connect("\0" + info.unix if local else (info.address, info.port))
            if local and _credentials(sock)[1] != os.getuid():
                raise ProtocolMismatch(f"{who} runs as another user")
            sock.sendall(hello.raw)
            answer = _receive(sock, 1, deadline)
            if answer == handshake.ADMITTED and not local:
                self._prove(sock, hello, who, deadline)
                answer = _receive(sock, 1, deadline)
            if answer == handshake.REFUSED:
                raise ProtocolMismatch(f"{who} rejected this process's proof of the secret")
            if answer != handshake.ADMITTED:
                raise PeerLost(f"{who} is not in this group or has left it")
            sock.settimeout(None)
            return sock
        except BaseException as error:
            discard(sock)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"{who} did not answer within {timeout_s:g} s") from error
            if isinstance(error, OSError):
                raise PeerLost(f"{who} cannot be reached: {error}") from error
            raise

    def _prove(self, sock: socket.socket, hello: Hello, who: str, deadline: float) -> None:
        answer = _receive(sock, handshake.NONCE_BYTES + handshake.PROOF_BYTES, deadline)
        challenge, theirs = answer[: handshake.NONCE_BYTES], answer[handshake.NONCE_BYTES :]
        if not handshake.proven(theirs, self.key, b"callee", hello, challenge):
            raise ProtocolMismatch(f"{who} did not prove the secret")
        sock.sendall(handshake.proof(self.key, b"caller", hello, challenge))

    def close(self) -> None:
        """Rejects later calls and closes connections that were not taken. Idempotent."""
        if not self.listener.ours:
            return
        self.listener.unregister(self)
        self.retire()

    def retire(self, kept: Purpose | None = None) -> None:
        """Serves only `kept` from now on; other callers are still admitted, then disconnected."""
        with self._changed:
            self._closed = True
            waiting = [sock for calls in self._waiting.values() for _, sock in calls]
            self._waiting.clear()
            self._handlers = {p: h for p, h in self._handlers.items() if p is kept}
        for sock in waiting:
            discard(sock)

    def arrive(self, hello: Hello, sock: socket.socket) -> None:
        """Delivers an admitted caller. The connection listener calls this method."""
        with self._changed:
            handler = self._handlers.get(hello.purpose)
            if handler is None and not self._closed:
                self._waiting.setdefault(hello.purpose, []).append((hello.sender, sock))
                self._changed.notify_all()
                return
        if handler is None:
            discard(sock)
            return
        try:
            handler(hello.sender, sock)
        except Exception:  # noqa: BLE001  # the acceptor also serves other connections
            get_logger("hfreduce").exception("a connection of rank %d was dropped", hello.sender)
            discard(sock)

    def note_unproven(self, hello: Hello, how: str) -> None:
        """Records a caller that knows the number but not the key. The connection listener calls
        this method."""
        with self._changed:
            self._unproven = f"rank {hello.sender} {how}"
            self._changed.notify_all()


class _Caller:
    """A connection in handshake: a small state machine that arriving bytes drive."""

    def __init__(self, listener: "ConnectionListener", sock: socket.socket, local: bool) -> None:
        self.listener = listener
        self.sock = sock
        self.local = local
        self.deadline = time.monotonic() + HANDSHAKE_S
        self.hello: Hello | None = None
        self.endpoint: GroupEndpoint | None = None
        self._data = b""
        self._challenge = b""

    def advance(self, readable: bool) -> bool:
        """Reads and answers received bytes; returns False once the handshake is over, whether or
        not the caller was admitted."""
        try:
            if self.endpoint is None and self.hello is not None:
                # A caller that waits for its endpoint sends nothing: a readable socket means that
                # it has closed.
                return not readable and self._look_up()
            wanted = handshake.PROOF_BYTES if self._challenge else handshake.HELLO_BYTES
            more = self.sock.recv(wanted - len(self._data))
            if not more:
                if self.endpoint is not None and self.hello is not None:
                    broke = "aborted the proof of the secret: it died or has another secret"
                    self.endpoint.note_unproven(self.hello, broke)
                return False
            self._data += more
            if len(self._data) < wanted:
                return True
            data, self._data = self._data, b""
            if self.hello is None:
                self.hello = Hello.parse(data)
                return self._look_up()
            return self._check(self.hello, data)
        except (BlockingIOError, InterruptedError):
            return True
        except (OSError, ValueError):
            return False

    def _look_up(self) -> bool:
        """Looks up the endpoint; if there is none yet, lets the caller wait until its deadline."""
        assert self.hello is not None
        self.endpoint = self.listener.find(self.hello.group, self.hello.receiver)
        if self.endpoint is None:
            if self.listener.was_closed(self.hello.group, self.hello.receiver):
                self.sock.send(handshake.UNKNOWN)
                return False
            return True
        if self.local:
            return self._admit(self.endpoint, self.hello)
        self._challenge = secrets.token_bytes(handshake.NONCE_BYTES)
        mine = handshake.proof(self.endpoint.key, b"callee", self.hello, self._challenge)
        self.sock.send(handshake.ADMITTED + self._challenge + mine)
        return True

    def _check(self, hello: Hello, theirs: bytes) -> bool:
        assert self.endpoint is not None
        if not handshake.proven(theirs, self.endpoint.key, b"caller", hello, self._challenge):
            self.sock.send(handshake.REFUSED)
            self.endpoint.note_unproven(hello, "did not prove the secret")
            return False
        return self._admit(self.endpoint, hello)

    def _admit(self, endpoint: GroupEndpoint, hello: Hello) -> bool:
        sock = self.sock
        sock.send(handshake.ADMITTED)
        sock.setblocking(True)
        self.listener.remove(self)
        endpoint.arrive(hello, sock)
        return False


class ConnectionListener:
    """The listeners of this process and the thread that admits callers; see `open_listener`."""

    def __init__(self) -> None:
        self.machine = boot_id()
        self.host = host_key(self.machine)
        self.users = 0
        self.unix = f"fireflyer-{os.getpid()}-{secrets.token_hex(12)}"
        self._lock = threading.Lock()
        self._endpoints: dict[
            bytes, list[GroupEndpoint]
        ] = {}  # by group number, one per member in this process
        self._closed_endpoints: deque[tuple[bytes, int]] = deque(maxlen=_CLOSED_ENDPOINTS)
        self._members = itertools.count()
        self._callers: dict[int, _Caller] = {}  # only the acceptor uses it; in order of age
        self._listeners: dict[str, socket.socket] = {}
        self.ours = True  # False in a forked child
        self._closing = False
        self._selector = selectors.EpollSelector()
        native.guard_descriptor(self._selector.fileno())
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for sock in (self._wake_receiver, self._wake_sender):
            sock.setblocking(False)
            native.guard_descriptor(sock.fileno())
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._listen("", socket.AF_UNIX, "\0" + self.unix)
        self._thread = threading.Thread(target=self._run, name="hfreduce-acceptor", daemon=True)
        self._thread.start()

    def info(self, address: str) -> RankInfo:
        """Returns the info that tells how to reach this process over the interface with the IPv4
        address `address`."""
        with self._lock:
            if address not in self._listeners:
                self._listen(address, socket.AF_INET, (address, 0))
            port: int = self._listeners[address].getsockname()[1]
        return RankInfo(
            self.machine,
            self.host,
            self.unix,
            address,
            port,
            zone=os.environ.get("FIREFLYER_ZONE", ""),
            cpus=cores.usable(),
            quota=cores.quota(),
            spin=cores.spin_wanted(),
            member=next(self._members),
        )

    def endpoint(self, number: bytes, rank: int, key: bytes) -> GroupEndpoint:
        """Registers a member of a group, and serves callers that already wait for it.

        Args:
            rank: rank of the member; -1 for an endpoint without a rank. A process may have several of
                these; callers reach the oldest.
        """
        endpoint = GroupEndpoint(self, number, rank, key)
        with self._lock:
            endpoints = self._endpoints.setdefault(number, [])
            if rank >= 0 and any(other.rank == rank for other in endpoints):
                raise ValueError("this process already has an endpoint of that number and rank")
            endpoints.append(endpoint)
        self._wake()
        return endpoint

    def unregister(self, endpoint: GroupEndpoint) -> None:
        with self._lock:
            endpoints = self._endpoints.get(endpoint.number, [])
            if endpoint in endpoints:
                endpoints.remove(endpoint)
                self._closed_endpoints.append((endpoint.number, endpoint.rank))
            if not endpoints:
                self._endpoints.pop(endpoint.number, None)

    def find(self, number: bytes, receiver: int) -> GroupEndpoint | None:
        """Returns the endpoint of rank `receiver` with this number; for -1 the oldest endpoint."""
        with self._lock:
            endpoints = self._endpoints.get(number, [])
            return next(
                (endpoint for endpoint in endpoints if receiver in (-1, endpoint.rank)), None
            )

    def was_closed(self, number: bytes, receiver: int) -> bool:
        with self._lock:
            return any(
                closed == number and receiver in (-1, rank)
                for closed, rank in self._closed_endpoints
            )

    def release(self) -> None:
        """Ends one use; the end of the last use closes the listeners and ends the thread. A no-op
        in a forked child."""
        global _listener
        if not self.ours:
            return
        with _listener_lock:
            self.users -= 1
            if self.users > 0:
                return
            if _listener is self:
                _listener = None
        self._closing = True  # the thread may see this at once and close its resources
        discard(self._wake_sender)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def disown(self) -> None:
        """Marks this object as a forked child's copy: it has no thread, and its descriptors refer
        to /dev/null."""
        self.ours = False

    def remove(self, caller: _Caller) -> None:
        """Removes an admitted caller's socket from the acceptor."""
        self._selector.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]

    def _listen(
        self, name: str, family: socket.AddressFamily, address: str | tuple[str, int]
    ) -> None:
        listener = socket.socket(family, socket.SOCK_STREAM)
        native.guard_descriptor(listener.fileno())
        try:
            listener.bind(address)
            listener.listen(_BACKLOG)
        except BaseException:
            discard(listener)
            raise
        listener.setblocking(False)
        self._listeners[name] = listener
        self._selector.register(listener, selectors.EVENT_READ)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake-up is pending already
            self._wake_sender.send(b"!")

    def _run(self) -> None:
        while not self._closing:
            oldest = next(iter(self._callers.values()), None)
            timeout = None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._wake_receiver:
                    self._drain_wakeups()
                elif (caller := self._callers.get(sock.fileno())) is not None:
                    self._advance(caller, readable=True)
                else:
                    self._accept(sock)
            self._expire()
        self._close()

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(64):
                pass
        for caller in list(self._callers.values()):
            if caller.hello is not None and caller.endpoint is None:
                self._advance(caller, readable=False)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors
            get_logger("hfreduce").warning("cannot accept a connection: %s", error)
            if not self._drop_oldest():
                time.sleep(0.1)  # the listener stays readable: without a pause this loop spins
            return
        native.guard_descriptor(sock.fileno())
        local = sock.family == socket.AF_UNIX
        if local and _credentials(sock)[1] != os.getuid():
            discard(sock)
            return
        sock.setblocking(False)
        if len(self._callers) >= MOST_CALLERS:
            self._drop_oldest()
        caller = _Caller(self, sock, local)
        self._callers[sock.fileno()] = caller
        self._selector.register(sock, selectors.EVENT_READ)
        self._advance(caller, readable=True)

    def _advance(self, caller: _Caller, readable: bool) -> None:
        if not caller.advance(readable):
            self._reject(caller)

    def _reject(self, caller: _Caller) -> None:
        if self._callers.get(caller.sock.fileno()) is not caller:
            return  # admitted
        self.remove(caller)
        discard(caller.sock)

    def _drop_oldest(self) -> bool:
        if not self._callers:
            return False
        self._reject(next(iter(self._callers.values())))
        return True

    def _expire(self) -> None:
        now = time.monotonic()
        while self._callers and next(iter(self._callers.values())).deadline <= now:
            self._drop_oldest()

    def _close(self) -> None:
        while self._drop_oldest():
            pass
        for sock in (*self._listeners.values(), self._wake_receiver):
            discard(sock)
        native.unguard_descriptor(self._selector.fileno())
        self._selector.close()


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the other side closed the connection")
        data += more
    return data


_listener_lock = threading.Lock()
_listener: ConnectionListener | None = None
_fork_hook = False


def open_listener() -> ConnectionListener:
    """Returns this process's connection listener; starts it if needed. Each call needs one
    `release`."""
    global _listener, _fork_hook
    with _listener_lock:
        if not _fork_hook:
            os.register_at_fork(after_in_child=_forget)
            _fork_hook = True
        if _listener is None:
            _listener = ConnectionListener()
        _listener.users += 1
        return _listener


def _forget() -> None:
    global _listener, _listener_lock
    _listener_lock = threading.Lock()  # another thread of the parent may have held it
    if _listener is not None:
        _listener.disown()
    _listener = None
