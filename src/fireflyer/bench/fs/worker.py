"""Client process of our file system or of a mounted file system. Commands are lines of JSON.

{"do": "attach", "where", "settings"}                            ours
{"do": "mounted", "root"}                                        a mounted one
{"do": "create"|"open", "directory", "prefix", "count", "threads"}   empty files, one per call;
    with "first" and "step": only every `step`th file, from number `first` on;
    with "bytes": number of bytes to write to each
{"do": "stat", "directory", "prefix", "count", "batch"}          `batch`: names per call, ours only
{"do": "read"|"small", "path", "block", "depth", "count", "seed"}    "small": ours only
    `depth`: blocks per call of our client (on a mounted file system a call reads one block);
    "read": in order from block `seed` on; "small": at random
{"do": "put", "path", "bytes"}                                   a file of random bytes
{"do": "stream", "path", "block", "threads", "rounds"}               all threads read the whole file
Answers: {"began", "ended"} on the monotonic clock; or {"error"}.
    "stream" adds "beyond": growth of the peak memory in bytes
"""

import json
import mmap
import os
import resource
import secrets
import stat
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fireflyer.errors import ConfigError, FileError, FireflyerError
from fireflyer.fs3.client import Client, Settings
from fireflyer.fs3.client.data import Buffer
from fireflyer.fs3.client.discovery import attach, find
from fireflyer.fs3.client.file import File
from fireflyer.fs3.client.metadata import Metadata, encoded
from fireflyer.fs3.client.settings import find_secret
from fireflyer.fs3.meta.inode import ROOT, Inode
from fireflyer.fs3.meta.messages import Create

Command = dict[str, Any]
PUT_AT_ONCE = 4 << 20


class Files(Protocol):
    """Creation and lookup of names."""

    def create(self, path: str, size: int = 0) -> None:
        """Creates a file of `size` bytes."""
        ...

    def open_new(self, path: str, size: int = 0) -> None:
        """Creates a file of `size` bytes by opening it for writing and closing it."""
        ...

    def stat_many(self, paths: list[str]) -> None: ...


class Ours:
    """File system of ours, through its client; `create` makes a file in one transaction."""

    def __init__(self, where: str, settings: Settings) -> None:
        place = find(where)
        secret = find_secret(place.secret_file)
        self.client = attach(where, settings=settings)
        self._metadata = Metadata(secrets.randbits(62) + 1, place.addresses, secret, settings)
        self._mode = self._metadata.masked(0o666)

    def create(self, path: str, size: int = 0) -> None:
        if size:
            self.open_new(path, size)
            return
        self._metadata.act(Create(ROOT, encoded(path), self._mode, True), Inode)

    def open_new(self, path: str, size: int = 0) -> None:
        with self.client.open(path, "xb") as file:
            if size:
                file.write(bytes(size))

    def stat_many(self, paths: list[str]) -> None:
        for found in self.client.stat_many(paths):
            if isinstance(found, FileError):
                raise found


class Mounted:
    """Mounted file system, accessed through the kernel."""

    def __init__(self, root: str) -> None:
        self._root = root

    def create(self, path: str, size: int = 0) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = os.open(self._root + path, flags, 0o644)
        try:
            if size:
                os.write(descriptor, bytes(size))
        finally:
            os.close(descriptor)

    open_new = create

    def stat_many(self, paths: list[str]) -> None:
        for path in paths:
            os.stat(self._root + path)

    def read(self, path: str, block: int, count: int, first: int) -> None:
        """Reads `count` blocks in order, starting at block `first`, into reused memory."""
        memory = page_aligned(block)
        descriptor = os.open(self._root + path, os.O_RDONLY)
        try:
            for number in range(first, first + count):
                if os.preadv(descriptor, [memory], number * block) != block:
                    raise ConfigError(f"{path}: block {number} is too short")
        finally:
            os.close(descriptor)


def creating(files: Files, command: Command) -> Command:
    make = files.create if command["do"] == "create" else files.open_new
    threads, base = command["threads"], f"{command['directory']}/{command['prefix']}"

    size = command.get("bytes", 0)
    numbers = range(command.get("first", 0), command["count"], command.get("step", 1))

    def work(part: int) -> None:
        for number in numbers[part::threads]:
            make(f"{base}-{number}", size)

    return _timed(lambda: _in_threads(threads, work))


def statting(files: Files, command: Command) -> Command:
    base, batch = f"{command['directory']}/{command['prefix']}", command["batch"]
    paths = [f"{base}-{number}" for number in range(command["count"])]

    def work() -> None:
        for at in range(0, len(paths), batch):
            files.stat_many(paths[at : at + batch])

    return _timed(work)


def page_aligned(size: int) -> memoryview:
    """Returns zeroed memory that starts at a page boundary, as in the raw programs.

    numpy's memory starts 16 bytes after a boundary. On some processors the kernel's copy to such an
    address takes twice as long.
    """
    return memoryview(mmap.mmap(-1, size))


