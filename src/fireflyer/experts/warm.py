"""Warm memory: verified images of experts in a folder of a tmpfs, shared by the stores of a node.

    lock                     locked (flock) during each change of the folder
    stores                   locked shared by each open store; the last store removes the folder
    DIGEST                   an image: the bytes of an expert's file; read-only
    DIGEST.PID-N.loading     an image that is being read, or pages for reuse

A process that uses an image locks it shared (flock). The lock lasts as long as a view on the
mapping, because the mapping holds a duplicate of the locked descriptor. A mapping without views is
kept, unlocked, until the image is evicted, so a later use needs no new page tables. A process that
loads an image locks its file exclusively. Locks end with their process, so a `.loading` file
without a lock belongs to a killed process and is removed. A file is named DIGEST only after its
checksums matched, so no process sees an incomplete image.

Thread contract: one thread of a process at a time is inside `locked`. All other methods are called
inside `locked`, except for the methods of a LoadBuffer, which belongs to one thread.
"""

import contextlib
import fcntl
import itertools
import mmap
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fireflyer.errors import ConfigError, StorageError
from fireflyer.storage.protocol import failure_of
from fireflyer.storage.targets import is_named

LOADING = ".loading"
_RESERVED = ("lock", "stores")
_counter = itertools.count()


class Found(NamedTuple):
    """Current content of the folder."""

    images: dict[str, tuple[int, int]]
    """Images by digest: size in bytes, and time of the last use in ns."""
    loading: dict[str, int]
    """Sizes of the images that other live processes are reading, by file name."""


class Mapped:
    """Private mapping of an image: bytes written to it stay in this process."""

    def __init__(self, fd: int) -> None:
        """Takes ownership of the descriptor, whose file is locked shared."""
        self._fd = fd
        self.mapping: mmap.mmap = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)

    def lock(self, path: Path) -> bool:
        """Locks the image again; returns False if it was evicted meanwhile."""
        return _flock(self._fd, fcntl.LOCK_SH) and is_named(self._fd, path)

    def unlock(self) -> bool:
        """Unlocks the image, so that it can be evicted.

        Returns False, and does not unlock the image, if a view of the mapping lives.
        """
        if sys.getrefcount(self.mapping) > 2:  # references of the attribute and the argument
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def close(self) -> mmap.mmap:
        """Closes the descriptor and returns the mapping. The lock ends when the caller drops the
        mapping."""
        os.close(self._fd)
        mapping = self.mapping
        del self.mapping
        return mapping


class LoadBuffer:
    """Writable memory of an image that is being loaded; other processes do not use it yet."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap | None, present: int) -> None:
        """Takes ownership of the descriptor, whose file is locked exclusively.

        Args:
            present: number of bytes whose pages are allocated.
        """
        self.path, self._fd, self._present = path, fd, present
        self._mapping = mapping
        self.bytes = 0

    def resize(self, size: int) -> None:
        """Sets the size, which counts in the folder's total; allocates no page yet."""
        os.ftruncate(self._fd, size)
        self._present = min(self._present, size)
        self.bytes = size

    def memory(self) -> memoryview:
        """Allocates all pages and returns them.

        Raises:
            NoSpace: the tmpfs is full.
            StorageError: the memory cannot be mapped.
        """
        try:
            if self.bytes > self._present:
                os.posix_fallocate(self._fd, self._present, self.bytes - self._present)
                self._present = self.bytes
            if self._mapping is None or len(self._mapping) < self.bytes:
                self._mapping = mmap.mmap(self._fd, self.bytes)
        except OSError as error:
            raise failure_of("make warm memory", self.path, error) from error
        return memoryview(self._mapping)[: self.bytes]

    def discard(self) -> None:
        """Removes the file and its pages, even if other processes keep unlocked mappings."""
        os.ftruncate(self._fd, 0)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.close()

    def close(self) -> None:
        """Closes the descriptor; the file remains."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._mapping = None

    def lock(self) -> bool:
        """Locks the file exclusively again; returns False if a process uses it."""
        return _flock(self._fd, fcntl.LOCK_EX)

    def share(self) -> None:
        """Unlocks the file, so that processes can lock it shared."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    @property
    def mapped(self) -> bool:
        return self._mapping is not None

    def is_at(self, path: Path) -> bool:
        """Returns True if the path names this file."""
        return is_named(self._fd, path)


