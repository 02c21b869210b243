"""Chunk cache of remote files on a local disk, bounded, shared by the processes of one user.

Writers and evictions lock the file `lock`; readers take no lock. A chunk is a file that appears by
rename, so a dead or failing writer at worst leaves a chunk missing. A chunk has no checksum of its
own. A reader therefore checks each sample made of chunks against the sample's CRC32, and discards
the chunks if the checksums differ. The file `used` counts the bytes on disk. The count grows before
a chunk is written, so it is never too low.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fireflyer._native import crc32
from fireflyer._native.ffrecord import chunk_name, read_pieces
from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord.integers import checked_integer
from fireflyer.log import get_logger

_USED = struct.Struct("<QI")  # number of bytes on disk, CRC32 of this number
_KEPT = 0.9
Pieces = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
_log = get_logger("ffrecord")


class ChunkCache:
    """Chunks of remote files, by the file's key and the chunk's number.

    The cache is thread-safe and can be pickled.

    Args:
        directory: directory of the cache, created if missing. Other users have no access to the
            directory and its files. The directory must hold no other files.
        limit_bytes: maximum size of all chunks together.
        chunk_bytes: size of a chunk; the last chunk of a file is shorter.

    Raises:
        ConfigError: a limit below one chunk.
        TypeError: a size is not an integer.
        StorageError: the directory cannot be created.
    """

    def __init__(
        self, directory: str | os.PathLike[str], limit_bytes: int, chunk_bytes: int = 1 << 18
    ) -> None:
        limit_bytes, chunk_bytes = (
            checked_integer("limit_bytes", limit_bytes),
            checked_integer("chunk_bytes", chunk_bytes),
        )
        if chunk_bytes < 1 or limit_bytes < chunk_bytes:
            raise ConfigError(
                f"a cache of {limit_bytes} bytes cannot hold one chunk of {chunk_bytes}: "
                "raise limit_bytes"
            )
        self.directory = os.path.abspath(directory)
        self.limit_bytes = limit_bytes
        self.chunk_bytes = chunk_bytes
        self._warned = False
        try:
            os.makedirs(self.directory, 0o700, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make cache directory {self.directory}: {error.strerror}"
            ) from error

    def __reduce__(self) -> tuple[type["ChunkCache"], tuple[str, int, int]]:
        return type(self), (self.directory, self.limit_bytes, self.chunk_bytes)

    def read(self, keys: Sequence[str], pieces: Pieces, arena: Bytes) -> npt.NDArray[np.bool_]:
        """Copies pieces of chunks into `arena` and marks the chunks as used.

        Args:
            keys: keys of files.
            pieces: int64 rows: index in `keys`, number of the chunk, first byte in the chunk,
                number of bytes, first byte in `arena`. Pieces must not overlap in `arena`.
            arena: uint8, C-contiguous. The bytes of a missing piece have undefined content.

        Returns:
            For each piece, True if its chunk is in the cache.
        """
        found, error = read_pieces(self.directory, keys, pieces, arena)
        if error:
            self._warn("read", OSError(error, os.strerror(error)))
        return found.view(np.bool_)

    def put(self, chunks: Iterable[tuple[str, int, bytes | memoryview]]) -> None:
        """Caches chunks (key, number, data of at most `chunk_bytes`).

        If the limit would be exceeded, evicts the least recently used chunks.
        """
        try:
            with self._locked():
                for key, number, data in chunks:
                    self._add(self._path(key, number), data)
        except OSError as error:
            self._warn("write", error)

    def discard(self, key: str, number: int) -> None:
        """Deletes a chunk."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key, number))

    def used_bytes(self) -> int:
        """Returns the bytes of all chunks on disk."""
        return sum(size for _, size, _ in self._scan())

    def _add(self, path: str, data: bytes | memoryview) -> None:
        size = len(data)
        if size > self.chunk_bytes:
            raise ValueError(f"invalid chunk of {size} bytes: expected at most {self.chunk_bytes}")
        if self._whole(path, size):
            return
        used = self._read_used()
        if used is None or used + size > self.limit_bytes:
            used = self._evict(self.limit_bytes - size)
        self._write_used(used + size)
        temporary = os.path.join(self.directory, "writing.tmp")
        with open(temporary, "wb", buffering=0, opener=_open_own) as file:
            content = memoryview(data)
            while content:
                content = content[file.write(content) :]
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        os.replace(temporary, path)

    def _whole(self, path: str, size: int) -> bool:
        """Returns whether the chunk exists already; deletes a truncated chunk."""
        try:
            if os.stat(path).st_size == size:
                return True
            os.unlink(path)
        except FileNotFoundError:
            pass
        return False

    def _evict(self, room: int) -> int:
        """Deletes the least recently used chunks if more than `room` bytes are used.

        It stops when at most `room` bytes and at most nine tenths of the limit are used. Returns the
        number of bytes that are then used.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, "writing.tmp"))  # left by a dead writer
        entries = sorted(self._scan())
        used = sum(size for _, size, _ in entries)
        if used <= room:
            return used
        aim = min(int(self.limit_bytes * _KEPT), room)
        for _, size, path in entries:
            if used <= aim:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    def _scan(self) -> list[tuple[int, int, str]]:
        """Returns (time of last use in ns, bytes, path) of every chunk."""
        found = []
        for entry in os.scandir(self.directory):
            if len(entry.name) != 2 or not entry.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(entry.path):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    found.append((status.st_mtime_ns, status.st_size, file.path))
        return found

    def _path(self, key: str, number: int) -> str:
        return os.path.join(self.directory, chunk_name(key, number))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path = os.path.join(self.directory, "lock")
        fd = _open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _read_used(self) -> int | None:
        """Returns the counter; None if the file is absent or damaged, so that a scan is needed."""
        try:
            with open(os.path.join(self.directory, "used"), "rb", buffering=0) as file:
                content = file.read()
        except FileNotFoundError:
            return None
        if len(content) != _USED.size:
            return None
        used, checksum = _USED.unpack(content)
        return int(used) if crc32(content[:8]) == checksum else None

    def _write_used(self, used: int) -> None:
        number = struct.pack("<Q", used)
        fd = _open_own(os.path.join(self.directory, "used"), os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, number + struct.pack("<I", crc32(number)), 0)
        finally:
            os.close(fd)

    def _warn(self, action: str, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            reason = os.strerror(error.errno) if error.errno else str(error)
            full = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            _log.warning(
                "chunk cache %s: cannot %s (%s); continuing without it%s",
                *(self.directory, action, reason, full),
            )


def _open_own(path: str, flags: int) -> int:
    """Opens a file; a new file is private to its owner, because remote bytes may be private."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
