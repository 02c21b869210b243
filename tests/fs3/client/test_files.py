"""Files through a client of a whole cluster."""

import errno
import gc
import io
import os
import random
import threading

import numpy as np
import pytest
from tests.fs3.client.conftest import CHUNK, Cluster
from tests.waiting import LIMIT_S

from fireflyer import finalizer
from fireflyer.fs3.client import Client

SIZES = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 4097]


@pytest.mark.parametrize("size", SIZES)
def test_what_was_written_is_read(fs: Client, size: int) -> None:
    data = random.Random(size).randbytes(size)
    with fs.open("/a", "wb") as file:
        assert file.write(data) == size
    with fs.open("/a") as file:
        assert file.size == size
        assert file.read() == data
        assert file.read() == b""
        assert file.pread(100, 5) == data[5:105]
        assert file.pread(1 << 20, size) == b""
    assert fs.stat("/a").st_size == size


def test_random_reads_and_writes_behave_as_on_a_local_file(fs: Client, calm: Cluster) -> None:
    rng = random.Random(7)
    model = bytearray()
    with fs.open("/a", "wb+") as file:
        for _ in range(150):
            where = rng.randrange(6 * CHUNK)
            length = rng.choice((1, 100, 4096, CHUNK, 3 * CHUNK))
            action = rng.randrange(5)
            if action < 2:
                data = rng.randbytes(length)
                assert file.pwrite(data, where) == length
                model.extend(bytes(max(0, where - len(model))))
                model[where : where + length] = data
            elif action == 2:
                file.truncate(where)
                del model[where:]
                model.extend(bytes(where - len(model)))
            else:
                assert file.pread(length, where) == model[where : where + length]
            assert file.size == len(model)
        assert file.pread(len(model), 0) == model
    with calm.connect() as other, other.open("a") as file:
        assert file.read() == model


def test_length_is_seen_by_others_after_fsync_and_close(fs: Client, calm: Cluster) -> None:
    with calm.connect() as other:
        with fs.open("/a", "wb") as file:
            file.write(b"one")
            file.fsync()
            assert other.stat("/a").st_size == 3
            file.write(b"two")
        with other.open("/a") as seen:
            assert seen.read() == b"onetwo"


def test_modes(fs: Client) -> None:
    with pytest.raises(FileNotFoundError):
        fs.open("/a", "rb")
    with fs.open("/a", "xb") as file:
        file.write(b"12345")
        with pytest.raises(io.UnsupportedOperation):
            file.read(1)
    with pytest.raises(FileExistsError):
        fs.open("/a", "xb")
    with fs.open("/a", "ab") as file:
        assert file.tell() == 5
        file.write(b"678")
    with fs.open("/a", "r+b") as file:
        file.write(b"ab")
        assert file.read() == b"345678"
        assert file.seek(-1, os.SEEK_END) == 7
    with fs.open("/a", "rb") as file, pytest.raises(io.UnsupportedOperation):
        file.write(b"x")
    with fs.open("/a", "wb"):
        assert fs.stat("/a").st_size == 0
    with fs.open("/a") as file:
        assert file.read() == b""
    for mode in ("", "rw", "rbt", "rbb", "b+", "z"):
        with pytest.raises(ValueError, match="mode"):
            fs.open("/a", mode)
    with pytest.raises(ValueError, match="closed"):
        file.pread(1, 0)


def test_a_file_made_short_and_long_again_holds_zeros(fs: Client) -> None:
    with fs.open("/a", "wb") as file:
        file.write(b"x" * (4 * CHUNK))
        file.truncate(CHUNK + 10)
    fs.truncate("/a", 3 * CHUNK)
    with fs.open("/a") as file:
        assert file.read() == b"x" * (CHUNK + 10) + bytes(2 * CHUNK - 10)


def test_buffered_and_text_faces_of_python(fs: Client) -> None:
    lines = [f"line {i}\n" for i in range(5000)]
    with io.TextIOWrapper(io.BufferedWriter(fs.open("/a", "wb"), 10_000)) as text:
        text.writelines(lines)
    with io.TextIOWrapper(io.BufferedReader(fs.open("/a"))) as text:
        assert text.readlines() == lines


def test_of_two_that_append_the_second_is_refused_until_the_first_is_closed(
    fs: Client, calm: Cluster
) -> None:
    with calm.connect() as other:
        with fs.open("/log", "ab") as first, other.open("/log", "ab") as second:
            first.write(b"one\n")
            with pytest.raises(OSError, match="another open file appends to it") as failed:
                second.write(b"two\n")
            assert failed.value.errno == errno.EBUSY
            second.pwrite(b"O", 0)  # a place of its own choice
            first.write(b"three\n")
            first.close()
            second.write(b"four\n")
        with fs.open("/log", "rb") as file:
            assert file.read() == b"One\nthree\nfour\n"


def test_a_file_that_is_forgotten_is_closed(fs: Client, calm: Cluster) -> None:
    """The collector drops it inside a call of its own client, which holds the lock of that."""
    with calm.connect() as other, other.open("/log", "ab") as second:
        file = fs.open("/log", "ab")
        file.write(b"one\n")
        knot: list[object] = [file]
        knot.append(knot)
        del file, knot
        with fs._metadata._lock, fs._keep_alive._lock:
            gc.collect()
        closed = threading.Event()
        finalizer.later(closed.set)
        assert closed.wait(LIMIT_S)
        second.write(b"two\n")
    with fs.open("/log", "rb") as file:
        assert file.read() == b"one\ntwo\n"


