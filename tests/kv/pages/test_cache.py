"""The page cache on a folder: a model, damage, eviction, other processes, full disks, kills."""

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests import waiting
from tests.draws import cases, drawn

from fireflyer import kv
from fireflyer._native import crc32c
from fireflyer._native.kv import MOST_KEY, PageIndex
from fireflyer.errors import Corrupted, InvalidKey, KvError, NoSpace, StorageError, Unavailable
from fireflyer.kv import opening
from fireflyer.kv.pages import inspection, layout, pins
from fireflyer.kv.pages.cache import PageCache
from fireflyer.kv.pages.eviction import Resident, survivors
from fireflyer.storage import DirectoryStorage, FsspecStorage

KIB = 1 << 10


def page_of(key: bytes, size: int = 5000, salt: bytes = b"") -> bytes:
    """Returns the content of a key's page, which no other key shares."""
    return random.Random(salt + b"/" + key).randbytes(size)


def fill(cache: PageCache, keys: list[bytes], **options: object) -> None:
    salt = bytes(options.get("salt", b""))  # type: ignore[call-overload]
    stored = cache.set_from(keys, [page_of(key, salt=salt) for key in keys], **options)  # type: ignore[arg-type]
    assert all(stored)


def got(cache: PageCache, keys: list[bytes], salt: bytes = b"", size: int = 5000) -> list[bool]:
    """Reads keys; what is there must be their own pages."""
    buffers = [bytearray(size) for _ in keys]
    done = cache.get_into(keys, buffers, salt=salt)
    for key, buffer, there in zip(keys, buffers, done, strict=True):
        assert not there or buffer == page_of(key, size, salt), f"another page under {key!r}"
    return done


def names(prefix: str, count: int) -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def test_a_cache_agrees_with_a_dict_of_which_it_may_forget(tmp_path: Path) -> None:
    rng, model = drawn("page cache model"), dict[tuple[bytes, bytes], int]()
    missed = hits = 0
    for _ in range(3):
        with kv.cache(tmp_path, 2 << 20, segment=64 * KIB) as cache:
            for _ in range(cases(600)):
                salt = rng.choice((b"", b"a", b"tenant"))
                keys = names("key", 200)
                keys = rng.sample(keys, rng.randrange(1, 9))
                if rng.random() < 0.5:
                    sizes = [model.get((salt, key)) or rng.randrange(1, 9000) for key in keys]
                    pages = [page_of(k, n, salt) for k, n in zip(keys, sizes, strict=True)]
                    assert all(cache.set_from(keys, pages, salt=salt))
                    model |= {(salt, key): n for key, n in zip(keys, sizes, strict=True)}
                    assert cache.exists(keys[:1], salt=salt) == 1
                    continue
                run = cache.exists(keys, salt=salt)
                assert all((salt, key) in model for key in keys[:run])
                for key in keys:
                    size = model.get((salt, key), 10)
                    (there,) = got(cache, [key], salt, size)
                    assert not there or (salt, key) in model
                    hits, missed = hits + there, missed + (not there)
            cache.flush()
            assert cache.stats()["bytes"] <= 2 << 20
            assert sum(cache.usage().values()) <= cache.stats()["bytes"]
            assert cache.stats()["dropped_pages"] == cache.stats()["damaged"] == 0
    assert hits > 50
    assert missed > 10
    assert inspection.check(DirectoryStorage(tmp_path))["damaged"] == []


def test_pages_are_found_again_by_another_process_and_after_a_restart(tmp_path: Path) -> None:
    keys = names("k", 40)
    with (
        kv.cache(tmp_path, 4 << 20, segment=64 * KIB) as cache,
        kv.cache(tmp_path, 4 << 20, poll=0.005) as other,
    ):
        fill(cache, keys)
        assert cache.exists([*keys, b"none"]) == 40
        assert got(cache, keys) == [True] * 40, "before they are written"
        cache.flush()
        waiting.until(lambda: other.exists(keys) == 40)
        assert all(got(other, keys))
        assert other.exists([b"none", *keys]) == 0
    with kv.cache(tmp_path, 4 << 20) as again:
        assert again.exists(keys) == 40
        assert all(got(again, keys))
        assert again.usage() == {b"": 40 * 5000}
        assert got(again, keys[:1], size=4999) == [False], "another size is another layout"


