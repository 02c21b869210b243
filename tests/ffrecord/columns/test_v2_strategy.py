"""v2 files by every strategy: the same bytes in every layout, and no damage that one of them overlooks."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from fireflyer._native.ffrecord import Reader
from fireflyer.errors import ConfigError, Corrupted, StorageError
from fireflyer.ffrecord import FileReader, FileWriter
from fireflyer.ffrecord.reader import Strategy

# Several index pages in each of two commits; a batch of all is shared between threads.
SAMPLES = [bytes([i % 251, i // 251]) * (i * 7919 % 10_000) for i in range(600)]
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"version": 2},
    "align": {"version": 2, "align": 4096},
    "zstd": {"version": 2, "compression": "zstd"},
    "columns": {"columns": {"data": "bytes", "size": "int64"}},
}
Make = Callable[[str], Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(layout: str) -> Path:
        if layout == "zstd":
            pytest.importorskip("zstandard")
        path = tmp_path / f"{layout}.ffr"
        writer = FileWriter(path, **FORMATS[layout])
        for i, sample in enumerate(SAMPLES):
            if i == 400:
                writer.commit()
            if layout == "columns":
                writer.write_row({"data": sample, "size": len(sample)})
            else:
                writer.write_one(sample)
        writer.close()
        return path

    return write


def opened(path: Path, strategy: Strategy) -> FileReader:
    """A reader that has read nothing; a kernel that bars direct reads skips the test."""
    if strategy == "direct":
        try:
            FileReader(path, strategy=strategy).read_one(1)
        except StorageError as error:
            pytest.skip(str(error))
    return FileReader(path, strategy=strategy)


def contents(reader: FileReader, indices: list[int]) -> list[bytes]:
    if reader.columns is None:
        return [sample.tobytes() for sample in reader.read(indices)]
    rows = reader.rows(indices)
    assert all(row["size"] == len(row["data"]) for row in rows)
    return [bytes(row["data"]) for row in rows]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.sample(8)
@pytest.mark.parametrize("strategy", get_args(Strategy))
@pytest.mark.parametrize("layout", FORMATS)
def test_every_layout_reads_the_same(make: Make, layout: str, strategy: Strategy) -> None:
    path = make(layout)
    reader = opened(path, strategy)
    random = np.random.default_rng(3)
    for count in (1, 7, 300, 2000):
        if count == 300:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        indices = random.integers(0, len(SAMPLES), count).tolist()
        assert contents(reader, indices) == [SAMPLES[i] for i in indices]
        arena, offsets = reader.read_batch(indices)
        parts = reader.read(indices)
        assert arena.tobytes() == b"".join(part.tobytes() for part in parts)
        assert offsets.tolist() == [0, *np.cumsum([len(part) for part in parts])]
        if layout == "zstd":
            with pytest.raises(ConfigError, match=r"zstd\.ffr', sample \d+ is compressed"):
                reader.read_views(list(range(len(SAMPLES))))
        else:
            views = reader.read_views(indices)
            assert [view.tobytes() for view in views] == [part.tobytes() for part in parts]
    assert contents(reader, []) == []


@pytest.mark.parametrize("strategy", get_args(Strategy))
@pytest.mark.parametrize("layout", FORMATS)
def test_damage_is_found_by_every_strategy(make: Make, layout: str, strategy: Strategy) -> None:
    path = make(layout)
    offsets = FileReader(path).get_offsets(0).tolist()
    reader = opened(path, strategy)
    flip(path, offsets[450] + 3)
    everything = list(range(len(SAMPLES)))
    with pytest.raises(Corrupted, match=rf"{layout}\.ffr' is damaged: sample 450 .* has checksum"):
        reader.read(everything)
    flip(path, offsets[450] + 3)
    assert contents(reader, [450]) == [SAMPLES[450]]

    fresh = opened(path, strategy)
    place: int = Reader([str(path)], True).last_commit(0)[7][1][1]  # pages of the second commit
    flip(path, place + 40)
    with pytest.raises(Corrupted, match="the index page of samples 400 to 526"):
        fresh.read(everything)
    with pytest.raises(Corrupted, match="the index page of samples 400 to 526"):
        fresh.read_views([450])
    assert contents(fresh, [399]) == [SAMPLES[399]]


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_places_need_not_rise_with_the_numbers(
    tmp_path: Path, encode_v2: Callable[..., bytes], strategy: Strategy
) -> None:
    samples = [bytes([i]) * (i * 997 % 9000) for i in range(100)]
    path = tmp_path / "a.ffr"
    file = bytearray(encode_v2([samples]))
    path.write_bytes(file)
    place: int = Reader([str(path)], True).last_commit(0)[7][0][1]
    head, end = place + 32, place + 32 * (1 + len(samples))
    entries = [file[at : at + 32] for at in range(head, end, 32)]
    file[head:end] = b"".join(reversed(entries))
    struct.pack_into("<I", file, place, zlib.crc32(file[place + 4 : place + 4096]))
    path.write_bytes(file)
    reader = opened(path, strategy)
    for indices in (list(range(100)), [5, 90, 5, 0, 99, 98]):
        assert contents(reader, indices) == [samples[99 - i] for i in indices]
