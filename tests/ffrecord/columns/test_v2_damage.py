"""Damage to v2 files: reported as such, repaired where a torn slot is the cause, never read as data."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from fireflyer.errors import Corrupted
from fireflyer.ffrecord import FileReader, FileWriter

Encode = Callable[..., bytes]
FIRST = [b"alpha", b"", b"beta" * 9]
SECOND = [b"gamma", b"d" * 5000]
BOTH = FIRST + SECOND
SLOTS = 4096  # where they are in a file without columns
DATA = SLOTS + 8192


def contents(path: Path) -> list[bytes]:
    with FileReader(path) as reader:
        return [sample.tobytes() for sample in reader.read(range(reader.n))]


def padding(file: bytes, path: Path) -> set[int]:
    """Bytes from the first sample on that belong to nothing of the last commit.

    They are what lies between samples and structures, and the index and footer of the first commit.
    """
    path.write_bytes(file)
    reader = FileReader(path)
    used = set(range(DATA))
    for start, sample in zip(reader.get_offsets(0).tolist(), BOTH, strict=False):
        used.update(range(start, start + len(sample)))
    footer = struct.unpack_from("<QQ", file, SLOTS + 4096 * _last_slot(file) + 16)
    used.update(range(footer[0], sum(footer)))
    runs = struct.unpack_from("<I", file, footer[0] + 4)[0]
    for run in range(runs):
        place = struct.unpack_from("<Q", file, footer[0] + 24 + 24 * run)[0]
        used.update(range(place, place + 4096))
    return set(range(len(file))) - used


def _last_slot(file: bytes) -> int:
    return 1 if struct.unpack_from("<Q", file, SLOTS + 4096 + 40)[0] else 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("mask", [0x01, 0xFF])
@pytest.mark.parametrize("commits", [[FIRST], [FIRST, SECOND]], ids=["one", "two"])
def test_a_flip_of_any_byte_is_found_or_changes_nothing(
    tmp_path: Path, encode_v2: Encode, commits: list[list[bytes]], mask: int
) -> None:
    """Nothing: where no commit has bytes, and in the newer of two slots, which the footer replaces."""
    good = encode_v2(commits)
    samples = [s for part in commits for s in part]
    path = tmp_path / "a.ffr"
    harmless = padding(good, path)
    if len(commits) == 2:
        harmless |= set(range(SLOTS + 4096, SLOTS + 8192))
    # In the zeros of pages one byte in 17 stands for all.
    plain_zero = {at for at in range(len(good)) if good[at - 32 : at + 32] == bytes(64)}
    positions = [at for at in range(len(good)) if at not in plain_zero or at % 17 == 0]
    for position in positions:
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([good[position] ^ mask]))
        if position in harmless:
            assert contents(path) == samples
        else:
            with pytest.raises(Corrupted, match=r"a\.ffr' is damaged"):
                contents(path)
            with pytest.raises(Corrupted):
                FileReader(path).validate()
        with path.open("r+b") as file:
            file.seek(position)
            file.write(good[position : position + 1])
    assert path.read_bytes() == good


@pytest.mark.sample(1)
@pytest.mark.parametrize("commits", [[[]], [FIRST], [FIRST, SECOND]])
def test_truncation_at_every_length_is_found(
    tmp_path: Path, encode_v2: Encode, commits: list[list[bytes]]
) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2(commits))
    for length in range(path.stat().st_size - 1, -1, -1):
        os.truncate(path, length)
        with pytest.raises(Corrupted, match=r"a\.ffr' is damaged"):
            FileReader(path)


@pytest.mark.parametrize("garbage", [b"\0", b"x" * 5000, b"\0" * 40_000])
def test_bytes_behind_the_last_commit_are_ignored_and_cut_off(
    tmp_path: Path, encode_v2: Encode, garbage: bytes
) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2([FIRST]) + garbage)
    assert contents(path) == FIRST
    with FileWriter.append(path) as writer:
        for sample in SECOND:
            writer.write_one(sample)
    assert path.read_bytes() == encode_v2([FIRST, SECOND])


def test_a_damaged_sample_is_named_and_the_others_are_read(
    tmp_path: Path, encode_v2: Encode
) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2([FIRST]).replace(b"betab", b"betaX"))
    reader = FileReader(path)
    assert [s.tobytes() for s in reader.read([0, 1])] == FIRST[:2]
    with pytest.raises(
        Corrupted, match=r"a\.ffr.*sample 2 \(36 bytes at byte 12296\) has checksum"
    ):
        reader.read([0, 2])


def test_a_torn_slot_is_replaced_by_the_footer_and_written_again(
    tmp_path: Path, encode_v2: Encode
) -> None:
    path = tmp_path / "a.ffr"
    good = encode_v2([FIRST, SECOND])
    later = encode_v2([FIRST, SECOND, [b"more"]])
    for torn in range(4, 64):
        file = bytearray(good)
        file[SLOTS + 4096 + torn : SLOTS + 4096 + 64] = bytes(64 - torn)
        path.write_bytes(file)
        assert contents(path) == BOTH
        with FileWriter.append(path) as writer:
            assert writer.count == 5
        assert path.read_bytes() == good
        path.write_bytes(file)
        with FileWriter.append(path) as writer:
            writer.write_one(b"more")
        assert path.read_bytes() == later


def test_a_torn_slot_without_its_commit_is_damage(tmp_path: Path, encode_v2: Encode) -> None:
    path = tmp_path / "a.ffr"
    good = encode_v2([FIRST, SECOND, [b"more"]])
    torn = bytearray(good)
    torn[SLOTS + 4096 + 10] ^= 1  # of commit 1, older than the last
    path.write_bytes(torn)
    with pytest.raises(Corrupted, match="slot 1 is damaged, and no later commit ends the file"):
        FileReader(path)
    torn = bytearray(good)
    torn[SLOTS + 10] ^= 1
    for tail in (b"x", bytes(4096), b"x" * 5000):
        path.write_bytes(torn + tail)
        with pytest.raises(Corrupted, match="slot 0 is damaged"):
            FileReader(path)
    torn[SLOTS + 4096 + 10] ^= 1
    path.write_bytes(torn)
    with pytest.raises(Corrupted, match="neither of its slots"):
        FileReader(path)


def test_a_slot_of_a_commit_that_is_not_next_to_the_other_is_damage(
    tmp_path: Path, encode_v2: Encode
) -> None:
    old = encode_v2([FIRST])
    new = bytearray(encode_v2([FIRST, *[[b"more"]] * 3]))
    new[SLOTS : SLOTS + 64] = old[SLOTS : SLOTS + 64]
    (tmp_path / "a.ffr").write_bytes(new)
    with pytest.raises(Corrupted, match="slot 0 is damaged"):
        FileReader(tmp_path / "a.ffr")


def test_a_file_cut_while_it_is_open_is_found(tmp_path: Path) -> None:
    """Also where the cut is in the mapped index, whose use would end the process."""
    path = tmp_path / "a.ffr"
    with FileWriter(path, version=2) as writer:
        for i in range(1000):
            writer.write_one(bytes([i % 256]) * 100)
    for length in (path.stat().st_size - 1, path.stat().st_size - 8192, 50_000, 0):
        whole = path.read_bytes()
        reader = FileReader(path, check_data=False)
        os.truncate(path, length)
        for use in (reader.read_one, reader.get_offsets, reader.get_checksums):
            with pytest.raises(Corrupted, match=f"ends at byte {length}, shorter than when"):
                use(0)
        path.write_bytes(whole)


def test_the_index_of_v1_may_be_cut_while_it_is_open(tmp_path: Path, encode: Encode) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode([b"x"] * 2000))
    reader = FileReader(path)
    os.truncate(path, 100)
    with pytest.raises(Corrupted, match="ends at byte 100, shorter than when"):
        reader.read_one(1999)


def reseal_page(file: bytearray, place: int) -> None:
    file[place : place + 4] = struct.pack("<I", zlib.crc32(file[place + 4 : place + 4096]))


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 0),
        (0, 2**63),
        (0, DATA + 1),
        (0, 2**64 - 8),
        (8, 2**63 - 1),
        (8, 2**64 - 1),
        (8, 100_000),
        (16, 4),
        (16, 2**63),
        (24, 1 << 32),
        (24, 2 << 32),
    ],
)
def test_an_entry_that_cannot_be_is_refused_though_its_page_is_sealed(
    tmp_path: Path, encode_v2: Encode, at: int, value: int
) -> None:
    file = bytearray(encode_v2([[b"alpha"]]))
    index = DATA + 4096
    file[index + 32 + at : index + 40 + at] = struct.pack("<Q", value)
    if (at, value) == (24, 1 << 32):  # zstd of a size that no frame of 5 bytes can have
        file[index + 48 : index + 56] = struct.pack("<Q", 1 << 40)
    reseal_page(file, index)
    (tmp_path / "a.ffr").write_bytes(file)
    reader = FileReader(tmp_path / "a.ffr", check_data=False)
    with pytest.raises(Corrupted, match=r"a\.ffr.*index entry of sample 0 .* cannot be"):
        reader.read_one(0)
    with pytest.raises(Corrupted):
        reader.validate()


@pytest.mark.parametrize(
    ("at", "value"), [(4, 1), (4, 128), (8, 1), (8, 2**64 - 1), (16, 1)], ids=str
)
def test_a_page_that_is_another_one_is_refused(
    tmp_path: Path, encode_v2: Encode, at: int, value: int
) -> None:
    file = bytearray(encode_v2([FIRST]))
    index = DATA + 4096
    size = 4 if at == 4 else 8
    file[index + at : index + at + size] = value.to_bytes(size, "little")
    reseal_page(file, index)
    (tmp_path / "a.ffr").write_bytes(file)
    with pytest.raises(Corrupted, match="index page of samples 0 to 2, at byte 16384"):
        FileReader(tmp_path / "a.ffr").read_one(0)


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [(0, 16384, 2)],
        [(1, 16384, 3)],
        [(0, 16384, 4)],
        [(0, 16384 + 8, 3)],
        [(0, 4096, 3)],
        [(0, 2**63 - 4096, 3)],
        [(0, 16384, 2**63 - 1)],
        [(0, 16384, 0), (0, 16384, 3)],
        [(0, 16384, 2), (2, 20480, 1)],
        [(0, 16384, 4), (4, 16384, -1)],
    ],
)
def test_a_footer_that_cannot_be_is_refused_though_it_is_sealed(
    tmp_path: Path, encode_v2: Encode, runs: list[tuple[int, int, int]]
) -> None:
    file = bytearray(encode_v2([FIRST]))
    place = 20480
    footer = struct.pack("<IQ", len(runs), 0) + b"".join(struct.pack("<qqq", *r) for r in runs)
    file[place:] = struct.pack("<I", zlib.crc32(footer)) + footer
    slot = struct.pack("<IQQQQQ16x", 0, 0, place, len(file) - place, len(file), 3)
    file[SLOTS : SLOTS + 64] = struct.pack("<I", zlib.crc32(slot)) + slot
    (tmp_path / "a.ffr").write_bytes(file)
    with pytest.raises(Corrupted, match="the footer of commit 0"):
        FileReader(tmp_path / "a.ffr")


@pytest.mark.parametrize(
    ("at", "value"),
    [(16, 0), (16, 7), (16, 24), (16, 2**63), (24, 4097), (24, 2**63), (36, 1), (4088, 1)],
)
def test_a_header_that_cannot_be_is_refused_though_it_is_sealed(
    tmp_path: Path, encode_v2: Encode, at: int, value: int
) -> None:
    file = bytearray(encode_v2([FIRST]))
    file[at : at + 8] = struct.pack("<Q", value)
    file[8:12] = struct.pack("<I", zlib.crc32(file[12:4096]))
    (tmp_path / "a.ffr").write_bytes(file)
    with pytest.raises(Corrupted, match=r"a\.ffr' is damaged"):
        FileReader(tmp_path / "a.ffr")


def test_damage_in_an_old_index_is_not_copied_into_a_new_one(
    tmp_path: Path, encode_v2: Encode
) -> None:
    path = tmp_path / "a.ffr"
    file = bytearray(encode_v2([FIRST]))
    file[DATA + 4096 + 40] ^= 1
    path.write_bytes(file)
    writer = FileWriter.append(path)
    for sample in FIRST:
        writer.write_one(sample)
    with pytest.raises(Corrupted, match="index page of samples 0 to 2"):
        writer.commit()
    with pytest.raises(ValueError, match="closed"):
        writer.write_one(b"")
    assert path.read_bytes() == file
