"""Data cases of `fireflyer bench fs`: reads over TCP, on the same node, in batches; writes."""

import itertools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from fireflyer.bench.checkpoint.limits import RawFile
from fireflyer.bench.fs.cluster import FileSystem
from fireflyer.bench.fs.context import BATCH, BLOCK, DEPTH, PAGE, Setting, contents, remote
from fireflyer.bench.fs.raw import RawReads
from fireflyer.bench.fs.worker import Reader, SmallReader
from fireflyer.bench.harness import goals
from fireflyer.bench.harness.options import size_text
from fireflyer.bench.harness.report import Row
from fireflyer.errors import ConfigError
from fireflyer.fs3.client import Client

_GB = 1e9
_WRITERS = 2
_AT_ONCE = 4

Rate = Callable[[], float]
"""Function that runs one round of a candidate and returns GB/s or operations per second."""


def tcp(setting: Setting) -> list[Row]:
    """Measures 4 MiB reads over TCP against a raw sendfile transfer of the same cached bytes."""
    count = setting.sizes.reads
    case = f"{size_text(BLOCK)} reads over TCP"
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "tcp", nodes=1))
        client = stack.enter_context(files.attach(**remote()))
        setting.say(f"{case}: writing {size_text(setting.sizes.data)}")
        setting.put(client, "/data")
        candidates = {"ours": _large_reads(_reader(client), count)}
        raw = setting.raw_file()
        missing = ""
        try:
            sendfile = stack.enter_context(RawReads("sendfile", raw, BLOCK, DEPTH))
        except ConfigError as error:
            missing = str(error)
        else:
            candidates["raw"] = lambda: count * BLOCK / _GB / sendfile(count, 0)
        found = setting.rounds(case, candidates)
    limits = found.get("raw", [])
    must, aim = goals.fs("tcp", "sendfile")
    title = missing or "raw sendfile"
    return [Row.of_speeds(case, "GB/s", found["ours"], title, limits, limits, must, aim)]


def _reader(client: Client) -> Reader:
    reader = Reader(client, "/data", BLOCK, DEPTH)
    wanted = contents(BLOCK)
    reader.read([0])
    if reader.memory[:BLOCK] != wanted:
        raise ConfigError("bench fs: the bytes read differ from the bytes written")
    return reader


def _large_reads(reader: Reader, count: int) -> Rate:
    def run() -> float:
        began = time.perf_counter()
        reader.read_all(count)
        return count * BLOCK / _GB / (time.perf_counter() - began)

    return run


def local(setting: Setting) -> list[Row]:
    """Measures 4 MiB reads on the node that stores the bytes, against pread of the same bytes.

    Our client and pread both read into reused memory.
    """
    count = setting.sizes.reads
    case = f"{size_text(BLOCK)} reads on the same node"
    with FileSystem(setting.work / "local") as files, files.attach() as client:
        setting.say(f"{case}: writing {size_text(setting.sizes.data)}")
        setting.put(client, "/data")
        raw = setting.raw_file()
        reader = _reader(client)
        candidates = {
            "ours": _large_reads(reader, count),
            "raw": _preads(raw, count, reader.memory),
        }
        found = setting.rounds(case, candidates)
    must, aim = goals.fs("local", "pread")
    return [Row.of_rates(case, "GB/s", found["ours"], "pread", found["raw"], must, aim)]


def _preads(raw: Path, count: int, memory: memoryview) -> Rate:
    parts = [memory[at : at + BLOCK] for at in range(0, BLOCK * DEPTH, BLOCK)]
    numbers = [number % (raw.stat().st_size // BLOCK) for number in range(count)]

    def run() -> float:
        descriptor = os.open(raw, os.O_RDONLY)
        try:
            began = time.perf_counter()
            for number, part in zip(numbers, itertools.cycle(parts), strict=False):
                os.preadv(descriptor, [part], number * BLOCK)
            return count * BLOCK / _GB / (time.perf_counter() - began)
        finally:
            os.close(descriptor)

    return run


def small(setting: Setting) -> list[Row]:
    """Measures batches of 64 random 4 KiB reads against a bare shared-memory ring."""
    count = setting.sizes.small_reads
    case = f"{size_text(PAGE)} random reads, {BATCH} a batch"
    seeds = itertools.count()
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "small"))
        client = stack.enter_context(files.attach())
        setting.say(f"{case}: writing {size_text(setting.sizes.data)}")
        setting.put(client, "/data")
        with client.open("/data") as file:
            # Reads in large pieces fill the page cache with large folios, as writes to raw.bin do.
            for at in range(0, file.size, BLOCK):
                file.pread(BLOCK, at)
        candidates = {"ours": _small_reads(client, count, seeds)}
        raw = setting.raw_file()
        missing = ""
        try:
            ring = stack.enter_context(RawReads("ring", raw, PAGE, BATCH))
        except ConfigError as error:
            missing = str(error)
        else:
            candidates["raw"] = lambda: count / ring(count, next(seeds))
        found = setting.rounds(case, candidates)
    limits = found.get("raw", [])
    must, aim = goals.fs("small", "ring")
    title = missing or "shared-memory ring"
    return [Row.of_speeds(case, "IO/s", found["ours"], title, limits, limits, must, aim)]


def _small_reads(client: Client, count: int, seeds: "itertools.count[int]") -> Rate:
    reader = SmallReader(client, "/data", PAGE, BATCH)

    def run() -> float:
        rows = reader.rows(count, next(seeds))
        began = time.perf_counter()
        reader.read(rows)
        return count / (time.perf_counter() - began)

    return run


def write(setting: Setting) -> list[Row]:
    """Measures durable writes to two replicas on one disk.

    The raw limit writes the same bytes twice and sends them once.
    """
    size = setting.sizes.data // 2
    case = f"{size_text(BLOCK)} writes, 2 replicas"
    numbers = itertools.count()
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "write", nodes=2, replicas=2))
        client = stack.enter_context(files.attach())
        candidates = {"ours": _writes(client, size, numbers)}
        disk = RawFile(setting.work / "twice.bin", 2 * size)
        stack.callback(disk.close)
        raw, missing = setting.raw_file(), ""
        try:
            loopback = stack.enter_context(RawReads("sendfile", raw, BLOCK, DEPTH))
        except ConfigError as error:
            missing = str(error)
        else:
            candidates["raw"] = lambda: size / _GB / (disk.write() + loopback(size // BLOCK, 0))
        found = setting.rounds(case, candidates)
    limits = found.get("raw", [])
    must, aim = goals.fs("write", "raw")
    title = missing or f"2 x {disk.title}, loopback"
    return [Row.of_speeds(case, "GB/s", found["ours"], title, limits, limits, must, aim)]


def _writes(client: Client, size: int, numbers: "itertools.count[int]") -> Rate:
    data = memoryview(contents(BLOCK * _AT_ONCE))
    parts = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    step = len(data) * _WRITERS

    def run() -> float:
        with client.open(f"/written-{next(numbers)}", "wb") as file:

            def work(part: int) -> None:
                for start in range(part * len(data), size, step):
                    places = range(start, min(start + len(data), size), BLOCK)
                    pairs = zip(places, parts, strict=False)
                    client.write_many([(file, at, piece) for at, piece in pairs])

            with ThreadPoolExecutor(_WRITERS) as pool:
                began = time.perf_counter()
                list(pool.map(work, range(_WRITERS)))
                return size / _GB / (time.perf_counter() - began)

    return run
