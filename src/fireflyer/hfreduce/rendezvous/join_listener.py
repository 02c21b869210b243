"""Queue of newcomers that wait until the members of a group admit them."""

import contextlib
import socket
import threading

import msgspec

from fireflyer.errors import ProtocolMismatch
from fireflyer.hfreduce.rendezvous.connection_listener import ConnectionListener, discard
from fireflyer.hfreduce.rendezvous.handshake import Lineage, Purpose
from fireflyer.hfreduce.topology import RankInfo
from fireflyer.rpc.frames import FrameBuffer, frame


class _WaitingMember:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.info: RankInfo | None = None
        self._frames = FrameBuffer()

    def look(self) -> bool:
        """Reads the newcomer's info if it has arrived; False if the peer left or is no newcomer."""
        try:
            data = self.sock.recv(1 << 16)
            for payload in self._frames.feed(data):
                self.info = msgspec.json.decode(payload, type=RankInfo)
            return bool(data)
        except BlockingIOError:
            return True
        except (OSError, ProtocolMismatch, msgspec.MsgspecError):
            return False


class JoinListener:
    """Listener for newcomers: one per member and group, open in every epoch. Thread-safe.

    A newcomer proves the secret, sends its info, and waits for the view that contains it. The
    member that holds the newcomer's connection adds that info to its own votes.
    """

    def __init__(self, listener: ConnectionListener, lineage: Lineage) -> None:
        self._lock = threading.Lock()
        self._newcomers: list[_WaitingMember] = []
        self._endpoint = listener.endpoint(lineage.number("join"), -1, lineage.key)
        self._endpoint.serve(Purpose.JOIN, self._accept)

    def waiting(self) -> list[RankInfo]:
        """Returns the infos of the newcomers that wait now."""
        with self._lock:
            gone = [newcomer for newcomer in self._newcomers if not newcomer.look()]
            self._newcomers = [newcomer for newcomer in self._newcomers if newcomer not in gone]
            infos = [newcomer.info for newcomer in self._newcomers if newcomer.info is not None]
        for newcomer in gone:
            discard(newcomer.sock)
        return infos

    def admit(self, infos: set[RankInfo], message: bytes) -> None:
        """Sends a frame to the newcomers in `infos` that wait here, and closes their
        connections."""
        with self._lock:
            admitted = [newcomer for newcomer in self._newcomers if newcomer.info in infos]
            self._newcomers = [newcomer for newcomer in self._newcomers if newcomer not in admitted]
        for newcomer in admitted:
            with contextlib.suppress(OSError):
                newcomer.sock.send(frame(message))
            discard(newcomer.sock)

    def close(self) -> None:
        """Closes the connections of all newcomers. Idempotent."""
        if not self._endpoint.listener.ours:
            return
        self._endpoint.close()
        with self._lock:
            newcomers, self._newcomers = self._newcomers, []
        for newcomer in newcomers:
            discard(newcomer.sock)

    def _accept(self, _rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        with self._lock:
            self._newcomers.append(_WaitingMember(sock))
