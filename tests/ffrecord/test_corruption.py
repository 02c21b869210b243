"""Damage of any kind is reported as such, and never read as data."""

import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer._native import crc32
from fireflyer.errors import Corrupted, StorageError
from fireflyer.ffrecord import FileReader

SAMPLES = [b"alpha", b"", b"beta" * 9, b"gamma"]
METADATA_END = 12 + 12 * len(SAMPLES)
Encode = Callable[[Sequence[bytes]], bytes]


def read_all(path: Path, check_data: bool = True) -> list[bytes]:
    with FileReader(path, check_data) as reader:
        return [sample.tobytes() for sample in reader.read(range(reader.n))]


def index_file(n: int, offsets: Sequence[int], data: bytes) -> bytes:
    """A file whose metadata checksum is right, whatever its index says."""
    sums = struct.pack(f"<{len(offsets)}I", *[0] * len(offsets))
    metadata = struct.pack("<q", n) + sums + struct.pack(f"<{len(offsets)}q", *offsets)
    return struct.pack("<I", zlib.crc32(metadata)) + metadata + data


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_is_found(tmp_path: Path, encode: Encode, mask: int) -> None:
    good = encode(SAMPLES)
    path = tmp_path / "a.ffr"
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= mask
        path.write_bytes(bad)
        with pytest.raises(Corrupted, match=r"a\.ffr' is damaged"):
            read_all(path)
        if position < METADATA_END:
            with pytest.raises(Corrupted):
                read_all(path, check_data=False)
        else:
            found = read_all(path, check_data=False)
            assert sum(a != b for a, b in zip(found, SAMPLES, strict=True)) == 1
            with pytest.raises(Corrupted):
                FileReader(path, check_data=False).validate()
            FileReader(path).validate(data=False)


def test_only_the_damaged_sample_cannot_be_read_and_is_named(
    tmp_path: Path, encode: Encode
) -> None:
    bad = bytearray(encode(SAMPLES))
    bad[METADATA_END + 5] ^= 1
    (tmp_path / "a.ffr").write_bytes(bad)
    (tmp_path / "0.ffr").write_bytes(encode([b"before"]))
    reader = FileReader(tmp_path)
    assert [s.tobytes() for s in reader.read([0, 1, 2, 4])] == [b"before", b"alpha", b"", b"gamma"]
    with pytest.raises(Corrupted, match=r"a\.ffr.*sample 2 \(36 bytes at byte 65\) has checksum"):
        reader.read([4, 3, 0])


@pytest.mark.parametrize("samples", [SAMPLES, [*SAMPLES, b""], [b""], []])
def test_truncation_at_every_length_is_found(
    tmp_path: Path, encode: Encode, samples: list[bytes]
) -> None:
    good = encode(samples)
    path = tmp_path / "a.ffr"
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(Corrupted):
            read_all(path)


@pytest.mark.parametrize("samples", [SAMPLES, [*SAMPLES, b""], [b""]])
def test_bytes_after_the_end_are_found(
    tmp_path: Path, encode: Encode, samples: list[bytes]
) -> None:
    (tmp_path / "a.ffr").write_bytes(encode(samples) + b"\0")
    with pytest.raises(Corrupted, match=f"sample {len(samples) - 1} "):
        read_all(tmp_path / "a.ffr")


