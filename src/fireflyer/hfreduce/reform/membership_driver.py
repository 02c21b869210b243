"""I/O driver of `membership`: runs one agreement over connections of the old epoch's endpoint."""

import contextlib
import selectors
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fireflyer._native import hfreduce as native
from fireflyer.errors import DeadlineExceeded, ProtocolMismatch, RankFailed, WireError
from fireflyer.hfreduce.reform.membership import (
    Arrived,
    Decided,
    Elapsed,
    Event,
    Fence,
    Here,
    Install,
    Lost,
    Membership,
    Message,
    Received,
    Send,
    Start,
    View,
    Wait,
)
from fireflyer.hfreduce.rendezvous.connection_listener import GroupEndpoint, discard
from fireflyer.hfreduce.rendezvous.handshake import Purpose
from fireflyer.hfreduce.topology import RankInfo
from fireflyer.rpc.frames import FrameBuffer, frame

_LOOK_AROUND_S = 0.2
_DIALLERS = 16


def encode(message: Message) -> bytes:
    """Encodes a message as a payload for `frame`."""
    return msgspec.msgpack.encode(message)


def decode(payload: bytes) -> Message:
    """Decodes a payload; raises msgspec.MsgspecError if it is not a message."""
    message: Message = msgspec.msgpack.decode(payload, type=Message)
    return message


