"""Wakeup when a file grows, without polling: one inotify instance on the running event loop."""

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


class Growing:
    """A watched file."""

    def __init__(self) -> None:
        self.times = 0
        """Number of growth notifications. Data read from the file stays current until the number
        changes."""
        self.watchers = 0
        self._news = asyncio.Event()

    def grown(self) -> None:
        """Wakes all waiters."""
        self.times += 1
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, seen: int) -> None:
        """Returns once `times` differs from `seen`. Read `times` first, then the file."""
        while self.times == seen:
            await self._news.wait()


class DirectoryWatch:
    """Watch on directories that reports when their files appear or grow. Used only from the loop's
    thread."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = -1
        self._files: dict[int, dict[bytes, Growing]] = {}
        """Watched files, by watch and name."""
        self._folders: dict[Path, int] = {}

    @contextmanager
    def watching(self, path: Path) -> Iterator[Growing]:
        """Watches the file at `path`, which may not exist yet; its directory must exist.

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
        name = os.fsencode(path.name)
        growing = self._files.setdefault(watch, {}).setdefault(name, Growing())
        growing.watchers += 1
        self._folders[path.parent] = watch
        try:
            yield growing
        finally:
            growing.watchers -= 1
            if not growing.watchers:
                self._leave(path.parent, watch, name)

    def _leave(self, folder: Path, watch: int, name: bytes) -> None:
        files = self._files[watch]
        del files[name]
        if not files:
            del self._files[watch]
            self._folders.pop(folder, None)
            self._libc.inotify_rm_watch(self._descriptor, watch)

    def wake(self, folder: Path) -> None:
        """Wakes the waiters of the files in one folder, as if the files had grown."""
        for growing in self._files.get(self._folders.get(folder, -1), {}).values():
            growing.grown()

    def wake_all(self) -> None:
        """Wakes all waiters, as if every file had grown, after a change outside the files."""
        for files in self._files.values():
            for growing in files.values():
                growing.grown()

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
            growing = self._files.get(watch, {}).get(name)
            if growing is not None:
                growing.grown()

    def _error(self, what: str) -> StorageError:
        number = ctypes.get_errno()
        return StorageError(f"{what}: {os.strerror(number)}; see fs.inotify in sysctl")
