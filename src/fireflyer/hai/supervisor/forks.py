"""Supervisor's client of its fork server."""

import os
import signal
import socket
import sys
import time

import msgspec

from fireflyer._native.hai import set_parent_death_signal
from fireflyer.hai.processes import kill
from fireflyer.hai.supervisor.messages import (
    TITLE_ROOM,
    Fork,
    Forked,
    ForkReply,
    RankSpec,
    Ready,
    Refused,
)
from fireflyer.rpc import FrameBuffer, frame

REPLY_S = 2.0
"""Seconds within which a warm fork server (its imports are complete) must accept a request, and
answer an abandoned request. Otherwise the server is killed. Both take milliseconds unless the
server is frozen."""


class ForkServer:
    """Fork server process and its socket. The process ends when this socket closes or the
    supervisor ends."""

    def __init__(self, pid: int, stream: socket.socket) -> None:
        """`pid`: fork server, a child of this process; `stream`: socket to the fork server, which
        reports when it is ready."""
        self.asked: tuple[RankSpec, ...] = ()
        """Ranks of the last request."""
        self.pending = False
        """True if the last request has not been answered."""
        self.give_up_at: float | None = None
        self._warm = False
        self._request = b""  # request that is sent after the imports
        self.pid = pid
        self.socket = stream
        self._buffer = FrameBuffer()
        self._decoder: msgspec.msgpack.Decoder[Ready | Forked | Refused]
        self._decoder = msgspec.msgpack.Decoder(ForkReply)

    def request(self, ranks: tuple[RankSpec, ...]) -> None:
        self.asked = ranks
        self.pending = True
        self._request = frame(msgspec.msgpack.encode(Fork(ranks=ranks, parent=os.getpid())))
        if self._warm:
            self._send()

    def _send(self) -> None:
        self.socket.settimeout(REPLY_S)
        try:
            self.socket.sendall(self._request)
        except OSError:
            self.kill()  # the server is frozen or dead; the request ends when its exit is reaped
        self._request = b""

    def replies(self) -> list[Forked | Refused]:
        """Returns the replies that arrived. Ignores the end of the stream, because the supervisor
        handles the exit of the process."""
        answers: list[Forked | Refused] = []
        try:
            data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except (ConnectionError, BlockingIOError):
            return answers
        for payload in self._buffer.feed(data):
            reply = self._decoder.decode(payload)
            if isinstance(reply, Ready):
                self._warm = True
                if self._request:
                    self._send()
            else:
                self.pending = False
                self.give_up_at = None
                answers.append(reply)
        return answers

    def give_up(self) -> None:
        """Abandons the pending request. If the server replies within REPLY_S, the supervisor kills
        the reported ranks; otherwise the supervisor kills the server. A server that is still
        importing is killed immediately."""
        if self.give_up_at is not None:
            return
        self.give_up_at = time.monotonic() + REPLY_S
        if not self._warm:
            self.kill()

    def kill(self) -> None:
        kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Closes the socket. REQUIRES: the process has been reaped."""
        self.socket.close()


def start_server(
    preload: tuple[str, ...], environment: dict[str, str], python: str = ""
) -> ForkServer:
    """Starts a fork server as a child; returns without waiting for its imports.

    Raises:
        OSError: no further process can be created.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    command = [python or sys.executable, "-P", "-m", "fireflyer.hai.forkserver"]
    pid = os.fork()
    if pid == 0:
        try:
            set_parent_death_signal(signal.SIGKILL)
            if os.getppid() == parent:
                os.setpgid(0, 0)
                theirs.set_inheritable(True)
                command += [str(theirs.fileno()), *preload, TITLE_ROOM]
                os.execve(command[0], command, environment)
        finally:
            os._exit(127)
    theirs.close()
    return ForkServer(pid, ours)