class WarmFolder:
    """Access of one store to warm memory."""

    def __init__(self, path: Path) -> None:
        """Opens the folder, or creates a missing folder.

        Raises:
            ConfigError: the folder belongs to another user, or other users may write to it.
            StorageError: the folder cannot be created.
        """
        self.path = path
        self._pid = os.getpid()
        self._own: dict[str, LoadBuffer] = {}
        """Images that this object loaded; their pages are reused after their eviction."""
        self._kept: dict[str, Mapped] = {}
        """Unlocked mappings of images."""
        self.garbage: list[mmap.mmap] = []
        """Mappings to drop. A drop takes milliseconds, so a thread may take this list and drop the
        mappings outside all locks."""
        self._spare: LoadBuffer | None = None
        """Evicted image, whose pages the next load reuses."""
        self._making: set[str] = set()
        """Names of this object's `.loading` files."""
        try:
            while not self._opened():
                pass  # a closing store removed the folder meanwhile
        except OSError as error:
            raise failure_of("make warm memory", path, error) from error

    def _opened(self) -> bool:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo, contextlib.suppress(FileNotFoundError):
            _check(self.path)
            self._lock = os.open(self.path / "lock", _CREATE, 0o600)
            undo.callback(os.close, self._lock)
            self._stores = os.open(self.path / "stores", _CREATE, 0o600)
            undo.callback(os.close, self._stores)
            fcntl.flock(self._stores, fcntl.LOCK_SH)
            if is_named(self._lock, self.path / "lock") and is_named(
                self._stores, self.path / "stores"
            ):
                undo.pop_all()
                return True
        return False

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder against changes by other processes."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def found(self) -> Found:
        """Lists the folder; removes the files of killed processes."""
        images: dict[str, tuple[int, int]] = {}
        loading: dict[str, int] = {}
        for entry in os.scandir(self.path):
            if entry.name in _RESERVED:
                continue
            status = entry.stat()
            if not entry.name.endswith(LOADING):
                images[entry.name] = (status.st_size, status.st_mtime_ns)
            elif entry.name not in self._making and not self._swept(entry.name):
                loading[entry.name] = status.st_size
        for digest in self._own.keys() - images.keys():
            self._own.pop(digest).close()  # evicted by another process
        for digest in self._kept.keys() - images.keys():
            self._drop(digest)
        return Found(images, loading)

    def _swept(self, name: str) -> bool:
        """Removes a file if no process has locked it; returns False if a process has locked it.

        The file's pages are not reused, because an I/O request of the killed process may still
        write to them.
        """
        try:
            fd = os.open(self.path / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            if not _flock(fd, fcntl.LOCK_EX):
                return False
            os.unlink(self.path / name)
            return True
        finally:
            os.close(fd)

    def has(self, digest: str) -> bool:
        """Returns True if an image is in warm memory."""
        return (self.path / digest).exists()

    def is_loading(self, digest: str) -> bool:
        """Returns True if another process is reading this image."""
        return any(name.startswith(digest + ".") for name in self.found().loading)

    def buffer(self, digest: str, size: int) -> LoadBuffer:
        """Returns memory for an image; reuses the pages of an evicted image if possible.

        Raises:
            StorageError: the file cannot be created.
        """
        name = f"{digest}.{os.getpid()}-{next(_counter)}{LOADING}"
        path = self.path / name
        try:
            if self._spare is not None:
                made, self._spare = self._spare, None
                os.rename(made.path, path)
                self._making.discard(made.path.name)
                made.path = path
            else:
                fd = os.open(path, _CREATE | os.O_EXCL, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX)
                made = LoadBuffer(path, fd, None, 0)
            made.resize(size)
        except OSError as error:
            raise failure_of("make warm memory", path, error) from error
        self._making.add(name)
        return made

    def publish(self, buffer: LoadBuffer, digest: str) -> None:
        """Makes verified memory visible to all processes: renames its file to `digest`."""
        if self.has(digest):  # another process published it first
            self.forget(buffer)
            return
        os.rename(buffer.path, self.path / digest)
        self._making.discard(buffer.path.name)
        buffer.path = self.path / digest
        buffer.share()
        self._own[digest] = buffer

    def forget(self, buffer: LoadBuffer) -> None:
        """Removes memory whose load failed."""
        self._making.discard(buffer.path.name)
        buffer.discard()

    def drop_spare(self) -> None:
        """Removes the pages of an evicted image that were not reused."""
        if self._spare is not None:
            self.forget(self._spare)
            self._spare = None

    def attach(self, digest: str) -> Mapped | None:
        """Maps an image, which cannot be evicted while a view lives. Returns None if there is no
        image."""
        if (kept := self._kept.get(digest)) is not None:
            if kept.lock(self.path / digest):
                return self._kept.pop(digest)
            self._drop(digest)
        try:
            fd = os.open(self.path / digest, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            return Mapped(fd)
        except OSError:
            os.close(fd)
            raise

    def detach(self, digest: str, mapped: Mapped) -> None:
        """Keeps a mapping for reuse if it has no views. Otherwise closes it; the image then stays
        until the last view ends."""
        if mapped.unlock():
            self._kept[digest] = mapped
        else:
            mapped.close()

    def _drop(self, digest: str) -> None:
        if (kept := self._kept.pop(digest, None)) is not None:
            self.garbage.append(kept.close())

    def touch(self, digest: str, now: int) -> None:
        """Records a use, which all stores see."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path / digest, ns=(now, now))

    def evict(self, digest: str) -> bool:
        """Removes an image; returns False if a process uses it."""
        path = self.path / digest
        self._drop(digest)
        buffer = self._own.pop(digest, None)
        if buffer is None or not buffer.is_at(path):
            if buffer is not None:
                buffer.close()
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                return True
            buffer = LoadBuffer(path, fd, None, os.fstat(fd).st_size)
        if not buffer.lock():
            if buffer.mapped:
                self._own[digest] = buffer
            else:
                buffer.close()
            return False
        if buffer.mapped and self._spare is None:
            spare = self.path / f"spare.{os.getpid()}-{next(_counter)}{LOADING}"
            os.rename(path, spare)
            buffer.path = spare
            self._making.add(spare.name)
            self._spare = buffer
        else:
            buffer.discard()
        return True

    def close(self) -> None:
        """Detaches from the folder; the last store removes it. Mappings of images stay valid."""
        if os.getpid() != self._pid:  # a forked child shares the locks with its parent
            return
        with self.locked():
            self.drop_spare()
            for buffer in self._own.values():
                buffer.close()
            self._own.clear()
            for digest in list(self._kept):
                self._drop(digest)
            self.garbage.clear()
            if _flock(self._stores, fcntl.LOCK_EX):
                self._remove()
        self._close()

    def _remove(self) -> None:
        for name in (*self.found().images, *_RESERVED):
            os.unlink(self.path / name)
        with contextlib.suppress(OSError):  # the folder has a file of another program
            os.rmdir(self.path)

    def _close(self) -> None:
        os.close(self._stores)
        os.close(self._lock)


_CREATE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check(path: Path) -> None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"cannot use {path} as warm memory: it is no folder")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"cannot use {path} as warm memory: it must be yours, and others must not write to it"
        )
