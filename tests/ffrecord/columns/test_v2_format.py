"""Bytes of v2: what is written, that it is read, and what opening it costs."""

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import cases

from fireflyer._native.ffrecord import Reader
from fireflyer.errors import ConfigError, Corrupted, StorageError
from fireflyer.ffrecord import FileReader, FileWriter

Encode = Callable[..., bytes]
MEBI = 1 << 20
SAMPLES = [b"alpha", b"", b"x" * 70_000, bytes(range(256)), b"", b"last"]
CASES = [
    [[]],
    [[b""]],
    [[], [b"one"]],
    [SAMPLES],
    [SAMPLES, SAMPLES, SAMPLES],
    [[b"a" * MEBI, b"b", b"c" * (3 * MEBI + 1), b"d"]],
    [[b"s"] * 127, [b"t"] * 128, [b"u"]],
    [[b"s"] * 600, [b"t"] * 300, [b"u"] * 100, [b"v"] * 700, [b"w"]],
    [[bytes([i])] * (6 - i) for i in range(6)],
]


def contents(path: Path) -> list[bytes]:
    with FileReader(path) as reader:
        return [sample.tobytes() for sample in reader.read(range(reader.n))]


def write(path: Path, commits: Sequence[Sequence[bytes]], align: int, again: bool) -> None:
    """One writer for all commits, or a new one for each."""
    writer = FileWriter(path, align=align)
    for number, samples in enumerate(commits):
        if again and number:
            writer.close()
            writer = FileWriter.append(path)
        for sample in samples:
            writer.write_one(sample)
        writer.commit()
    writer.close()


@pytest.mark.parametrize("again", [False, True], ids=["one writer", "appended"])
@pytest.mark.parametrize("align", [8, 4096])
@pytest.mark.parametrize("commits", CASES, ids=lambda c: " ".join(str(len(s)) for s in c))
def test_the_file_is_byte_for_byte_that_of_an_independent_writer(
    tmp_path: Path, encode_v2: Encode, commits: list[list[bytes]], align: int, again: bool
) -> None:
    write(tmp_path / "a.ffr", commits, align, again)
    assert (tmp_path / "a.ffr").read_bytes() == encode_v2(commits, align)
    assert os.listdir(tmp_path) == ["a.ffr"]
    assert contents(tmp_path / "a.ffr") == [s for samples in commits for s in samples]


@pytest.mark.parametrize("commits", CASES, ids=lambda c: " ".join(str(len(s)) for s in c))
def test_a_file_of_the_independent_writer_is_read_and_added_to(
    tmp_path: Path, encode_v2: Encode, commits: list[list[bytes]]
) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2(commits, 64))
    before = [s for samples in commits for s in samples]
    assert contents(path) == before
    with FileWriter.append(path) as writer:
        assert writer.count == len(before)
        writer.write_one(b"more")
        assert writer.count == len(before) + 1
    assert path.read_bytes() == encode_v2([*commits, [b"more"]], 64)
    FileReader(path).validate()


@settings(max_examples=cases(40), deadline=None)
@given(st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=9), max_size=12))
def test_any_commits_are_read_and_have_few_runs(
    tmp_path_factory: pytest.TempPathFactory, encode_v2: Encode, commits: list[list[bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.ffr"
    commits = commits or [[]]
    write(path, commits, 8, False)
    assert path.read_bytes() == encode_v2(commits)
    samples = [s for part in commits for s in part]
    assert contents(path) == samples
    assert len(Reader([str(path)], True).last_commit(0)[-1]) <= len(samples).bit_length()


def test_falling_commits_do_not_pile_up_runs(tmp_path: Path) -> None:
    """Merging only runs that are no longer than the new one would leave 60 here."""
    path = tmp_path / "a.ffr"
    with FileWriter(path, version=2) as writer:
        for size in range(60, 0, -1):
            for i in range(size):
                writer.write_one(bytes([i]))
            writer.commit()
    assert contents(path) == [bytes([i]) for size in range(60, 0, -1) for i in range(size)]
    assert len(Reader([str(path)], True).last_commit(0)[-1]) <= (60 * 61 // 2).bit_length()


@pytest.mark.parametrize("align", [8, 4096, MEBI])
def test_samples_are_aligned(tmp_path: Path, align: int) -> None:
    with FileWriter(tmp_path / "a.ffr", align=align) as writer:
        for sample in SAMPLES:
            writer.write_one(sample)
    reader = FileReader(tmp_path / "a.ffr")
    assert not (reader.get_offsets(0)[:-1] % align).any()
    assert reader.get_checksums(0).tolist() == [zlib.crc32(s) for s in SAMPLES]
    order = [5, 2, 2, 0, 3, 1]
    assert [s.tobytes() for s in reader.read(order)] == [SAMPLES[i] for i in order]


def test_files_of_both_versions_are_one_sequence(
    tmp_path: Path, encode: Encode, encode_v2: Encode
) -> None:
    (tmp_path / "a.ffr").write_bytes(encode(SAMPLES))
    (tmp_path / "b.ffr").write_bytes(encode_v2([SAMPLES, SAMPLES]))
    reader = FileReader(tmp_path)
    order = np.random.default_rng(0).integers(0, 18, 100).tolist()
    assert [s.tobytes() for s in reader.read(order)] == [SAMPLES[i % 6] for i in order]
    assert reader.columns is None
    reader.validate()


def test_a_reader_keeps_its_commit(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "a.ffr", version=2)
    writer.write_one(b"one")
    writer.commit()
    early = FileReader(tmp_path / "a.ffr")
    for i in range(300):
        writer.write_one(bytes([i % 7]))
        writer.commit()
        assert FileReader(tmp_path / "a.ffr").n == i + 2
    writer.close()
    assert (early.n, early.read_one(0).tobytes()) == (1, b"one")
    early.validate()
    with pytest.raises(IndexError):
        early.read_one(1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"version": 3}, "invalid version 3"),
        ({"align": 4}, "invalid align 4"),
        ({"align": 24}, "invalid align 24"),
        ({"align": 2 * MEBI}, "invalid align"),
        ({"compression": "lz4"}, "invalid compression 'lz4'"),
        ({"compression": "zstd", "level": 99}, "invalid zstd compression level 99"),
        ({"columns": {}}, "at least one"),
    ],
)
def test_options_that_cannot_be_are_config_errors(
    tmp_path: Path, options: dict[str, object], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        FileWriter(tmp_path / "a.ffr", **options)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_a_v1_file_is_neither_committed_nor_added_to(tmp_path: Path, encode: Encode) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer, pytest.raises(ConfigError, match="is v1"):
        writer.commit()
    assert (tmp_path / "a.ffr").read_bytes() == encode([])
    with pytest.raises(ConfigError, match=r"a\.ffr' is v1"):
        FileWriter.append(tmp_path / "a.ffr")
    with pytest.raises(StorageError, match="No such file"):
        FileWriter.append(tmp_path / "b.ffr")


def test_a_later_version_is_not_called_damage(tmp_path: Path, encode_v2: Encode) -> None:
    file = bytearray(encode_v2([SAMPLES]))
    file[12] = 3
    file[8:12] = struct.pack("<I", zlib.crc32(file[12:4096]))
    (tmp_path / "a.ffr").write_bytes(file)
    with pytest.raises(StorageError, match="version 3, which needs a later Fireflyer") as caught:
        FileReader(tmp_path / "a.ffr")
    assert not isinstance(caught.value, Corrupted)


def resident_kib() -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0])


