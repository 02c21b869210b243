"""Measures switching to another expert with our store and with other loaders, interleaved in one
process."""

import contextlib
import gc
import itertools
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch

from fireflyer.bench.harness import goals
from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row
from fireflyer.experts import Store, sim
from fireflyer.experts.folder import pack
from fireflyer.storage import open_storage

EXPERTS = 4
WIDTH = 2048
PIECE = 4 << 20
IN_FLIGHT = 4
PAGE = 4096


def _model(layers: int) -> torch.nn.Module:
    with torch.device("meta"):
        return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def _touch(model: torch.nn.Module) -> None:
    """Reads an element of each page, so that lazily mapped files are in memory."""
    for parameter in model.parameters():
        parameter.detach().view(-1)[:: PAGE // parameter.element_size()].sum()


def _forget(path: Path) -> None:
    """Drops a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


class Raw:
    """Reads a file with O_DIRECT into memory that is already faulted in, several reads at a time."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size + PAGE)
        self._view = memoryview(self._memory)
        for start in range(0, len(self._view), PAGE):
            self._view[start] = 1
        self._threads = ThreadPoolExecutor(IN_FLIGHT)

    def read(self, path: Path) -> None:
        size = path.stat().st_size
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

        def one(start: int) -> None:
            asked = min(PIECE, -(-(size - start) // PAGE) * PAGE)
            got = os.preadv(fd, [self._view[start : start + asked]], start)
            if got != min(asked, size - start):
                raise OSError(f"a read of {asked} bytes of {path} returned {got}")

        try:
            list(self._threads.map(one, range(0, size, PIECE)))
        finally:
            os.close(fd)


class Switches:
    """Experts in the formats of all candidates, and stores of these experts."""

    def __init__(self, size: int, work: Path, stack: contextlib.ExitStack) -> None:
        self._layers = max(1, size // (WIDTH * (WIDTH + 1) * 4))
        self._work = work
        folder = work / "experts"
        shutil.rmtree(work, ignore_errors=True)
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        for number in range(EXPERTS):
            torch.manual_seed(number)
            model = _model(self._layers).to_empty(device="cpu")
            state = {name: torch.randn_like(one) for name, one in model.state_dict().items()}
            folder.mkdir(parents=True, exist_ok=True)
            safetensors.torch.save_file(state, folder / f"e{number}.safetensors")
            torch.save(state, work / f"e{number}.pt")
        del model, state
        os.sync()
        sizes = [found.size for _, found in pack(open_storage(folder))]
        one = max(sizes)
        self.raw = Raw(one)
        self._cold = stack.enter_context(
            Store(folder, warm_bytes=2 * one, warm_folder=_shared("cold"))
        )
        self._warm = stack.enter_context(
            Store(folder, warm_bytes=2 * one, hot_bytes=one, warm_folder=_shared("warm"))
        )
        for number in (0, 1):
            self._serve(self._warm, number)

    def file(self, number: int) -> Path:
        return self._work / "experts" / f"e{number}.safetensors"

    def timed(self, act: Callable[[int], object], numbers: int = EXPERTS) -> Callable[[], float]:
        """Returns a function that measures a switch to the next expert, whose files are cold."""
        turn = itertools.cycle(range(numbers))

        def measure() -> float:
            number = next(turn)
            _forget(self.file(number))
            _forget(self._work / f"e{number}.pt")
            gc.collect()
            begin = time.perf_counter()
            act(number)
            return time.perf_counter() - begin

        return measure

    def _serve(self, store: Store, number: int) -> None:
        with store.get(f"e{number}") as expert:
            model = _model(self._layers)
            expert.load_into(model)
            _touch(model)

    def cold(self, number: int) -> None:
        self._serve(self._cold, number)

    def warm(self, number: int) -> None:
        self._serve(self._warm, number)

    def torch_load(self, number: int) -> None:
        model = _model(self._layers)
        path = self._work / f"e{number}.pt"
        model.load_state_dict(torch.load(path, weights_only=True), assign=True)
        _touch(model)

    def safetensors_load(self, number: int) -> None:
        model = _model(self._layers)
        model.load_state_dict(safetensors.torch.load_file(self.file(number)), assign=True)
        _touch(model)


def _shared(name: str) -> Path:
    return Path(f"/dev/shm/bench-experts-{os.getpid()}-{name}")


def run(size: int, work: Path, rounds: int, tell: Callable[[str], None]) -> list[Row]:
    """Measures switches, and simulates hit rates."""
    with contextlib.ExitStack() as stack:
        tell("experts: writing files")
        switches = Switches(size, work, stack)
        for number in range(EXPERTS):  # fills the warm tier, whose pages are then reused
            switches.cold(number)
        tell("experts: switches")
        found = interleaved(
            {
                "raw": switches.timed(lambda number: switches.raw.read(switches.file(number))),
                "cold": switches.timed(switches.cold),
                "torch.load": switches.timed(switches.torch_load),
                "safetensors": switches.timed(switches.safetensors_load),
                "warm": switches.timed(switches.warm, 2),
            },
            rounds,
        )
    rows = [
        Row.of_times(
            "switch to a cold expert", "s", found["cold"], name, found[peer], found["raw"],
            *goals.EXPERTS[peer],
        )
        for peer, name in (
            ("raw", "raw O_DIRECT of the bytes"), ("torch.load", "torch.load, cold"),
            ("safetensors", "safetensors, cold"),
        )
    ]  # fmt: skip
    rows.append(
        Row.of_times(
            "switch to a warm expert", "s", found["warm"], "torch.load, cold",
            found["torch.load"], (), *goals.EXPERTS["warm"],
        )
    )  # fmt: skip
    return rows + _hit_rates(tell)


def _hit_rates(tell: Callable[[str], None]) -> list[Row]:
    rows = []
    for stream in ("zipf", "bursty"):
        tell(f"experts: {stream} requests")
        setup = sim.Setup(requests=2000)
        lru, hints = (sim.simulate(setup, stream, policy).hits for policy in ("lru", "hints"))
        rows.append(
            Row.of_speeds(f"hit rate, {stream}, hints", "share", [hints], "LRU", [lru], goal=1.0)
        )
    return rows
