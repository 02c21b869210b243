"""Bytes of the format: what is written, and that what was written is read."""

import os
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord import FileReader, FileWriter, dump

SAMPLES = [b"alpha", b"", b"x" * 70_000, bytes(range(256)), b"", b"last"]
MEBI = 1 << 20


def contents(reader: FileReader) -> list[bytes]:
    return [sample.tobytes() for sample in reader.read(range(reader.n))]


def write(path: Path, samples: Sequence[bytes], announce: bool) -> None:
    with FileWriter(path, len(samples) if announce else None) as writer:
        for sample in samples:
            writer.write_one(sample)


@pytest.mark.parametrize("announce", [True, False], ids=["n given", "n unknown"])
@pytest.mark.parametrize(
    "samples",
    [[], [b""], [b"one"], SAMPLES, [b"a" * MEBI, b"b", b"c" * (3 * MEBI + 1), b"d"], [b"s"] * 5000],
    ids=["none", "empty", "one", "mixed", "larger than a block", "many"],
)
def test_the_file_is_byte_for_byte_that_of_an_independent_writer(
    tmp_path: Path,
    encode: Callable[[Sequence[bytes]], bytes],
    samples: list[bytes],
    announce: bool,
) -> None:
    write(tmp_path / "a.ffr", samples, announce)
    assert (tmp_path / "a.ffr").read_bytes() == encode(samples)
    assert os.listdir(tmp_path) == ["a.ffr"]


def test_a_file_of_the_independent_writer_is_read(store: Callable[..., Path]) -> None:
    with FileReader(store(SAMPLES)) as reader:
        assert (len(reader), reader.n, contents(reader)) == (6, 6, SAMPLES)
        assert [reader.read_one(i).tobytes() for i in range(6)] == SAMPLES