def tell_outcome(endpoint: GroupEndpoint, view: View) -> None:
    """Sends the decided view to every later caller of `endpoint` that wants to take part in the
    agreement."""
    told = frame(encode(Decided(view)))

    def answer(_rank: int, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.send(told, socket.MSG_DONTWAIT)
        discard(sock)

    endpoint.serve(Purpose.REFORM, answer)
    endpoint.retire(Purpose.REFORM)


class MembershipDriver:
    """Driver of one agreement. `agree` runs in the caller's thread; a few other threads dial.

    Args:
        endpoint: endpoint of the old epoch.
        machine: this member's state machine, not started.
        dead: polled; returns the ranks known to be dead.
        newcomers: polled; returns the processes that wait for admission.
        grace_s: time to wait for a member that is not known to be dead.
    """

    def __init__(
        self,
        endpoint: GroupEndpoint,
        machine: Membership,
        dead: Callable[[], set[int]],
        newcomers: Callable[[], list[RankInfo]],
        grace_s: float,
    ) -> None:
        self._endpoint = endpoint
        self._machine = machine
        self._dead = dead
        self._newcomers = newcomers
        self._grace_s = grace_s
        self._alarm = 0.0
        self._outcome: Install | Fence | None = None
        self._selector = selectors.EpollSelector()
        self._sockets: dict[int, list[socket.socket]] = defaultdict(list)
        self._unsent: dict[int, list[bytes]] = {}  # messages to ranks that are being dialled
        self._diallers = ThreadPoolExecutor(_DIALLERS, "hfreduce-reform")
        self._lock = threading.Lock()  # guards `_closed` and `_made`
        self._closed = False
        self._made: deque[tuple[int, socket.socket | None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for sock in (self._wake_receiver, self._wake_sender):
            sock.setblocking(False)
            native.guard_descriptor(sock.fileno())
        native.guard_descriptor(self._selector.fileno())
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def agree(self, deadline: float, neighbours: Collection[int] = ()) -> View:
        """Agrees on the next view, which contains this rank, and returns it.

        Args:
            deadline: monotonic time.
            neighbours: ranks to notify that this rank takes part.

        Raises:
            RankFailed: the other members decided without this rank, which they believed dead.
            DeadlineExceeded: no quorum was reached by `deadline`.
        """
        try:
            self._endpoint.serve(Purpose.REFORM, self._made_link)
            for info in self._newcomers():
                self._step(Arrived(info))
            self._step(Start(frozenset(self._dead())))
            for rank in neighbours:
                self._send(rank, frame(encode(Here())))
            while self._outcome is None:
                self._once(deadline)
        finally:
            self._close()
        view, me = self._outcome.view, self._machine.rank
        tell_outcome(self._endpoint, view)
        if isinstance(self._outcome, Fence):
            raise RankFailed(
                f"rank {me} (this rank) was declared dead: the group formed epoch {view.epoch} "
                "without it; join as a newcomer",
                me,
            )
        return view

    def _once(self, deadline: float) -> None:
        now = time.monotonic()
        if now >= deadline:
            machine = self._machine
            raise DeadlineExceeded(
                f"timed out: the group did not agree on epoch {machine.epoch}: "
                f"{max(1, machine.voters)} of {len(machine.members)} ranks voted, {machine.needed}"
            )
        if now >= self._alarm:
            self._alarm = deadline
            self._step(Elapsed())
            return
        for key, _ in self._selector.select(min(self._alarm - now, deadline - now, _LOOK_AROUND_S)):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is self._wake_receiver:
                self._drain_wakeups()
            elif self._outcome is None:
                self._read(sock, *key.data)
        for rank in self._dead() & set(range(len(self._machine.members))):
            self._step(Lost(rank))
        for info in self._newcomers():
            self._step(Arrived(info))

    def _step(self, event: Event) -> None:
        if self._outcome is not None:
            return
        for action in self._machine.step(event):
            match action:
                case Send(rank, message):
                    self._send(rank, frame(encode(message)))
                case Wait(leading):
                    self._alarm = time.monotonic() + self._grace_s * (1 if leading else 2)
                case Install() | Fence():
                    self._outcome = action

    def _send(self, rank: int, data: bytes) -> None:
        """Sends data, or drops it if the rank is unreachable: the agreement tolerates losses."""
        for sock in reversed(self._sockets[rank]):
            with contextlib.suppress(OSError):
                if sock.send(data) == len(data):
                    return
        if rank in self._unsent:
            self._unsent[rank].append(data)
        elif not self._sockets[rank] and self._outcome is None:
            self._unsent[rank] = [data]
            self._diallers.submit(self._dial, rank)

    def _dial(self, rank: int) -> None:
        info = self._machine.members[rank]
        sock = None
        with contextlib.suppress(WireError):
            sock = self._endpoint.dial(rank, info, Purpose.REFORM, self._grace_s)
        self._made_link(rank, sock)

    def _made_link(self, rank: int, sock: socket.socket | None) -> None:
        """Queues a new connection to or from `rank`; `sock` is None if dialling failed. Thread-safe."""
        with self._lock:
            if not self._closed:
                self._made.append((rank, sock))
                with contextlib.suppress(BlockingIOError):  # a wake-up is pending already
                    self._wake_sender.send(b"!")
                return
        if sock is not None:
            discard(sock)

    def _drain_wakeups(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(64):
                pass
        while True:
            with self._lock:
                if not self._made:
                    return
                rank, sock = self._made.popleft()
            if sock is None:
                self._unsent.pop(rank, None)
                self._step(Lost(rank))
                continue
            sock.setblocking(False)
            self._sockets[rank].append(sock)
            self._selector.register(sock, selectors.EVENT_READ, (rank, FrameBuffer()))
            for data in self._unsent.pop(rank, []):
                self._send(rank, data)

    def _read(self, sock: socket.socket, rank: int, frames: FrameBuffer) -> None:
        try:
            data = sock.recv(1 << 16)
            messages = [decode(payload) for payload in frames.feed(data)]
        except BlockingIOError:
            return
        except (OSError, ProtocolMismatch, msgspec.MsgspecError):
            data, messages = b"", []
        if not data:
            self._selector.unregister(sock)
            self._sockets[rank].remove(sock)
            discard(sock)
            if not self._sockets[rank]:
                self._step(Lost(rank))
        for message in messages:
            self._step(Received(rank, message))

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            made = [sock for _, sock in self._made if sock is not None]
        self._diallers.shutdown(wait=False, cancel_futures=True)
        for links in self._sockets.values():
            made += links
        for sock in (*made, self._wake_receiver, self._wake_sender):
            discard(sock)
        native.unguard_descriptor(self._selector.fileno())
        self._selector.close()