def test_salts_do_not_share_pages(tmp_path: Path) -> None:
    with kv.cache(tmp_path, 4 << 20) as cache:
        fill(cache, [b"k"], salt=b"one")
        assert cache.exists([b"k"]) == cache.exists([b"k"], salt=b"two") == 0
        assert cache.exists([b"k"], salt=b"one") == 1
        cache.flush()
        assert cache.usage() == {b"one": 5000}


def test_a_flipped_byte_makes_a_miss_and_no_wrong_page(tmp_path: Path) -> None:
    keys, rng = names("k", 12), drawn("page flips")
    with kv.cache(tmp_path, 4 << 20) as cache:
        fill(cache, keys)
    (path,) = (tmp_path / "segment").iterdir()
    whole = path.read_bytes()
    head = layout.decode(path.name, whole).head_bytes
    inside = [
        at for p in layout.decode(path.name, whole).pages() for at in (p.offset, p.offset + 4999)
    ]
    points = [
        *range(70),
        *inside,
        *rng.sample(range(head), 10),
        *rng.sample(range(len(whole)), 40),
    ]
    for at in points:
        path.write_bytes(
            whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        )
        assert inspection.check(DirectoryStorage(tmp_path))["damaged"], f"byte {at} is not covered"
        with kv.cache(tmp_path, 4 << 20, poll=0) as cache:
            there = got(cache, keys)
            assert sum(there) in (12, 11, 0), f"byte {at}"
            assert sum(there) < 12 or at >= head
            fill(cache, keys)
            assert got(cache, keys) == [True] * 12, "a damaged page can be set again"
        for made in (tmp_path / "segment").iterdir():
            if made != path:
                made.unlink()
    for size in (0, 100, head, len(whole) - 4096, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert inspection.check(DirectoryStorage(tmp_path))["damaged"]
        with kv.cache(tmp_path, 4 << 20, poll=0) as cache:
            assert sum(got(cache, keys)) < 13
    path.write_bytes(whole)
    renamed = path.with_name(layout.segment_name(9, "0" * 16))
    path.rename(renamed)
    with kv.cache(tmp_path, 4 << 20, poll=0) as cache:
        assert cache.exists(keys) == 0, "a segment under another name is none"


def test_eviction_keeps_to_the_capacity_and_writes_used_pages_again(tmp_path: Path) -> None:
    hot = names("hot", 4)
    with kv.cache(tmp_path, 1 << 20, segment=64 * KIB, poll=0) as cache:
        fill(cache, [*hot, *names("beside", 5)])  # at most half of a segment is written again
        cache.flush()
        for turn in range(60):
            assert got(cache, hot) == [True] * 4, f"turn {turn}"
            fill(cache, names(f"cold{turn}-", 8))
            cache.flush()
            stats = cache.stats()
            assert stats["bytes"] <= 1 << 20
            on_disk = sum(path.stat().st_size for path in (tmp_path / "segment").iterdir())
            assert on_disk == stats["bytes"]
        assert stats["evicted_segments"] > 20
        assert stats["rewritten_bytes"] > 0
        assert cache.exists(names("cold0-", 8)) == 0
        assert cache.exists(names("cold59-", 8)) == 8


def test_tails_leave_before_heads() -> None:
    def page(number: int, hits: int, *, pinned: bool = False) -> Resident:
        return Resident(b"%016d" % number, 100, 0, 0, hits, number, b"", pinned)

    kept = survivors([page(number, 2) for number in (3, 0, 1, 2)], 400)
    assert kept is not None
    assert [page.position for page in kept] == [0, 1]
    kept = survivors([page(0, 1), page(5, 3), page(1, 0), page(2, 0, pinned=True)], 400)
    assert kept is not None
    assert [page.position for page in kept] == [2, 5]
    assert survivors([page(number, 0, pinned=True) for number in range(3)], 400) is None
    assert survivors([], 400) == []


def test_of_one_call_the_tail_is_in_the_older_segment(tmp_path: Path) -> None:
    keys = names("k", 26)
    with kv.cache(tmp_path, 1 << 20, segment=64 * KIB, poll=0) as cache:
        fill(cache, keys)
        cache.flush()
        oldest = min((tmp_path / "segment").iterdir())
        head = layout.decode(oldest.name, oldest.read_bytes())
        positions = [page.position for page in head.pages()]
        assert positions == list(range(25, 25 - len(positions), -1))


def test_pins_of_any_process_protect_pages_until_they_end(tmp_path: Path) -> None:
    keys = names("pinned", 4)
    with kv.cache(tmp_path, 1 << 20, segment=64 * KIB, poll=0) as cache:
        fill(cache, keys)
        cache.flush()
        with kv.cache(tmp_path, 1 << 20, poll=0) as other, other.pin(keys, 3600):
            for turn in range(40):
                fill(cache, names(f"{turn}-", 8))
                cache.flush()
            assert other.exists(keys) == 4
            assert all(got(other, keys)), "found again where eviction wrote them"
        for turn in range(40, 80):
            fill(cache, names(f"{turn}-", 8))
            cache.flush()
        assert cache.exists(keys) == 0
        everything = [key for turn in range(50, 80) for key in names(f"{turn}-", 8)]
        pin = cache.pin(everything, 3600)
        for turn in range(40):
            fill(cache, names(f"full{turn}-", 8))
            cache.flush()
        assert "pinned pages fill the capacity" in cache.stats()["trouble"]
        assert cache.stats()["bytes"] <= 1 << 20
        pin.release()
        fill(cache, names("new", 8))
        cache.flush()
        assert cache.exists(names("new", 8)) == 8
        with pytest.raises(KvError, match="invalid seconds"):
            cache.pin(keys, 0)


def test_pins_expire_and_damaged_ones_protect_nothing(tmp_path: Path) -> None:
    storage, watch = DirectoryStorage(tmp_path), pins.PinWatch()
    pins.Pin(storage, [b"d" * 16, b"e" * 16], 10.0)
    damaged = pins.Pin(storage, [b"f" * 16], 10.0)
    path = tmp_path / "pins" / damaged.name
    path.write_bytes(path.read_bytes()[:-1])
    assert watch.pinned(storage, 1000.0) == {b"d" * 16, b"e" * 16}
    assert not path.exists()
    assert watch.pinned(storage, 1009.0) == {b"d" * 16, b"e" * 16}
    assert watch.pinned(storage, 1011.0) == set()
    assert list((tmp_path / "pins").iterdir()) == []
    other = b"FFKVPPN1" + crc32c(b"\x00").to_bytes(4, "little") + b"\x00"
    with pytest.raises(Corrupted, match="invalid structure"):
        pins.decode("x", other)


class Troubled(DirectoryStorage):
    """A folder on a disk that may be full, or that does not answer."""

    room: int | None = None
    away = False

    def write(self, name: str, chunks: object) -> None:
        data = b"".join(chunks)  # type: ignore[arg-type]
        used = sum(path.stat().st_size for path in (self.root / "segment").glob("*"))
        if self.room is not None and used + len(data) > self.room:
            raise NoSpace(f"cannot write {name}: no space left on device")
        super().write(name, [data])

    def read_summed(self, *arguments: Any) -> list[int]:
        if self.away:
            raise Unavailable("cannot read: no answer")
        return super().read_summed(*arguments)


def test_a_full_disk_evicts_and_an_absent_one_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Troubled(tmp_path)
    monkeypatch.setattr(opening, "open_storage", lambda url: storage)
    with kv.cache(tmp_path, 8 << 20, segment=64 * KIB, poll=0) as cache:
        for turn in range(4):
            fill(cache, names(f"{turn}-", 8))
            cache.flush()
        storage.room = 300 * KIB
        for turn in range(4, 20):
            fill(cache, names(f"{turn}-", 8))
            cache.flush()
            assert all(got(cache, names(f"{turn}-", 8)))
        assert cache.stats()["dropped_pages"] == 0
        assert cache.stats()["evicted_segments"] > 5
        storage.room = 10
        fill(cache, names("lost", 4))
        cache.flush()
        assert cache.exists(names("lost", 4)) == 0
        assert "no space" in cache.stats()["trouble"]
        storage.room = None
        fill(cache, names("kept", 4))
        cache.flush()
        storage.away = True
        assert got(cache, names("kept", 4)) == [False] * 4
        storage.away = False
        assert got(cache, names("kept", 4)) == [True] * 4
        assert cache.stats()["damaged"] == 0


def test_threads_share_a_cache(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with kv.cache(tmp_path, 1 << 20, segment=64 * KIB, poll=0.001) as cache:

        def work(number: int) -> None:
            rng = random.Random(number)
            try:
                for _ in range(60):
                    keys = rng.sample(names("k", 300), 5)
                    if rng.random() < 0.5:
                        fill(cache, keys)
                    else:
                        got(cache, keys)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cache.flush()
        assert cache.stats()["damaged"] == cache.stats()["dropped_pages"] == 0
    assert not failures


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with kv.cache(tmp_path, 1 << 20) as cache:
        for size in (0, MOST_KEY + 1):
            with pytest.raises(InvalidKey, match=f"{size} bytes"):
                cache.exists([b"k" * size])
            with pytest.raises(InvalidKey):
                cache.set_from([b"k" * size], [b"page"])
        cache.set_from([b"k" * MOST_KEY], [b"page"])
        assert cache.exists([b"k" * MOST_KEY]) == 1
        with pytest.raises(TypeError, match="writable"):
            cache.get_into([b"a"], [b"page"])
        for call in (cache.get_into, cache.set_from):
            with pytest.raises(ValueError, match="as many buffers"):
                call([b"a"], [])
        assert cache.set_from([b"empty", b"huge"], [b"", bytes(1 << 20)]) == [False, False]
        assert cache.get_into([], []) == []
    with pytest.raises(KvError, match="closed"):
        cache.set_from([b"a"], [b"page"])
    for capacity, segment, poll in (
        (1000, 1 << 20, 1.0),
        (1 << 30, 10, 1.0),
        (1 << 30, 1 << 20, -1),
    ):
        with pytest.raises(KvError, match="invalid size"):
            kv.cache(tmp_path, capacity, segment=segment, poll=poll)


def test_any_driver_of_fsspec_will_do() -> None:
    url = "memory://page-cache-test"
    with kv.cache(url, 1 << 20, segment=32 * KIB, poll=0) as cache:
        for turn in range(60):
            fill(cache, names(f"{turn}-", 8))
            cache.flush()
        assert all(got(cache, names("59-", 8)))
        assert cache.stats()["bytes"] <= 1 << 20
    assert inspection.check(FsspecStorage(url))["damaged"] == []


def test_the_index_costs_at_most_64_bytes_a_page_when_it_was_laid() -> None:
    index, count = PageIndex(), 200_000
    pages = [layout.Page(os.urandom(16), 4096, 0, b"", 0) for _ in range(count)]
    head = layout.encode("0" * 20 + "-" + "0" * 16, pages)
    entries = layout.decode("0" * 20 + "-" + "0" * 16, head).entries
    index.insert(1, entries, [0])
    assert len(index) == count
    assert 40 * count < index.memory <= 128 * count
    assert index.leading(b"".join(page.digest for page in pages[:128])) == 128
    index.forget(1)
    assert len(index) == index.bytes_of(0) == 0
    for segment in (1, 2):
        with pytest.raises(StorageError, match="names a salt"):
            index.insert(segment, entries[:36], [])


_KILLED = """
import sys
from tests.kv.pages.test_cache import fill, got, names
from fireflyer import kv
with kv.cache(sys.argv[1], 1 << 20, segment=1 << 16, poll=0) as cache:
    print("open", flush=True)
    for turn in range(10**9):
        fill(cache, names(f"{turn}-", 8))
        cache.flush()
        got(cache, names(f"{turn - 2}-", 8))
        print(turn, flush=True)
"""


def test_killed_processes_leave_whole_pages(tmp_path: Path) -> None:
    rng = drawn("page cache kills")
    for _ in range(cases(40)):
        process = subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        written = -1
        for _ in range(rng.randrange(2, 40)):
            line = process.stdout.readline()
            written = int(line) if line.strip().isdigit() else written
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert inspection.check(DirectoryStorage(tmp_path))["damaged"] == []
        with kv.cache(tmp_path, 1 << 20, poll=0) as cache:
            if written >= 0:
                assert got(cache, names(f"{written}-", 8)) == [True] * 8, "flushed pages stay"
            for turn in range(written + 2):
                got(cache, names(f"{turn}-", 8))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_caller_does_not_wait_for_a_thread_that_an_unexpected_error_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = kv.cache(tmp_path, 2 << 20, segment=64 * KIB)

    def fails(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cache._writer, "write", fails)
    keys = names("key", 200)
    with pytest.raises(KvError, match="closed"):
        cache.set_from(keys, [page_of(key) for key in keys])
    assert got(cache, [b"key0"]) == [False]
    cache.close()
