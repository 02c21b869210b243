"""Disk: sequential and random transfers that bypass the page cache, and the latency of fsync."""

import errno
import itertools
import math
import mmap
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings
from fireflyer.validator.sampling import sampled

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
        disk=True,
        duration_s=7.0,
        function="fireflyer.validator.checks.disk:run",
    ),
)

MIB = 1 << 20
QUICK_BYTES = 64 * MIB
FULL_BYTES = 2048 * MIB
BLOCK = MIB
PAGE = 4096
WINDOW_S = 0.15
"""Duration of one measurement. It exceeds the slices, of up to 0.1 s, in which throttles of the
kernel work."""

BEST_OF = 10
"""Windows per sample. A sample is the fastest window, as in STREAM: stalls only slow a disk
down."""

FULL_BESTS = 20
"""Samples in a full validation; a quick one takes one sample."""

MOST_S = 4.0
"""Time limit, on a slow disk, for a sample's random reads; the same limit holds for its fsyncs."""

LEAST_WINDOWS = 3


def run(settings: Settings) -> Iterator[Measured]:
    """Writes, reads and syncs a file in the scratch folder."""
    size = QUICK_BYTES if settings.quick else FULL_BYTES
    count = BEST_OF * (1 if settings.quick else FULL_BESTS)
    most_s = MOST_S * (1 if settings.quick else FULL_BESTS)
    folder = Path(settings.directory)
    free = shutil.disk_usage(folder).free
    if free < 5 * size:
        raise NotRun(f"{free // MIB} MiB are free on the disk; {5 * size // MIB} MiB are needed")
    path = folder / "disk"
    try:
        written = [rate / 1e6 for rate in _sequential(path, size, count, write=True)]
        yield sampled("disk write", written, BEST_OF, "more")
        seen = [rate / 1e6 for rate in _sequential(path, size, count, write=False)]
        yield sampled("disk read", seen, BEST_OF, "more")
        reads = _random_reads(path, size, count, most_s)
        yield sampled("disk random read", reads, BEST_OF, "more")
        rates = _fsyncs(folder / "sync", count, most_s)
        yield sampled("fsync latency", [1e3 / rate for rate in rates], BEST_OF, "less")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NotRun(f"the disk of {folder.parent} is full: {error.strerror}") from None
        if error.errno == errno.EIO:
            yield Measured("disk read", None, f"the disk failed: {error.strerror}")
            return
        raise


def open_direct(path: Path, flags: int) -> int:
    """Opens a file with O_DIRECT if the file system allows it."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o600)


def windows(
    count: int,
    step: Callable[[], float],
    *,
    finish: Callable[[], object] = lambda: None,
    least: int = 0,
    most_s: float = math.inf,
) -> list[float]:
    """Repeats a step and returns its rate in each window of WINDOW_S seconds.

    The first window is left out, because throttles let a burst pass in it.

    Args:
        count: number of windows to return; more if `least` steps take longer, fewer if `most_s` has
            passed.
        step: returns the amount that it transferred.
        finish: called at the end of each window; its time counts.
        least: minimum number of steps.
        most_s: time after which LEAST_WINDOWS windows are enough.
    """
    found: list[float] = []
    steps, amount = 0, 0.0
    begin = at = time.perf_counter()
    while steps < least or len(found) <= count:
        amount += step()
        steps += 1
        if time.perf_counter() - at < WINDOW_S:
            continue
        finish()
        now = time.perf_counter()
        found.append(amount / (now - at))
        amount, at = 0.0, now
        if steps >= least and len(found) > LEAST_WINDOWS and now - begin > most_s:
            break
    return found[1:]


def _sequential(path: Path, size: int, count: int, *, write: bool) -> list[float]:
    """Transfers the whole file repeatedly, at least once; returns each window's bytes per
    second."""
    file = open_direct(path, os.O_CREAT | os.O_WRONLY if write else os.O_RDONLY)
    at = itertools.cycle(range(0, size, BLOCK))
    try:
        with mmap.mmap(-1, BLOCK) as block:
            block.write(os.urandom(BLOCK))
            return windows(
                count, lambda: _transfer(file, block, next(at), write=write),
                finish=lambda: os.fdatasync(file) if write else None, least=size // BLOCK,
            )  # fmt: skip
    finally:
        os.close(file)


def _transfer(file: int, block: mmap.mmap, at: int, *, write: bool) -> float:
    done = os.pwritev(file, [block], at) if write else os.preadv(file, [block], at)
    if done != BLOCK:
        raise OSError(errno.ENOSPC if write else errno.EIO, "a short transfer")
    return BLOCK


def _random_reads(path: Path, size: int, count: int, most_s: float) -> list[float]:
    """Returns the number of one-page reads per second in each window, with one read in flight."""
    file = open_direct(path, os.O_RDONLY)
    draw = random.Random(1)
    try:
        with mmap.mmap(-1, PAGE) as page:

            def read() -> float:
                os.preadv(file, [page], draw.randrange(size // PAGE) * PAGE)
                return 1.0

            return windows(count, read, most_s=most_s)
    finally:
        os.close(file)


def _fsyncs(path: Path, count: int, most_s: float) -> list[float]:
    """Returns the number of one-page appends per second in each window, each with an fsync."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)

    def append() -> float:
        os.write(file, bytes(PAGE))
        os.fsync(file)
        return 1.0

    try:
        return windows(count, append, most_s=most_s)
    finally:
        os.close(file)
