"""Timed candidates of the record benchmark: each reads the same samples and returns its seconds."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fireflyer.bench.records.data import DataSet, drop_cache
from fireflyer.errors import ConfigError
from fireflyer.ffrecord import FileReader
from fireflyer.ffrecord.convert.formats.folder import FolderSource
from fireflyer.ffrecord.convert.record_writer import Plan
from fireflyer.ffrecord.convert.repack import pack
from fireflyer.ffrecord.convert.source import Selected

Indices = npt.NDArray[np.int64]
Timed = Callable[[Indices, int], float]
"""Timed run: a function from (indices, samples per batch) to seconds."""

FIO_DEPTH = 128
PAGE = 4096


def ours(data: DataSet, *, cold: bool) -> Timed:
    """Returns a run that reads whole batches and verifies every sample."""
    reader = FileReader(data.record)

    def run(indices: Indices, batch: int) -> float:
        nonlocal reader
        if cold:
            reader.close()
            drop_cache(data.record)
            reader = FileReader(data.record)
        began = time.perf_counter()
        for start in range(0, len(indices), batch):
            reader.read_batch(indices[start : start + batch])
        return time.perf_counter() - began

    return run


def views(data: DataSet) -> Timed:
    """Returns a run that reads views of the mapped file and touches one byte per page.

    Each sample is verified before the run.
    """
    reader = FileReader(data.record)
    for start in range(0, reader.n, 1024):
        reader.read_views(range(start, min(start + 1024, reader.n)))

    def run(indices: Indices, batch: int) -> float:
        began = time.perf_counter()
        for start in range(0, len(indices), batch):
            for sample in reader.read_views(indices[start : start + batch]):
                sample[::PAGE].sum()
        return time.perf_counter() - began

    return run


def loose(data: DataSet, *, cold: bool) -> Timed:
    """Returns a run that opens, reads and closes one file per sample."""
    names = [str(data.loose_name(index)) for index in range(data.loose)]

    def run(indices: Indices, batch: int) -> float:
        if cold:
            drop_cache(data.folder / "loose")
        wanted = (indices % len(names)).tolist()
        began = time.perf_counter()
        for index in wanted:
            with open(names[index], "rb", buffering=0) as file:
                file.read()
        return time.perf_counter() - began

    return run


def memcpy(data: DataSet) -> Timed:
    """Returns a run that copies as many bytes as each batch has, from memory into a reused block.

    Each batch is one copy.
    """
    sizes = data.sizes()
    source = np.fromfile(data.folder / "raw.bin", np.uint8)
    target = np.ones(1, np.uint8)

    def run(indices: Indices, batch: int) -> float:
        nonlocal target
        parts = np.split(indices, range(batch, len(indices), batch))
        totals = [int(sizes[part].sum()) for part in parts]
        if len(target) < max(totals):
            target = np.ones(max(totals), np.uint8)
        starts = [int(part[0]) * 977 % max(1, len(source) - max(totals)) for part in parts]
        began = time.perf_counter()
        for start, size in zip(starts, totals, strict=True):
            target[:size] = source[start : start + size]
        return time.perf_counter() - began

    return run


def fio(data: DataSet) -> Timed:
    """Returns a run of random direct reads of one size by fio.

    The run's seconds are the samples' bytes divided by fio's rate.

    Raises:
        ConfigError: fio is not installed, or it fails.
    """
    program = shutil.which("fio")
    if program is None:
        raise ConfigError("fio is not installed: apt-get install fio")
    block = -(-int(data.sizes().mean()) // 4096) * 4096

    def run(indices: Indices, batch: int) -> float:
        for engine in ("io_uring", "libaio", "psync"):
            command = [
                program, "--name=read", f"--filename={data.record}", "--rw=randread", "--readonly",
                f"--bs={block}", "--direct=1", f"--ioengine={engine}", f"--iodepth={FIO_DEPTH}",
                f"--io_size={block * len(indices)}", "--output-format=json",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found: Any = json.loads(done.stdout[done.stdout.index("{") :])
                rate: float = found["jobs"][0]["read"]["bw_bytes"]
                return float(data.sizes().mean()) * len(indices) / rate
        raise ConfigError(f"fio cannot read {data.record}: {done.stderr.strip()[-200:]}")

    return run


def torch_loader(data: DataSet, kind: str, workers: int, *, cold: bool = False) -> Timed:
    """Returns a run of torch's DataLoader over our file or over the loose files.

    Args:
        kind: "batched": one tensor and its offsets per batch, by `__getitems__`; "single": one
            tensor per sample, one by one; "loose": one tensor per file.
    """
    import torch
    from torch.utils.data import DataLoader, Dataset

    from fireflyer.ffrecord.torch import Dataset as Records

    class Batched(Records):
        def __getitems__(self, indices: Any) -> Any:
            arena, offsets = self.reader.read_batch(indices)
            return torch.from_numpy(arena), torch.from_numpy(offsets)

    class Single(Dataset[Any]):
        def __init__(self) -> None:
            self.reader = FileReader(data.record)

        def __getitem__(self, index: int) -> Any:
            return torch.from_numpy(self.reader.read_one(index))

    class Loose(Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            with open(data.loose_name(index), "rb", buffering=0) as file:
                return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)

    made: Any = {"batched": lambda: Batched(data.record), "single": Single, "loose": Loose}[kind]()

    batches: list[list[int]] = []  # the loader reads this list in each round and keeps its workers
    loader: Any = DataLoader(
        made,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=_as_it_is,
    )

    def run(indices: Indices, batch: int) -> float:
        if cold:
            drop_cache(data.folder / "loose" if kind == "loose" else data.record)
        parts = np.split(indices, range(batch, len(indices), batch))
        batches[:] = [part.tolist() for part in parts]
        began = time.perf_counter()
        for _ in loader:
            pass
        return time.perf_counter() - began

    return run


def _as_it_is(batch: Any) -> Any:
    return batch


def packing(files: Path, out: Path) -> float:
    """Packs a folder of files into one synced record file and returns the seconds."""
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    source = Selected(FolderSource(files), ["data"])
    pack(source, Plan(out=out), 1, lambda samples, held: None)
    return time.perf_counter() - began


def concatenating(files: Path, out: Path) -> float:
    """Concatenates the same files with `cat` into one synced file; returns the seconds."""
    out.unlink(missing_ok=True)
    began = time.perf_counter()
    with open(out, "wb") as target:
        find = ["find", str(files), "-type", "f", "-print0"]
        with subprocess.Popen(find, stdout=subprocess.PIPE) as names:
            subprocess.run(["xargs", "-0", "cat"], stdin=names.stdout, stdout=target, check=True)
        os.fsync(target.fileno())
    return time.perf_counter() - began


def opening(path: Path, indices: Indices) -> float:
    """Opens a file, reads one batch and returns the seconds."""
    began = time.perf_counter()
    with FileReader(path) as reader:
        reader.read_batch(indices)
    return time.perf_counter() - began
