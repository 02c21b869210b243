"""The chunk cache: bounded, checked, shared by processes, and sound after any death."""

import logging
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import fork_child

from fireflyer.errors import ConfigError, StorageError
from fireflyer.ffrecord import ChunkCache

KEYS = [f"{number:02x}" + "0" * 38 for number in range(4)]


def data_of(key: str, number: int, length: int = 100) -> bytes:
    return random.Random(f"{key}{number}").randbytes(length)


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.chunk"))


def test_what_is_put_is_got_by_this_and_other_caches(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 100_000, 100)
    assert cache.get(KEYS[0], 0) is None
    cache.put([(KEYS[0], 0, b"zero"), (KEYS[0], 7, b""), (KEYS[1], 0, bytes(100))])
    for one in (cache, ChunkCache(tmp_path, 100_000, 100)):
        assert one.get(KEYS[0], 0) == b"zero"
        assert one.get(KEYS[0], 7) == b""
        assert one.get(KEYS[1], 0) == bytes(100)
        assert one.get(KEYS[1], 1) is None
    cache.discard(KEYS[0], 0)
    cache.discard(KEYS[0], 0)
    assert cache.get(KEYS[0], 0) is None
    with pytest.raises(ValueError, match="101 bytes"):
        cache.put([(KEYS[0], 1, bytes(101))])


def test_the_longest_unused_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 2000, 100)  # 17 chunks of 112 bytes
    for number in range(17):
        cache.put([(KEYS[0], number, data_of(KEYS[0], number))])
        os.utime(cache._path(KEYS[0], number), ns=(number, number))
    assert cache.get(KEYS[0], 0) is not None  # used just now
    cache.put([(KEYS[1], 0, bytes(100))])
    kept = [number for number in range(17) if cache.get(KEYS[0], number) is not None]
    assert kept == [0, *range(2, 17)]
    for number in range(1000):
        cache.put([(KEYS[2], number, data_of(KEYS[2], number))])
        assert on_disk(tmp_path) <= 2000
    assert cache.used_bytes() == on_disk(tmp_path) > 1500


def test_a_batch_larger_than_the_cache(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 1000, 100)
    cache.put((KEYS[0], number, bytes(100)) for number in range(50))
    assert 500 < on_disk(tmp_path) <= 1000


def test_every_flipped_byte_and_cut_is_a_miss(tmp_path: Path) -> None:
    cache = ChunkCache(tmp_path, 10_000, 100)
    content = data_of(KEYS[0], 3)
    cache.put([(KEYS[0], 3, content)])
    [path] = tmp_path.rglob("*.chunk")
    good = path.read_bytes()
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 16]) + good[index + 1 :])
        assert cache.get(KEYS[0], 3) is None
        path.write_bytes(good[:index])
        assert cache.get(KEYS[0], 3) is None
    path.write_bytes(good + b"x")
    assert cache.get(KEYS[0], 3) is None
    cache.put([(KEYS[0], 3, content)])
    assert cache.get(KEYS[0], 3) == content, "a damaged chunk is replaced"


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
    calls = ("open", "close", "pwrite", "replace", "unlink", "makedirs", "utime", "scandir")
    points, status = 0, -signal.SIGKILL
    cache = ChunkCache(tmp_path, 1500, 100)
    while status != 0:
        points += 1

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
                cache.get(key, point + number)

        pid = fork_child(victim)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert on_disk(tmp_path) <= 1500
        for path in tmp_path.rglob("*.chunk"):
            key, number = path.stem.split("-")
            assert cache.get(key, int(number)) == data_of(key, int(number))
    assert points > 60
    cache.put([(KEYS[0], 10**6 + number, bytes(100)) for number in range(30)])
    assert on_disk(tmp_path) <= 1500
    assert not list(tmp_path.glob("*.tmp"))


def test_many_processes_share_one_cache(tmp_path: Path) -> None:
    def work(seed: int) -> None:
        cache = ChunkCache(tmp_path, 5000, 100)
        rng = random.Random(seed)
        for _ in range(300):
            key, number = rng.choice(KEYS), rng.randrange(30)
            found = cache.get(key, number)
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
    assert cache.get(KEYS[0], 0) is None
    monkeypatch.undo()
    cache.put([(KEYS[0], 0, b"x")])
    assert cache.get(KEYS[0], 0) == b"x"


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot hold one chunk"):
        ChunkCache(tmp_path, 100, 100)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot make cache directory"):
        ChunkCache(tmp_path / "file" / "cache", 1000, 100)
