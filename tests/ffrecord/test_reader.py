"""Batches: which indices are taken, who owns the memory, threads, forks and pickles."""

import gc
import multiprocessing
import operator
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import LIMIT_S

from fireflyer.errors import StorageError
from fireflyer.ffrecord import FileReader, FileWriter, RemoteFiles

SAMPLES = [bytes([i % 251]) * (i * 37 % 5000) for i in range(600)]
Store = Callable[..., Path]


@pytest.fixture
def reader(store: Store) -> FileReader:
    """600 samples in three files, the second without any."""
    return FileReader(
        [store(SAMPLES[:250], "a.ffr"), store([], "b.ffr"), store(SAMPLES[250:], "c.ffr")]
    )


def matches(reader: FileReader, indices: list[int]) -> bool:
    return [s.tobytes() for s in reader.read(indices)] == [SAMPLES[i] for i in indices]


@pytest.mark.parametrize(
    "indices",
    [
        [],
        [0],
        [599, 0],
        [249, 250, 251],
        [5, 5, 5],
        [7, 6, 7, 5, 6, 599, 7],
        list(range(600)),
        list(range(599, -1, -1)),
        list(range(0, 600, 2)),
        [250] * 3000,
    ],
    ids=lambda indices: f"{len(indices)} from {indices[:3]}",
)
def test_samples_come_in_the_order_asked_for(reader: FileReader, indices: list[int]) -> None:
    assert matches(reader, indices)


def test_random_batches_far_over_the_4096_of_the_original(reader: FileReader) -> None:
    indices = np.random.default_rng(1).integers(0, 600, 20_000)
    assert matches(reader, indices.tolist())


@pytest.mark.parametrize("bad", [-1, 600, 2**62, 2**63, 2**64, -(2**63) - 1])
def test_an_index_outside_is_an_index_error(reader: FileReader, bad: int) -> None:
    for check in (reader, FileReader(reader.fnames, check_data=False)):
        with pytest.raises(IndexError, match="index"):
            check.read([1, bad, 2])
        with pytest.raises(IndexError, match="index"):
            check.read_one(bad)


def test_an_empty_file_has_no_index(store: Store) -> None:
    reader = FileReader(store([]))
    assert reader.read([]) == []
    with pytest.raises(IndexError):
        reader.read_one(0)


@pytest.mark.parametrize("indices", [[1.0], ["1"], [True], [None], [[1, 2]], {1, 2}, 3, [1, None]])
def test_what_is_no_list_of_integers_is_a_type_error(reader: FileReader, indices: object) -> None:
    with pytest.raises(TypeError, match="indices must be"):
        reader.read(indices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "indices",
    [
        (3, 1),
        range(3, 0, -2),
        np.array([3, 1], np.uint8),
        np.array([3, 1], np.uint64),
        np.array([3, 0, 1, 0], np.int64)[::2],
        np.array([3, 1], ">i4"),
    ],
)
def test_indices_of_any_integer_sequence(reader: FileReader, indices: list[int]) -> None:
    assert [s.tobytes() for s in reader.read(indices)] == [SAMPLES[3], SAMPLES[1]]


def test_a_batch_is_one_arena_whose_views_outlive_the_reader(reader: FileReader) -> None:
    arena, offsets = reader.read_batch([9, 3, 9])
    sizes = [len(SAMPLES[i]) for i in (9, 3, 9)]
    assert offsets.tolist() == [0, *np.cumsum(sizes)]
    assert arena.tobytes() == SAMPLES[9] + SAMPLES[3] + SAMPLES[9]
    first, second, third = reader.read([9, 3, 9])
    reader.close()
    del reader, arena
    gc.collect()
    first[:] = 0
    assert (second.tobytes(), third.tobytes()) == (SAMPLES[3], SAMPLES[9])
    assert first.base is third.base


def test_a_closed_reader_refuses(reader: FileReader) -> None:
    with reader:
        pass
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read([0])
    assert str(reader) == "FileReader(3 files, 600 samples)"


def test_many_threads_share_one_reader(reader: FileReader) -> None:
    def work(seed: int) -> bool:
        random = np.random.default_rng(seed)
        return all(matches(reader, random.integers(0, 600, 50).tolist()) for _ in range(30))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_close_during_reads_of_other_threads_lets_them_finish(reader: FileReader) -> None:
    started = threading.Barrier(5)

    def work() -> str:
        started.wait(LIMIT_S)
        while True:
            try:
                assert matches(reader, list(range(600)))
            except ValueError as error:
                return str(error)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(work) for _ in range(4)]
        started.wait(LIMIT_S)
        reader.close()
        # A new file takes the numbers of descriptors that were closed too early.
        files = [open(os.devnull, "rb") for _ in range(8)]  # noqa: SIM115
        assert [f.result(LIMIT_S) for f in futures] == ["the FileReader is closed"] * 4
        for file in files:
            file.close()


