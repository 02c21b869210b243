"""Rate-limited log of refused connections."""

import socket
import struct
import time
from collections.abc import Callable

from fireflyer.log import get_logger

LINES = 4
"""Maximum lines in `SPAN_S` seconds; further refusals are counted."""
SPAN_S = 10.0


class RefusalLog:
    """Log of one listener's refusals; only the listener's thread uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # End of the current span. `_logged` and `_more` count its refusals with and without a log
        # line.
        self._ends = 0.0
        self._logged = 0
        self._more = 0

    @property
    def due(self) -> float | None:
        """Time at which `flush` must be called next; None: not before the next refusal."""
        return self._ends if self._more else None

    def note(self, peer: str, why: object) -> None:
        """Logs or counts a refused connection."""
        self.flush()
        if self._clock() >= self._ends:
            self._ends, self._logged = self._clock() + SPAN_S, 0
        if self._logged < LINES:
            self._logged += 1
            get_logger("fs3").warning("a connection from %s was refused: %s", peer, why)
        else:
            self._more += 1

    def flush(self) -> None:
        """Logs how many refusals got no log line of their own, once the span is over."""
        if self._more and self._clock() >= self._ends:
            get_logger("fs3").warning(
                "%d more connections were refused within %g s", self._more, SPAN_S
            )
            self._more = 0


def peer_of(sock: socket.socket) -> str:
    """Returns the peer's address; for a Unix socket, its process and user."""
    try:
        if sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            return "process {} of uid {}".format(*struct.unpack("3i", credentials)[:2])
        host, port = sock.getpeername()[:2]
    except OSError:  # the peer has disconnected
        return "a peer that disconnected"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