@pytest.mark.parametrize("mode", ["", "t"])
def test_without_a_b_a_file_is_text(fs: Client, mode: str) -> None:
    with fs.open("/a", f"x{mode}", permissions=0o600) as text:
        assert isinstance(text, io.TextIOWrapper)
        assert text.mode == f"x{mode}"
        text.write("für\n")
    with fs.open("/a", f"a{mode}", encoding="latin-1", newline="\r\n") as text:
        assert isinstance(text, io.TextIOWrapper)
        text.write("für\n")
    with fs.open("/a", "rb") as file:
        assert file.read() == "für\n".encode() + "für\r\n".encode("latin-1")
    with fs.open("/a", f"r{mode}", errors="replace") as text:
        assert list(text) == ["für\n", "f\N{REPLACEMENT CHARACTER}r\n"]
    with fs.open("/a", f"r+{mode}", errors="surrogateescape") as text:
        assert isinstance(text, io.TextIOWrapper)
        assert text.read(2) == "fü"
        text.seek(0)
        text.write("F")
    with fs.open("/a", f"r{mode}", newline="", errors="ignore") as text:
        assert text.readline() == "Für\n"
    with fs.open("/a", f"w{mode}") as text:
        assert text.tell() == 0
    assert fs.stat("/a").st_size == 0


def test_batches_into_memory_of_several_kinds(fs: Client) -> None:
    torch = pytest.importorskip("torch")
    rng = random.Random(1)
    data = rng.randbytes(4 * CHUNK)
    array = np.frombuffer(rng.randbytes(8 * 1000), np.float64)
    with fs.open("/a", "wb+") as a, fs.open("/b", "wb+") as b:
        assert (
            fs.write_many([(a, 0, data), (b, 100, array), (a, len(data), b"end")])
            == len(data) + 8000 + 3
        )
        part, whole, numbers = bytearray(1000), bytearray(5 * CHUNK), np.zeros(1000)
        tensor = torch.zeros(2000, dtype=torch.bfloat16)
        view = memoryview(bytearray(50))[10:20]
        counts = fs.read_many(
            [(a, 5, part), (a, 0, whole), (b, 100, numbers), (a, 16, tensor), (b, 99, view)]
        )
        assert counts == [1000, 4 * CHUNK + 3, 8000, 4000, 10]
        assert part == data[5:1005]
        assert whole[: 4 * CHUNK + 3] == data + b"end"
        assert (numbers == array).all()
        assert bytes(tensor.view(torch.uint8).numpy()) == data[16:4016]
        assert view == b"\0" + array.tobytes()[:9]
        with pytest.raises(ValueError, match="contiguous"):
            fs.read_many([(a, 0, torch.zeros(4, 4).t())])
        with pytest.raises(TypeError, match="read-write"):
            fs.read_many([(a, 0, b"not writable")])
        with pytest.raises(ValueError, match="contiguous"):  # as numpy says it
            fs.read_many([(a, 0, np.zeros((4, 4))[:, 1])])
        assert fs.read_many([]) == []


def test_threads_share_a_client(fs: Client) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for turn in range(5):
            data = rng.randbytes(rng.randrange(1, 4 * CHUNK))
            with fs.open(f"/f{number}-{turn}", "wb") as file:
                file.write(data)
            with fs.open(f"/f{number}-{turn}") as file:
                if file.read() != data:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(fs.listdir("/")) == 40


def test_an_open_file_survives_its_name(fs: Client) -> None:
    with fs.open("/a", "wb+") as file:
        file.write(b"still here")
        fs.unlink("/a")
        assert file.pread(5, 0) == b"still"
        assert not fs.exists("/a")


def test_a_file_wider_than_its_first_chain_tells_before_it_writes(fs: Client) -> None:
    with fs.open("/a", "wb") as file:
        assert file.inode.dyn_stripe == 1
        file.pwrite(b"far", 2 * CHUNK)
        assert file.inode.chains >= 3
    with fs.open("/a", "rb+") as file:
        file.truncate(0)
        file.truncate(3 * CHUNK)
        assert file.read() == bytes(3 * CHUNK)


@pytest.mark.parametrize("mode", ["r", "r+", "w", "a"])
def test_a_directory_is_no_file(fs: Client, mode: str) -> None:
    fs.mkdir("/a")
    with pytest.raises(IsADirectoryError):
        fs.open("/a", mode)


@pytest.mark.parametrize("length", [0, 100, CHUNK])
def test_a_file_that_grew_elsewhere_is_cut_as_long_as_it_is(
    fs: Client, calm: Cluster, length: int
) -> None:
    with fs.open("/a", "wb+") as file:
        with calm.connect() as other, other.open("/a", "rb+") as grown:
            grown.write(b"x" * (2 * CHUNK))
        file.truncate(length)
        file.truncate(2 * CHUNK)
        assert file.pread(2 * CHUNK, 0) == b"x" * length + bytes(2 * CHUNK - length)


def test_a_write_of_nothing_changes_nothing(fs: Client) -> None:
    with fs.open("/a", "wb+") as file:
        assert file.pwrite(b"", 5000) == 0
        assert fs.write_many([(file, 100, b""), (file, 3, b"ab")]) == 2
        assert file.size == 5
    assert fs.stat("/a").st_size == 5
