"""Arguments that nothing can be done with: refused where they are given, as `os` and `io` do."""

import errno
import os
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import pytest
from tests.fs3.client.conftest import CHUNK, Cluster

from fireflyer.errors import FileError
from fireflyer.fs3.client import Client, File
from fireflyer.fs3.meta.inode import Inode
from fireflyer.fs3.meta.messages import ReportLength, Truncate

BYTES_MAX = CHUNK << 32
HUGE = 1 << 63
Act = Callable[[Any, Any], object]

REFUSED: dict[str, tuple[Act, type[Exception]]] = {
    "pwrite beyond 64 bits": (lambda _, f: f.pwrite(b"x", HUGE), OverflowError),
    "pwrite before the file": (lambda _, f: f.pwrite(b"x", -1), ValueError),
    "pwrite at half a byte": (lambda _, f: f.pwrite(b"x", 1.5), TypeError),
    "pwrite nowhere": (lambda _, f: f.pwrite(b"x", None), TypeError),
    "pwrite of a text": (lambda _, f: f.pwrite("x", 0), TypeError),
    "write of nothing": (lambda _, f: f.write(None), TypeError),
    "pread beyond 64 bits": (lambda _, f: f.pread(1, HUGE), OverflowError),
    "pread of too much": (lambda _, f: f.pread(HUGE, 0), OverflowError),
    "pread of less than nothing": (lambda _, f: f.pread(-1, 0), ValueError),
    "pread before the file": (lambda _, f: f.pread(1, -1), ValueError),
    "pread_into beyond 64 bits": (lambda _, f: f.pread_into(bytearray(1), HUGE), OverflowError),
    "pread_into before the file": (lambda _, f: f.pread_into(bytearray(1), -1), ValueError),
    "pread_into what cannot change": (lambda _, f: f.pread_into(b"x", 0), TypeError),
    "pread_into a number": (lambda _, f: f.pread_into(5, 0), TypeError),
    "read of half a byte": (lambda _, f: f.read(1.5), TypeError),
    "seek beyond 64 bits": (lambda _, f: f.seek(HUGE), OverflowError),
    "seek before the file": (lambda _, f: f.seek(-1), ValueError),
    "seek to half a byte": (lambda _, f: f.seek(1.5), TypeError),
    "seek from nowhere": (lambda _, f: f.seek(0, 9), ValueError),
    "truncate beyond 64 bits": (lambda _, f: f.truncate(HUGE), OverflowError),
    "truncate to less than nothing": (lambda _, f: f.truncate(-1), ValueError),
    "truncate to half a byte": (lambda _, f: f.truncate(1.5), TypeError),
    "truncate to a text": (lambda fs, _: fs.truncate("/a", "x"), TypeError),
    "write_many of a text": (lambda fs, f: fs.write_many([(f, 0, "x")]), TypeError),
    "write_many before the file": (lambda fs, f: fs.write_many([(f, -1, b"x")]), ValueError),
    "write_many beyond 64 bits": (lambda fs, f: fs.write_many([(f, HUGE, b"x")]), OverflowError),
    "write_many to a name": (lambda fs, _: fs.write_many([("/a", 0, b"x")]), TypeError),
    "read_many before the file": (lambda fs, f: fs.read_many([(f, -1, bytearray(1))]), ValueError),
    "read_many beyond 64 bits": (
        lambda fs, f: fs.read_many([(f, HUGE, bytearray(1))]),
        OverflowError,
    ),
    "read_many of a name": (lambda fs, _: fs.read_many([("/a", 0, bytearray(1))]), TypeError),
    "a mode that is none": (lambda fs, _: fs.open("/a", None), TypeError),
    "a mode of both": (lambda fs, _: fs.open("/a", "rbt"), ValueError),
    "an encoding of bytes": (lambda fs, _: fs.open("/a", "rb", encoding="utf-8"), ValueError),
    "an encoding that is none": (lambda fs, _: fs.open("/a", "r", encoding="utf-9"), LookupError),
    "permissions in words": (lambda fs, _: fs.open("/n", "wb", permissions="rw"), TypeError),
    "permissions beyond 64 bits": (
        lambda fs, _: fs.open("/n", "wb", permissions=HUGE),
        OverflowError,
    ),
    "a path that is none": (lambda fs, _: fs.open(None), TypeError),
    "a path that is a number": (lambda fs, _: fs.stat(5), TypeError),
    "one of many paths is none": (lambda fs, _: fs.stat_many(["/a", None]), TypeError),
    "a path with a NUL": (lambda fs, _: fs.open("/a\0"), ValueError),
    "a path of bytes with a NUL": (lambda fs, _: fs.mkdir(b"/a\0"), ValueError),
    "a new name with a NUL": (lambda fs, _: fs.rename("/a", "/\0"), ValueError),
    "a symlink to a NUL": (lambda fs, _: fs.symlink("\0", "/s"), ValueError),
    "a path of half a character": (lambda fs, _: fs.open("/\ud800", "wb"), ValueError),
    "an empty path": (lambda fs, _: fs.stat(""), FileNotFoundError),
    "an empty path to list": (lambda fs, _: fs.listdir(b""), FileNotFoundError),
    "names that are numbers": (lambda fs, _: fs.create_many("/", [5]), TypeError),
    "chmod beyond 64 bits": (lambda fs, _: fs.chmod("/a", HUGE), OverflowError),
    "chmod in words": (lambda fs, _: fs.chmod("/a", "rw"), TypeError),
    "chown beyond 64 bits": (lambda fs, _: fs.chown("/a", HUGE, 0), OverflowError),
    "chown to a name": (lambda fs, _: fs.chown("/a", "root", 0), TypeError),
    "times beyond 64 bits": (lambda fs, _: fs.utime("/a", ns=(1 << 70, 0)), OverflowError),
    "the smallest 64 bits": (lambda fs, _: fs.utime("/a", ns=(-(1 << 63), 0)), OverflowError),
    "times of both kinds": (lambda fs, _: fs.utime("/a", (1, 1), ns=(1, 1)), ValueError),
    "one time in seconds": (lambda fs, _: fs.utime("/a", (1,)), TypeError),
    "a time in words": (lambda fs, _: fs.utime("/a", ("1", "2")), TypeError),
    "half a time": (lambda fs, _: fs.utime("/a", ns=(1.5, 0)), TypeError),
    "one time": (lambda fs, _: fs.utime("/a", ns=(1,)), TypeError),
    "a time that means another": (lambda fs, _: fs.utime("/a", ns=(-2, 0)), ValueError),
    "an attribute of text": (lambda fs, _: fs.setxattr("/a", "user.n", "x"), TypeError),
    "an attribute with a NUL": (lambda fs, _: fs.getxattr("/a", "user.\0"), ValueError),
    "a layout that is none": (lambda fs, _: fs.set_layout("/", None), TypeError),
}


