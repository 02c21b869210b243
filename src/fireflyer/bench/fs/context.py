"""Shared parts of the file-system benchmark's cases: sizes, folders, clients and rounds."""

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import numpy as np

from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row
from fireflyer.fs3.client import Client

BLOCK = 4 << 20
DEPTH = 4
PAGE = 4096
BATCH = 64

Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Amount of work per round.

    Attributes:
        data: size in bytes of the file that is read, and total size of both replicas of the file
            that is written.
        reads, small_reads: number of blocks to read, of BLOCK and of PAGE bytes.
        creates: number of files that all callers together create; a peer creates fewer.
        commits: number of files that one caller creates.
        stats: number of names to stat.
        files: number of files in the memory cases.
        servers: number of servers in the incast.
        written: number of files that one caller makes and writes in a mount.
        found: number of files that `find` visits in a mount.
    """

    data: int
    reads: int
    small_reads: int
    creates: int
    commits: int
    stats: int
    files: int
    servers: int
    written: int
    found: int


WHOLE = Sizes(
    data=512 << 20, reads=256, small_reads=200_000, creates=8192, commits=500, stats=20_000,
    files=1_000_000, servers=16, written=200, found=100_000,
)  # fmt: skip
QUICK = Sizes(
    data=32 << 20, reads=8, small_reads=640, creates=64, commits=20, stats=256, files=2000,
    servers=3, written=16, found=250,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Options of one run of the benchmark.

    Attributes:
        work: folder of file systems and raw files; all files written there are removed.
        peers: folder of the peers' environments, which remain.
        only: cases to run, from CASES.
        passthrough: program that mounts a folder of this disk, for `bench mount`.
    """

    work: Path
    peers: Path
    only: tuple[str, ...]
    rounds: int
    sizes: Sizes = WHOLE
    passthrough: Path | None = None


class Setting:
    """Context of a run: folder, sizes and progress; a context manager.

    SIGTERM ends the run and its services.
    """

    def __init__(self, spec: Spec, say: Say) -> None:
        self.spec, self._say = spec, say
        spec.work.mkdir(parents=True, exist_ok=True)
        self.work = spec.work.resolve()
        self.sizes = spec.sizes
        self._signal = 0

    def __enter__(self) -> Self:
        self._end = ExitStack()
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGTERM, self._leave)
            self._end.callback(signal.signal, signal.SIGTERM, before)
        self._end.callback((self.work / "raw.bin").unlink, missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end.close()

    def say(self, text: str) -> None:
        """Reports progress; raises SystemExit after SIGTERM."""
        if self._signal:
            raise SystemExit(128 + self._signal)
        self._say(text)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        # The interrupted call may catch every exception, so `say` raises SystemExit again.
        self._signal = number
        raise SystemExit(128 + number)

    def rounds(self, what: str, candidates: dict[str, Callable[[], _T]]) -> dict[str, list[_T]]:
        """Runs `interleaved` and reports the candidate of `what` that is running."""

        def reporting(name: str, run: Callable[[], _T]) -> Callable[[], _T]:
            def run_and_report() -> _T:
                self.say(f"{what}: {name}")
                return run()

            return run_and_report

        runs = {name: reporting(name, run) for name, run in candidates.items()}
        return interleaved(runs, self.spec.rounds)

    def raw_file(self) -> Path:
        """Returns a file of `sizes.data` random bytes, in the page cache."""
        path = self.work / "raw.bin"
        if not path.exists() or path.stat().st_size != self.sizes.data:
            path.write_bytes(contents(self.sizes.data))
        with open(path, "rb", buffering=0) as file:
            memory = bytearray(BLOCK)
            while file.readinto(memory):
                continue
        return path

    def put(self, client: Client, path: str) -> None:
        """Writes the bytes of `raw_file` to `path`."""
        data = memoryview(contents(self.sizes.data))
        with client.open(path, "wb") as file:
            for at in range(0, len(data), BLOCK):
                file.write(data[at : at + BLOCK])


def contents(size: int) -> bytes:
    """Returns random bytes; equal sizes give equal bytes."""
    return np.random.default_rng(5).bytes(size)


def remote() -> dict[str, Any]:
    """Returns the settings of a client that reads over the network even from its own host."""
    return {"local": False}


def at_most(case: str, unit: str, value: float, what: str, most: float) -> Row:
    """Returns a row for a value that must be at most `most`."""
    return Row.of_times(case, unit, [value], what, [most], goal=1.0)
