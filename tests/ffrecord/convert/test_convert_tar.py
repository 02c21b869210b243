"""Tar archives and webdataset shards: every file in them is a sample's, or the archive is refused."""

import gzip
import io
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fireflyer.errors import ConfigError, Corrupted, FireflyerError
from fireflyer.ffrecord.convert.detect import open_source
from fireflyer.ffrecord.convert.formats.tar import TarSource
from fireflyer.ffrecord.convert.source import Row


def rows_of(path: Path) -> list[Row]:
    return list(open_source([str(path)]).rows())


def plain(row: Row) -> dict[str, Any]:
    return {name: v.tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()}


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_webdataset_shards(tmp_path: Path, suffix: str) -> None:
    array = io.BytesIO()
    np.save(array, np.arange(3, dtype=np.float32))
    files = {
        "d/0.jpg": b"\xff\xd8", "d/0.cls": b"7\n", "d/0.v.npy": array.getvalue(),
        "d/1.jpg": b"", "d/1.cls": b"-1", "d/1.v.npy": array.getvalue(),
    }  # fmt: skip
    path = make_tar(tmp_path / f"a{suffix}", files, "w:gz" if suffix.endswith("gz") else "w")
    assert [plain(row) for row in rows_of(path)] == [
        {"key": "d/0", "jpg": b"\xff\xd8", "cls": 7, "v.npy": [0, 1, 2]},
        {"key": "d/1", "jpg": b"", "cls": -1, "v.npy": [0, 1, 2]},
    ]


def test_long_names_of_both_kinds(tmp_path: Path) -> None:
    name = f"{'x' * 180}/{'y' * 120}.bin"
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = tmp_path / f"{form}.tar"
        with tarfile.open(path, "w", format=form) as archive:
            info = tarfile.TarInfo(name)
            info.size = 3
            archive.addfile(info, io.BytesIO(b"abc"))
        assert rows_of(path) == [{"key": name.removesuffix(".bin"), "bin": b"abc"}]


def test_folders_in_a_tar_are_left_out_and_links_and_devices_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.LNKTYPE):
        with tarfile.open(path, "w") as archive:
            info = tarfile.TarInfo("l.bin")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
            info = tarfile.TarInfo("f.bin")
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
        if kind == tarfile.DIRTYPE:
            assert rows_of(path) == [{"key": "f", "bin": b"x"}]
        else:
            with pytest.raises(ConfigError, match=r"(link|FIFO).*'l\.bin'|'l\.bin'.*(link|FIFO)"):
                rows_of(path)


def gnu_tar(path: Path, folder: Path, *options: str) -> Path:
    subprocess.run(["tar", "-cf", path, "-C", folder, *options, "."], check=True)
    return path


@pytest.mark.parametrize(
    "options",
    [["--format=gnu"], *(["--format=posix", f"--sparse-version={v}"] for v in ("0.1", "1.0"))],
)
def test_sparse_files_and_hard_links_of_a_tar_are_read(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0.bin").write_bytes(b"zero")
    os.link(folder / "0.bin", folder / "1.bin")
    os.truncate(folder / "0.bin", 4)
    with open(folder / "2.bin", "wb") as file:  # more stretches than one header holds
        for number in range(40):
            file.seek(number << 16)
            file.write(b"%02d" % number)
        file.truncate(3 << 20)
    os.link(folder / "2.bin", folder / "3.bin")
    (folder / "4.bin").write_bytes(b"last")
    expected = {f"./{n}": (folder / f"{n}.bin").read_bytes() for n in range(5)}
    for number, more in enumerate((["--sparse"], [])):
        path = gnu_tar(tmp_path / f"{number}.tar", folder, *options, *more)
        assert {row["key"]: row["bin"] for row in rows_of(path)} == expected
    assert (tmp_path / "0.tar").stat().st_size < 1 << 20
    packed = tmp_path / "a.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "0.tar").read_bytes()))
    with pytest.raises(ConfigError, match=r"hard link .* compressed archive: decompress it"):
        rows_of(packed)


def test_a_sparse_file_of_a_pax_header_that_makes_no_sense(tmp_path: Path) -> None:
    maps = {"0,2,8,2": 11, "0,2,9,2": 10, "0,5": 10, "0": 10, "0,4": 1 << 40, "x,4": 10}
    for text, size in maps.items():
        path = tmp_path / "a.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            info = tarfile.TarInfo("a.bin")
            info.size = 4
            info.pax_headers = {"GNU.sparse.map": text, "GNU.sparse.size": str(size)}
            archive.addfile(info, io.BytesIO(b"abcd"))
        if text == "0,2,8,2":
            assert rows_of(path) == [{"key": "a", "bin": b"ab\0\0\0\0\0\0cd\0"}]
        else:
            with pytest.raises(FireflyerError, match=r"sparse file|invalid size"):
                rows_of(path)


def test_archives_behind_one_another_are_read_to_the_end(tmp_path: Path) -> None:
    parts = [make_tar(tmp_path / f"{n}.tar", {f"{n}.bin": b"x" * n}) for n in range(1, 4)]
    whole = tmp_path / "all.tar"
    whole.write_bytes(b"".join(part.read_bytes() for part in parts) + bytes(700))
    assert [row["bin"] for row in rows_of(whole)] == [b"x", b"xx", b"xxx"]
    with open(whole, "ab") as file:
        file.write(b"no archive")
    with pytest.raises(Corrupted, match=r"cut|damaged"):
        rows_of(whole)


def test_every_cut_and_every_flip_of_a_tar_header_is_an_error(tmp_path: Path) -> None:
    whole = make_tar(tmp_path / "a.tar", {"0.bin": b"x" * 700, "1.bin": b"y" * 10}).read_bytes()
    end = 512 + 1024 + 512 + 512
    path = tmp_path / "b.tar"
    for cut in [*range(0, end, 37), end - 1]:
        if cut % 512 == 0 and cut in (1536,):
            continue  # between two files: a shorter archive
        path.write_bytes(whole[:cut])
        with pytest.raises(FireflyerError):
            rows_of(path)
    for at in range(512):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        path.write_bytes(bytes(damaged))
        with pytest.raises(FireflyerError):
            rows_of(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a tar" * 100,
        gzip.compress(b"x" * 600, mtime=0),
        gzip.compress(b"x" * 5000, mtime=0)[:-9],
        b"\x1f\x8b",
    ],
)
def test_what_is_no_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(Corrupted, match=r"a\.tar"):
        TarSource(path)


def test_a_size_that_is_not_there_takes_no_memory(tmp_path: Path) -> None:
    header = bytearray(make_tar(tmp_path / "a.tar", {"0.bin": b"x"}).read_bytes()[:512])
    header[124:136] = b"\x80" + (1 << 60).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = tmp_path / "b.tar"
    path.write_bytes(header + b"x" * 1024)
    with pytest.raises(Corrupted, match="cut"):
        TarSource(path)


def test_a_pickle_in_a_tar_is_not_loaded(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.array([{"a": 1}], object), allow_pickle=True)
    path = make_tar(tmp_path / "a.tar", {"0.v.npy": array.getvalue()})
    with pytest.raises(Corrupted, match="does not match its suffix"):
        TarSource(path)


def test_samples_of_a_tar_with_other_suffixes_are_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", {"0.jpg": b"", "1.png": b""})
    with pytest.raises(ConfigError, match=r"sample 1 \('1'\) has columns key, png"):
        rows_of(path)
