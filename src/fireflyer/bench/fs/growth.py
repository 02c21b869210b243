"""Curves of `fireflyer bench fs --growth`: speed and memory against the amount of data or clients.

Each curve is measured once, from small to large amounts. Each row compares a point with the first
point of its curve.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fireflyer.bench.fs.cluster import FileSystem, Worker, together
from fireflyer.bench.fs.context import BATCH, BLOCK, PAGE, QUICK, Setting, Spec, contents
from fireflyer.bench.fs.memory import fill
from fireflyer.bench.harness import curves as drawing
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.report import Row
from fireflyer.fs3.client import Client

_STAT_BATCH = 256
_PART = 64 << 20
"""Maximum number of data bytes in a file; a hole precedes the data."""
_REPEATS = 3
_MB = 1e6


class Curve:
    """Points of one measure: (amount, figure). More is better unless `less` is set."""

    def __init__(self, what: str, of: str, unit: str, *, less: bool = False) -> None:
        self.what, self.of, self.unit, self._less = what, of, unit, less
        self.points: list[tuple[float, float]] = []

    def add(self, at: float, value: float) -> None:
        self.points.append((at, value))

    def rows(self, label: Callable[[float], str]) -> list[Row]:
        _, first = self.points[0]
        peer = f"at {label(self.points[0][0])}"
        compare = Row.of_times if self._less else Row.of_speeds
        return [
            compare(f"{self.what}, {label(at)} {self.of}", self.unit, [value], peer, [first])
            for at, value in self.points
        ]

    def panel(self, axis: str) -> drawing.Panel:
        """Returns the curve as a drawing over a logarithmic axis, from 0 to above its maximum."""
        top = drawing.round_up(max(value for _, value in self.points))
        line = drawing.Curve("measured", self.points, dots=True)
        marks = [at for at, _ in self.points]
        return drawing.Panel(
            self.what, self.unit, axis, [line], 0.0, top, marks, log=True, label=drawing.short
        )


def clients(setting: Setting) -> list[Curve]:
    """Measures the throughput of all clients together; each client is a process."""
    quick = setting.sizes is QUICK
    large = Curve(f"{size_text(BLOCK)} reads", "clients", "GB/s")
    small = Curve(f"{size_text(PAGE)} reads, {BATCH} a batch", "clients", "IO/s")
    made = Curve("creates", "clients", "creates/s")
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "clients"))
        client = stack.enter_context(files.attach())
        setting.put(client, "/data")
        client.mkdir("/made")
        workers: list[Worker] = []
        for count in (1, 2) if quick else (1, 2, 4, 8, 16):
            setting.say(f"{count} clients")
            while len(workers) < count:
                workers.append(stack.enter_context(files.worker(f"client {len(workers)}")))
            blocks = max(1, setting.sizes.reads * 2 // count)
            read = {"do": "read", "path": "/data", "block": BLOCK, "depth": 1, "count": blocks}
            taken = _median(workers, read)
            large.add(count, blocks * count * BLOCK / 1e9 / taken)
            reads = max(BATCH, setting.sizes.small_reads // count)
            read = {"do": "small", "path": "/data", "block": PAGE, "depth": BATCH, "count": reads}
            small.add(count, reads * count / _median(workers, read))
            files_each = max(1, setting.sizes.creates // 2 // count)
            create = {"do": "create", "directory": "/made", "count": files_each, "threads": 4}
            made.add(count, files_each * count / _median(workers, create))
    return [large, small, made]


def _median(workers: list[Worker], command: dict[str, object]) -> float:
    """Returns the median time, in seconds, that all workers take together."""

    def once(number: int) -> float:
        commands = [
            {**command, "seed": index, "prefix": f"{len(workers)}-{number}-{index}"}
            for index in range(len(workers))
        ]
        return together(workers, commands)

    return statistics.median(once(number) for number in range(_REPEATS))


def directory(setting: Setting) -> list[Curve]:
    """Measures operations in one directory against the number of names in it."""
    made = Curve("creates, 100 a call", "names in the directory", "creates/s")
    seen = Curve(f"stat, {_STAT_BATCH} a call", "names in the directory", "stats/s")
    listed = Curve("listing", "names in the directory", "names/s")
    removed = Curve("unlink, one caller", "names in the directory", "unlinks/s")
    most = 100 if setting.sizes is QUICK else 100_000
    with FileSystem(setting.work / "directory") as files, files.attach() as client:
        for count in _decades(10, most):
            setting.say(f"{count:,} names in a directory")
            path = f"/of-{count}"
            client.mkdir(path)
            for at in range(0, count, 1000):
                names = [f"name-{number}" for number in range(at, min(at + 1000, count))]
                client.create_many(path, names)
            began = time.perf_counter()
            for number in range(20):
                client.create_many(path, [f"more-{number}-{each}" for each in range(100)])
            made.add(count, 2000 / (time.perf_counter() - began))
            seen.add(count, _stat_rate(client, _named(path), count))
            began, times = time.perf_counter(), max(1, 2000 // count)
            for _ in range(times):
                found = len(client.listdir(path))
            listed.add(count, found * times / (time.perf_counter() - began))
            began = time.perf_counter()
            for number in range(100):
                client.unlink(f"{path}/more-0-{number}")
            removed.add(count, 100 / (time.perf_counter() - began))
    return [made, seen, listed, removed]


def _named(path: str) -> Callable[[int], str]:
    return lambda number: f"{path}/name-{number}"


def _stat_rate(client: Client, name: Callable[[int], str], count: int) -> float:
    """Returns the stats per second of names chosen at random among `count` names."""
    random = np.random.default_rng(count)
    batches = [
        [name(int(number)) for number in random.integers(0, count, _STAT_BATCH)] for _ in range(20)
    ]
    began = time.perf_counter()
    for paths in batches:
        client.stat_many(paths)
    return len(batches) * _STAT_BATCH / (time.perf_counter() - began)


def bytes_of_file(setting: Setting) -> list[Curve]:
    """Measures writing, reading and removing a file against its length.

    At most the last 64 MiB of a file are data; the rest is a hole.
    """
    written = Curve("write at the end and close", "file", "MB/s")
    read = Curve("open and read the end", "file", "MB/s")
    removed = Curve("unlink", "file", "unlinks/s")
    sizes = [1, 1 << 10, 1 << 20, 1 << 26, 1 << 30, 100 << 30]
    data = memoryview(contents(_PART))
    into = memoryview(bytearray(_PART))
    with FileSystem(setting.work / "bytes") as files, files.attach() as client:
        for size in sizes[:3] if setting.sizes is QUICK else sizes:
            setting.say(f"files of {size_text(size)}")
            part = min(size, _PART)
            times = [
                _life(client, f"/{size}-{number}", size, data[:part], into[:part])
                for number in range(_REPEATS)
            ]
            writes, reads, removals = (statistics.median(each) for each in zip(*times, strict=True))
            written.add(size, part / _MB / writes)
            read.add(size, part / _MB / reads)
            removed.add(size, 1 / removals)
    return [written, read, removed]


def _life(
    client: Client, path: str, size: int, data: memoryview, into: memoryview
) -> tuple[float, float, float]:
    """Returns the seconds to write, to read and to remove a file."""
    times = [time.perf_counter()]
    with client.open(path, "wb") as file:
        for at in range(0, len(data), BLOCK):
            file.pwrite(data[at : at + BLOCK], size - len(data) + at)
    times.append(time.perf_counter())
    with client.open(path) as file:
        for at in range(0, len(data), BLOCK):
            file.pread_into(into[at : at + BLOCK], size - len(data) + at)
    times.append(time.perf_counter())
    client.unlink(path)
    times.append(time.perf_counter())
    first, second, third = (b - a for a, b in itertools.pairwise(times))
    return first, second, third


def total(setting: Setting) -> list[Curve]:
    """Measures name operations and the memory of manager and meta against the number of files."""
    made = Curve("creates, 64 callers", "files", "creates/s")
    many = Curve("creates, 1,000 a call", "files", "creates/s")
    seen = Curve(f"stat, {_STAT_BATCH} a call", "files", "stats/s")
    held = Curve("memory of manager and meta", "files", "MiB", less=True)
    quick = setting.sizes is QUICK
    there = 0
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "total", nodes=1))
        client = stack.enter_context(files.attach())
        workers = [stack.enter_context(files.worker(f"client {n}")) for n in range(4)]
        client.mkdir("/made")
        for count in _decades(100 if quick else 10_000, setting.sizes.files):
            began, before = time.perf_counter(), there
            fill(client, count, setting, there)
            there = count
            many.add(count, (count - before) / (time.perf_counter() - began))
            setting.say(f"{count:,} files")
            create = {"do": "create", "directory": "/made", "count": 1000, "threads": 16}
            taken = statistics.median(
                together(workers, [{**create, "prefix": f"{count}-{n}-{w}"} for w in range(4)])
                for n in range(_REPEATS)
            )
            made.add(count, 4000 / taken)
            seen.add(count, _stat_rate(client, lambda n: f"/d{n // 10_000}/file-{n}", count))
            held.add(count, files.services[0].most_resident() / (1 << 20))
    return [made, many, seen, held]


def _decades(low: int, high: int) -> list[int]:
    return [10**power for power in range(round(math.log10(low)), round(math.log10(high)) + 1)]


CURVES: dict[str, tuple[str, Callable[[Setting], list[Curve]], Callable[[float], str]]] = {
    "clients": ("clients", clients, lambda at: f"{at:.0f}"),
    "directory": ("names in a directory", directory, lambda at: f"{at:,.0f}"),
    "bytes": ("bytes of the file", bytes_of_file, lambda at: size_text(int(at))),
    "total": ("files in all", total, lambda at: f"{at:,.0f}"),
}


def grow(
    spec: Spec, wanted: tuple[str, ...], plots: Path | None, say: Callable[[str], None]
) -> list[Row]:
    """Measures the wanted curves, in the order of CURVES, and returns their rows.

    Args:
        plots: folder for fs3-growth-NAME.svg, created if missing; None: no plots.

    Raises:
        FireflyerError: a service or a client failed.
    """
    rows: list[Row] = []
    with Setting(spec, say) as setting:
        for name, (axis, measure, label) in CURVES.items():
            if name not in wanted:
                continue
            curves = measure(setting)
            for curve in curves:
                rows += curve.rows(label)
            if plots is not None:
                plots.mkdir(parents=True, exist_ok=True)
                panels = [curve.panel(axis) for curve in curves]
                title = f"{', '.join(curve.what for curve in curves)} against {axis}"
                (plots / f"fs3-growth-{name}.svg").write_text(drawing.draw(title, panels))
    return rows
