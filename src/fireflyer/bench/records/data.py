"""Data sets of the record benchmark, made once in a work folder.

Each data set is stored in our format, as loose files, and as raw bytes.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fireflyer.ffrecord import FileWriter

FILES_A_FOLDER = 1000


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Samples of one distribution.

    Attributes:
        folder: holds raw.bin, offsets.npy, data.ffr and, if requested, loose/.
        count: number of samples.
        mean, deviation: parameters of the normal distribution of the samples' lengths in bytes;
            lengths are clipped to a third and to 5/3 of the mean.
        loose: number of samples that are also stored as loose files.
    """

    name: str
    folder: Path
    count: int
    mean: int
    deviation: int
    loose: int

    @property
    def record(self) -> Path:
        return self.folder / "data.ffr"

    def loose_name(self, index: int) -> Path:
        return self.folder / "loose" / f"{index // FILES_A_FOLDER:03d}" / f"{index:06d}.bin"

    def make(self) -> None:
        """Writes the data set unless it exists; equal arguments give equal bytes."""
        marker = self.folder / f"written-{self.count}-{self.mean}-{self.deviation}-{self.loose}"
        if marker.exists():
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        rng = np.random.default_rng(7)
        sizes = rng.normal(self.mean, self.deviation, self.count)
        sizes = np.clip(sizes, self.mean // 3, self.mean * 5 // 3).astype(np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        np.save(self.folder / "offsets.npy", offsets)
        with (
            open(self.folder / "raw.bin", "wb") as raw,
            FileWriter(self.record, self.count) as record,
        ):
            for index, (start, end) in enumerate(pairwise(offsets.tolist())):
                sample = rng.bytes(end - start)
                raw.write(sample)
                record.write_one(sample)
                if index < self.loose:
                    path = self.loose_name(index)
                    if index % FILES_A_FOLDER == 0:
                        path.parent.mkdir(parents=True)
                    path.write_bytes(sample)
        os.sync()
        marker.write_text("")

    def sizes(self) -> npt.NDArray[np.int64]:
        offsets: npt.NDArray[np.int64] = np.load(self.folder / "offsets.npy")
        return np.diff(offsets)


def order(seed: int, count: int, wanted: int) -> npt.NDArray[np.int64]:
    """Returns `wanted` random indices below `count`; none repeats before all have occurred."""
    rng = np.random.default_rng(seed)
    found = [rng.permutation(count) for _ in range(-(-wanted // count))]
    return np.concatenate(found)[:wanted]


def drop_cache(path: Path) -> None:
    """Writes back and drops every cached page of a file, or of all files below a folder."""
    for file in [path] if path.is_file() else _files(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(path: Path) -> None:
    """Reads a file, or all files below a folder, once."""
    buffer = bytearray(1 << 20)
    for file in [path] if path.is_file() else _files(path):
        with open(file, "rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def tiny_samples(path: Path, count: int) -> None:
    """Writes a v2 file of `count` samples of 8 bytes unless it exists."""
    if path.exists():
        return
    block = np.arange(count, dtype="<i8").tobytes()
    with FileWriter(path, count, version=2) as writer:
        view = memoryview(block)
        for at in range(0, len(block), 8):
            writer.write_one(view[at : at + 8])
