"""Main memory: bandwidth of each NUMA node, and a pattern test."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from fireflyer.validator.model import Check, Figure, Measured, NotRun, Settings, read_text
from fireflyer.validator.sampling import best_of

CHECKS = (
    Check(
        name="memory bandwidth",
        figures=(Figure("memory bandwidth", "GB/s"),),
        duration_s=2.0,
        function="fireflyer.validator.checks.memory:run_bandwidth",
    ),
    Check(
        name="memory pattern",
        figures=(Figure("memory pattern", "GB tested"),),
        duration_s=4.0,
        function="fireflyer.validator.checks.memory:run_pattern",
    ),
)

MIB = 1 << 20
ARRAY_BYTES = 64 * MIB
"""Maximum size of each of a thread's three arrays; larger than the thread's share of a cache."""

ROUNDS = 12
FULL_ROUNDS = 100

BEST_OF = 4
"""Rounds per sample. A sample is the fastest of them."""

QUICK_PATTERN_MIB = 256
CHUNK_BYTES = 4 * MIB
"""Size of the pieces in which memory is tested; larger than a second-level cache."""

PATTERNS = (0x0000000000000000, 0x5555555555555555, 0x0F0F0F0F0F0F0F0F, 0x00FF00FF00FF00FF)
WALKING = tuple(1 << bit for bit in range(64))

Words = NDArray[np.uint64]
Disturb = Callable[[Words, int], None]
"""Callback that receives the memory and the number of verifications so far; called before each
verification."""


def run_bandwidth(settings: Settings) -> Iterator[Measured]:
    """Adds two arrays into a third on all CPUs of each NUMA node, like STREAM's Add.

    An element causes three words of traffic. The figure is the bandwidth of the slowest NUMA node,
    in its best round.
    """
    best: dict[str, list[float]] = {}
    for node, cpus in numa_nodes(Path("/sys"), os.sched_getaffinity(0)).items():
        best[node] = bandwidth(cpus, ROUNDS if settings.quick else FULL_ROUNDS)
    slowest = min(best, key=lambda node: max(best[node]))
    samples = best_of(best[slowest], BEST_OF, "more")
    yield Measured("memory bandwidth", max(samples), samples=samples)


def numa_nodes(sys_: Path, allowed: set[int]) -> dict[str, set[int]]:
    """Returns the allowed CPUs of each NUMA node that has such CPUs."""
    found = {}
    for folder in sorted(sys_.glob("devices/system/node/node[0-9]*")):
        cpus = parse_list(read_text(folder / "cpulist") or "") & allowed
        if cpus:
            found[folder.name] = cpus
    return found or {"node0": set(allowed)}


def parse_list(text: str) -> set[int]:
    """Parses a CPU list in the kernel's form, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def bandwidth(cpus: set[int], rounds: int, array_bytes: int = ARRAY_BYTES) -> list[float]:
    """Returns the GB/s of each round, with one thread on each of these CPUs.

    Each thread touches its own memory first, so the memory lies on the thread's NUMA node.

    Raises:
        NotRun: too little memory is free.
    """
    available = psutil.virtual_memory().available
    size = min(array_bytes, available // (6 * len(cpus)))
    if size < MIB:
        raise NotRun(f"only {available // MIB} MiB of memory are available")
    barrier = threading.Barrier(len(cpus) + 1)
    failed: list[BaseException] = []

    def work(cpu: int) -> None:
        try:
            os.sched_setaffinity(0, {cpu})
            left, right, out = (np.full(size // 8, number, np.float64) for number in (1, 2, 0))
            for _ in range(rounds):
                barrier.wait()
                np.add(left, right, out=out)
                barrier.wait()
        except (OSError, MemoryError, threading.BrokenBarrierError) as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(cpu,), daemon=True) for cpu in sorted(cpus)]
    for thread in threads:
        thread.start()
    found = []
    moved = 3 * (size // 8) * 8 * len(cpus)
    try:
        for _ in range(rounds):
            barrier.wait()
            begin = time.perf_counter()
            barrier.wait()
            found.append(moved / (time.perf_counter() - begin) / 1e9)
    except threading.BrokenBarrierError:
        raise NotRun(f"a thread failed: {failed[0]}") from None
    for thread in threads:
        thread.join()
    return found


def run_pattern(settings: Settings) -> Iterator[Measured]:
    """Writes patterns to memory and verifies them (moving inversions)."""
    wanted = settings.memory_mib
    available = psutil.virtual_memory().available // MIB
    if not wanted:
        wanted = min(QUICK_PATTERN_MIB, available // 4) if settings.quick else available * 3 // 4
    if wanted > available * 9 // 10 or wanted < 1:
        raise NotRun(f"{wanted} MiB are needed; {available} MiB of memory are available")
    disturb = flip_one_bit if settings.drill == "memory pattern" else _leave
    words = np.empty(wanted * MIB // 8, np.uint64)
    wrong = verify_pattern(words, disturb, PATTERNS if settings.quick else PATTERNS + WALKING)
    failed = f"{wrong} words of {wanted} MiB did not keep their bits" if wrong else ""
    yield Measured("memory pattern", words.nbytes / 1e9, failed)


def verify_pattern(words: Words, disturb: Disturb, patterns: tuple[int, ...] = PATTERNS) -> int:
    """Returns the number of words that did not keep a pattern.

    The first pass writes the pattern upwards. The second verifies and inverts each piece upwards.
    The third verifies and restores each piece downwards. The last verifies all pieces again.
    """
    wrong = 0
    step = CHUNK_BYTES // 8
    starts = range(0, len(words), step)
    for number, pattern in enumerate(patterns):
        plain, inverse = np.uint64(pattern), np.uint64(pattern ^ (1 << 64) - 1)
        words.fill(plain)
        disturb(words, 3 * number)
        wrong += _verify_and_write(words, starts, step, plain, inverse)
        disturb(words, 3 * number + 1)
        wrong += _verify_and_write(words, starts[::-1], step, inverse, plain)
        disturb(words, 3 * number + 2)
        wrong += int(sum(np.count_nonzero(words[at : at + step] != plain) for at in starts))
    return wrong


def _verify_and_write(
    words: Words, starts: range, step: int, expected: np.uint64, following: np.uint64
) -> int:
    wrong = 0
    for at in starts:
        piece = words[at : at + step]
        wrong += int(np.count_nonzero(piece != expected))
        piece.fill(following)
    return wrong


def flip_one_bit(words: Words, number: int) -> None:
    """Flips one bit before the second verification."""
    if number == 1:
        words[len(words) // 2] ^= np.uint64(1 << 17)


def _leave(words: Words, number: int) -> None:
    del words, number
