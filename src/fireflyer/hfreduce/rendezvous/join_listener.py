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
        self.card: RankInfo | None = None
        self._frames = FrameBuffer()

    def look(self) -> bool:
        """Reads the newcomer's info if it has arrived; False if the peer left or is no newcomer."""
        try:
            data = self.sock.recv(1 << 16)
            for payload in self._frames.feed(data):
                self.card = msgspec.json.decode(payload, type=RankInfo)
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

    def __init__(self, board: ConnectionListener, lineage: Lineage) -> None:
        self._lock = threading.Lock()
        self._visitors: list[_WaitingMember] = []
        self._line = board.line(lineage.number("join"), -1, lineage.key)
        self._line.serve(Purpose.JOIN, self._knock)

    def waiting(self) -> list[RankInfo]:
        """Returns the infos of the newcomers that wait now."""
        with self._lock:
            gone = [visitor for visitor in self._visitors if not visitor.look()]
            self._visitors = [visitor for visitor in self._visitors if visitor not in gone]
            cards = [visitor.card for visitor in self._visitors if visitor.card is not None]
        for visitor in gone:
            discard(visitor.sock)
        return cards

    def admit(self, cards: set[RankInfo], message: bytes) -> None:
        """Sends a frame to the newcomers in `cards` that wait here, and closes their
        connections."""
        with self._lock:
            admitted = [visitor for visitor in self._visitors if visitor.card in cards]
            self._visitors = [visitor for visitor in self._visitors if visitor not in admitted]
        for visitor in admitted:
            with contextlib.suppress(OSError):
                visitor.sock.send(frame(message))
            discard(visitor.sock)

    def close(self) -> None:
        """Closes the connections of all newcomers. Idempotent."""
        if not self._line.board.ours:
            return
        self._line.close()
        with self._lock:
            visitors, self._visitors = self._visitors, []
        for visitor in visitors:
            discard(visitor.sock)

    def _knock(self, _rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        with self._lock:
            self._visitors.append(_WaitingMember(sock))
