"""Files that others remove, replace or cut while they are open."""

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.fs3.client.conftest import CHUNK, Cluster

from fireflyer.errors import FileError
from fireflyer.fs3 import survey
from fireflyer.fs3.client import Client, transfer
from fireflyer.fs3.meta.inode import Inode
from fireflyer.fs3.meta.messages import Close, Collected, Done, Request, User

DATA = b"a" * (6 * CHUNK)


def swept(calm: Cluster, fs: Client, inode: Inode, *, ended: bool) -> None:
    """What runs beside the metadata service does this to a file without names; `ended`: to the end."""
    fs._data.cut(inode, 0, "a removed file")
    if ended:
        answer = calm.service.execute(Request(User(0, 0, ()), 0, Collected([inode.number])))
        assert isinstance(answer, Done)


def made(fs: Client, path: str, data: bytes = DATA) -> Inode:
    with fs.open(path, "wb") as file:
        file.write(data)
    return fs.inode(path)


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("how", ["unlink", "rename"])
def test_a_file_removed_while_it_is_read_is_no_file_of_zeros(
    fs: Client, calm: Cluster, how: str, ended: bool
) -> None:
    inode = made(fs, "/a")
    with fs.open("/a") as file, fs.open("/a") as walked:
        assert file.read(10) == DATA[:10]
        if how == "unlink":
            fs.unlink("/a")
        else:
            made(fs, "/b")
            fs.rename("/b", "/a")
        assert file.pread(CHUNK, CHUNK) == DATA[:CHUNK]  # as long as its chunks are there
        swept(calm, fs, inode, ended=ended)
        memory = np.zeros(CHUNK, np.uint8)
        rows = np.array([[0, CHUNK, CHUNK, memory.ctypes.data]], np.int64)
        for read in (
            file.read,
            lambda: fs.read_many([(file, 0, memory)]),
            lambda: fs.read_rows([file], rows),
            lambda: list(walked.stretches(CHUNK)),
        ):
            with pytest.raises(FileError, match="removed while it was read") as caught:
                read()
            assert (caught.value.errno, caught.value.filename) == (errno.ESTALE, "/a")


def test_a_file_that_this_client_writes_is_read_without_a_name(fs: Client) -> None:
    with fs.open("/a", "wb+") as file:
        file.pwrite(b"end", 3 * CHUNK)
        file.fsync()
        with fs.open("/a") as reader:
            fs.unlink("/a")
            assert file.read() == reader.read() == bytes(3 * CHUNK) + b"end"


def test_a_file_cut_while_it_is_read_ends_there(fs: Client, calm: Cluster) -> None:
    made(fs, "/a")
    with fs.open("/a") as file, fs.open("/a") as other, calm.connect() as far:
        far.truncate("/a", CHUNK + 10)
        memory = bytearray(2 * CHUNK)
        assert fs.read_many([(other, CHUNK, memory), (other, 0, bytearray(5))]) == [10, 5]
        assert file.read(CHUNK) == DATA[:CHUNK]
        assert file.read() == DATA[:10]
        assert file.size == CHUNK + 10


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE", CHUNK)
    monkeypatch.setattr(survey, "PIECE", CHUNK)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("size", [6 * CHUNK, 200 * CHUNK])
