"""What all cases of the file system's benchmark share: sizes, folders, clients, and the rounds."""

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import numpy as np

from fireflyer.bench.report import Row
from fireflyer.bench.turns import interleaved
from fireflyer.fs3.client import Client

BLOCK = 4 << 20
DEPTH = 4
PAGE = 4096
BATCH = 64

Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much a round does.

    Attributes:
        data: bytes of the file that is read, and of one that is written.
        reads, small_reads: blocks that are read, of BLOCK and of PAGE bytes.
        creates: files, by all callers together; of a peer's fewer.
        commits: files that one caller makes.
        stats: names that are looked at.
        files: of the metadata's memory.
        servers: of the incast.
    """

    data: int
    reads: int
    small_reads: int
    creates: int
    commits: int
    stats: int
    files: int
    servers: int


WHOLE = Sizes(
    data=512 << 20, reads=256, small_reads=200_000, creates=8192, commits=500, stats=20_000,
    files=1_000_000, servers=16,
)  # fmt: skip
QUICK = Sizes(
    data=32 << 20, reads=8, small_reads=640, creates=64, commits=20, stats=256, files=2000,
    servers=3,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run of the benchmark.

    Attributes:
        work: where file systems and raw files lie; what is written there is removed.
        peers: folder of the peers' environments, which stay.
        only: cases to run, of CASES.
    """

    work: Path
    peers: Path
    only: tuple[str, ...]
    rounds: int
    sizes: Sizes = WHOLE


class Setting:
    """Where and with what a run measures; a context manager. SIGTERM ends what is within, services too."""

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
        """What goes on; raises SystemExit after SIGTERM."""
        if self._signal:
            raise SystemExit(128 + self._signal)
        self._say(text)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        # What it interrupts may be a call that answers for every error itself: `say` raises it again.
        self._signal = number
        raise SystemExit(128 + number)

    def rounds(self, what: str, candidates: dict[str, Callable[[], _T]]) -> dict[str, list[_T]]:
        """See `interleaved`; says which candidate of `what` runs."""

        def telling(name: str, run: Callable[[], _T]) -> Callable[[], _T]:
            def told() -> _T:
                self.say(f"{what}: {name}")
                return run()

            return told

        runs = {name: telling(name, run) for name, run in candidates.items()}
        return interleaved(runs, self.spec.rounds)

    def raw_file(self) -> Path:
        """A file of `sizes.data` random bytes, in the page cache."""
        path = self.work / "raw.bin"
        if not path.exists() or path.stat().st_size != self.sizes.data:
            path.write_bytes(contents(self.sizes.data))
        with open(path, "rb", buffering=0) as file:
            memory = bytearray(BLOCK)
            while file.readinto(memory):
                continue
        return path

    def put(self, client: Client, path: str) -> None:
        """The same bytes as those of `raw_file`."""
        data = memoryview(contents(self.sizes.data))
        with client.open(path, "wb") as file:
            for at in range(0, len(data), BLOCK):
                file.write(data[at : at + BLOCK])


def contents(size: int) -> bytes:
    """Random bytes; equal sizes, equal bytes."""
    return np.random.default_rng(5).bytes(size)


def remote() -> dict[str, Any]:
    """Settings of a client that reads over the network also where the storage is on its host."""
    return {"local": False}


def at_most(case: str, unit: str, value: float, what: str, most: float) -> Row:
    """A row of what must not be more than `most`."""
    return Row.of_times(case, unit, [value], what, [most], goal=1.0)
