"""Where newcomers wait until the members of a group let them in."""

import contextlib
import socket
import threading

import msgspec

from fireflyer.errors import ProtocolMismatch
from fireflyer.hfreduce.handshake import Lineage, Purpose
from fireflyer.hfreduce.switchboard import Switchboard, discard
from fireflyer.hfreduce.topology import Card
from fireflyer.rpc.frames import FrameBuffer, frame


class _Visitor:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.card: Card | None = None
        self._frames = FrameBuffer()

    def look(self) -> bool:
        """Reads its card if that has come; False when it went away or is no newcomer."""
        try:
            data = self.sock.recv(1 << 16)
            for payload in self._frames.feed(data):
                self.card = msgspec.json.decode(payload, type=Card)
            return bool(data)
        except BlockingIOError:
            return True
        except (OSError, ProtocolMismatch, msgspec.MsgspecError):
            return False


class Door:
    """One a member and group; open in every epoch. Thread-safe.

    A newcomer proves the secret, sends its card, and waits for the view that has it. Whoever holds
    its connection puts its card into his votes.
    """

    def __init__(self, board: Switchboard, lineage: Lineage) -> None:
        self._lock = threading.Lock()
        self._visitors: list[_Visitor] = []
        self._line = board.line(lineage.number("join"), -1, lineage.key)
        self._line.serve(Purpose.JOIN, self._knock)

    def waiting(self) -> list[Card]:
        """The cards of those who wait now."""
        with self._lock:
            gone = [visitor for visitor in self._visitors if not visitor.look()]
            self._visitors = [visitor for visitor in self._visitors if visitor not in gone]
            cards = [visitor.card for visitor in self._visitors if visitor.card is not None]
        for visitor in gone:
            discard(visitor.sock)
        return cards

    def admit(self, cards: set[Card], message: bytes) -> None:
        """Sends a frame to those of `cards` who wait here, and lets go of them."""
        with self._lock:
            admitted = [visitor for visitor in self._visitors if visitor.card in cards]
            self._visitors = [visitor for visitor in self._visitors if visitor not in admitted]
        for visitor in admitted:
            with contextlib.suppress(OSError):
                visitor.sock.send(frame(message))
            discard(visitor.sock)

    def close(self) -> None:
        """Sends everybody away. Idempotent."""
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
            self._visitors.append(_Visitor(sock))
