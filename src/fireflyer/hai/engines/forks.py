"""The supervisor's end of its fork server."""

import os
import signal
import socket
import sys
import time

import msgspec

from fireflyer._native.hai import set_parent_death_signal
from fireflyer.hai.engines.messages import (
    TITLE_ROOM,
    Fork,
    Forked,
    ForkReply,
    RankSpec,
    Ready,
    Refused,
)
from fireflyer.hai.processes import kill
from fireflyer.rpc import FrameBuffer, frame

REPLY_S = 2.0
"""What a warm fork server has to take a request, and to answer one that is no longer wanted, before it is
killed; both take milliseconds unless it is frozen."""


class ForkServer:
    """A fork server process and its socket. Ends when this object's socket or the supervisor does."""

    def __init__(self, pid: int, stream: socket.socket) -> None:
        """`pid`: our child; `stream`: our end of its socket. It says when it is ready."""
        self.asked: tuple[RankSpec, ...] = ()
        """What the last request was for."""
        self.pending = False
        """It has not been answered."""
        self.give_up_at: float | None = None
        self._warm = False
        self._held = b""  # a request waits here for the end of the imports
        self.pid = pid
        self.socket = stream
        self._buffer = FrameBuffer()
        self._decoder: msgspec.msgpack.Decoder[Ready | Forked | Refused]
        self._decoder = msgspec.msgpack.Decoder(ForkReply)

    def request(self, ranks: tuple[RankSpec, ...]) -> None:
        self.asked = ranks
        self.pending = True
        self._held = frame(msgspec.msgpack.encode(Fork(ranks=ranks, parent=os.getpid())))
        if self._warm:
            self._send()

    def _send(self) -> None:
        self.socket.settimeout(REPLY_S)
        try:
            self.socket.sendall(self._held)
        except OSError:
            self.kill()  # frozen, or dead already: its exit is reaped and ends the request
        self._held = b""

    def replies(self) -> list[Forked | Refused]:
        """What arrived; an end of the stream is seen as the exit of the process instead."""
        answers: list[Forked | Refused] = []
        try:
            data = self.socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except (ConnectionError, BlockingIOError):
            return answers
        for payload in self._buffer.feed(data):
            reply = self._decoder.decode(payload)
            if isinstance(reply, Ready):
                self._warm = True
                if self._held:
                    self._send()
            else:
                self.pending = False
                self.give_up_at = None
                answers.append(reply)
        return answers

    def give_up(self) -> None:
        """The pending request is no longer wanted: soon its ranks are known, to be killed, or
        the server goes."""
        if self.give_up_at is not None:
            return
        self.give_up_at = time.monotonic() + REPLY_S
        if not self._warm:
            self.kill()

    def kill(self) -> None:
        kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """REQUIRES: the process has been reaped."""
        self.socket.close()


def start_server(
    preload: tuple[str, ...], environment: dict[str, str], python: str = ""
) -> ForkServer:
    """A fork server of our own; its imports take their time in the other process.

    Raises:
        OSError: if there can be no further process.
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
