"""The storage protocol, by a directory and by fsspec: whole or absent, durable, named errors."""

import errno
import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fireflyer.errors import ConfigError, Corrupted, NoSpace, StorageError
from fireflyer.storage import DirectoryStorage, FsspecStorage, Storage, open_storage

numbers = itertools.count()


@pytest.fixture(params=["directory", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "directory":
        return DirectoryStorage(tmp_path / "root")
    return FsspecStorage(f"memory://storage-test-{next(numbers)}")


def test_written_files_are_read_listed_renamed_deleted(storage: Storage) -> None:
    storage.write("a/b/one", [b"hello ", memoryview(b"world")])
    storage.write("a/two", iter([bytearray(b"x")]))
    assert storage.size("a/b/one") == 11
    assert storage.size("a/absent") is None
    assert storage.size("no/where") is None
    assert storage.read("a/b/one") == b"hello world"
    assert storage.read("a/b/one", 6, 3) == b"wor"
    assert storage.read("a/b/one", 6) == b"world"
    assert storage.read("a/b/one", 9, 100) == b"ld"
    assert storage.list() == ["a"]
    assert storage.list("a") == ["b", "two"]
    assert storage.list("nothing/here") == []
    storage.rename("a/b/one", "c/d/three")
    assert storage.size("a/b/one") is None
    assert storage.read("c/d/three") == b"hello world"
    storage.delete("a/two")
    assert storage.size("a/two") is None
    storage.delete("a/two")
    storage.delete("never/was")


def test_write_replaces_and_create_does_not(storage: Storage) -> None:
    storage.write("f", [b"first"])
    storage.write("f", [b"second"])
    assert storage.read("f") == b"second"
    assert storage.create("f", b"third") is False
    assert storage.read("f") == b"second"
    assert storage.create("g", b"fourth") is True
    assert storage.read("g") == b"fourth"
    assert storage.list() == ["f", "g"]


def test_rename_replaces(storage: Storage) -> None:
    storage.write("f", [b"new"])
    storage.write("g", [b"old"])
    storage.rename("f", "g")
    assert storage.read("g") == b"new"
    assert storage.list() == ["g"]


def test_delete_leaves_a_directory_that_is_not_empty(storage: Storage) -> None:
    storage.write("d/f", [b"kept"])
    storage.delete("d")
    assert storage.read("d/f") == b"kept"
    storage.delete("d/f")
    storage.delete("d")
    assert storage.list() == []


def test_read_into_fills_or_says_that_the_file_is_short(storage: Storage) -> None:
    storage.write("f", [bytes(range(100))])
    buffer = bytearray(10)
    storage.read_into("f", 90, memoryview(buffer))
    assert buffer == bytes(range(90, 100))
    with pytest.raises(Corrupted, match="ends at byte 100"):
        storage.read_into("f", 91, memoryview(buffer))
    with pytest.raises(StorageError, match=r"cannot read .*absent"):
        storage.read_into("absent", 0, memoryview(buffer))
    with pytest.raises(StorageError, match=r"cannot read .*absent"):
        storage.read("absent")


def broken(error: BaseException) -> Iterator[bytes]:
    yield b"half"
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("bad chunk")])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    storage: Storage, error: BaseException
) -> None:
    storage.write("d/f", [b"old"])
    with pytest.raises(type(error)):
        storage.write("d/f", broken(error))
    with pytest.raises(type(error)):
        storage.write("d/new", broken(error))
    assert storage.read("d/f") == b"old"
    assert storage.list("d") == ["f"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_place_is_no_space(storage: Storage, number: int) -> None:
    with pytest.raises(NoSpace, match=r"cannot write .*d/f"):
        storage.write("d/f", broken(OSError(number, os.strerror(number))))
    with pytest.raises(StorageError, match="Input/output error") as caught:
        storage.write("d/f", broken(OSError(errno.EIO, os.strerror(errno.EIO))))
    assert not isinstance(caught.value, NoSpace)
    assert storage.size("d/f") is None


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../b", "a//b", "a/", "./a"])
def test_names_stay_inside_the_root(storage: Storage, name: str) -> None:
    for call in (storage.read, storage.size, storage.delete, storage.list):
        with pytest.raises(ValueError, match="must be relative"):
            call(name)
    with pytest.raises(ValueError, match="must be relative"):
        storage.write(name, [b""])


def test_a_write_is_synced_before_and_after_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data, then the name, then the directory that holds the name; new directories from the top."""
    storage = DirectoryStorage(tmp_path)
    happened: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        happened.append(("fsync", Path(path).name.split(".")[0]))
        fsync(fd)

    def seen_replace(source: Any, target: Any) -> None:
        happened.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    storage.write("x/y/file", [b"data"])
    root = tmp_path.name.split(".")[0]
    assert happened == [
        ("fsync", root),
        ("fsync", "x"),
        ("fsync", "file"),
        ("replace", "file"),
        ("fsync", "y"),
    ]


def test_a_directory_that_vanishes_while_writing_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = DirectoryStorage(tmp_path)
    real = os.open
    vanished: list[Any] = []

    def open_after_removal(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_CREAT and not vanished:
            vanished.append(path)
            (tmp_path / "d").rmdir()
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", open_after_removal)
    storage.write("d/f", [b"data"])
    assert vanished
    assert storage.read("d/f") == b"data"


def test_open_storage_knows_paths_and_urls(tmp_path: Path) -> None:
    assert isinstance(open_storage(tmp_path), DirectoryStorage)
    assert isinstance(open_storage(str(tmp_path)), DirectoryStorage)
    by_url = open_storage(f"file://{tmp_path}/deep/er")
    assert isinstance(by_url, DirectoryStorage)
    assert by_url.root == tmp_path / "deep" / "er"
    assert isinstance(open_storage("memory://x"), FsspecStorage)


def test_a_root_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot make directory .*file"):
        DirectoryStorage(tmp_path / "file" / "sub")


def test_an_unknown_url_is_named() -> None:
    with pytest.raises(ConfigError, match="nosuch://x"):
        open_storage("nosuch://x")


def test_many_ranges_are_read_at_once_and_errors_stand_in_their_places(storage: Storage) -> None:
    storage.write("a", [bytes(range(100))])
    storage.write("d/b", [b"hello"])
    first, missing, second, short = storage.read_many(
        [("a", 90, 95), ("absent", 0, 5), ("d/b", 1, 4), ("a", 98, 200)]
    )
    assert (first, second, short) == (bytes(range(90, 95)), b"ell", bytes([98, 99]))
    assert isinstance(missing, StorageError)
    assert not missing.retryable
    assert storage.read_many([]) == []


def test_an_fsspec_storage_pickles_and_works_in_a_forked_child(tmp_path: Path) -> None:
    storage = FsspecStorage(f"file://{tmp_path}")
    storage.write("f", [b"x"])
    assert pickle.loads(pickle.dumps(storage)).read("f") == b"x"
    pid = os.fork()
    if pid == 0:
        os._exit(0 if storage.read("f") == b"x" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
