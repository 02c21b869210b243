"""Names and attributes by a client, compared with what `os` does in a local directory."""

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from fireflyer.errors import FileError
from fireflyer.fs3.client import Client
from fireflyer.fs3.meta import Layout


def test_a_tree_is_listed_and_walked_as_a_local_one(fs: Client, tmp_path: Path) -> None:
    for folder in ("a", "a/b", "c"):
        fs.mkdir(folder)
        (tmp_path / folder).mkdir()
    for name in ("x", "a/y", "a/b/z"):
        fs.open(name, "xb").close()
        (tmp_path / name).touch()
    fs.symlink("a/y", "link")
    (tmp_path / "link").symlink_to("a/y")
    assert fs.listdir() == sorted(os.listdir(tmp_path))
    local = [
        (path.removeprefix(str(tmp_path)) or "/", sorted(below), sorted(names))
        for path, below, names in os.walk(tmp_path)
    ]
    assert sorted(fs.walk()) == sorted(local)
    kinds = {
        entry.name: (entry.is_dir(), entry.is_file(), entry.is_symlink()) for entry in fs.scandir()
    }
    assert kinds["a"] == (True, False, False)
    assert kinds["x"] == (False, True, False)
    assert kinds["link"] == (False, False, True)
    assert fs.readlink("link") == "a/y"
    assert fs.isfile("link")
    assert not fs.isdir("link")


def test_a_directory_is_listed_in_parts(fs: Client) -> None:
    names = [f"{number:05}" for number in range(2500)]
    fs.mkdir("many")
    made = fs.create_many("many", names)
    assert not [one for one in made if isinstance(one, FileError)]
    assert fs.listdir("many") == names
    found = fs.stat_many(["many/00000", "many/none", "many"])
    assert isinstance(found[0], os.stat_result)
    assert stat.S_ISREG(found[0].st_mode)
    assert isinstance(found[1], FileError)
    assert found[1].errno == errno.ENOENT
    again = fs.create_many("many", ["00001", "new"])
    assert [isinstance(one, FileError) for one in again] == [True, False]


@pytest.mark.parametrize(
    ("act", "kind", "number"),
    [
        (lambda fs: fs.stat("none"), FileNotFoundError, errno.ENOENT),
        (lambda fs: fs.stat("file/below"), NotADirectoryError, errno.ENOTDIR),
        (lambda fs: fs.mkdir("full"), FileExistsError, errno.EEXIST),
        (lambda fs: fs.rmdir("full"), OSError, errno.ENOTEMPTY),
        (lambda fs: fs.unlink("full"), IsADirectoryError, errno.EISDIR),
        (lambda fs: fs.open("full", "wb"), IsADirectoryError, errno.EISDIR),
        (lambda fs: fs.rename("full", "full/in"), OSError, errno.EINVAL),
        (lambda fs: fs.rename("file", "full/in", replace=False), FileExistsError, errno.EEXIST),
        (lambda fs: fs.readlink("file"), OSError, errno.EINVAL),
        (lambda fs: fs.open("n" * 256, "wb"), OSError, errno.ENAMETOOLONG),
        (lambda fs: fs.getxattr("file", "user.none"), OSError, errno.ENODATA),
    ],
)
def test_errors_are_those_of_posix(
    fs: Client, act: Callable[[Client], object], kind: type[OSError], number: int
) -> None:
    fs.mkdir("full")
    fs.open("full/in", "xb").close()
    fs.open("file", "xb").close()
    with pytest.raises(kind) as caught:
        act(fs)
    assert isinstance(caught.value, FileError)
    assert caught.value.errno == number


@pytest.mark.parametrize("times", [(1, 2), (0.1, 1700000000.123456789), (-1.5, -0.1), (-3, 1e9)])
def test_times_in_seconds_are_those_of_os(
    fs: Client, tmp_path: Path, times: tuple[float, float]
) -> None:
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", times)
    fs.open("file", "xb").close()
    fs.utime("file", times)
    real, ours = os.stat(tmp_path / "file"), fs.stat("file")
    assert (ours.st_atime_ns, ours.st_mtime_ns) == (real.st_atime_ns, real.st_mtime_ns)


def test_a_time_too_small_is_named(fs: Client) -> None:
    with pytest.raises(OverflowError, match=r"-9223372036854775808 is beyond 9223372036854775807"):
        fs.utime("file", ns=(-(1 << 63), 0))


def test_attributes(fs: Client) -> None:
    fs.open("file", "xb", permissions=0o640).close()
    fs.chmod("file", 0o600)
    fs.utime("file", ns=(1_000_000_001, 2_000_000_002))
    now = fs.stat("file")
    assert (now.st_mode, now.st_nlink) == (stat.S_IFREG | 0o600, 1)
    assert (now.st_atime_ns, now.st_mtime_ns) == (1_000_000_001, 2_000_000_002)
    assert (now.st_uid, now.st_gid, now.st_mtime) == (os.getuid(), os.getgid(), 2.000000002)
    fs.setxattr("file", "user.colour", b"blue")
    assert fs.getxattr("file", "user.colour") == b"blue"
    assert fs.listxattr("file") == ["user.colour"]
    fs.removexattr("file", "user.colour")
    assert fs.listxattr("file") == []
    fs.link("file", "other")
    assert fs.stat("other").st_nlink == 2
    assert fs.stat("other").st_ino == now.st_ino
    assert fs.statfs().files >= 2


def test_rename_replaces_and_exchanges(fs: Client) -> None:
    for name in ("a", "b"):
        with fs.open(name, "wb") as file:
            file.write(name.encode())
    fs.rename("a", "b", exchange=True)
    with fs.open("a") as file:
        assert file.read() == b"b"
    fs.replace("a", "b")
    assert fs.listdir() == ["b"]


def test_makedirs(fs: Client) -> None:
    fs.makedirs("a/b/c/d")
    fs.makedirs("/a/b/c/d/", exist_ok=True)
    fs.makedirs("/", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.makedirs("a/b")
    fs.open("a/file", "xb").close()
    with pytest.raises(FileExistsError):
        fs.makedirs("a/file", exist_ok=True)
    with pytest.raises(NotADirectoryError):
        fs.makedirs("a/file/b")


def test_a_directory_gives_its_files_their_layout(fs: Client) -> None:
    fs.mkdir("wide")
    layout = fs.inode("/").layout
    assert layout is not None
    fs.set_layout("wide", Layout(layout.table, layout.table_version, 4096, 2))
    with fs.open("wide/file", "wb+") as file:
        file.write(b"x" * 50_000)
        assert file.read() == b""
        assert file.pread(50_000, 0) == b"x" * 50_000
        assert file.inode.layout is not None
        assert (file.inode.layout.chunk_size, file.inode.layout.stripe) == (4096, 2)


def test_bytes_that_are_no_text_are_names_too(fs: Client) -> None:
    raw = b"\xff\xfe name"
    fs.open(raw, "xb").close()
    assert [os.fsencode(name) for name in fs.listdir()] == [raw]
    with pytest.raises(FileExistsError) as caught:
        fs.open(raw, "xb")
    assert os.fsencode(caught.value.filename).endswith(raw)
