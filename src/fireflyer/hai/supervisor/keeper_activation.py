"""Starts the keeper: the process that holds a task's checkpoints in memory from attempt to attempt.

Socket activation: ranks find the path of a listening socket in FIREFLYER_KEEPER, and the first
connection starts the keeper. A task whose ranks never connect has no keeper.
"""

import contextlib
import os
import signal
import socket
import sys

from fireflyer._native.hai import set_parent_death_signal

MODULE = "fireflyer.checkpoint.memory.keeper"
"""Module that serves on descriptor 3. It is started by name, because the platform never imports
it."""

KEEPER_SUFFIX = ".keeper.sock"


def keeper_path(directory: str, node: str) -> str:
    """Returns the path of the socket of a node's keeper, in the task's directory."""
    return os.path.join(directory, node + KEEPER_SUFFIX)


class KeeperActivation:
    """Socket activation of the keeper by the supervisor: the listening socket, and the keeper's pid
    while it lives. The keeper ends with the supervisor."""

    def __init__(self, path: str) -> None:
        """Opens the listening socket.

        Raises:
            OSError: the socket cannot be created.
        """
        self.pid: int | None = None
        self.socket = socket.socket(socket.AF_UNIX)
        # A socket address holds at most 108 bytes, and `path` may be longer.
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
        """Starts the keeper for a new connection. REQUIRES: no keeper is running.

        Raises:
            OSError: no further process can be created.
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
        """Handles the exit of the keeper after it was reaped. Closes pending connections, because
        one of them may have caused the exit."""
        self.pid = None
        with contextlib.suppress(BlockingIOError):
            while True:
                self.socket.accept()[0].close()
