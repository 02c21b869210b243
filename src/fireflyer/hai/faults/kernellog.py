"""Reads the kernel's log as it grows: /dev/kmsg, or a file, for tests and where a log daemon writes one.

FIREFLYER_KERNEL_LOG of the server names it; "off": none. Only what comes after the opening is read. Where it
may not be read (`kernel.dmesg_restrict`, no /dev/kmsg in a container) nothing is observed, and nothing else
changes. A file that is rotated is not followed.
"""

import contextlib
import errno
import os
import stat

DEFAULT = "/dev/kmsg"

KMSG = os.makedev(1, 11)
"""Others, /dev/null or a console in its place, would always be readable."""

RECORD_BYTES = 8192
"""The longest record of /dev/kmsg."""

_IN_MODIFY = 0x2


class KernelLog:
    """Never blocks. Whoever has it reads when `descriptor` is readable."""

    def __init__(self, path: str) -> None:
        """Raises OSError: it may not be read."""
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self.descriptor = self._file
        self._partial = b""
        try:
            found = os.fstat(self._file)
            self._lines = stat.S_ISREG(found.st_mode)
            """What is read are lines; else one record at a time."""
            if self._lines:
                self.descriptor = _watch(path)
            elif not stat.S_ISCHR(found.st_mode) or found.st_rdev != KMSG:
                raise OSError(errno.EINVAL, "neither a file nor /dev/kmsg")
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            os.close(self._file)
            raise

    def read(self) -> list[bytes]:
        """The records or lines that came since the last call."""
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
                if error.errno == errno.EPIPE:  # overtaken: the oldest that is left comes next
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
    """The path that the environment names."""
    return os.environ.get("FIREFLYER_KERNEL_LOG", DEFAULT)


def open_kernel_log(path: str) -> KernelLog | None:
    """The log; None where there is none that may be read."""
    if path in ("", "off"):
        return None
    try:
        return KernelLog(path)
    except OSError:
        return None


def _watch(path: str) -> int:
    """An inotify descriptor that is readable when the file has grown."""
    import ctypes  # most supervisors read /dev/kmsg, and stay small without it

    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(path), _IN_MODIFY) < 0:
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(ctypes.get_errno(), "inotify")
    return descriptor
