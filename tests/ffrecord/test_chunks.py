"""The chunk cache: bounded, checked, shared by processes, and sound after any death."""

import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import draws
from tests.conftest import fork_child

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord import ChunkCache

KEYS = [f"{number:02x}" + "0" * 38 for number in range(4)]


def data_of(key: str, number: int, length: int = 100) -> bytes:
    return random.Random(f"{key}{number}").randbytes(length)


def get(cache: ChunkCache, key: str, number: int, length: int = 100) -> bytes | None:
    """The first bytes of a chunk, read as two pieces."""
    cut = length // 3
    table = [[0, number, cut, length - cut, cut], [0, number, 0, cut, 0]]
    arena = np.zeros(length, np.uint8)
    found = cache.read([key], np.array(table, np.int64), arena)
    return arena.tobytes() if found.all() else None


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.chunk"))


def test_what_is_put_is_got_by_this_and_other_caches(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 100_000, 100)
    assert get(cache, KEYS[0], 0) is None
    cache.put([(KEYS[0], 0, b"zero"), (KEYS[0], 7, b""), (KEYS[1], 0, bytes(100))])
    for one in (cache, ChunkCache(tmp_path, 100_000, 100)):
        assert get(one, KEYS[0], 0, 4) == b"zero"
        assert get(one, KEYS[0], 0, 5) is None, "it is shorter"
        assert get(one, KEYS[0], 7, 0) == b""
        assert get(one, KEYS[1], 0) == bytes(100)
        assert get(one, KEYS[1], 1) is None
    cache.discard(KEYS[0], 0)
    cache.discard(KEYS[0], 0)
    assert get(cache, KEYS[0], 0, 4) is None
    with pytest.raises(ValueError, match="101 bytes"):
        cache.put([(KEYS[0], 1, bytes(101))])


def test_other_users_can_read_nothing_of_it(tmp_path: Path) -> None:
    (ours := tmp_path / "open").mkdir(mode=0o755)
    before = os.umask(0o022)
    try:
        for directory in (tmp_path / "made", ours):
            cache = ChunkCache(directory, 100_000, 100)
            cache.put([(KEYS[0], 0, b"zero"), (KEYS[1], 0, b"one")])
            inside = list(directory.rglob("*"))
            assert len(inside) == 6  # lock, used, two directories, two chunks
            assert [path for path in inside if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert ours.stat().st_mode & 0o777 == 0o755, "somebody else's directory is left as it is"


def test_the_longest_unused_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 1785, 100)  # 17 chunks
    for number in range(17):
        cache.put([(KEYS[0], number, data_of(KEYS[0], number))])
        os.utime(cache._path(KEYS[0], number), ns=(number, number))
    assert get(cache, KEYS[0], 0) is not None  # used just now
    cache.put([(KEYS[1], 0, bytes(100))])
    kept = [number for number in range(17) if get(cache, KEYS[0], number) is not None]
    assert kept == [0, *range(2, 17)]
    for number in range(1000):
        cache.put([(KEYS[2], number, data_of(KEYS[2], number))])
        assert on_disk(tmp_path) <= 1785
    assert cache.used_bytes() == on_disk(tmp_path) > 1500


def test_a_batch_larger_than_the_cache(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 1000, 100)
    cache.put((KEYS[0], number, bytes(100)) for number in range(50))
    assert 500 < on_disk(tmp_path) <= 1000


def test_a_chunk_that_was_cut_is_a_miss_where_it_ends_and_makes_room(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 10_000, 100)
    content = data_of(KEYS[0], 3)
    cache.put([(KEYS[0], 3, content)])
    [path] = tmp_path.rglob("*.chunk")
    for length in range(100):
        path.write_bytes(content[:length])
        assert get(cache, KEYS[0], 3, length) == content[:length]
        assert get(cache, KEYS[0], 3, length + 1) is None
        cache.put([(KEYS[0], 3, content)])
        assert get(cache, KEYS[0], 3) == content


