"""Files being written: temporary files that are renamed when complete, and files that are appended
to."""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from fireflyer.errors import NoSpace, StorageError
from fireflyer.storage.targets import final_path, is_named

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # numpy's stubs treat arrays as buffers only from Python 3.12 on.
    SampleBuffer = Buffer | npt.NDArray[Any] | np.generic

BLOCK = 1 << 20
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def reserve(target: str, make: Callable[[str], int]) -> tuple[str, int]:
    """Creates a temporary path beside `target`; returns the path and a locked descriptor.

    `make` creates and opens the path, and raises FileExistsError if the path exists. The creator
    holds the lock until it renames or removes the path. An unlocked path therefore belongs to a
    dead writer, and the next writer to the same target removes it.
    """
    number = 0
    while True:
        path = _temporary_name(target, number)
        try:
            fd = make(path)
        except FileExistsError:
            number += not sweep(path)
            continue
        if _lock_new(fd, path):
            break
        os.close(fd)
    beyond = _temporary_name(target, number + 1)
    if os.path.lexists(beyond):
        sweep(beyond)
    return path, fd


def sweep(path: str) -> bool:
    """Removes the leftover of a dead writer; False if the writer lives or its state is unknown."""
    flags = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, os.O_RDWR | flags)
        except IsADirectoryError:
            fd = os.open(path, os.O_RDONLY | flags)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_named(fd, path):
            return False
        # The lock is held to the end, so no other writer can recreate the name in between.
        if os.path.isdir(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _lock_new(fd: int, path: str) -> bool:
    """Locks a new path; False if a sweeper saw the path unlocked and removes it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # this file system has no locks, so no sweeper can get a lock
    return is_named(fd, path)


def _temporary_name(target: str, number: int) -> str:
    folder, name = os.path.split(target)
    tag = hashlib.sha256(_kernel() + b"/" + os.fsencode(name)).hexdigest()[:16]
    return os.path.join(folder, f".ffrecord-{tag}-{number}.tmp")


def new_file(path: str) -> int:
    """Creates a file for reading and writing; raises FileExistsError if the name exists."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def sync_directory(path: str | os.PathLike[str]) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@cache
def _kernel() -> bytes:
    """Returns an id of the running kernel, for temporary names.

    On some shared file systems a lock excludes only processes of the same kernel. So writers on
    different kernels must not share a temporary name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip()
    except OSError:
        return secrets.token_bytes(16)


class Output:
    """File of which this object is the only writer. Its name is `target`, at the latest after
    `publish`.

    Invariant: until `close` or `discard` the file is open either under `target` (published) or
    under a temporary name beside it.
    """

    def __init__(self, target: str, path: str, fd: int) -> None:
        self.target = target
        self.path = path
        self.fd = fd

    @classmethod
    def temporary(cls, target: str) -> "Output":
        """Creates a file beside `target`, or beside the file that a link of this name leads to.

        Raises:
            ConfigError: a pipe or a device is there.
        """
        target = final_path(target)
        path, fd = reserve(target, new_file)
        return cls(target, path, fd)

    @classmethod
    def existing(cls, target: str) -> "Output":
        """Opens the file `target` to append to it.

        Raises:
            StorageError: another writer appends to the file.
        """
        file = cls(target, target, os.open(target, os.O_RDWR | os.O_CLOEXEC))
        try:
            file.lock()
            file.check_name()
        except BaseException:
            file.close()
            raise
        return file

    @property
    def published(self) -> bool:
        return self.path == self.target

    def lock(self) -> None:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(
                f"record file '{self.target}' is open for adding in another writer: "
                "close that writer first, or write another file"
            ) from None

    def check_name(self) -> None:
        """Raises StorageError if `path` no longer names this file."""
        if not is_named(self.fd, self.path):
            raise StorageError(
                f"another process replaced or deleted record file '{self.target}' while a writer "
                "was adding to it: open it again"
            )

    def write(self, buffers: Sequence["Buffer"], offset: int) -> None:
        """Writes all of `buffers` at `offset`. It does not use the file position, which a forked
        child shares."""
        views = [memoryview(b) for b in buffers if len(memoryview(b)) > 0]
        while views:
            done = os.pwritev(self.fd, views, offset)
            offset += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if views:
                views[0] = views[0][done:]

    def copy_from(self, source: "Output", size: int, offset: int) -> None:
        """Copies the first `size` bytes of `source` to `offset`, in the kernel if possible."""
        done = 0
        in_kernel = True
        while done < size:
            if in_kernel:
                try:
                    step = os.copy_file_range(source.fd, self.fd, size - done, done, offset + done)
                except OSError as error:
                    if error.errno not in _NO_KERNEL_COPY:
                        raise
                    in_kernel = False
                    continue
            else:
                block = os.pread(source.fd, min(BLOCK, size - done), done)
                self.write([block], offset + done)
                step = len(block)
            if step == 0:
                raise OSError(errno.EIO, f"another process truncated temporary file {source.path}")
            done += step

    def publish(self) -> None:
        """Syncs the bytes, renames the file to its target, syncs the directory."""
        os.fsync(self.fd)
        os.replace(self.path, self.target)
        self.path = self.target
        sync_directory(os.path.dirname(self.target) or ".")

    def discard(self) -> None:
        """Closes the file, and deletes it if it is not published."""
        # Delete under the lock: later the temporary name may belong to another writer.
        if self.fd >= 0 and not self.published:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            # Unlocks explicitly: a forked child may hold the descriptor, which would keep the lock.
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = -1


class Tail:
    """Buffer of 1 MiB for appends to an `Output`; a sample is copied at most once.

    Invariant: of the bytes before `end`, the last ones are in the buffer, all others are in the
    file.
    """

    def __init__(self, file: Output, end: int) -> None:
        self.end = end
        self._file = file
        self._buffer = memoryview(bytearray(BLOCK))
        self._used = 0

    def add(self, parts: Sequence[memoryview]) -> None:
        size = sum(map(len, parts))
        if self._used + size > BLOCK:
            self._file.write([self._buffer[: self._used], *parts], self.end - self._used)
            self._used = 0
        else:
            for part in parts:
                self._buffer[self._used : self._used + len(part)] = part
                self._used += len(part)
        self.end += size

    def flush(self) -> None:
        self._file.write([self._buffer[: self._used]], self.end - self._used)
        self._used = 0


def bytes_of(data: "SampleBuffer") -> memoryview:
    """Returns all bytes of a contiguous buffer, as a flat view."""
    view = memoryview(cast("Buffer", data))
    if not view.c_contiguous:
        raise ValueError("a sample must be a C-contiguous buffer: copy it first")
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError:  # formats with several fields cannot be cast
        return memoryview(view.tobytes())


def translated(error: OSError, name: str) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = NoSpace if full else StorageError
    advice = "free some space and write it again" if full else "check its path and write it again"
    return kind(f"cannot write record file '{name}': {error.strerror or error}; {advice}")
