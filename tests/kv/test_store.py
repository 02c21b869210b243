"""The store on a folder: what it promises to callers, and what damage and other writers do to it."""

import os
import threading
from pathlib import Path

import pytest
from tests import waiting
from tests.draws import drawn

from fireflyer import kv
from fireflyer._native.kv import MOST_KEY, BlockCache, Compaction, Memtable, Scan, Table, View
from fireflyer.errors import (
    Corrupted,
    FireflyerError,
    InvalidKey,
    KvError,
    NoSpace,
    SnapshotGone,
    Stale,
    StorageError,
)
from fireflyer.kv import batch as batches
from fireflyer.kv import inspection, opening, reading
from fireflyer.kv import store as stores
from fireflyer.kv.core import frames, manifest
from fireflyer.kv.core.planning import MOST_RUNS, runs_to_merge
from fireflyer.storage import DirectoryStorage, FsspecStorage


def test_a_store_agrees_with_a_dict_over_flushes_merges_and_reopening(tmp_path: Path) -> None:
    rng, model = drawn("kv model"), dict[bytes, bytes]()
    for _ in range(3):
        with kv.open(tmp_path / "db", write=True, memtable=20_000) as store:
            for step in range(150):
                with store.batch() as batch:
                    for _ in range(rng.randrange(1, 8)):
                        key = b"key%d" % rng.randrange(300)
                        if rng.random() < 0.25:
                            batch.delete(key)
                            model.pop(key, None)
                        else:
                            model[key] = rng.randbytes(rng.choice((0, 10, 500)))
                            batch.put(key, model[key])
                if step % 50 == 49:
                    store.flush()
                    store.compact(everything=step == 99)
                    store.collect()
            assert dict(store.scan()) == model
            keys = [b"key%d" % number for number in range(300)]
            assert store.get_many(keys) == [model.get(key) for key in keys]
    with kv.open(tmp_path / "db", poll=0) as reader:
        assert list(reader.scan()) == sorted(model.items())
        low, high = b"key1", b"key2"
        assert [k for k, _ in reader.scan(low, high)] == sorted(k for k in model if low <= k < high)
        assert dict(reader.scan(prefix=b"key1")) == dict(reader.scan(low, high))
        assert len(list(reader.scan(limit=7))) == 7
    assert inspection.check(DirectoryStorage(tmp_path / "db"))["damaged"] == []


def test_threads_share_log_objects(tmp_path: Path) -> None:
    with kv.open(tmp_path, write=True) as store:

        def put(number: int) -> None:
            for index in range(20):
                store.put(b"%d-%d" % (number, index), b"v")

        threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(store.scan())) == 320
        assert store.sequence == 320


def test_a_write_is_visible_to_readers_and_survives_without_close(tmp_path: Path) -> None:
    store = kv.open(tmp_path, write=True)
    with kv.open(tmp_path, poll=0.001) as reader:
        store.put(b"a", b"1")
        waiting.until(lambda: reader.get(b"a") == b"1")
        store.flush()
        store.put(b"a", b"2")
        assert reader.refresh() == 2
        assert reader.get(b"a") == b"2"
        with pytest.raises(KvError, match="write=True"):
            reader.put(b"a", b"3")
    with kv.open(tmp_path, write=True) as newer:
        assert newer.get(b"a") == b"2"
        assert newer.epoch == store.epoch + 1
        with pytest.raises(Stale, match="epoch 1 was replaced"):
            store.put(b"a", b"4")
        with pytest.raises(Stale):
            store.get(b"a")
        assert newer.get(b"a") == b"2"
    store.close()


def test_queued_puts_are_durable_after_sync(tmp_path: Path) -> None:
    with kv.open(tmp_path, write=True) as store:
        for number in range(50):
            store.put(b"%d" % number, b"v", wait=False)
        store.sync()
        with kv.open(tmp_path, poll=0) as reader:
            assert len(list(reader.scan())) == 50