def test_pieces_of_many_chunks_and_files_go_to_their_places(tmp_path: Path) -> None:
    """More than a thread's share, in any order, some of them missing; nothing else is touched."""
    cache = ChunkCache(tmp_path, 10 << 20, 1 << 16)
    chunks = {(key, n): data_of(KEYS[key], n, 1 << 16) for key in range(3) for n in range(12)}
    cache.put((KEYS[key], n, data) for (key, n), data in chunks.items() if n != 5)
    rng = random.Random(1)
    rows, at = [], 7
    for _ in range(900):
        first = rng.randrange(1 << 16)
        size = rng.randrange(min(8000, (1 << 16) - first) + 1)
        rows.append((rng.randrange(3), rng.randrange(12), first, size, at))
        at += size + 7
    arena = np.full(at, 170, np.uint8)
    found = cache.read(KEYS, np.array(rows, np.int64), arena)
    expected = np.full(at, 170, np.uint8)
    for (key, number, first, size, target), here in zip(rows, found.tolist(), strict=True):
        assert here == (number != 5)
        if here:
            data = chunks[key, number][first : first + size]
            expected[target : target + size] = np.frombuffer(data, np.uint8)
    assert at > 3 << 20
    assert np.array_equal(arena, expected)


@pytest.mark.parametrize(
    "row",
    [
        *((1, 0, 0, 1, 0), (-1, 0, 0, 1, 0), (0, 0, -1, 1, 0), (0, 0, 0, 11, 0)),
        *((0, 0, 0, -1, 0), (0, 0, 0, 2, 9), (0, 0, 0, 1, -1)),
    ],
)
def test_pieces_outside_the_arena_are_refused(tmp_path: Path, row: tuple[int, ...]) -> None:
    cache = ChunkCache(tmp_path, 1000, 100)
    with pytest.raises(IndexError):
        cache.read([KEYS[0]], np.array([row], np.int64), np.empty(10, np.uint8))


def test_a_damaged_counter_is_counted_anew(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 2000, 100)
    for damage in (b"", b"short", b"\xff" * 12, bytes(12)):
        (tmp_path / "used").write_bytes(damage)
        for number in range(40):
            cache.put([(KEYS[0], number, bytes(100))])
        assert on_disk(tmp_path) <= 2000
    (tmp_path / "used").unlink()
    cache.put((KEYS[1], number, bytes(100)) for number in range(40))
    assert on_disk(tmp_path) <= 2000


def test_killed_at_any_call_the_cache_is_sound_and_within_its_limit(tmp_path: Path) -> None:
    """A child dies at its n-th call of the system; whatever it left, chunks are right and few enough."""
    calls = ("open", "close", "pwrite", "replace", "unlink", "makedirs", "stat", "scandir")
    status = -signal.SIGKILL
    cache = ChunkCache(tmp_path, 1350, 100)
    for points in draws.points("chunks", 400):
        if status == 0:
            break

        def victim(point: int = points) -> None:
            count = 0

            def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
                def called(*args: Any, **kwargs: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == point:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **kwargs)

                return called

            for name in calls:
                setattr(os, name, wrap(getattr(os, name)))
            for number in range(14):
                key = KEYS[(point + number) % 4]
                cache.put([(key, point + number, data_of(key, point + number))])
                get(cache, key, point + number)

        pid = fork_child(victim)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert on_disk(tmp_path) <= 1350
        for path in tmp_path.rglob("*.chunk"):
            key, number = path.stem.split("-")
            assert get(cache, key, int(number)) == data_of(key, int(number))
    assert points > 60
    cache.put([(KEYS[0], 10**6 + number, bytes(100)) for number in range(30)])
    assert on_disk(tmp_path) <= 1350
    assert not list(tmp_path.glob("*.tmp"))


def test_many_processes_share_one_cache(tmp_path: Path) -> None:
    def work(seed: int) -> None:
        cache = ChunkCache(tmp_path, 5000, 100)
        rng = random.Random(seed)
        for _ in range(300):
            key, number = rng.choice(KEYS), rng.randrange(30)
            found = get(cache, key, number)
            if found is None:
                cache.put([(key, number, data_of(key, number))])
            elif found != data_of(key, number):
                raise AssertionError
            with cache._locked():  # nobody adds or evicts meanwhile
                if on_disk(tmp_path) > 5000:
                    raise AssertionError

    pids = [fork_child(lambda s=seed: work(s)) for seed in range(4)]  # type: ignore[misc]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    assert 1000 < on_disk(tmp_path) <= 5000


def test_a_cache_that_cannot_be_written_misses_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ChunkCache(tmp_path, 10_000, 100)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.put([(KEYS[0], 0, b"x")])
    [record] = caplog.records
    assert "free some space" in record.getMessage()
    assert get(cache, KEYS[0], 0) is None
    monkeypatch.undo()
    cache.put([(KEYS[0], 0, b"x")])
    assert get(cache, KEYS[0], 0, 1) == b"x"


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold one chunk"):
        ChunkCache(tmp_path, 99, 100)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make cache directory"):
        ChunkCache(tmp_path / "file" / "cache", 1000, 100)
