"""Programs whose requests the threads of a mount execute."""

import errno
import signal
import threading

from fireflyer.errors import FileError

PENDING, EXIT_CODE = 31, 52
"""Numbers of two fields of /proc/<thread>/stat: the pending signals, and the exit code (proc(5))."""


class Caller(threading.local):
    """Program whose request this thread executes."""

    thread_id = 0
    """Id of the program's thread; 0: the kernel itself, or an unknown program."""

    def check(self) -> None:
        """Raises FileError (EINTR) if a signal has killed the program.

        The kernel lets a killed program wait until its request is answered. Signals that the
        program handles or ignores do not count, because programs expect no EINTR from files.
        """
        if self.thread_id and killed(self.thread_id):
            raise FileError(errno.EINTR)


def killed(thread_id: int) -> bool:
    """Returns whether a thread ends by a signal: SIGKILL is pending, or its exit code is a signal.

    The kernel sends SIGKILL to each thread of a process that a signal kills.
    """
    try:
        with open(f"/proc/{thread_id}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()  # from the third field on
    except OSError:
        return False
    pending, exit_code = int(fields[PENDING - 3]), int(fields[EXIT_CODE - 3])
    return bool(pending >> (signal.SIGKILL - 1) & 1 or exit_code & 0x7F)
