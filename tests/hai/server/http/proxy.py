"""A TCP proxy that can freeze: it then takes bytes and connections and passes nothing on."""

import contextlib
import socket
import threading


class Proxy:
    """Passes connections on to a port of this host.

    Args:
        port: where to.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._moving = threading.Event()
        self._moving.set()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def freeze(self) -> None:
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    def close(self) -> None:
        self.thaw()
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _start(self, work: object, *arguments: object) -> None:
        assert callable(work)
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._moving.wait()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [near, far]
                self._start(self._pass, near, far)
                self._start(self._pass, far, near)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._moving.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
