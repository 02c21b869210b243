"""Disk: sequential and random transfers past the page cache, and the latency of fsync."""

import errno
import mmap
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings

CHECKS = (
    Check(
        name="disk",
        figures=(
            Figure("disk write", "MB/s"),
            Figure("disk read", "MB/s"),
            Figure("disk random read", "IOPS"),
            Figure("fsync latency", "ms", "less"),
        ),
        needs="a folder on a disk (--directory), 5 times the file's size free",
        duration_s=5.0,
        function="fireflyer.validator.checks.disk:run",
    ),
)

MIB = 1 << 20
QUICK_BYTES = 64 * MIB
FULL_BYTES = 2048 * MIB
BLOCK = MIB
PAGE = 4096
SECONDS = 1.0
"""Time for the random reads, and for the fsyncs, if quick."""

FULL_S = 20.0
MOST_FSYNCS = 200


def run(settings: Settings) -> Iterator[Measured]:
    """Writes, reads and syncs a file in the scratch folder."""
    size = QUICK_BYTES if settings.quick else FULL_BYTES
    seconds = SECONDS if settings.quick else FULL_S
    folder = Path(settings.directory)
    free = shutil.disk_usage(folder).free
    if free < 5 * size:
        raise NotRun(f"{free // MIB} MiB are free on the disk; {5 * size // MIB} MiB are needed")
    path = folder / "disk"
    try:
        yield _moved("disk write", _sequential(path, size, write=True))
        yield _moved("disk read", _sequential(path, size, write=False))
        rates = _random_reads(path, size, seconds)
        yield Measured("disk random read", statistics.median(rates), samples=tuple(rates))
        times = _fsyncs(folder / "sync", seconds)
        yield Measured("fsync latency", statistics.median(times), samples=tuple(times))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NotRun(f"the disk of {folder.parent} is full: {error.strerror}") from None
        if error.errno == errno.EIO:
            yield Measured("disk read", None, f"the disk failed: {error.strerror}")
            return
        raise


def open_direct(path: Path, flags: int) -> int:
    """Opens a file past the page cache where the file system allows it."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _moved(name: str, rates: list[float]) -> Measured:
    return Measured(name, statistics.median(rates), samples=tuple(rates))


def _sequential(path: Path, size: int, *, write: bool) -> list[float]:
    """Returns the MB/s of each eighth of the file."""
    file = open_direct(path, os.O_CREAT | os.O_WRONLY if write else os.O_RDONLY)
    try:
        with mmap.mmap(-1, BLOCK) as block:
            block.write(os.urandom(BLOCK))
            return [_eighth(file, block, part, size // 8, write=write) for part in range(8)]
    finally:
        os.close(file)


def _eighth(file: int, block: mmap.mmap, part: int, size: int, *, write: bool) -> float:
    begin = time.perf_counter()
    for at in range(part * size, (part + 1) * size, BLOCK):
        done = os.pwritev(file, [block], at) if write else os.preadv(file, [block], at)
        if done != BLOCK:
            raise OSError(errno.ENOSPC if write else errno.EIO, "a short transfer")
    if write:
        os.fdatasync(file)
    return size / (time.perf_counter() - begin) / 1e6


def _random_reads(path: Path, size: int, seconds: float) -> list[float]:
    """Returns the reads per second of each tenth of the time, one read in flight."""
    file = open_direct(path, os.O_RDONLY)
    draw, found = random.Random(1), []
    try:
        with mmap.mmap(-1, PAGE) as page:
            for _ in range(10):
                begin, count = time.perf_counter(), 0
                while (took := time.perf_counter() - begin) < seconds / 10:
                    os.preadv(file, [page], draw.randrange(size // PAGE) * PAGE)
                    count += 1
                found.append(count / took)
    finally:
        os.close(file)
    return found


def _fsyncs(path: Path, seconds: float) -> list[float]:
    """Returns the milliseconds of each append of a page with its fsync."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    found: list[float] = []
    try:
        end = time.perf_counter() + seconds
        while len(found) < MOST_FSYNCS and (len(found) < 5 or time.perf_counter() < end):
            begin = time.perf_counter()
            os.write(file, bytes(PAGE))
            os.fsync(file)
            found.append((time.perf_counter() - begin) * 1e3)
    finally:
        os.close(file)
    return found
