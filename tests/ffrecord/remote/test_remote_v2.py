"""v2 files read by ranges: as a local reader reads them, as strict, and through a cache that heals."""

import itertools
import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from tests.conftest import fork_child
from tests.ffrecord.remote.ranged import RangedFileSystem, RangeServer

from fireflyer.errors import ConfigError, Corrupted, StorageError, Unavailable
from fireflyer.ffrecord import ChunkCache, FileReader, FileWriter, RemoteFiles
from fireflyer.ffrecord.remote_index import PAGE, PageCache
from fireflyer.storage import FsspecStorage, Range, Storage

Encode = Callable[..., bytes]
Make = Callable[[Path], None]
COLUMNS: dict[str, Any] = {"image": ("uint8", (None, 3)), "label": "int64", "text": "str"}
counter = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[RangeServer]:
    fsspec.register_implementation("ranged", RangedFileSystem, clobber=True)
    server = RangeServer()
    yield server
    server.close()


@pytest.fixture(params=["no cache", "small chunks", "large chunks"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkCache | None:
    if request.param == "no cache":
        return None
    return ChunkCache(
        tmp_path / "cache", 1 << 24, 1000 if request.param == "small chunks" else 1 << 18
    )


@pytest.fixture
def memory() -> FsspecStorage:
    return FsspecStorage(f"memory://remote-v2-{next(counter)}")


class Counted:
    """A storage that counts its calls and notes the ranges it was asked for."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.ranges: list[Range] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def size(self, name: str) -> int | None:
        self.calls.append("size")
        return self.inner.size(name)

    def stamp(self, name: str) -> str:
        self.calls.append("stamp")
        return self.inner.stamp(name)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        self.calls.append("read_many")
        self.ranges += ranges
        return self.inner.read_many(ranges)


def sample(i: int) -> bytes:
    return random.Random(i).randbytes(i * 37 % 900) * (1 + i % 3)


def plain(path: Path) -> None:
    with FileWriter(path, version=2) as writer:
        for i in range(300):
            writer.write_one(sample(i))


def appended(path: Path) -> None:
    """Commits of ever fewer samples: several runs of index pages, some with compressed samples."""
    start = 0
    for number, size in enumerate((300, 140, 30, 3)):
        options: dict[str, Any] = {"compression": "zstd" if number % 2 else None}
        kind = FileWriter.append(path, **options) if number else FileWriter(path, version=2)
        with kind as writer:
            for i in range(start, start + size):
                writer.write_one(sample(i) * 2)
        start += size


def aligned(path: Path) -> None:
    with FileWriter(path, align=4096, compression="zstd") as writer:
        for i in range(150):
            writer.write_one(bytes([i]) * (i * 50) if i % 2 else sample(i))


def row(i: int) -> dict[str, Any]:
    return {
        "image": np.full((i % 7, 3), i, np.uint8),
        "label": i,
        "text": f"row {i} " * (i % 9),
    }


def columns(path: Path) -> None:
    with FileWriter(path, columns=COLUMNS, compression="zstd") as writer:
        for i in range(100):
            writer.write_row(row(i))
    with FileWriter.append(path) as writer:
        for i in range(100, 160):
            writer.write_row(row(i))


def publish(server: RangeServer, paths: Sequence[Path]) -> list[str]:
    urls = []
    for path in paths:
        name = f"{next(counter)}-{path.name}"
        server.files[name] = path.read_bytes()
        urls.append(f"ranged://127.0.0.1:{server.port}/{name}")
    return urls


@pytest.mark.sample(8)
@pytest.mark.parametrize("make", [plain, appended, aligned])
@pytest.mark.parametrize("remote", ["memory", "http"])
def test_batches_equal_local_ones(
    tmp_path: Path, server: RangeServer, cache: ChunkCache | None, make: Make, remote: str
) -> None:
    make(path := tmp_path / "a.ffr")
    with FileWriter(one := tmp_path / "one.ffr", n=2) as writer:  # of version 1
        for text in (b"first", b""):
            writer.write_one(text)
    with FileWriter(empty := tmp_path / "empty.ffr", version=2):
        pass
    paths = [one, path, empty]
    if remote == "http":
        urls = publish(server, paths)
    else:
        storage = FsspecStorage(f"memory://remote-v2-{next(counter)}")
        for number, local in enumerate(paths):
            storage.write(f"{number}.ffr", [local.read_bytes()])
        urls = [f"{storage}/{number}.ffr" for number in range(3)]
    near = FileReader(paths)
    rng = np.random.default_rng(3)
    for _ in range(2):  # the second time the cache is warm
        far = RemoteFiles(urls, cache=cache)
        assert (far.n, far.columns) == (near.n, None)
        for batch in ([], [0], [7, 3, 7, 1], range(near.n), rng.integers(0, near.n, 200)):
            arena, offsets = far.read_batch(batch)
            expected, places = near.read_batch(batch)
            assert arena.tobytes() == expected.tobytes()
            assert offsets.tolist() == places.tolist()
            assert arena.flags.writeable
        assert far.read_one(5).tobytes() == near.read_one(5).tobytes()
        for number in range(3):
            assert far.get_offsets(number).tolist() == near.get_offsets(number).tolist()
            assert far.get_checksums(number).tolist() == near.get_checksums(number).tolist()
        far.validate()
        far.validate(data=False)
        copy = pickle.loads(pickle.dumps(far))
        assert copy.read_one(9).tobytes() == near.read_one(9).tobytes()


def test_rows_and_columns_equal_local_ones(
    tmp_path: Path, server: RangeServer, cache: ChunkCache | None
) -> None:
    columns(path := tmp_path / "a.ffr")
    plain(other := tmp_path / "b.ffr")
    urls = publish(server, [path, other])
    near, far = FileReader(path), RemoteFiles(urls[0], cache=cache)
    assert far.columns == near.columns
    order = [159, 0, 5, 159, 77]
    for found, i in zip(far.rows(order), order, strict=True):
        assert all(np.array_equal(found[name], value) for name, value in row(i).items())
    found, expected = far.read_columns(order), near.read_columns(order)
    assert found["label"].tolist() == expected["label"].tolist() == order
    assert found["text"] == expected["text"]
    assert far.read_columns([])["label"].shape == (0,)
    with pytest.raises(ConfigError, match="have different columns"):
        RemoteFiles(urls)
    with pytest.raises(ConfigError, match="no columns"):
        RemoteFiles(urls[1]).rows([0])


def test_an_open_takes_two_round_trips_and_a_batch_at_most_two(
    memory: FsspecStorage, tmp_path: Path
) -> None:
    appended(path := tmp_path / "a.ffr")
    storage = Counted(memory)
    content = path.read_bytes()
    memory.write("a.ffr", [content])
    memory.write("b.ffr", [content])
    reader = RemoteFiles(["a.ffr"], storage=storage)
    assert storage.calls == ["size", "read_many"]
    reader = RemoteFiles(["a.ffr", "b.ffr"], storage=storage)
    storage.calls.clear()
    wanted = [3, 200, reader.n - 1, 500]
    first = reader.read_batch(wanted)[0].tobytes()
    assert storage.calls == ["read_many", "read_many"], "index pages of both files, then samples"
    assert reader.read_batch(wanted)[0].tobytes() == first
    assert storage.calls == ["read_many"] * 3, "the pages are known"
    storage.calls.clear()
    memory.write("torn.ffr", [content, b"what a dead writer left" * 400])
    torn = RemoteFiles(["torn.ffr"], storage=storage)
    assert storage.calls == ["size", "read_many", "read_many"]
    assert torn.read([9])[0].tobytes() == reader.read([9])[0].tobytes()
    storage.calls.clear()
    RemoteFiles(["a.ffr"], storage=storage, cache=ChunkCache(tmp_path / "cache", 1 << 20))
    assert storage.calls == ["size", "read_many", "stamp"]


def test_of_a_large_index_only_the_pages_in_use_are_read(
    memory: FsspecStorage, tmp_path: Path
) -> None:
    with FileWriter(path := tmp_path / "a.ffr", version=2) as writer:
        for i in range(200_000):
            writer.write_one(i.to_bytes(4, "little"))
    memory.write("a.ffr", [path.read_bytes()])
    storage = Counted(memory)
    reader = RemoteFiles(["a.ffr"], storage=storage)
    for i in (0, 199_999, 100_000):
        assert reader.read_one(i).tobytes() == i.to_bytes(4, "little")
    asked = sum(end - start for _, start, end in storage.ranges)
    assert asked <= (16 << 10) + PAGE + 3 * (PAGE + 4)
    assert path.stat().st_size > 6 << 20


def test_the_memory_of_pages_has_a_bound_and_keeps_what_is_used() -> None:
    memory = PageCache(limit=100)
    memory.put(0, 0, b"often")
    for place in range(1, 10_000):
        memory.put(place % 3, place, b"page")
        assert memory.get(0, 0) == b"often"
        assert len(memory._new) + len(memory._old) <= 100
    assert memory.get(1, 1) is None
    assert memory.get(9999 % 3, 9999) == b"page"


def test_a_file_that_grows_while_it_is_opened(memory: FsspecStorage, tmp_path: Path) -> None:
    """The size is that before the commit which the slots name, as when it is appended to meanwhile."""
    appended(path := tmp_path / "a.ffr")
    memory.write("a.ffr", [path.read_bytes()])
    storage = Counted(memory)
    sizes = [path.stat().st_size - 9000]
    storage.size = lambda name: sizes.pop() if sizes else memory.size(name)  # type: ignore[method-assign]
    near, far = FileReader(path), RemoteFiles(["a.ffr"], storage=storage)
    assert far.read_batch(range(near.n))[0].tobytes() == near.read_batch(range(near.n))[0].tobytes()


def outcome(read: Callable[[], list[bytes]]) -> list[bytes] | type[Exception]:
    try:
        return read()
    except (StorageError, ConfigError) as error:
        return type(error) if "a.ffr" in str(error) else AssertionError


@pytest.mark.sample(1)
@pytest.mark.parametrize("cached", [False, True])
def test_flips_and_cuts_are_found_as_a_local_reader_finds_them(
    memory: FsspecStorage, tmp_path: Path, encode_v2: Encode, cached: bool
) -> None:
    good = encode_v2([[b"alpha", b"", b"beta" * 9], [b"gamma", b"d" * 90]])
    options: dict[str, Any] = {"storage": memory, "backoff_s": 0.0}
    if cached:
        options["cache"] = ChunkCache(tmp_path / "cache", 1 << 20, 700)
    path = tmp_path / "a.ffr"

    def both(content: bytes) -> None:
        path.write_bytes(content)
        memory.write("a.ffr", [content])

        def near() -> list[bytes]:
            with FileReader(path) as reader:
                return [s.tobytes() for s in reader.read(range(reader.n))]

        def far() -> list[bytes]:
            with RemoteFiles(["a.ffr"], **options) as reader:
                return [s.tobytes() for s in reader.read(range(reader.n))]

        assert outcome(far) == outcome(near)

    used = [at for at, byte in enumerate(good) if byte]
    for at in {*used, *range(0, len(good), 197)}:
        both(good[:at] + bytes([good[at] ^ (1 << at % 8)]) + good[at + 1 :])
    for length in {*range(0, len(good), 411), len(good) - 1, 12, 4096, 12288}:
        both(good[:length])
    both(good)


def test_errors_name_file_and_sample(memory: FsspecStorage, tmp_path: Path) -> None:
    plain(path := tmp_path / "a.ffr")
    good = path.read_bytes()
    offsets = FileReader(path).get_offsets(0)
    broken = bytearray(good)
    broken[offsets[201]] ^= 1
    memory.write("a.ffr", [broken])
    memory.write("b.ffr", [good])
    reader = RemoteFiles(["b.ffr", "a.ffr"], storage=memory)
    with pytest.raises(Corrupted, match=r"a\.ffr', sample 201 does not match"):
        reader.read([500, 501])
    assert reader.read([500])[0].tobytes() == sample(200)
    with pytest.raises(Corrupted, match=r"a\.ffr', sample 201"):
        reader.validate()
    reader.validate(data=False)
    unchecked = RemoteFiles(["a.ffr"], False, storage=memory)
    assert unchecked.read([201])[0][0] == sample(201)[0] ^ 1
    broken = bytearray(good)
    broken[len(good) - 5000] ^= 1  # in an index page
    memory.write("c.ffr", [broken])
    with pytest.raises(
        Corrupted, match=r"c\.ffr' is damaged: the index page of samples \d+ to \d+"
    ):
        RemoteFiles(["c.ffr"], storage=memory).read(range(300))
    memory.write("d.ffr", [good[:8], b"\0\0\0\0\3", good[13:]])
    with pytest.raises(Corrupted, match=r"d\.ffr' is damaged: its header"):
        RemoteFiles(["d.ffr"], storage=memory)


@pytest.mark.parametrize("make", [appended, columns])
def test_broken_answers_are_ridden_out(
    tmp_path: Path, server: RangeServer, cache: ChunkCache | None, make: Make
) -> None:
    """Every other request is answered wrongly: by an error, half of it, a flip, a cut connection."""
    make(path := tmp_path / "a.ffr")
    [url] = publish(server, [path])
    turn = itertools.count()
    lock = threading.Lock()
    met: set[int] = set()

    def spoil(_name: str, _start: int, _end: int, right: bytes) -> bytes | int | None:
        with lock:
            number, odd = divmod(next(turn), 2)
        if odd:
            return right
        met.add(kind := number % 4)
        flipped = right[:-1] + bytes([right[-1] ^ 1])
        return (503, None, right[: len(right) // 2], flipped)[kind]

    near = FileReader(path)
    server.spoil = spoil
    try:
        for _ in range(5):
            far = RemoteFiles(url, cache=cache, backoff_s=0.0)
            for batch in (range(0, near.n, 3), [1, 5, 1], range(near.n), range(near.n)):
                assert far.read_batch(batch)[0].tobytes() == near.read_batch(batch)[0].tobytes()
        server.spoil = lambda *_: 503
        with pytest.raises(Unavailable, match="status 503"):
            RemoteFiles(url, backoff_s=0.0, attempts=2)
    finally:
        server.spoil = lambda _name, _start, _end, right: right
    assert met == {0, 1, 2, 3}


def flip_chunks(directory: Path) -> int:
    """Changes every byte of every chunk in a cache."""
    chunks = list(directory.rglob("*.chunk"))
    for path in chunks:
        path.write_bytes(bytes(byte ^ 255 for byte in path.read_bytes()))
    return len(chunks)


@pytest.mark.parametrize("make", [plain, appended, columns])
@pytest.mark.parametrize("check_data", [False, True])
def test_a_damaged_cache_heals(
    memory: FsspecStorage, tmp_path: Path, make: Make, check_data: bool
) -> None:
    make(path := tmp_path / "a.ffr")
    memory.write("a.ffr", [path.read_bytes()])
    storage = Counted(memory)
    cache = ChunkCache(tmp_path / "cache", 1 << 24, 5000)
    near = FileReader(path)
    right = near.read_batch(range(near.n))[0].tobytes()

    def fresh() -> RemoteFiles:
        return RemoteFiles(["a.ffr"], check_data, storage=storage, cache=cache)

    assert fresh().read_batch(range(near.n))[0].tobytes() == right
    assert flip_chunks(tmp_path / "cache") > 5
    assert fresh().read_batch(range(near.n))[0].tobytes() == right
    assert fresh().read_batch(range(near.n))[0].tobytes() == right
    storage.ranges.clear()
    reader = fresh()
    opened = len(storage.ranges)
    assert reader.read_batch(range(near.n))[0].tobytes() == right
    assert len(storage.ranges) == opened, "nothing was missing or damaged any more"


def test_damage_of_the_remote_file_is_told_from_that_of_the_cache(
    memory: FsspecStorage, tmp_path: Path, encode: Callable[[Sequence[bytes]], bytes]
) -> None:
    """Of v1 and v2; the damaged sample stays wrong, its neighbours in the same chunks are right."""
    samples = [sample(i) for i in range(40)]
    with FileWriter(path := tmp_path / "v2.ffr", version=2) as writer:
        for data in samples:
            writer.write_one(data)
    (tmp_path / "v1.ffr").write_bytes(encode(samples))
    for name in ("v1.ffr", "v2.ffr"):
        path = tmp_path / name
        broken = bytearray(path.read_bytes())
        broken[FileReader(path).get_offsets(0)[7] + 3] ^= 64
        memory.write(name, [broken])
        cache = ChunkCache(tmp_path / "cache", 1 << 20, 3000)
        for _ in range(2):
            reader = RemoteFiles([name], storage=memory, cache=cache)
            with pytest.raises(Corrupted, match=rf"{name}', sample 7 does not match"):
                reader.read(range(40))
            rest = [i for i in range(40) if i != 7]
            assert [s.tobytes() for s in reader.read(rest)] == [samples[i] for i in rest]
            flip_chunks(tmp_path / "cache")


def test_a_chunk_damaged_on_its_way_is_found_when_its_other_samples_are_read(
    memory: FsspecStorage, tmp_path: Path
) -> None:
    plain(path := tmp_path / "a.ffr")
    memory.write("a.ffr", [path.read_bytes()])
    cache = ChunkCache(tmp_path / "cache", 1 << 24)
    storage = Counted(memory)
    reader = RemoteFiles(["a.ffr"], storage=storage, cache=cache)
    reader.read([0])
    for chunk in (tmp_path / "cache").rglob("*.chunk"):  # as if it had come so
        content = bytearray(chunk.read_bytes())
        content[20_000:21_000] = bytes(1000)
        chunk.write_bytes(content)
    storage.calls.clear()
    assert [s.tobytes() for s in reader.read(range(300))] == [sample(i) for i in range(300)]
    assert storage.calls


def test_a_replaced_file_is_not_read_from_the_cache(memory: FsspecStorage, tmp_path: Path) -> None:
    """Not even one that differs in nothing but the first sample and its checksum."""
    cache = ChunkCache(tmp_path / "cache", 1 << 24)
    for content in (b"old!", b"new!"):
        with FileWriter(path := tmp_path / "a.ffr", version=2) as writer:
            writer.write_one(content)
            for i in range(1, 300):
                writer.write_one(sample(i))
        memory.write("a.ffr", [path.read_bytes()])
        reader = RemoteFiles(["a.ffr"], storage=memory, cache=cache)
        assert reader.read_one(0).tobytes() == content


def test_where_no_stamp_tells_versions_apart_nothing_is_cached(
    memory: FsspecStorage, tmp_path: Path
) -> None:
    plain(path := tmp_path / "a.ffr")
    memory.write("a.ffr", [path.read_bytes()])
    storage = Counted(memory)
    storage.stamp = lambda name: ""  # type: ignore[method-assign]
    cache = ChunkCache(tmp_path / "cache", 1 << 24)
    reader = RemoteFiles(["a.ffr"], storage=storage, cache=cache)
    assert reader.read_one(7).tobytes() == sample(7)
    assert cache.used_bytes() == 0


def test_processes_share_a_cache_that_is_too_small(tmp_path: Path) -> None:
    """They evict what the others read; every batch is right and the limit holds."""
    appended(path := tmp_path / "a.ffr")
    (tmp_path / "remote").mkdir()
    os.rename(path, remote := tmp_path / "remote" / "a.ffr")
    right = [s.tobytes() for s in FileReader(remote).read(range(473))]
    limit = 60_000
    assert remote.stat().st_size > 4 * limit

    def work(seed: int) -> None:
        rng = random.Random(seed)
        cache = ChunkCache(tmp_path / "cache", limit, 4096)
        reader = RemoteFiles(f"file://{remote}", cache=cache)
        for _ in range(40):
            batch = [rng.randrange(473) for _ in range(20)]
            if [s.tobytes() for s in reader.read(batch)] != [right[i] for i in batch]:
                raise AssertionError
            with cache._locked():
                if cache.used_bytes() > limit:
                    raise AssertionError

    pids = [fork_child(lambda s=seed: work(s)) for seed in range(3)]  # type: ignore[misc]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 3
    assert limit // 2 < ChunkCache(tmp_path / "cache", limit, 4096).used_bytes() <= limit


def test_threads_share_one_reader(memory: FsspecStorage, tmp_path: Path) -> None:
    appended(path := tmp_path / "a.ffr")
    memory.write("a.ffr", [path.read_bytes()])
    reader = RemoteFiles(
        ["a.ffr"], storage=memory, cache=ChunkCache(tmp_path / "cache", 50_000, 4096)
    )
    right = [s.tobytes() for s in FileReader(path).read(range(473))]
    wrong: list[object] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(30):
                batch = [rng.randrange(473) for _ in range(20)]
                if [s.tobytes() for s in reader.read(batch)] != [right[i] for i in batch]:
                    wrong.append(batch)
        except BaseException as error:  # noqa: BLE001  # carried to the assertion
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