@pytest.mark.parametrize("size", [12, 13, 24, 4096])
def test_the_empty_header_of_a_dead_writer_is_not_an_empty_file(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.ffr").write_bytes(bytes(size))
    with pytest.raises(Corrupted, match="a writer that died"):
        FileReader(tmp_path / "a.ffr")


@pytest.mark.parametrize(
    ("n", "offsets", "data"),
    [
        (-1, [], b""),
        (0, [], b"data"),
        (1, [], b""),
        (2**62, [24], b""),
        (2**63 - 1, [24], b""),
        (1, [0], b"data"),
        (1, [25], b"data"),
        (1, [-24], b"data"),
        (1, [29], b"data"),
        (1, [2**62], b"data"),
        (2, [36, 35], b"data"),
        (2, [36, 41], b"data"),
        (2, [36, -1], b"data"),
        (2, [37, 38], b"data"),
        (3, [48, 50, 49], b"data"),
        (3, [48, 2**62, 49], b"data"),
    ],
)
def test_an_index_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, n: int, offsets: list[int], data: bytes
) -> None:
    content = index_file(n, offsets, data)
    for check_data in (True, False):
        (tmp_path / "a.ffr").write_bytes(content)
        with pytest.raises(Corrupted, match="is damaged"):
            FileReader(tmp_path / "a.ffr", check_data)
    # The same index in an old file, where no checksum covers it; n = 0 is then a dead writer's header.
    (tmp_path / "a.ffr").write_bytes(b"\0\0\0\0" + content[4:])
    with pytest.raises(Corrupted, match="is damaged"):
        FileReader(tmp_path / "a.ffr")


@settings(max_examples=cases(300), deadline=None)
@given(
    st.binary(max_size=120)
    | st.builds(
        lambda n, offsets, data: index_file(n, offsets, data),
        st.integers(-2, 6),
        st.lists(st.integers(-100, 200) | st.integers(-(2**63), 2**63 - 1), max_size=5),
        st.binary(max_size=60),
    )
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ffr"
    path.write_bytes(content)
    for check_data in (True, False):
        try:
            found = read_all(path, check_data)
        except Corrupted:
            continue
        assert b"".join(found) == content[12 + 12 * len(found) :]


def test_a_file_cut_while_it_is_open_is_found(tmp_path: Path, encode: Encode) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode(SAMPLES))
    reader = FileReader(path, check_data=False)
    os.truncate(path, METADATA_END + 20)
    assert reader.read_one(0).tobytes() == b"alpha"
    with pytest.raises(Corrupted, match=r"ends at byte 80, shorter than when it was opened"):
        reader.read([0, 1, 2])


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.ffr")
    with pytest.raises(StorageError, match="not a regular file"):
        FileReader(tmp_path / "fifo.ffr")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner.ffr").mkdir()
    with pytest.raises(StorageError, match="not a regular file"):
        FileReader(tmp_path / "folder")


def test_one_bad_file_of_many_is_named_and_none_stays_open(tmp_path: Path, encode: Encode) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.ffr").write_bytes(encode(SAMPLES))
    os.truncate(tmp_path / "b.ffr", 30)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Corrupted, match=r"b\.ffr"):
        FileReader(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_validate_checks_samples_across_its_block_and_sees_later_damage(
    tmp_path: Path, encode: Encode
) -> None:
    big = np.random.default_rng(0).bytes((5 << 20) + 3)
    samples = [b"head", big[: (1 << 20) - 7], b"", big, b"tail"]
    path = tmp_path / "a.ffr"
    path.write_bytes(encode(samples))
    reader = FileReader(path, check_data=False)
    reader.validate()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"X")
    with pytest.raises(Corrupted, match="sample 4 "):
        reader.validate()
    with path.open("r+b") as file:
        file.seek(4)
        file.write(b"X")
    with pytest.raises(Corrupted, match="header"):
        reader.validate(data=False)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.validate()


@pytest.mark.full
def test_a_sample_of_more_than_two_gibibytes() -> None:
    """One read call of Linux moves at most 2 GiB - 4 KiB. The sample is a hole in a tmpfs, free to read."""
    if _available_memory() < 6 << 30:
        pytest.skip("needs 6 GiB of free memory")
    size = (1 << 31) + 12_345
    checksum = crc32(np.zeros(size, np.uint8).data)
    metadata = struct.pack("<q2I2q", 2, checksum, zlib.crc32(b"end"), 36, 36 + size)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "a.ffr")
        with path.open("wb") as file:
            file.write(struct.pack("<I", zlib.crc32(metadata)) + metadata)
            file.seek(36 + size)
            file.write(b"end")
        arena, offsets = FileReader(path).read_batch([1, 0])
    assert offsets.tolist() == [0, 3, 3 + size]
    assert arena[:3].tobytes() == b"end"
    assert not arena[-4096:].any()


def _available_memory() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024
