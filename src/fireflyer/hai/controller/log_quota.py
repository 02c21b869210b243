"""Keeps logs from filling the disk: punches a hole (`fallocate`) into the middle of a log that has
grown too long.

The log's size, the offsets of its remaining bytes and its writers are unaffected. Ranks write their
logs themselves, so a log may exceed the limit until the next check.
"""

import asyncio
import ctypes
import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from fireflyer.log import get_logger

LIMIT_BYTES = 4 << 30
"""Maximum bytes on disk of the log of one rank in one attempt."""

HEAD_BYTES = 1 << 20
"""Bytes at the beginning of a log that are always kept."""

TIGHT_BYTES = 4 << 20
"""Limit of each log while the file system is nearly full, in bytes."""

SPARE_BYTES = 512 << 20
SPARE_SHARE = 0.05
"""Thresholds, in bytes and as a share: a file system is nearly full if its free space is below both
thresholds."""

LOOK_S = 5.0

BLOCK = 1 << 16
"""Alignment of holes in bytes: no file system has larger blocks."""

_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_log = get_logger("hai")


class LogQuota:
    """Limits the size of the logs of one home.

    Args:
        folder: folder of the home's tasks.
        limit: bytes of the log of one rank in one attempt, at least 2 * HEAD_BYTES.
    """

    def __init__(self, folder: Path, limit: int = LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit = limit
        self._grew: set[Path] = set()

    def make(self) -> int:
        """Cuts the logs of all tasks if the file system is nearly full; returns the bytes freed."""
        if not nearly_full(self._folder):
            return 0
        return sum(trim(path, TIGHT_BYTES) for path in self._folder.glob("*/*/*.log"))

    def look(self, attempts: Iterable[Path]) -> int:
        """Cuts the logs of these attempts, and once more the logs of attempts that have ended since
        the last call. Returns the bytes freed."""
        grow = set(attempts)
        limit = min(self._limit, TIGHT_BYTES) if nearly_full(self._folder) else self._limit
        freed = 0
        for attempt in grow | self._grew:
            freed += sum(trim(path, limit) for path in attempt.glob("*.log"))
        self._grew = grow
        return freed

    async def keep(self, attempts: Callable[[], list[Path]]) -> None:
        """Calls `look` every LOOK_S seconds until cancelled.

        Args:
            attempts: returns the folders of attempts whose ranks may write.
        """
        while True:
            freed = await asyncio.to_thread(self.look, attempts())
            if freed:
                _log.info("freed %d MiB from the middle of long logs", freed >> 20)
            await asyncio.sleep(LOOK_S)


def nearly_full(folder: Path) -> bool:
    """Returns whether a folder's file system has little space left for this user."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    return free < SPARE_BYTES and free < SPARE_SHARE * found.f_blocks * found.f_frsize


def trim(path: Path, limit: int) -> int:
    """Frees the middle of a log that takes more than `limit` bytes; the rest takes at most `limit`.
    Returns the bytes freed: 0 also if the file is gone or its file system does not support
    holes."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return 0
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode) or before.st_blocks * 512 <= limit:
            return 0
        end = (before.st_size - (limit - HEAD_BYTES) + BLOCK - 1) // BLOCK * BLOCK
        if end <= HEAD_BYTES:
            return 0
        _punch(descriptor, HEAD_BYTES, min(end, before.st_size // BLOCK * BLOCK) - HEAD_BYTES)
        return max(0, (before.st_blocks - os.fstat(descriptor).st_blocks) * 512)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            _log.warning("cannot shorten %s: %s", path, error)
        return 0
    finally:
        os.close(descriptor)


_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _punch(descriptor: int, begin: int, length: int) -> None:
    if length > 0 and _fallocate(descriptor, _KEEP_SIZE_PUNCH_HOLE, begin, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def read_at(path: Path, offset: int, most: int) -> tuple[int, bytes]:
    """Returns the offset and the bytes of a log's first data at or after `offset`; holes are
    skipped. Returns no bytes if the file is missing or ends before `offset`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return offset, b""
    try:
        while True:
            begin, end = _piece(descriptor, offset)
            data = os.pread(descriptor, min(most, end - begin), begin)
            after, still = _piece(descriptor, offset)
            if after == begin and still >= begin + len(data):  # else another thread punched a hole
                return begin, data
    finally:
        os.close(descriptor)


def _piece(descriptor: int, offset: int) -> tuple[int, int]:
    """Returns the begin and the end of the first data at or after `offset`."""
    try:
        begin = os.lseek(descriptor, offset, os.SEEK_DATA)
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno == errno.ENXIO:  # beyond the end of the file
            return offset, offset
        raise
    return begin, end


def gap(length: int) -> bytes:
    """Returns the text shown in place of a hole."""
    return b"\n[%d bytes of this log were deleted to free disk space]\n" % length