def test_compare_and_set_lets_one_of_many_win(tmp_path: Path) -> None:
    with kv.open(tmp_path, write=True) as store:
        won: list[int] = []

        def add(number: int) -> None:
            for _ in range(5):
                while True:
                    found = store.get(b"n")
                    if store.compare_and_set(b"n", found, b"%d" % (int(found or b"0") + 1)):
                        won.append(number)
                        break

        threads = [threading.Thread(target=add, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.get(b"n") == b"30"
        assert len(won) == 30
        assert not store.compare_and_set(b"n", None, b"x")
        assert store.compare_and_set(b"n", b"30", None)
        assert store.get(b"n") is None


def test_snapshots_do_not_change_and_keep_their_tables(tmp_path: Path) -> None:
    with kv.open(tmp_path, write=True) as store:
        store.put(b"a", b"1")
        snapshot = store.snapshot()
        assert snapshot.id is not None
        with kv.open(tmp_path, poll=0) as reader, reader.snapshot() as of_reader:
            assert of_reader.id is None
            for number in range(4):
                store.put(b"a", b"%d" % (number + 2))
                store.flush()
            store.compact(everything=True)
            store.put(b"b", b"1")
            store.flush()
            store.collect()
            assert len(list((tmp_path / "table").iterdir())) == 3, "of the pin, merged, flushed"
            assert snapshot.get(b"a") == of_reader.get(b"a") == b"1"
            with kv.open(tmp_path, snapshot=snapshot.id) as elsewhere:
                assert dict(elsewhere.scan()) == {b"a": b"1"}
            assert reader.get(b"a") == b"1", "a reader that does not poll stays where it was"
            assert reader.refresh()
            assert reader.get(b"a") == b"5"
        snapshot.close()
        store.collect()
        assert len(list((tmp_path / "table").iterdir())) == 2
        with pytest.raises(SnapshotGone):
            kv.open(tmp_path, snapshot=snapshot.id)
        with pytest.raises(SnapshotGone):
            kv.open(tmp_path, snapshot="never")


def test_values_expire_by_the_clock_and_a_clock_an_hour_off_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000_000_000_000]
    for module in (batches, reading, stores):
        monkeypatch.setattr(module, "now_ms", lambda: now[0])
    with kv.open(tmp_path, write=True) as store:
        store.put(b"short", b"v", ttl=60)
        store.put(b"kept", b"v")
        assert store.get(b"short") == b"v"
        now[0] += 3600_000  # the clock is an hour fast: the value is hidden ...
        assert store.get(b"short") is None
        assert [key for key, _ in store.scan()] == [b"kept"]
        store.flush()
        store.compact(everything=True)
        now[0] -= 3600_000  # ... and is there again once the clock is right
        assert store.get(b"short") == b"v"
        assert store.compare_and_set(b"short", b"v", b"w", ttl=1)
        now[0] += 48 * 3600_000
        store.flush()
        store.compact(everything=True)
        assert inspection.stat(DirectoryStorage(tmp_path))["records"] == 1
        with pytest.raises(KvError, match="invalid ttl"):
            store.put(b"a", b"b", ttl=-1)


def test_the_change_feed_tells_every_operation_in_order(tmp_path: Path) -> None:
    with kv.open(tmp_path, write=True, history=100) as store:
        with store.batch() as batch:
            batch.put(b"a", b"1")
            batch.put(b"b", b"2")
        store.delete(b"a")
        with kv.open(tmp_path, poll=0) as reader:
            expected = [
                kv.Change(1, b"a", b"1"),
                kv.Change(2, b"b", b"2"),
                kv.Change(3, b"a", None),
            ]
            assert list(reader.changes()) == expected
            assert list(reader.changes(1)) == expected[1:]
            follow = reader.changes(3, wait=None)
            store.put(b"c", b"3")
            assert next(follow) == kv.Change(4, b"c", b"3")
        store.flush()
        store.collect()
        assert len(list(store.changes())) == 4, "history keeps what was flushed"
    with kv.open(tmp_path / "short", write=True) as store:
        store.put(b"a", b"1")
        store.flush()
        store.put(b"b", b"2")
        store.collect()
        with pytest.raises(SnapshotGone, match="were collected"):
            list(store.changes())
        assert [change.key for change in store.changes(1)] == [b"b"]


@pytest.mark.parametrize("size", [0, MOST_KEY + 1])
def test_keys_of_a_wrong_size_are_refused(tmp_path: Path, size: int) -> None:
    key = b"k" * size
    with kv.open(tmp_path, write=True) as store:
        with pytest.raises(InvalidKey, match=f"{size} bytes"):
            store.put(key, b"v")
        with pytest.raises(InvalidKey, match=f"{size} bytes"):
            store.get(key)
        with pytest.raises(InvalidKey, match=f"{size} bytes"):
            store.delete(key)
        with pytest.raises(ValueError, match="expected 1 to 65536"):
            store.compare_and_set(key, None, b"v")
        with pytest.raises(TypeError, match="a key is bytes"):
            store.put("text", b"v")  # type: ignore[arg-type]
        store.put(b"k" * MOST_KEY, b"v")
        assert store.get(b"k" * MOST_KEY) == b"v"
        assert store.sequence == 1


class Full(DirectoryStorage):
    """A folder on a disk that may be full."""

    full = False

    def create(self, name: str, data: bytes) -> bool:
        self._check(name)
        return super().create(name, data)

    def write(self, name: str, chunks: object) -> None:
        self._check(name)
        super().write(name, chunks)  # type: ignore[arg-type]

    def _check(self, name: str) -> None:
        if self.full:
            raise NoSpace(f"cannot write {name}: no space left on device")


def test_a_full_disk_refuses_puts_loses_nothing_and_still_collects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Full(tmp_path)
    monkeypatch.setattr(opening, "open_storage", lambda url: storage)
    with kv.open(tmp_path, write=True) as store:
        for number in range(3):
            store.put(b"a", b"%d" % number)
            store.flush()
        store.compact(everything=True)
        storage.full = True
        with pytest.raises(NoSpace):
            store.put(b"a", b"lost")
        assert store.get(b"a") == b"2"
        (tmp_path / "table" / "0000000001-0000009999").write_bytes(b"an orphan")
        store.collect()  # or the store's own thread, just before
        assert not (tmp_path / "table" / "0000000001-0000009999").exists()
        storage.full = False
        store.put(b"a", b"3")
        assert store.get(b"a") == b"3"


def damage(folder: Path) -> list[object]:
    """Returns what `kv check` finds damaged."""
    try:
        return list(inspection.check(DirectoryStorage(folder))["damaged"])
    except Corrupted as error:
        return [error]


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    store = kv.open(tmp_path, write=True)
    model = {b"key%d" % number: os.urandom(30) for number in range(60)}
    for key, value in model.items():
        store.put(key, value, wait=False)
    store.flush()
    store.put(b"tail", b"value")
    store.close(flush=False)
    rng = drawn("kv flips")
    for folder in ("table", "log", "manifest"):
        newest = max((tmp_path / folder).iterdir())
        for path in sorted((tmp_path / folder).iterdir())[-2:]:
            whole = path.read_bytes()
            tail = range(
                len(whole) - 40, len(whole)
            )  # of a table: the trailer, and the index's end
            for at in [*rng.sample(range(len(whole)), 12), *rng.sample(tail, 8)]:
                path.write_bytes(
                    whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
                )
                if path == newest:
                    assert damage(tmp_path), f"byte {at} of {path.name} is not covered"
                try:
                    with kv.open(tmp_path, poll=0) as reader:
                        found = dict(reader.scan())
                        assert found == {**model, b"tail": b"value"}, f"{path.name}, byte {at}"
                except Corrupted:
                    pass
                finally:
                    path.write_bytes(whole)
    with kv.open(tmp_path, poll=0) as reader:
        assert dict(reader.scan()) == {**model, b"tail": b"value"}


def test_a_missing_log_object_is_an_error_not_a_gap(tmp_path: Path) -> None:
    store = kv.open(tmp_path, write=True)
    for number in range(5):
        store.put(b"%d" % number, b"v")
    store.close(flush=False)
    sorted((tmp_path / "log").iterdir())[2].unlink()
    with pytest.raises(Corrupted, match="is missing"):
        kv.open(tmp_path, write=True)


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    kv.open(tmp_path, write=True).close()
    left = tmp_path / "log" / "00000000000000000009.1-1.tmp"
    left.write_bytes(b"half")
    kv.open(tmp_path, write=True).close()
    assert not left.exists()


def test_drivers_without_an_exclusive_create_are_opened_for_reading_only(tmp_path: Path) -> None:
    with kv.open(tmp_path, write=True) as store:
        store.put(b"a", b"1")
    url = f"local://{tmp_path}"
    assert not FsspecStorage(url).exclusive_create
    with kv.open(url, poll=0) as reader:
        assert reader.get(b"a") == b"1"
    with pytest.raises(KvError, match="does not create files exclusively"):
        kv.open(url, write=True)
    with kv.open("memory://kv-test", write=True) as in_memory:
        in_memory.put(b"a", b"1")
        assert in_memory.get(b"a") == b"1"


def test_opening_what_is_not_there_or_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(KvError, match=f"no store at {tmp_path}/none: "):
        kv.open(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(KvError, match=f"no store at {tmp_path}: "):
        kv.open(tmp_path)
    with pytest.raises(KvError, match=f"no store at {tmp_path}: "):
        inspection.require_store(DirectoryStorage(tmp_path))
    assert os.listdir(tmp_path) == []
    with pytest.raises(KvError, match="invalid size"):
        kv.open(tmp_path, write=True, cache=-1)
    store = kv.open(tmp_path, write=True)
    store.close()
    store.close()
    for call in (lambda: store.get(b"a"), lambda: store.put(b"a", b"b"), store.scan):
        with pytest.raises(KvError, match="closed"):
            call()


def test_manifests_and_frames_of_another_kind_are_refused() -> None:
    whole = manifest.encode(manifest.Manifest(3, 1, b"w"))
    assert manifest.decode(3, whole).epoch == 1
    with pytest.raises(Corrupted, match="holds manifest 3"):
        manifest.decode(4, whole)
    newer = manifest.encode(manifest.Manifest(3, 1, b"w", version=9))
    with pytest.raises(StorageError, match="upgrade"):
        manifest.decode(3, newer)
    frame = frames.encode(frames.BATCH, 5, 1, b"writer00", 1, 1, [frames.operation(b"k", b"v")])
    assert list(frames.operations(frames.decode(5, frame))) == [(1, b"k", b"v", 0)]
    with pytest.raises(Corrupted, match="holds frame 5"):
        frames.decode(6, frame)
    with pytest.raises(FireflyerError):
        frames.decode(5, frame[:40])


def test_merges_are_of_similar_sizes_and_bound_the_runs() -> None:
    assert runs_to_merge([]) == 0
    assert runs_to_merge([1, 1, 1]) == 0
    assert runs_to_merge([1, 1, 1, 1]) == 4
    assert runs_to_merge([1, 1, 1, 1, 1000]) == 4
    assert runs_to_merge([1, 100, 10_000]) == 0
    assert runs_to_merge([3**n for n in range(MOST_RUNS + 1)]) == 2
    sizes: list[int] = []
    written = 0
    for _ in range(1000):
        sizes.insert(0, 1)
        if count := runs_to_merge(sizes):
            merged = sum(sizes[:count])
            written += merged
            sizes[:count] = [merged]
        assert len(sizes) <= MOST_RUNS
    assert written < 10 * 1000


def test_a_scan_needs_no_more_cache_than_a_block(tmp_path: Path) -> None:
    memtable = Memtable()
    parts = [frames.operation(b"%06d" % number, b"v" * 100) for number in range(2000)]
    memtable.apply(b"".join(parts), 0, 1)
    compaction = Compaction(View([memtable], [], 1 << 40), 1 << 20, True, 0)
    assert compaction.step() is True
    whole = compaction.take()
    assert whole is not None
    data, first, last, offset, size, records = whole
    assert records == 2000
    cache = BlockCache(0)
    table = Table("t", first, last, offset, size, cache)
    walk, found = Scan(View([], [[table], []], 1 << 40), b"", None), []
    while True:
        items, state = walk.next(0, 100, 1 << 20)
        found += items
        if state is True:
            break
        if isinstance(state, tuple):
            begin, length = state[0].range(state[1])
            state[0].supply(begin, data[begin : begin + length])
    assert [key for key, _ in found] == [b"%06d" % number for number in range(2000)]
    with pytest.raises(Corrupted):
        Table("t", first, last, offset, size, cache).supply(
            offset, data[offset : offset + size - 1]
        )