@settings(max_examples=cases(60), deadline=None)
@given(
    st.lists(st.lists(st.binary(max_size=300), max_size=12), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_round_trip(files: list[list[bytes]], announce: bool, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.ffr") for number in range(len(files))]
        for path, samples in zip(paths, files, strict=True):
            write(path, samples, announce)
        everything = [sample for samples in files for sample in samples]
        with FileReader(paths) as reader:
            assert reader.n == len(everything)
            top = max(0, reader.n - 1)
            indices = data.draw(st.lists(st.integers(0, top), max_size=40 if everything else 0))
            assert [s.tobytes() for s in reader.read(indices)] == [everything[i] for i in indices]
            reader.validate()


def test_offsets_and_checksums_are_those_of_the_format_and_own_their_memory(
    store: Callable[..., Path],
) -> None:
    reader = FileReader([store([b"xy"], "z.ffr"), store(SAMPLES)])
    offsets, checksums = reader.get_offsets(1), reader.get_checksums(1)
    del reader
    sizes = np.array([len(s) for s in SAMPLES])
    assert offsets.tolist() == [12 + 12 * 6, *(12 + 12 * 6 + np.cumsum(sizes))]
    assert checksums.tolist() == [zlib.crc32(s) for s in SAMPLES]
    assert [str(offsets.dtype), str(checksums.dtype)] == ["int64", "uint32"]


@pytest.mark.parametrize("file", [-1, 1])
def test_a_file_number_out_of_range_is_an_index_error(
    store: Callable[..., Path], file: int
) -> None:
    reader = FileReader(store(SAMPLES))
    with pytest.raises(IndexError, match="file index"):
        reader.get_offsets(file)
    with pytest.raises(IndexError, match="file index"):
        reader.get_checksums(file)


def test_a_directory_is_its_files_sorted_by_name(
    store: Callable[..., Path], tmp_path: Path
) -> None:
    store([b"3"], "c.ffr")
    store([b"1", b"2"], "a.ffr")
    store([], "b.ffr")
    store([b"hidden"], ".a.ffr")
    (tmp_path / "notes.txt").write_text("not a record file")
    (tmp_path / "deeper").mkdir()
    store([b"deeper"], "deeper/d.ffr")
    reader = FileReader(tmp_path)
    assert [Path(name).name for name in reader.fnames] == ["a.ffr", "b.ffr", "c.ffr"]
    assert contents(reader) == [b"1", b"2", b"3"]


def test_sample_buffers_of_any_type_are_written_whole(tmp_path: Path) -> None:
    """Not by their first dimension alone, as the original did."""
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    structured = np.zeros(3, dtype=[("a", "<i4"), ("b", "<f8")])
    samples: list[Any] = [
        matrix,
        np.int64(7),
        bytearray(b"ab"),
        memoryview(b"cd"),
        structured,
        np.empty((0, 3)),
    ]
    with FileWriter(tmp_path / "a.ffr", len(samples)) as writer:
        for sample in samples:
            writer.write_one(sample)
    expected = [matrix.tobytes(), np.int64(7).tobytes(), b"ab", b"cd", structured.tobytes(), b""]
    assert contents(FileReader(tmp_path / "a.ffr")) == expected


@pytest.mark.parametrize(
    "sample", [np.arange(10)[::2], np.zeros((3, 4)).T, memoryview(b"abc")[::2]]
)
def test_a_buffer_with_gaps_is_refused_and_the_writer_goes_on(tmp_path: Path, sample: Any) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer:
        with pytest.raises(ValueError, match="C-contiguous"):
            writer.write_one(sample)
        writer.write_one(b"good")
    assert contents(FileReader(tmp_path / "a.ffr")) == [b"good"]


def test_text_is_not_a_sample(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer, pytest.raises(TypeError):
        writer.write_one("text")  # type: ignore[arg-type]


def test_an_old_file_without_metadata_checksum_is_read_with_a_warning(
    store: Callable[..., Path],
) -> None:
    path = store(SAMPLES)
    path.write_bytes(b"\0\0\0\0" + path.read_bytes()[4:])
    with pytest.warns(UserWarning, match=r"a\.ffr.*no checksum") as caught:
        reader = FileReader(path)
    assert caught[0].filename == __file__
    assert contents(reader) == SAMPLES


def test_a_zero_that_is_the_true_checksum_needs_no_warning(tmp_path: Path) -> None:
    """A sample checksum can be solved for that gives the metadata the CRC32 zero."""
    sums = _checksum_that_zeroes_the_metadata()
    metadata = struct.pack("<qIq", 1, sums, 24)
    assert zlib.crc32(metadata) == 0
    (tmp_path / "a.ffr").write_bytes(struct.pack("<I", 0) + metadata + b"data")
    assert FileReader(tmp_path / "a.ffr", check_data=False).read_one(0).tobytes() == b"data"


def _checksum_that_zeroes_the_metadata() -> int:
    """CRC32 is affine in the bits of the field: solve 32 equations over GF(2)."""

    def crc(field: int) -> int:
        return zlib.crc32(struct.pack("<qIq", 1, field, 24))

    zero = crc(0)
    rows = [(crc(1 << bit) ^ zero, 1 << bit) for bit in range(32)]
    target, answer = zero, 0
    for bit in range(32):
        at = next(i for i, (value, _) in enumerate(rows) if value >> bit & 1)
        value, field = rows.pop(at)
        rows = [(v ^ value, f ^ field) if v >> bit & 1 else (v, f) for v, f in rows]
        if target >> bit & 1:
            target, answer = target ^ value, answer ^ field
    return answer


@pytest.mark.parametrize("name", ["a.txt", "a", "ffr", "a.ffr.gz"])
def test_the_suffix_is_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not end in '\.ffr'"):
        FileReader(tmp_path / name)
    with pytest.raises(ConfigError, match=r"does not end in '\.ffr'"):
        FileWriter(tmp_path / name, 1)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b.ffr", os.fsdecode(b"\xff.ffr")])
def test_names_that_are_not_text_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="UTF-8 without zero bytes"):
        FileReader(name)


def test_names_may_be_any_text(tmp_path: Path) -> None:
    path = tmp_path / "データ 'é'.ffr"
    write(path, SAMPLES, True)
    assert contents(FileReader(path)) == SAMPLES


def test_nothing_to_read_is_a_config_error_and_a_missing_file_a_storage_error(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="no record file given"):
        FileReader([])
    with pytest.raises(ConfigError, match=r"no '\*\.ffr' file in directory"):
        FileReader(tmp_path)
    with pytest.raises(StorageError, match=r"absent\.ffr': No such file"):
        FileReader(tmp_path / "absent.ffr")
    with pytest.raises(StorageError, match=r"cannot write .*absent"):
        FileWriter(tmp_path / "absent" / "a.ffr", 1)


def test_dump_splits_evenly(tmp_path: Path) -> None:
    samples = [bytes([i]) * i for i in range(10)]
    names = dump(samples, tmp_path / "parts", nfiles=3)
    assert [Path(name).name for name in names] == [f"PART_{i:05d}.ffr" for i in range(3)]
    assert [FileReader(name).n for name in names] == [4, 4, 2]
    assert contents(FileReader(tmp_path / "parts")) == samples
    assert dump(samples, tmp_path / "one.ffr") == [str(tmp_path / "one.ffr")]
    assert contents(FileReader(tmp_path / "one.ffr")) == samples
    with pytest.warns(UserWarning, match="10 samples fill 5 files instead of 6"):
        dump(samples, tmp_path / "six", nfiles=6)
    with pytest.warns(UserWarning, match="0 samples fill 1 files"):
        dump([], tmp_path / "none", nfiles=2)
    assert FileReader(tmp_path / "none").n == 0
    with pytest.raises(ConfigError):
        dump(samples, tmp_path / "bad", nfiles=0)


def test_import_needs_no_torch() -> None:
    code = "import sys, fireflyer.ffrecord; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