class Reader:
    """Reads of one file into reused memory."""

    def __init__(self, client: Client, path: str, block: int, depth: int) -> None:
        self.file: File = client.open(path)
        self.block = block
        self.blocks = self.file.size // block
        memory = page_aligned(block * depth)
        self.memory = memory
        self._parts = [memory[at : at + block] for at in range(0, block * depth, block)]
        self._client = client

    def read(self, numbers: list[int]) -> None:
        """Reads the blocks of these numbers, at most `depth`, in one call."""
        requests: list[tuple[File, int, Buffer]] = [
            (self.file, number * self.block, part)
            for number, part in zip(numbers, self._parts, strict=False)
        ]
        self._client.read_many(requests)

    def read_all(self, count: int, first: int = 0) -> None:
        """Reads `count` blocks in order, starting at block `first`; wraps around after the last
        block."""
        depth, numbers = len(self._parts), [(first + at) % self.blocks for at in range(count)]
        for at in range(0, len(numbers), depth):
            self.read(numbers[at : at + depth])


class SmallReader:
    """Random reads of small blocks, `depth` per call, into reused memory."""

    def __init__(self, client: Client, path: str, block: int, depth: int) -> None:
        self._client, self._file = client, client.open(path)
        self._block, self._depth = block, depth
        self._memory = np.frombuffer(page_aligned(block * depth), np.uint8)

    def rows(self, count: int, seed: int) -> NDArray[np.int64]:
        """Returns the rows to read: int64[count, 4], see `Client.read_rows`."""
        rows = np.empty((count, 4), np.int64)
        blocks = self._file.size // self._block
        rows[:, 0], rows[:, 2] = 0, self._block
        rows[:, 1] = np.random.default_rng(seed).integers(0, blocks, count) * self._block
        rows[:, 3] = self._memory.ctypes.data + np.arange(count) % self._depth * self._block
        return rows

    def read(self, rows: NDArray[np.int64]) -> None:
        for at in range(0, len(rows), self._depth):
            self._client.read_rows([self._file], rows[at : at + self._depth])


def reading_small(client: Client, command: Command) -> Command:
    reader = SmallReader(client, command["path"], command["block"], command["depth"])
    rows = reader.rows(command["count"], command["seed"])
    return _timed(lambda: reader.read(rows))


def reading(client: Client, command: Command) -> Command:
    reader = Reader(client, command["path"], command["block"], command["depth"])
    return _timed(lambda: reader.read_all(command["count"], command["seed"]))


def streaming(client: Client, command: Command) -> Command:
    """Reads the whole file `rounds` times in every thread, one block at a time."""
    threads = command["threads"]
    readers = [Reader(client, command["path"], command["block"], 1) for _ in range(threads)]
    for reader in readers:
        reader.memory[:] = bytes(len(reader.memory))  # faults the pages in before the measurement
    before = _most_held()

    def work(part: int) -> None:
        for _ in range(command["rounds"]):
            readers[part].read_all(readers[part].blocks)

    answer = _timed(lambda: _in_threads(threads, work))
    return {**answer, "beyond": _most_held() - before}


def putting(client: Client, command: Command) -> Command:
    def work() -> None:
        with client.open(command["path"], "wb") as file:
            for at in range(0, command["bytes"], PUT_AT_ONCE):
                size = min(PUT_AT_ONCE, command["bytes"] - at)
                file.write(np.random.default_rng(at).bytes(size))

    return _timed(work)


def _most_held() -> int:
    """Returns the peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _in_threads(threads: int, work: Callable[[int], None]) -> None:
    if threads == 1:
        work(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def _timed(work: Callable[[], object]) -> Command:
    began = time.monotonic()
    work()
    return {"began": began, "ended": time.monotonic()}


class CommandLoop:
    """Executor of commands, one after the other."""

    def __init__(self) -> None:
        self._files: Files | None = None

    def do(self, command: Command) -> Command:
        """Runs a command; raises FireflyerError or OSError."""
        what = command["do"]
        if what == "attach":
            settings = Settings(**command["settings"])
            self._files = Ours(command["where"], settings)
            return {}
        if what == "mounted":
            if not stat.S_ISDIR(os.stat(command["root"]).st_mode):
                raise ConfigError(f"invalid root {command['root']!r}: expected a directory")
            self._files = Mounted(command["root"])
            return {}
        assert self._files is not None
        if what in ("create", "open"):
            return creating(self._files, command)
        if what == "stat":
            return statting(self._files, command)
        if isinstance(self._files, Mounted):
            assert what == "read"
            mounted = self._files
            words = command["path"], command["block"], command["count"], command["seed"]
            return _timed(lambda: mounted.read(*words))
        assert isinstance(self._files, Ours)
        return {"read": reading, "small": reading_small, "stream": streaming, "put": putting}[what](
            self._files.client, command
        )


def main() -> None:
    commands = CommandLoop()
    for line in sys.stdin:
        try:
            answer = commands.do(json.loads(line))
        except (FireflyerError, OSError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
