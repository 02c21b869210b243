"""Files being written: a temporary one that takes its name when it is whole, and one that is added to."""

import errno
import fcntl
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from fireflyer.errors import NoSpace, StorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # numpy's stubs call their arrays buffers only from Python 3.12 on.
    SampleBuffer = Buffer | npt.NDArray[Any] | np.generic

BLOCK = 1 << 20
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Output:
    """A file of which `target` is the name, now or after `publish`, and its writer the only one.

    Invariant: exactly one of "open under `target`" (published) and "open under a temporary name
    beside it" holds until `close` or `discard`.
    """

    def __init__(self, target: str, path: str, fd: int) -> None:
        self.target = target
        self.path = path
        self.fd = fd

    @classmethod
    def temporary(cls, target: str) -> "Output":
        """A new file in the directory of `target`."""
        path = os.path.join(os.path.dirname(target), f".ffrecord-{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return cls(target, path, os.open(path, flags, 0o666))

    @classmethod
    def existing(cls, target: str) -> "Output":
        """The file `target`, for adding to it.

        Raises:
            StorageError: another writer has it open for adding.
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
                "close that one first, or write another file"
            ) from None

    def check_name(self) -> None:
        """Raises StorageError when `path` is no longer this file."""
        try:
            named = os.stat(self.path)
        except FileNotFoundError:
            named = None
        own = os.fstat(self.fd)
        if named is None or (named.st_dev, named.st_ino) != (own.st_dev, own.st_ino):
            raise StorageError(
                f"record file '{self.target}' was replaced or deleted by others while a writer "
                "was adding to it: open it again"
            )

    def write(self, buffers: Sequence["Buffer"], offset: int) -> None:
        """Writes all of `buffers` at `offset`; the file position is never used, so a fork is harmless."""
        views = [memoryview(b) for b in buffers if len(memoryview(b)) > 0]
        while views:
            done = os.pwritev(self.fd, views, offset)
            offset += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if views:
                views[0] = views[0][done:]

    def copy_from(self, source: "Output", size: int, offset: int) -> None:
        """Copies the first `size` bytes of `source` to `offset`, in the kernel where it can."""
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
                raise OSError(errno.EIO, f"temporary file {source.path} was truncated by others")
            done += step

    def publish(self) -> None:
        """Syncs the bytes, gives the file its name, syncs the directory."""
        os.fsync(self.fd)
        os.replace(self.path, self.target)
        self.path = self.target
        directory = os.open(os.path.dirname(self.target) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def discard(self) -> None:
        """Closes the file, and deletes it if it is not published."""
        self.close()
        if not self.published:
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def close(self) -> None:
        if self.fd >= 0:
            # A child of a fork may hold the descriptor, and with it the lock.
            with suppress(OSError):
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)
            self.fd = -1


class Tail:
    """What is written next to an `Output`, gathered in blocks of 1 MiB; a sample is copied at most once.

    Invariant: the bytes of the file before `end` are in it, but for the last ones in the buffer.
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
    """All bytes of a contiguous buffer, as a flat view."""
    view = memoryview(cast("Buffer", data))
    if not view.c_contiguous:
        raise ValueError("a sample must be a C-contiguous buffer: copy it first")
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError:  # formats of several fields cannot be cast
        return memoryview(view.tobytes())


def translated(error: OSError, name: str) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = NoSpace if full else StorageError
    advice = "free some space and write it again" if full else "check its path and write it again"
    return kind(f"cannot write record file '{name}': {error.strerror or error}; {advice}")
