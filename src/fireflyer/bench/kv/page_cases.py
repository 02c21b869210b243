"""Cases of the page cache: pages over fs3, Redis and files; lookups; memory."""

import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from fireflyer import kv
from fireflyer._native.kv import PageIndex
from fireflyer.bench.fs.cluster import FileSystem
from fireflyer.bench.fs.context import Setting, at_most, remote
from fireflyer.bench.harness.report import Row
from fireflyer.bench.kv.redis import Redis
from fireflyer.errors import ConfigError, FireflyerError
from fireflyer.kv.pages import layout
from fireflyer.kv.pages.cache import PageCache

PAGE = 4_497_408
"""Size in bytes of a page: 64 tokens of DeepSeek-V3, 61 layers of 576 values of 2 bytes."""
CALL = 32
"""Number of pages in each call."""
PAGES = 96
"""Number of pages that are stored, if the command's --scale is 1."""
_GB = 1e9
Rate = Callable[[], float]


def keys_of(count: int) -> list[bytes]:
    return [b"model/tp0/%064x" % number for number in range(count)]


class Pages:
    """Pages of random bytes, buffers to read them into, and random draws of 32 pages."""

    def __init__(self, count: int) -> None:
        self.keys = keys_of(count)
        rng = random.Random(3)
        self.data = [rng.randbytes(PAGE) for _ in range(count)]
        self.memory = [memoryview(bytearray(PAGE)) for _ in range(CALL)]
        self._rng = random.Random(4)

    def draw(self) -> list[int]:
        return self._rng.sample(range(len(self.keys)), min(CALL, len(self.keys)))

    def rate(self, read: Callable[[list[int]], object], calls: int) -> Rate:
        """Returns a function that reads 32 pages in each of `calls` calls and returns GB/s.

        The function verifies the bytes of the last call.
        """

        def run() -> float:
            draws = [self.draw() for _ in range(calls)]
            began = time.perf_counter()
            for draw in draws:
                read(draw)
            took = time.perf_counter() - began
            for at, memory in zip(draws[-1], self.memory, strict=False):
                if memory != self.data[at]:
                    raise FireflyerError("a page that was read has the wrong bytes")
            return sum(map(len, draws)) * PAGE / _GB / took

        return run

    def fill(self, cache: PageCache) -> None:
        for at in range(0, len(self.keys), 8):
            cache.set_from(self.keys[at : at + 8], self.data[at : at + 8])
        cache.flush()

    def from_cache(self, cache: PageCache) -> Callable[[list[int]], object]:
        def read(draw: list[int]) -> None:
            if not all(cache.get_into([self.keys[at] for at in draw], self.memory[: len(draw)])):
                raise FireflyerError("a page is missing")

        return read


def over_fs3(setting: Setting, count: int, calls: int, *, far: bool) -> list[Row]:
    """Measures reads of pages of a cache on fs3, against `read_many` of the same bytes from one file."""
    pages = Pages(count)
    case = f"{CALL} pages of 4.3 MB, fs3 {'over TCP' if far else 'on the same node'}"
    with ExitStack() as stack:
        files = stack.enter_context(FileSystem(setting.work / "pages", nodes=1 if far else 0))
        client = stack.enter_context(files.attach(**(remote() if far else {})))
        cache = PageCache(client.storage("/cache"), 8 << 30, 64 << 20, 0.0)
        stack.callback(cache.close)
        setting.say(f"{case}: writing")
        pages.fill(cache)
        with client.open("/plain", "wb") as file:
            for data in pages.data:
                file.write(data)
        plain = stack.enter_context(client.open("/plain"))

        def read_many(draw: list[int]) -> None:
            wanted = zip(draw, pages.memory, strict=False)
            client.read_many([(plain, at * PAGE, memory) for at, memory in wanted])

        found = setting.rounds(
            case,
            {
                "ours": pages.rate(pages.from_cache(cache), calls),
                "fs3": pages.rate(read_many, calls),
            },
        )
    return [Row.of_speeds(case, "GB/s", found["ours"], "read_many", found["fs3"], (), 0.85, 0.95)]


def over_redis(setting: Setting, count: int, calls: int) -> list[Row]:
    """Measures reads of pages of a cache in a folder, against Redis on a Unix socket."""
    pages = Pages(count)
    case = f"{CALL} pages of 4.3 MB, folder, warm"
    with ExitStack() as stack:
        cache = stack.enter_context(_cache(setting.work / "folder", stack))
        pages.fill(cache)
        candidates = {"ours": pages.rate(pages.from_cache(cache), calls)}
        title = "Redis"
        try:
            server = stack.enter_context(Redis(setting.work / "redis"))
        except ConfigError as error:
            title = str(error)
        else:
            for key, data in zip(pages.keys, pages.data, strict=True):
                server.set(key, data)

            def read(draw: list[int]) -> None:
                server.get_into([pages.keys[at] for at in draw], pages.memory[: len(draw)])

            candidates["redis"] = pages.rate(read, calls)
        found = setting.rounds(case, candidates)
    peers = found.get("redis", [])
    return [Row.of_speeds(case, "GB/s", found["ours"], title, peers, (), 1.5, 3.0)]