def read_calls() -> int:
    if not os.path.exists("/proc/thread-self/io"):
        pytest.skip("this kernel does not count system calls")
    with open("/proc/thread-self/io") as io:
        return int(dict(line.split(":") for line in io)["syscr"])


def test_a_hundred_million_samples_open_with_few_reads_and_little_memory(tmp_path: Path) -> None:
    """The file is sparse but for its head, its footer and the index pages of the samples that are read."""
    count = 100_000_000
    pages = -(-count // 127)
    index, sample = 16384, 12288
    footer_place = index + 4096 * pages
    footer = struct.pack("<IQQQQ", 1, 0, 0, index, count)
    footer = struct.pack("<I", zlib.crc32(footer)) + footer
    rest = struct.pack("<IQQI", 2, 8, 0, 0).ljust(4084, b"\0")
    end = footer_place + len(footer)
    slot = struct.pack("<IQQQQQ16x", 0, 0, footer_place, len(footer), end, count)
    entry = struct.pack("<QQQII", sample, 4, 4, zlib.crc32(b"data"), 0)
    wanted = [0, 126, 127, 50_000_000, count - 1]
    with (tmp_path / "a.ffr").open("wb") as file:
        file.write(b"\x89FFREC2\n" + struct.pack("<I", zlib.crc32(rest)) + rest)
        file.write(struct.pack("<I", zlib.crc32(slot)) + slot)
        os.pwrite(file.fileno(), b"data", sample)
        for number in {i // 127 for i in wanted}:
            used = min(127, count - 127 * number)
            page = struct.pack("<IQ16x", used, 127 * number) + entry * used
            page = page.ljust(4092, b"\0")
            sealed = struct.pack("<I", zlib.crc32(page)) + page
            os.pwrite(file.fileno(), sealed, index + 4096 * number)
        os.pwrite(file.fileno(), footer, footer_place)
    memory = resident_kib()
    own = -(read_calls() - read_calls())
    calls = read_calls()
    reader = FileReader(tmp_path / "a.ffr")
    calls = read_calls() - calls - own
    found = [s.tobytes() for s in reader.read(wanted)]
    memory = resident_kib() - memory
    assert (reader.n, found) == (count, [b"data"] * 5)
    assert calls == 4  # the magic, the header, the slots, the footer
    assert memory < 20 << 10
    with pytest.raises(Corrupted, match=r"a\.ffr.*index page of samples 254 to 380"):
        reader.read_one(300)


def test_the_index_of_v1_is_not_held_in_memory(tmp_path: Path) -> None:
    """Its 72 MiB are checked whole when the file is opened, but do not stay."""
    count = 6_000_000
    offsets = np.full(count, 12 + 12 * count, "<i8")
    metadata = struct.pack("<q", count) + bytes(4 * count) + offsets.tobytes()
    (tmp_path / "a.ffr").write_bytes(struct.pack("<I", zlib.crc32(metadata)) + metadata)
    del metadata, offsets
    memory = resident_kib()
    reader = FileReader(tmp_path / "a.ffr")
    found = reader.read([0, 3_000_000, count - 1])
    memory = resident_kib() - memory
    assert [s.size for s in found] == [0, 0, 0]
    # The kernel may map 2 MiB at each of the five places that are used.
    assert memory < 20 << 10
