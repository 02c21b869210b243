"""Non-blocking probe that tells when an unresponsive keeper has recovered."""

import contextlib
import errno
import socket
from collections.abc import Callable

_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN)


class KeeperProbe:
    """Request to a keeper on a separate connection, whose answer is pending. Any answer, including
    a closed connection, means that a regular request to the keeper will not hang. Not
    thread-safe."""

    def __init__(
        self, connect: Callable[[socket.socket], None], family: int, question: bytes
    ) -> None:
        """
        Args:
            connect: starts to connect a non-blocking socket of `family`.
            question: sent once; a keeper answers it or closes the connection.
        """
        self._connect, self._family, self._question = connect, family, question
        self._sock: socket.socket | None = None
        self._sent = False

    def answered(self) -> bool:
        """Returns True if an answer has arrived; connects and sends the question if needed."""
        try:
            if self._sock is None:
                self._sock, self._sent = socket.socket(self._family), False
                self._sock.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    self._connect(self._sock)
            if not self._sent:
                self._sock.sendall(self._question)
                self._sent = True
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (*_UNREACHED, errno.ENOTCONN):
                return True  # refused or reset: the unresponsive keeper is gone, so nothing hangs
            self.close()
            return False
        return True

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None
