"""Limits for the checkpoint benchmark: memcpy on all cores, raw writes and raw reads."""

import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fireflyer.bench.harness.command_process import TimedProcess
from fireflyer.errors import ConfigError

BLOCK = 1 << 20
DEPTH = 16
_WORKER = Path(__file__).parents[1] / "peers" / "memcpy.py"
_AROUND_CACHES = "glibc.cpu.x86_non_temporal_threshold"
_BUFFER = 1 << 30
_LEAST_THRESHOLD = 0x4040


class Memcpy(TimedProcess):
    """Copier of `size` bytes on all cores, in its own process.

    Both buffers are far larger than a cache, lie on huge pages, and are faulted in before the first
    copy.
    """

    def __init__(self, size: int) -> None:
        self.threads = len(os.sched_getaffinity(0))
        # Above the threshold, glibc copies from two pages in turn; far above it, from four. This
        # benchmark wants two pages, so the threshold is half of the bytes that a thread copies.
        threshold = max(_LEAST_THRESHOLD, min(size, _BUFFER) // self.threads // 2)
        super().__init__(
            "copies memory",
            [sys.executable, "-P", _WORKER, str(size), str(self.threads), str(_BUFFER)],
            {**os.environ, "GLIBC_TUNABLES": f"{_AROUND_CACHES}={threshold}"},
        )

    @property
    def title(self) -> str:
        return f"memcpy, {self.threads} threads"

    def __call__(self) -> float:
        """Returns the seconds of one copy; raises PeerLost if the process ended."""
        return self.seconds("copy")


class RawFile:
    """File written and read with O_DIRECT, sequentially, with several blocks in flight.

    fio reads and writes if it is installed, otherwise threads of this process do.

    Attributes:
        title: name of the program that reads and writes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = -(-size // BLOCK) * BLOCK
        self._share = size / self.size
        self._fio = shutil.which("fio")
        self.title = "O_DIRECT by fio" if self._fio else f"O_DIRECT by {DEPTH} threads"

    def close(self) -> None:
        """Removes the file."""
        self.path.unlink(missing_ok=True)

    def write(self) -> float:
        """Returns the seconds to write the bytes into a new file and sync it."""
        self.close()
        return self._share * (self._by_fio("write") if self._fio else self._by_threads("write"))

    def read(self) -> float:
        """Returns the seconds to read the file that `write` left."""
        return self._share * (self._by_fio("read") if self._fio else self._by_threads("read"))

    def _by_fio(self, way: str) -> float:
        assert self._fio is not None
        for engine in ("io_uring", "libaio", "psync"):
            command = [
                self._fio, "--name=raw", f"--filename={self.path}", f"--rw={way}", "--direct=1",
                f"--bs={BLOCK}", f"--iodepth={DEPTH}", f"--ioengine={engine}", f"--size={self.size}",
                "--end_fsync=1" if way == "write" else "--readonly", "--output-format=json",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found: Any = json.loads(done.stdout[done.stdout.index("{") :])
                rate: float = found["jobs"][0][way]["bw_bytes"]
                return self.size / rate
        raise ConfigError(f"fio cannot {way} {self.path}: {done.stderr.strip()[-200:]}")

    def _by_threads(self, way: str) -> float:
        flags = os.O_RDONLY if way == "read" else os.O_WRONLY | os.O_CREAT
        buffers = [mmap.mmap(-1, BLOCK) for _ in range(DEPTH)]
        move: Callable[..., int] = os.preadv if way == "read" else os.pwritev
        descriptor = os.open(self.path, flags | os.O_DIRECT, 0o600)
        try:

            def work(part: int) -> None:
                for at in range(part * BLOCK, self.size, DEPTH * BLOCK):
                    if move(descriptor, [buffers[part]], at) != BLOCK:
                        raise ConfigError(f"a {way} of {BLOCK} bytes of {self.path} was cut short")

            with ThreadPoolExecutor(DEPTH) as pool:
                began = time.perf_counter()
                list(pool.map(work, range(DEPTH)))
                if way == "write":
                    os.fsync(descriptor)
                return time.perf_counter() - began
        finally:
            os.close(descriptor)
