"""Set-up of data connections: connect, accept and handshake, before native code takes over."""

import contextlib
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable

from fireflyer.errors import ConfigError, DeadlineExceeded, PeerLost, ProtocolMismatch
from fireflyer.fs3.refusal_log import RefusalLog, peer_of
from fireflyer.rpc.address import Address, tune
from fireflyer.rpc.handshake import Handshake
from fireflyer.rpc.proof import Secret

MAX_UNAUTHENTICATED = 128
"""Maximum number of unauthenticated connections of a listener."""
HANDSHAKE_TIMEOUT_S = 5.0
"""Timeout of a handshake, in seconds."""


def dial(
    address: str, secret: Secret, role: int, timeout_s: float = HANDSHAKE_TIMEOUT_S
) -> socket.socket:
    """Opens an authenticated, non-blocking connection.

    Raises:
        PeerLost, DeadlineExceeded: no process listens at the address, or the peer does not answer.
        ProtocolMismatch: the peer has another secret or version, or is no data service.
        Exception: a signal handler raised it meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    wanted = Address.parse(address)
    try:
        sock = wanted.connect(timeout_s)
    except OSError as error:
        if not _is_socket_error(error):
            raise
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{address} does not answer") from error
        raise PeerLost(f"{address} cannot be reached: {error.strerror or error}") from error
    try:
        _prove(sock, Handshake("client", secret, role), deadline, address)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


_SOCKETS = {__file__, socket.__file__, sys.modules[Address.__module__].__file__}


def _is_socket_error(error: OSError) -> bool:
    """Returns True if a socket call raised the error, False if a signal handler did."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is None or at.tb_frame.f_code.co_filename in _SOCKETS


def _prove(sock: socket.socket, handshake: Handshake, deadline: float, address: str) -> None:
    try:
        sock.sendall(handshake.opening)
        while not handshake.done:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = sock.recv(4096)
            if not data:
                raise PeerLost(f"{address} closed the connection during the handshake")
            sock.sendall(handshake.feed(data))
    except OSError as error:
        if not _is_socket_error(error):
            raise
        if isinstance(error, TimeoutError):
            raise DeadlineExceeded(f"{address} did not complete the handshake in time") from error
        raise PeerLost(f"{address} closed the connection during the handshake") from error
    if handshake.rest:
        raise ProtocolMismatch(f"{address} sent data before any request: it is not a data service")


ACCEPT_PAUSE_S = 0.1
"""Seconds that a listener pauses after the process ran out of descriptors."""


class Acceptor:
    """Listener thread that authenticates peers and passes each connection to `admit`.

    Without a secret, the listener serves only this machine.
    """

    def __init__(
        self, address: str, secret: Secret, role: int, admit: Callable[[int], None]
    ) -> None:
        """Starts to listen.

        Args:
            address: host:port (port 0: any free port) or unix:/path.
            admit: callback that gets a non-blocking descriptor and owns it; runs on the listener's
                thread.

        Raises:
            ConfigError: the address is not available, or other machines could reach it without a
                secret.
        """
        wanted = Address.parse(address)
        if not secret and not wanted.is_local:
            raise ConfigError(
                f"cannot listen at {wanted} without a secret: other machines could connect"
            )
        self._secret, self._role, self._admit = secret, role, admit
        self._listener = _listen(wanted)
        self.address = (
            wanted if wanted.path else Address(wanted.host, self._listener.getsockname()[1])
        )
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._handshakes: dict[socket.socket, tuple[Handshake, float]] = {}  # oldest first
        self._paused_until: float | None = None  # end of the pause; None: not paused
        self._refusals = RefusalLog()
        self._thread = threading.Thread(target=self._serve, name="fs3-acceptor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the listener. In a forked child, closes only the child's copies of the sockets."""
        if self._thread.is_alive():
            # A `close` would not wake the listener if a forked child has a copy of the socket.
            self._wake_sender.send(b".")
            self._thread.join()
        self._wake_sender.close()

    def _serve(self) -> None:
        while True:
            oldest = next(iter(self._handshakes.values()), None)
            dues = [oldest[1]] if oldest is not None else []
            dues += [due for due in (self._refusals.due, self._paused_until) if due is not None]
            left = max(0.0, min(dues) - time.monotonic()) if dues else None
            for key, _ in self._selector.select(left):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._wake_receiver:
                    self._end()
                    return
                if sock is self._listener:
                    self._accept()
                else:
                    self._receive(sock)
            self._refusals.flush()
            now = time.monotonic()
            if self._paused_until is not None and self._paused_until <= now:
                self._paused_until = None
                self._selector.register(self._listener, selectors.EVENT_READ)
            while self._handshakes and next(iter(self._handshakes.values()))[1] <= now:
                self._drop(next(iter(self._handshakes)))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | ConnectionAbortedError):
                self._refusals.note("an unknown peer", error.strerror or error)
                self._selector.unregister(self._listener)  # new connections wait in the backlog
                self._paused_until = time.monotonic() + ACCEPT_PAUSE_S
                if self._handshakes:
                    self._drop(next(iter(self._handshakes)))
            return
        sock.setblocking(False)
        tune(sock)
        if len(self._handshakes) >= MAX_UNAUTHENTICATED:
            self._drop(next(iter(self._handshakes)))
        handshake = Handshake("server", self._secret, self._role)
        self._handshakes[sock] = (handshake, time.monotonic() + HANDSHAKE_TIMEOUT_S)
        self._selector.register(sock, selectors.EVENT_READ)

    def _receive(self, sock: socket.socket) -> None:
        handshake = self._handshakes[sock][0]
        try:
            data = sock.recv(4096)
            answer = handshake.feed(data) if data else b""
            if not data or (answer and sock.send(answer) != len(answer)) or handshake.rest:
                raise ConnectionResetError
        except BlockingIOError:
            return
        except ProtocolMismatch as error:
            self._refusals.note(peer_of(sock), error)
            with contextlib.suppress(OSError):
                sock.send(handshake.refusal())
            self._drop(sock)
        except OSError:
            self._drop(sock)
        else:
            if handshake.done:
                self._selector.unregister(sock)
                del self._handshakes[sock]
                self._admit(sock.detach())

    def _drop(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._handshakes[sock]
        sock.close()

    def _end(self) -> None:
        for sock in list(self._handshakes):
            self._drop(sock)
        self._selector.close()
        self._listener.shutdown(socket.SHUT_RDWR)  # also ends listening in forked children
        self._listener.close()
        self._wake_receiver.close()


def _listen(address: Address) -> socket.socket:
    family = (
        socket.AF_UNIX
        if address.path
        else socket.AF_INET6
        if ":" in address.host
        else socket.AF_INET
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if not address.path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address.path or (address.host, address.port))
        listener.listen(512)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {address}: {error.strerror or error}") from error
    return listener
