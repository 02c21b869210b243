"""Writing record files: a file is visible under its name whole and on disk, or not at all.

Samples go to a temporary file in the directory of the target. `close` writes the header, syncs the
file, renames it into place and syncs the directory. When the number of samples was not given, the
samples are spooled first and copied behind a header of the right size by the kernel.
"""

import errno
import os
import secrets
import struct
import threading
import warnings
from array import array
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer.errors import ConfigError, NoSpace, StorageError
from fireflyer.ffrecord.paths import PathName, record_path

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # numpy's stubs call their arrays buffers only from Python 3.12 on.
    SampleBuffer = Buffer | npt.NDArray[Any] | np.generic

_BLOCK = 1 << 20
_HEADER = 12
_PER_SAMPLE = 12
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Temporary:
    """A file beside `target` that takes its name in `commit` or vanishes in `discard`."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.path = os.path.join(os.path.dirname(target), f".ffrecord-{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.fd = os.open(self.path, flags, 0o666)

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

    def copy_from(self, source: "_Temporary", size: int, offset: int) -> None:
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
                block = os.pread(source.fd, min(_BLOCK, size - done), done)
                self.write([block], offset + done)
                step = len(block)
            if step == 0:
                raise OSError(errno.EIO, f"temporary file {source.path} was truncated by others")
            done += step

    def commit(self) -> None:
        os.fsync(self.fd)
        os.replace(self.path, self.target)
        self.close()
        directory = os.open(os.path.dirname(self.target) or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def discard(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileWriter:
    """Writes one record file; it appears under its name in `close`, complete and synced to disk.

    Until then, and for ever when the writer fails, dies or is discarded, nothing opens under that
    name except what was there before. Threads may share a writer; a forked child may not use it.

    Args:
        fname: the file, ending in `.ffr`; an existing one is replaced in `close`.
        n: number of samples that will be written. Without it the samples are written twice.

    Attributes:
        n: as given.
        count: number of samples written so far.

    Raises:
        ConfigError: wrong suffix, negative `n`.
        NoSpace, StorageError: the file cannot be created.
    """

    def __init__(self, fname: PathName, n: int | None = None) -> None:
        self._file: _Temporary | None = None
        self.fname = record_path(fname)
        if n is not None and n < 0:
            raise ConfigError(f"a record file cannot hold {n} samples")
        self.n = n
        self._base = 0 if n is None else _HEADER + _PER_SAMPLE * n
        self._end = self._base  # where the next sample starts in the temporary file
        self._checksums = array("I")
        self._offsets = array("q")
        self._pending = bytearray()  # the last bytes before _end, not yet in the file
        self._lock = threading.Lock()
        self._process = os.getpid()
        try:
            self._file = _Temporary(os.path.abspath(self.fname))
        except OSError as error:
            raise _translated(error, self.fname) from error

    @property
    def count(self) -> int:
        return len(self._checksums)

    def write_one(self, data: "SampleBuffer") -> None:
        """Appends one sample: all bytes of a C-contiguous buffer of any type and shape.

        A failure discards the whole file.

        Raises:
            ConfigError: more samples than `n`.
            ValueError: the buffer is not C-contiguous, or the writer is closed.
            NoSpace, StorageError: the bytes cannot be written.
        """
        view = _bytes_of(data)
        self._own()
        with self._lock:
            file = self._open()
            if self.count == self.n:
                self._drop()
                raise ConfigError(
                    f"record file '{self.fname}': more samples than the {self.n} announced; "
                    "nothing was written: pass the right n, or none"
                )
            try:
                checksum = crc32(view)
                if len(self._pending) + len(view) <= _BLOCK:
                    self._pending += view
                else:
                    file.write([self._pending, view], self._end - len(self._pending))
                    self._pending.clear()
                self._offsets.append(self._end)
                self._checksums.append(checksum)
                self._end += len(view)
            except OSError as error:
                self._drop()
                raise _translated(error, self.fname) from error
            except BaseException:
                self._drop()
                raise

    def close(self) -> None:
        """Completes the file and makes it visible and durable; may be called again.

        Raises:
            ConfigError: fewer samples than `n`; no file is made.
            NoSpace, StorageError: the bytes cannot be written or synced; no file is made, unless only
                the last step failed, the sync of the directory.
        """
        self._own()
        with self._lock:
            if self._file is None:
                return
            if self.n is not None and self.count != self.n:
                self._drop()
                raise ConfigError(
                    f"record file '{self.fname}': {self.count} of {self.n} announced samples came; "
                    "nothing was written: pass the right n, or none"
                )
            try:
                self._finish(self._file)
            except OSError as error:
                raise _translated(error, self.fname) from error
            finally:
                self._drop()

    def discard(self) -> None:
        """Ends the writer without a file; may be called again, and after `close` does nothing."""
        self._own()
        with self._lock:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            return
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if self._file is not None and os.getpid() == self._process:
            self._drop()
            warnings.warn(
                f"FileWriter of '{self.fname}' was not closed: no file was made",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    def _finish(self, file: _Temporary) -> None:
        file.write([self._pending], self._end - len(self._pending))
        first = _HEADER + _PER_SAMPLE * self.count
        offsets = np.frombuffer(self._offsets, "<i8") + (first - self._base)
        metadata = struct.pack("<q", self.count) + self._checksums.tobytes() + offsets.tobytes()
        header = [struct.pack("<I", crc32(metadata)), metadata]
        if self.n is not None:
            file.write(header, 0)
            file.commit()
            return
        whole = _Temporary(file.target)
        try:
            whole.write(header, 0)
            whole.copy_from(file, self._end, first)
            whole.commit()
        finally:
            whole.discard()

    def _own(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"FileWriter of '{self.fname}' belongs to the process that made it: "
                "make one writer and one file for each process"
            )

    def _open(self) -> _Temporary:
        if self._file is None:
            raise ValueError(f"the FileWriter of '{self.fname}' is closed")
        return self._file

    def _drop(self) -> None:
        file, self._file = self._file, None
        self._pending = bytearray()
        if file is not None:
            file.discard()


def dump(samples: Sequence[Any], fname: PathName, nfiles: int = 1) -> list[str]:
    """Writes `samples[0] ... samples[len - 1]`, buffers each, to record files; returns their names.

    With `nfiles` > 1, `fname` is a directory (made when missing) that gets files
    `PART_00000.ffr ...` of ceil(len / nfiles) samples each, which may be fewer than `nfiles`: then
    it warns. Each file is complete or absent; raises what `FileWriter` does.
    """
    if nfiles < 1:
        raise ConfigError(f"cannot write {nfiles} record files")
    total = len(samples)
    if nfiles == 1:
        parts = [(record_path(fname), range(total))]
    else:
        try:
            os.makedirs(fname, exist_ok=True)
        except OSError as error:
            raise _translated(error, os.fspath(fname)) from error
        size = max(1, -(-total // nfiles))
        parts = [
            (os.path.join(fname, f"PART_{number:05d}.ffr"), range(at, min(at + size, total)))
            for number, at in enumerate(range(0, max(1, total), size))
        ]
        if len(parts) != nfiles:
            warnings.warn(
                f"{total} samples make {len(parts)} files rather than {nfiles}", stacklevel=2
            )
    for path, indices in parts:
        with FileWriter(path, len(indices)) as writer:
            for index in indices:
                writer.write_one(samples[index])
    return [path for path, _ in parts]


def _bytes_of(data: "SampleBuffer") -> memoryview:
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


def _translated(error: OSError, name: str) -> StorageError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = NoSpace if full else StorageError
    advice = "free some space and write it again" if full else "check its path and write it again"
    return kind(f"cannot write record file '{name}': {error.strerror or error}; {advice}")