def test_a_copy_of_a_file_removed_meanwhile_fails(
    fs: Client, calm: Cluster, tmp_path: Path, size: int
) -> None:
    inode, to, told = made(fs, "/a", b"a" * size), tmp_path / "a", threading.Event()

    def advance(_: int) -> None:
        if not told.is_set():
            told.set()
            fs.unlink("/a")
            swept(calm, fs, inode, ended=True)

    local, remote = transfer.Local(), transfer.Remote(fs)
    items = transfer.plan(remote, "/a", local, str(to), recursive=False)
    with pytest.raises(FileError, match="removed while it was read") as caught:
        transfer.copy(remote, local, items, advance)
    assert caught.value.filename == "/a"
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_pieces")
def test_a_copy_of_a_file_cut_meanwhile_fails(fs: Client, tmp_path: Path) -> None:
    made(fs, "/a")
    local, remote = transfer.Local(), transfer.Remote(fs)
    items = transfer.plan(remote, "/a", local, str(tmp_path / "a"), recursive=False)
    opened = remote.reader

    def reader(path: str) -> transfer.Handle:
        handle = opened(path)
        fs.truncate(path, 3 * CHUNK)  # all that is missing will seem a hole
        return handle

    remote.reader = reader  # type: ignore[method-assign]
    with pytest.raises(Exception, match="became shorter"):
        transfer.copy(remote, local, items, lambda _: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_pieces")
def test_a_check_passes_over_what_is_removed_meanwhile(fs: Client, calm: Cluster) -> None:
    inode, told = made(fs, "/a"), threading.Event()

    def advance(_: int) -> None:
        if not told.is_set():
            told.set()
            fs.unlink("/a")
            swept(calm, fs, inode, ended=True)

    assert survey.check(fs, "/", advance).damages == []
    assert told.is_set()


# Truncated by others while it is written.


@pytest.mark.parametrize("by", ["fsync", "close"])
@pytest.mark.parametrize("length", [0, 10, CHUNK + 5])
def test_what_is_written_after_a_cut_by_another_stays(
    fs: Client, calm: Cluster, by: str, length: int
) -> None:
    with calm.connect() as other:
        file = fs.open("/a", "wb+")
        file.write(b"x" * (4 * CHUNK))
        file.fsync()
        other.truncate("/a", length)
        file.write(b"TAIL")
        getattr(file, by)()
        expected = b"x" * length + bytes(4 * CHUNK - length) + b"TAIL"
        with other.open("/a") as again:
            assert again.read() == expected
        file.close()
        assert other.stat("/a").st_size == len(expected)


@pytest.mark.parametrize("client", ["same", "other"])
def test_a_short_write_after_a_cut_by_another_is_the_file(
    fs: Client, calm: Cluster, client: str
) -> None:
    with calm.connect() as far, fs.open("/a", "wb") as file:
        file.write(b"x" * 1000)
        (fs if client == "same" else far).truncate("/a", 0)
        file.pwrite(b"hello", 0)
        file.close()
        with far.open("/a") as again:
            assert again.read() == b"hello"


def test_lines_go_on_after_the_log_was_cut(fs: Client, calm: Cluster) -> None:
    with calm.connect() as other, fs.open("/a", "wb") as file:
        file.write(b"x" * 1000)
        other.truncate("/a", 0)
        for number in range(5):
            file.write(b"line %d\n" % number)
            file.fsync()
            assert other.stat("/a").st_size == 1000 + 7 * (number + 1)
            if number == 2:
                other.truncate("/a", 7)


@pytest.mark.parametrize("fill", [0, 1])
def test_two_that_open_one_file_anew_lose_nothing(fs: Client, calm: Cluster, fill: int) -> None:
    with calm.connect() as other, fs.open("/a", "wb") as one:
        one.write(b"0" * fill)
        with other.open("/a", "wb"):
            one.write(b"1" * 1000)
            one.close()
            assert fs.stat("/a").st_size == fill + 1000
        assert fs.stat("/a").st_size == fill + 1000


def test_a_cut_that_makes_no_file_longer_cuts_what_others_have_not_reported(
    fs: Client, calm: Cluster
) -> None:
    with calm.connect() as other, fs.open("/a", "wb") as one:
        one.write(b"x" * (4 * CHUNK))
        other.truncate("/a", CHUNK)
        one.fsync()
        assert fs.stat("/a").st_size == CHUNK


# One handle, many threads; sessions that end.


def test_threads_that_append_to_one_file_keep_off_each_other(fs: Client) -> None:
    begin = threading.Barrier(8)
    with fs.open("/a", "ab") as file:

        def append(number: int) -> None:
            begin.wait()
            for _ in range(20):
                file.write(bytes([number]) * 100)

        threads = [threading.Thread(target=append, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with fs.open("/a") as file:
        found = file.read()
    assert len(found) == 8 * 20 * 100
    rows = [found[at : at + 100] for at in range(0, len(found), 100)]
    assert sorted(rows) == sorted(bytes([number]) * 100 for number in range(8) for _ in range(20))


@pytest.mark.parametrize("by", ["fsync", "close"])
def test_a_file_whose_session_ended_says_what_that_means(fs: Client, by: str) -> None:
    file = fs.open("/a", "wb")
    file.write(b"last")
    fs._metadata.act(Close(file.inode.number, file._handle), Inode)
    with pytest.raises(
        FileError, match=r"session expired, .*; the file may lack the last writes"
    ) as caught:
        getattr(file, by)()
    assert (caught.value.errno, caught.value.filename) == (errno.EBADF, "/a")
    if not file.closed:
        with pytest.raises(FileError):
            file.close()
