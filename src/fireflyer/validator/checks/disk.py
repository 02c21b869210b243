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
        duration_s=6.0,
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

WINDOW_S = 0.15
"""Time of one measurement of a transfer. Throttles of the kernel work in slices of up to 0.1 s."""

BEST_OF = 10
"""Windows of which the best is a sample, as with STREAM."""

FULL_BESTS = 20

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
        for name, write in (("disk write", True), ("disk read", False)):
            windows = BEST_OF if settings.quick else FULL_BESTS * BEST_OF
            yield _median(name, best(_sequential(path, size, windows, write=write)))
        yield _median("disk random read", _random_reads(path, size, seconds))
        yield _median("fsync latency", _fsyncs(folder / "sync", seconds))
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


def _median(name: str, samples: list[float]) -> Measured:
    return Measured(name, statistics.median(samples), samples=tuple(samples))


def _sequential(path: Path, size: int, windows: int, *, write: bool) -> list[float]:
    """Returns the MB/s of windows of WINDOW_S, while the file is transferred over and over, at
    least once; without the first window, in which throttles let a burst pass."""
    file = open_direct(path, os.O_CREAT | os.O_WRONLY if write else os.O_RDONLY)
    found: list[float] = []
    try:
        with mmap.mmap(-1, BLOCK) as block:
            block.write(os.urandom(BLOCK))
            count = moved = 0
            at = time.perf_counter()
            while count < size // BLOCK or len(found) <= windows:
                _transfer(file, block, count % (size // BLOCK) * BLOCK, write=write)
                count, moved = count + 1, moved + BLOCK
                if time.perf_counter() - at < WINDOW_S:
                    continue
                if write:
                    os.fdatasync(file)
                now = time.perf_counter()
                found.append(moved / (now - at) / 1e6)
                moved, at = 0, now
    finally:
        os.close(file)
    return found[1:]


def best(rates: list[float]) -> list[float]:
    """Returns the best of each BEST_OF rates in turn: other processes only slow a disk down."""
    count = max(len(rates) // BEST_OF, 1)
    return [max(rates[at::count]) for at in range(count)]


def _transfer(file: int, block: mmap.mmap, at: int, *, write: bool) -> None:
    done = os.pwritev(file, [block], at) if write else os.preadv(file, [block], at)
    if done != BLOCK:
        raise OSError(errno.ENOSPC if write else errno.EIO, "a short transfer")


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