@pytest.fixture
def file(fs: Client) -> File:
    with fs.open("/a", "wb") as made:
        made.write(b"abc")
    return fs.open("/a", "rb+")


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused(fs: Client, file: File, what: str) -> None:
    act, kind = REFUSED[what]
    with file, pytest.raises(kind) as raised:
        act(fs, file)
    assert "incompatible function arguments" not in str(raised.value)
    assert fs.listdir() == ["a"]
    with fs.open("/a") as again:
        assert again.read() == b"abc"


@pytest.mark.parametrize("path", ["/d/a", "d/a", b"/d/a", PurePosixPath("/d/a")])
def test_what_is_a_path(fs: Client, path: str | bytes | PurePosixPath) -> None:
    fs.mkdir("/d")
    with fs.open(path, "wb") as file:
        file.write(b"abc")
        assert file.name == os.fsdecode(path)
    assert fs.stat(path).st_size == 3
    assert fs.exists(path)
    assert not fs.exists("/d/a\0")
    assert not fs.isdir("")


@pytest.mark.parametrize(
    "act",
    [
        lambda _, f: f.pwrite(b"x", BYTES_MAX),
        lambda _, f: f.pwrite(b"xx", BYTES_MAX - 1),
        lambda _, f: (f.seek(BYTES_MAX), f.write(b"x")),
        lambda fs, f: fs.write_many([(f, 0, b"x"), (f, BYTES_MAX, b"x")]),
        lambda _, f: f.truncate(BYTES_MAX + 1),
        lambda fs, _: fs.truncate("/a", BYTES_MAX + 1),
        lambda fs, f: fs._metadata.act(
            Truncate(f.inode.number, b"", BYTES_MAX + 1, f._handle), Inode
        ),
        lambda fs, f: fs._metadata.act(
            ReportLength(f.inode.number, f._handle, BYTES_MAX + 1, f.inode.length_version), Inode
        ),
        lambda fs, _: fs._metadata.act(Truncate(1, b"/a", BYTES_MAX + 1), Inode),
    ],
)
def test_a_file_has_no_more_bytes_than_chunks_can_hold(fs: Client, file: File, act: Act) -> None:
    """Neither by the client nor by one that keeps to no rule."""
    with file, pytest.raises(FileError) as raised:
        act(fs, file)
    assert raised.value.errno == errno.EFBIG
    assert str(BYTES_MAX) in str(raised.value)
    assert fs.stat("/a").st_size == 3


def test_the_last_byte_of_the_last_chunk(calm: Cluster, fs: Client, file: File) -> None:
    with file:
        assert file.pwrite(b"x", BYTES_MAX - 1) == 1
        assert file.size == BYTES_MAX
    with calm.connect() as other, other.open("/a") as seen:
        assert seen.pread(2, BYTES_MAX - 1) == b"x"
