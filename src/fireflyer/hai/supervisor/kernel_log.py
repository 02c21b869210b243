"""Reader of the kernel's log while it grows: /dev/kmsg, or a file, for tests and for log daemons
that write the kernel's log to a file.

The server's environment variable FIREFLYER_KERNEL_LOG names the log; "off": read no log. Only lines
that are written after `open_kernel_log` are read. If the log may not be read
(`kernel.dmesg_restrict`, no /dev/kmsg in a container), the supervisor makes no observations from
it. A rotated file is not followed.
"""

import contextlib
import errno
import os
import stat

DEFAULT = "/dev/kmsg"

KMSG = os.makedev(1, 11)
"""Device number of /dev/kmsg. Other devices in its place, such as /dev/null or a console, are
rejected because they would always be readable."""

RECORD_BYTES = 8192
"""Maximum size of a record of /dev/kmsg."""

_IN_MODIFY = 0x2


class KernelLog:
    """Non-blocking reader; the caller calls `read` when `descriptor` is readable."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the log may not be read."""
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptor = self._file
        self._partial = b""
        try:
            found = os.fstat(self._file)
            self._lines = stat.S_ISREG(found.st_mode)
            """True if the log is a file of lines; False: each read returns one record."""
            if self._lines:
                self.descriptor = _watch(path)
            elif not stat.S_ISCHR(found.st_mode) or found.st_rdev != KMSG:
                raise OSError(errno.EINVAL, "neither a file nor /dev/kmsg")
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            os.close(self._file)
            raise

    def read(self) -> list[bytes]:
        """Returns the records or lines that arrived since the last call."""
        if self.descriptor != self._file:
            with contextlib.suppress(BlockingIOError):
                while os.read(self.descriptor, 4096):
                    pass
        found: list[bytes] = []
        while True:
            try:
                data = os.read(self._file, RECORD_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno == errno.EPIPE:  # the kernel overwrote unread records
                    continue
                return found
            if not data:
                return found
            if not self._lines:
                found.append(data)
                continue
            *whole, self._partial = (self._partial + data).split(b"\n")
            self._partial = self._partial[-RECORD_BYTES:]
            found += whole

    def close(self) -> None:
        for descriptor in {self.descriptor, self._file}:
            os.close(descriptor)


def chosen() -> str:
    """Returns the path that the environment names."""
    return os.environ.get("FIREFLYER_KERNEL_LOG", DEFAULT)


def open_kernel_log(path: str) -> KernelLog | None:
    """Returns the log; None if there is no readable log."""
    if path in ("", "off"):
        return None
    try:
        return KernelLog(path)
    except OSError:
        return None


def _watch(path: str) -> int:
    """Returns an inotify descriptor that is readable when the file has grown."""
    import ctypes  # imported here, because most supervisors read /dev/kmsg and do not need it

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(ctypes.get_errno(), "inotify")
    return descriptor