def over_files(setting: Setting, count: int, calls: int) -> list[Row]:
    """Measures reads of pages of a cache in a folder, against SGLang's layout: one file per page, no
    checksum."""
    pages = Pages(count)
    rows = []
    with ExitStack() as stack:
        cache = stack.enter_context(_cache(setting.work / "folder", stack))
        pages.fill(cache)
        plain = setting.work / "files"
        shutil.rmtree(plain, ignore_errors=True)
        plain.mkdir(parents=True)
        stack.callback(shutil.rmtree, plain)
        paths = [plain / f"{number:064x}_model_0_1.bin" for number in range(count)]
        for path, data in zip(paths, pages.data, strict=True):
            path.write_bytes(data)
        os.sync()

        def read(draw: list[int]) -> None:
            for at, memory in zip(draw, pages.memory, strict=False):
                with open(paths[at], "rb", buffering=0) as file:
                    if file.readinto(memory) != PAGE:
                        raise FireflyerError("a file is too short")

        for at in range(0, count, CALL):  # from now on, the kernel's page cache holds both copies
            draw = list(range(at, min(at + CALL, count)))
            pages.from_cache(cache)(draw)
            read(draw)
        for cold in (False, True):
            case = f"{CALL} pages of 4.3 MB, folder, {'cold' if cold else 'warm'}"
            ours = pages.rate(pages.from_cache(cache), 1 if cold else calls)
            theirs = pages.rate(read, 1 if cold else calls)
            both = [*paths, *(setting.work / "folder" / "segment").iterdir()]
            found = setting.rounds(
                case,
                {
                    "ours": _after(both, ours) if cold else ours,
                    "files": _after(both, theirs) if cold else theirs,
                },
            )
            rows.append(
                Row.of_speeds(
                    case, "GB/s", found["ours"], "SGLang's files", found["files"], (), 1.0, 1.5
                )
            )
    return rows


def _cache(folder: Path, stack: ExitStack) -> PageCache:
    shutil.rmtree(folder, ignore_errors=True)
    stack.callback(shutil.rmtree, folder)
    return kv.cache(folder, 8 << 30, poll=0)


def _after(paths: Sequence[Path], run: Rate) -> Rate:
    """Returns a function that drops the files from the page cache and then calls `run`."""

    def cold() -> float:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        return run()

    return cold


def exists(setting: Setting, count: int) -> list[Row]:
    """Measures `exists` of 128 keys that all exist."""
    with ExitStack() as stack:
        cache = stack.enter_context(_cache(setting.work / "folder", stack))
        keys = keys_of(count)
        setting.say("exists: writing")
        page = bytes(4096)
        for at in range(0, count, 1000):
            cache.set_from(keys[at : at + 1000], [page] * len(keys[at : at + 1000]))
        cache.flush()
        times = []
        for turn in range(2000):
            at = turn * 61 % max(1, count - 128)
            began = time.perf_counter()
            run = cache.exists(keys[at : at + 128])
            times.append(time.perf_counter() - began)
            if run != 128:
                raise FireflyerError(f"only {run} of 128 keys exist")
    case = f"exists of 128 keys, of {count:,} pages"
    return [
        at_most(f"{case}, p50", "ms", statistics.median(times) * 1e3, "most", 1.0),
        at_most(f"{case}, p99", "ms", sorted(times)[1979] * 1e3, "most", 1.0),
    ]


def memory(setting: Setting, count: int) -> list[Row]:
    """Measures the memory of the index per page: first as the index reports it, then as growth of
    the process."""
    entries = _entries(count)
    before = _resident()
    index = PageIndex()
    for number, part in enumerate(entries):
        index.insert(number, part, [0])
    grown = max(1, _resident() - before)
    return [
        at_most(f"index of {count:,} pages", "B/page", index.memory / count, "most", 128),
        at_most(f"index of {count:,} pages, growth", "B/page", grown / count, "most", 128),
    ]


def _entries(count: int) -> list[bytes]:
    """Returns the index entries of each segment; a segment has 16 pages."""
    name = layout.segment_name(1, "0" * 16)
    parts = []
    for at in range(0, count, 16):
        digests = layout.digests_of([b"%d" % number for number in range(at, at + 16)], b"")
        pages = [layout.Page(digest, PAGE, 0, b"", 0) for digest in digests]
        parts.append(layout.decode(name, layout.encode(name, pages)).entries)
    return parts


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