def test_a_read_releases_the_interpreter_lock(store: Store) -> None:
    """With no forced switching, this thread runs between `set` and the end of the read only when the
    read itself lets go of the lock; which it does each time, but the scheduler may be late."""
    reader = FileReader(store([bytes(16 << 20)]))

    def read(started: threading.Event, ended: threading.Event) -> None:
        started.set()
        reader.read([0] * 4)
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        seen_inside = False
        deadline = time.monotonic() + 20
        while not seen_inside and time.monotonic() < deadline:
            started, ended = threading.Event(), threading.Event()
            thread = threading.Thread(target=read, args=(started, ended))
            thread.start()
            started.wait()
            seen_inside = not ended.is_set()
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen_inside


def read_calls() -> int:
    """Read system calls of this thread so far."""
    if not os.path.exists("/proc/thread-self/io"):
        pytest.skip("this kernel does not count system calls")
    with open("/proc/thread-self/io") as io:
        return int(dict(line.split(":") for line in io)["syscr"])


def calls_of(reader: FileReader, indices: list[int]) -> int:
    before = read_calls()
    own = read_calls() - before
    before = read_calls()
    reader.read(indices)
    return read_calls() - before - own


def test_neighbours_are_read_with_one_call_and_repeats_once(store: Store) -> None:
    files = [store([b"abc"] * 100, "a.ffr"), store([b"", b"x", b""] * 100, "b.ffr")]
    reader = FileReader(files, strategy="cached")
    shuffled = np.random.default_rng(0).permutation(100).tolist()
    assert calls_of(reader, shuffled) == 1
    assert calls_of(reader, list(range(400))) == 2
    assert calls_of(reader, [7] * 1000) == 1
    assert calls_of(reader, [9, 5, 7, 6]) == 2
    assert calls_of(reader, [100, 102, 103]) == 0
    assert calls_of(reader, []) == 0


def test_many_small_samples_found_in_the_page_cache_cost_no_call_the_next_time(
    store: Store,
) -> None:
    reader = FileReader(store([b"abc"] * 100, "a.ffr"))
    assert bytes(reader.read_batch(range(100))[0]) == b"abc" * 100
    assert calls_of(reader, list(range(0, 100, 2))) == 0


def test_a_reader_used_before_a_fork_works_in_parent_and_children(reader: FileReader) -> None:
    assert matches(reader, [1, 2, 3, 4])
    children = []
    for seed in range(3):
        child = os.fork()
        if child == 0:
            indices = np.random.default_rng(seed).integers(0, 600, 400).tolist()
            os._exit(0 if matches(reader, indices) else 1)
        children.append(child)
    assert matches(reader, list(range(600)))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


def test_pickle_reopens_by_path_from_any_directory(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(SAMPLES)
    monkeypatch.chdir(tmp_path)
    reader = FileReader("a.ffr", check_data=False)
    frozen = pickle.dumps(reader)
    monkeypatch.chdir("/")
    copy = pickle.loads(frozen)
    assert (copy.n, copy.check_data) == (600, False)
    assert matches(copy, [5, 599])
    assert matches(reader, [5, 599])
    (tmp_path / "a.ffr").unlink()
    with pytest.raises(StorageError, match="No such file"):
        pickle.loads(frozen)
    assert matches(reader, [7])


@pytest.mark.parametrize("change", ["replaced", "added to"])
@pytest.mark.parametrize("remote", [False, True])
def test_a_pickled_reader_refuses_other_files_than_those_it_had(
    tmp_path: Path, change: str, remote: bool
) -> None:
    def write(name: str, content: bytes) -> Path:
        with FileWriter(tmp_path / name, version=2 if change == "added to" else 1) as writer:
            writer.write_one(content)
        return tmp_path / name

    paths = [write("a.ffr", b"one"), write("b.ffr", b"two")]
    urls = [f"file://{path}" for path in paths]
    reader = RemoteFiles(urls) if remote else FileReader(paths)
    before = pickle.dumps(reader)
    if change == "replaced":
        write("b.ffr", b"TWO")
    else:
        with FileWriter.append(paths[1]) as writer:
            writer.write_one(b"three")
    for frozen in (before, pickle.dumps(reader)):
        with pytest.raises(StorageError, match=r"b\.ffr' has changed since"):
            pickle.loads(frozen)
    if not remote:
        assert [sample.tobytes() for sample in reader.read([0, 1])] == [b"one", b"two"]


def test_a_spawned_process_gets_a_reader(reader: FileReader) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        read = operator.methodcaller("read", [5, 599, 250])
        found = pool.submit(read, reader).result(LIMIT_S)
    assert [s.tobytes() for s in found] == [SAMPLES[5], SAMPLES[599], SAMPLES[250]]


def _descriptors_of(path: Path) -> list[int]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(link) == str(path):
                found.append(int(link.name))
    return found


def test_descriptors_are_closed_and_not_inherited(store: Store) -> None:
    path = store(SAMPLES)
    reader = FileReader(path)
    (fd,) = _descriptors_of(path)
    assert not os.get_inheritable(fd)
    reader.close()
    assert _descriptors_of(path) == []
