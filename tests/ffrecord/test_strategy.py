"""Every way to fetch a batch gives the same samples, in any process and thread; views; memory."""

import gc
import multiprocessing
import operator
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tests.waiting import LIMIT_S

from fireflyer._native.ffrecord import arena_bytes
from fireflyer.errors import ConfigError, Corrupted, StorageError
from fireflyer.ffrecord import FileReader
from fireflyer.ffrecord.reader import Strategy

# Two megabytes and more in a batch are shared between threads.
SAMPLES = [bytes([i % 251, i // 251]) * (i * 7919 % 20_000) for i in range(500)]
Store = Callable[..., Path]


@pytest.fixture
def paths(store: Store) -> list[Path]:
    return [store(SAMPLES[:200], "a.ffr"), store(SAMPLES[200:], "b.ffr")]


@pytest.fixture(params=get_args(Strategy))
def reader(request: pytest.FixtureRequest, paths: list[Path]) -> FileReader:
    reader = FileReader(paths, strategy=request.param)
    if reader.strategy == "direct":
        try:
            reader.read_one(1)
        except StorageError as error:
            pytest.skip(str(error))
    return reader


def matches(reader: FileReader, seed: int, count: int) -> bool:
    indices = np.random.default_rng(seed).integers(0, len(SAMPLES), count).tolist()
    expected = [SAMPLES[i] for i in indices]
    arena, offsets = reader.read_batch(indices)
    return (
        [s.tobytes() for s in reader.read(indices)] == expected
        and arena.tobytes() == b"".join(expected)
        and offsets.tolist() == [0, *np.cumsum([len(s) for s in expected])]
    )


def drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_the_same_samples_cached_or_not(paths: list[Path], threads: int | None) -> None:
    for strategy in ("auto", "cached", "threads", "mmap"):
        reader = FileReader(paths, strategy=strategy, threads=threads)
        for seed, count in enumerate((1, 10, 300, 300)):
            drop_from_cache(paths)
            assert matches(reader, seed, count)
            assert matches(reader, seed, count)


def test_every_strategy_reads_what_is_not_cached(reader: FileReader, paths: list[Path]) -> None:
    drop_from_cache(paths)
    assert matches(reader, 1, 300)
    assert matches(reader, 1, 1)


@pytest.mark.sample(3)
def test_a_child_of_a_process_that_reads(reader: FileReader) -> None:
    assert matches(reader, 1, 300)
    children = []
    for seed in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0 if matches(reader, seed, 300) and matches(reader, seed, 300) else 1)
        children.append(child)
    assert matches(reader, 9, 300)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]


@pytest.mark.sample(1)
def test_children_of_threads_that_read(reader: FileReader) -> None:
    """A lock that another thread held at the fork would stop the child for ever."""

    def read_on(seed: int) -> bool:
        return all(matches(reader, seed, 200) for _ in range(20))

    def read_in_child(seed: int) -> None:
        os._exit(0 if matches(reader, seed, 200) else 1)

    context = multiprocessing.get_context("fork")
    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read_on, seed) for seed in range(3)]
        for seed in range(10):
            child = context.Process(target=read_in_child, args=(seed,))
            child.start()
            child.join(LIMIT_S)
            assert child.exitcode == 0
        assert all(future.result() for future in reading)


@pytest.mark.sample(3)
def test_a_spawned_process(reader: FileReader) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        found = pool.submit(operator.methodcaller("read", [5, 499, 250, 5]), reader).result(LIMIT_S)
    assert [s.tobytes() for s in found] == [SAMPLES[i] for i in (5, 499, 250, 5)]


def test_threads_share_a_reader(reader: FileReader) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda seed: matches(reader, seed, 200), range(20)))


def test_pickle_keeps_the_strategy(paths: list[Path]) -> None:
    reader = FileReader(paths, strategy="threads", threads=2)
    copy = pickle.loads(pickle.dumps(reader))
    assert (copy.strategy, copy.threads, matches(copy, 1, 20)) == ("threads", 2, True)


def test_what_is_no_strategy_is_refused(paths: list[Path]) -> None:
    with pytest.raises(ValueError, match="invalid strategy 'fast'"):
        FileReader(paths, strategy="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="invalid threads 0: expected 1 to 4096"):
        FileReader(paths, threads=0)


def test_damage_is_found_once_it_is_there(reader: FileReader, paths: list[Path]) -> None:
    bad = bytearray(paths[0].read_bytes())
    bad[-1] ^= 1
    with open(paths[0], "r+b") as file:
        file.write(bad)
    with pytest.raises(Corrupted, match=r"a\.ffr.* sample 199 .*checksum"):
        reader.read(list(range(500)))


def test_a_file_that_is_cut_is_corrupted(reader: FileReader, paths: list[Path]) -> None:
    matches(reader, 1, 100)
    os.truncate(paths[0], 5000)
    with pytest.raises(Corrupted, match="shorter than when it was opened"):
        reader.read([199, 150, 100])
    with pytest.raises(Corrupted, match="shorter than when it was opened"):
        reader.read_views([100])


def test_views_are_the_file_itself_and_outlive_the_reader(paths: list[Path]) -> None:
    reader = FileReader(paths)
    indices = [3, 499, 3, 0, 250]
    views = reader.read_views(indices)
    reader.close()
    del reader
    gc.collect()
    assert [view.tobytes() for view in views] == [SAMPLES[i] for i in indices]
    assert np.shares_memory(views[0], views[2])
    assert not any(view.flags.writeable for view in views)
    with pytest.raises(ValueError, match=r"WRITEABLE|read-only"):
        views[0].flags.writeable = True
    with pytest.raises(ValueError, match="closed"):
        FileReader.read_views(_closed(paths), [0])
    with pytest.raises(IndexError):
        FileReader(paths).read_views([500])
    assert FileReader(paths).read_views([]) == []


def _closed(paths: list[Path]) -> FileReader:
    with FileReader(paths) as reader:
        return reader


def test_a_view_is_checked_the_first_time_only(paths: list[Path]) -> None:
    reader = FileReader(paths[0])
    reader.read_views([199])
    with open(paths[0], "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")
    assert reader.read_views([199])[0][-1] == 7
    with pytest.raises(Corrupted, match="sample 199"):
        FileReader(paths[0]).read_views([199])
    assert FileReader(paths[0], check_data=False).read_views([199])[0][-1] == 7


@pytest.fixture
def no_arenas() -> Iterator[None]:
    gc.collect()
    assert arena_bytes() == 0
    yield
    gc.collect()
    assert arena_bytes() == 0


@pytest.mark.usefixtures("no_arenas")
def test_a_reader_keeps_two_arenas_at_most(paths: list[Path]) -> None:
    reader = FileReader(paths)
    everything = list(range(500))
    arena, _ = reader.read_batch(everything)
    one = arena_bytes()
    assert arena.nbytes <= one < 2 * arena.nbytes
    del arena
    held = [reader.read_batch(everything)[0] for _ in range(5)]
    assert arena_bytes() == 5 * one
    held.clear()
    for _ in range(10):
        reader.read(everything)
        assert arena_bytes() <= 2 * one
    view = reader.read(everything)[300]
    reader.close()
    del reader
    gc.collect()
    assert arena_bytes() == one
    assert view.tobytes() == SAMPLES[300]


@pytest.mark.usefixtures("no_arenas")
def test_small_batches_take_what_they_need(paths: list[Path]) -> None:
    reader = FileReader(paths)
    held = [reader.read_one(i) for i in range(500)]
    assert arena_bytes() == 0
    assert [sample.tobytes() for sample in held] == SAMPLES
