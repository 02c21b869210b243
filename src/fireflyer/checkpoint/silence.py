"""A keeper that did not answer: whether it does now, without a wait."""

import contextlib
import errno
import socket
from collections.abc import Callable

_UNREACHED = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN)


class Probe:
    """A question left open on a connection of its own. Whatever comes of it, also the end of the connection,
    says that asking the keeper in earnest will not hang. Not thread-safe."""

    def __init__(
        self, connect: Callable[[socket.socket], None], family: int, question: bytes
    ) -> None:
        """
        Args:
            connect: begins to connect a socket of `family` that does not block.
            question: sent once; a keeper answers it, or closes.
        """
        self._connect, self._family, self._question = connect, family, question
        self._sock: socket.socket | None = None
        self._sent = False

    def answered(self) -> bool:
        """Whether an answer has come by now."""
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
                return True  # refused or reset: there is another keeper, or none
            self.close()
            return False
        return True

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None
