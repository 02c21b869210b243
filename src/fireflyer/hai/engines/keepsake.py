"""The one process of a task that stays from attempt to attempt: the keeper of its checkpoints in memory.

Socket activation: ranks find the path of a listening socket in FIREFLYER_KEEPER, and the first one that
connects has the keeper started. A task whose ranks never ask has none.
"""

import contextlib
import os
import signal
import socket
import sys

from fireflyer._native.hai import set_parent_death_signal

MODULE = "fireflyer.checkpoint.keeper"
"""Serves on descriptor 3. By name and at run time only: the platform needs nothing of it."""

KEEPER_SUFFIX = ".keeper.sock"


def keeper_path(directory: str, node: str) -> str:
    """The socket of a node's keeper, in the task's directory."""
    return os.path.join(directory, node + KEEPER_SUFFIX)


class Keepsake:
    """The supervisor's end: the listening socket, and the keeper while there is one, which ends with us."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            OSError: if there can be no such socket.
        """
        self.pid: int | None = None
        self.socket = socket.socket(socket.AF_UNIX)
        # A short name: an address holds 108 bytes, a path may be longer.
        directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
        try:
            address = f"/proc/self/fd/{directory}/{os.path.basename(path)}"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            self.socket.bind(address)
            self.socket.listen(256)
        except BaseException:
            self.socket.close()
            raise
        finally:
            os.close(directory)
        self.socket.setblocking(False)

    def start(self) -> None:
        """Somebody has connected. REQUIRES: no keeper lives.

        Raises:
            OSError: if there can be no further process.
        """
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                set_parent_death_signal(signal.SIGKILL)
                if os.getppid() == parent:
                    os.setpgid(0, 0)
                    os.dup2(self.socket.fileno(), 3)
                    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE])
            finally:
                os._exit(127)

    def ended(self) -> None:
        """The keeper has been reaped. Who still waits for an answer is sent away: it may be the reason."""
        self.pid = None
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.accept()[0].close()
