"""Waking up when a file grows, without polling: one inotify instance on the running event loop."""

import asyncio
import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fireflyer.errors import StorageError

_MODIFY = 0x2
_CREATE = 0x100
_MOVED_TO = 0x80
_EVENT = struct.Struct("iIII")


class DirectoryWatch:
    """Sets events when files of watched directories appear or grow. Used from the loop's thread alone."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1
        self._waiters: dict[int, list[tuple[bytes, asyncio.Event]]] = {}
        self._folders: dict[Path, int] = {}

    @contextmanager
    def watching(self, path: Path) -> Iterator[asyncio.Event]:
        """An event that is set whenever the file at `path` may have grown; its directory must exist.

        Raises:
            StorageError: the kernel has no watch left.
        """
        if self._descriptor < 0:
            self._open()
        watch = self._libc.inotify_add_watch(
            self._descriptor, os.fsencode(path.parent), _MODIFY | _CREATE | _MOVED_TO
        )
        if watch < 0:
            raise self._error(f"cannot watch {path.parent}")
        waiter = (os.fsencode(path.name), asyncio.Event())
        waiters = self._waiters.setdefault(watch, [])
        waiters.append(waiter)
        self._folders[path.parent] = watch
        try:
            yield waiter[1]
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.pop(watch, None) is not None:
                self._libc.inotify_rm_watch(self._descriptor, watch)
                self._folders.pop(path.parent, None)

    def wake(self, folder: Path) -> None:
        """Sets the events of the files in one folder."""
        for _, event in self._waiters.get(self._folders.get(folder, -1), ()):
            event.set()

    def wake_all(self) -> None:
        """Sets every event, for news that is not in the files."""
        for waiters in self._waiters.values():
            for _, event in waiters:
                event.set()

    def close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:
            raise self._error("cannot use inotify")
        self._descriptor = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def _read(self) -> None:
        data = os.read(self._descriptor, 65536)
        at = 0
        while at < len(data):
            watch, _, _, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            if watch < 0:
                self.wake_all()  # the kernel's queue overflowed
            for wanted, event in self._waiters.get(watch, ()):
                if name == wanted:
                    event.set()

    def _error(self, what: str) -> StorageError:
        number = ctypes.get_errno()
        return StorageError(f"{what}: {os.strerror(number)}; see fs.inotify in sysctl")
