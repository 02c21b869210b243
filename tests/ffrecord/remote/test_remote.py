"""Record files at URLs: equal to local ones, whatever the transport does; never wrong data."""

import itertools
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fireflyer.errors import ConfigError, Corrupted, StorageError, Unavailable
from fireflyer.ffrecord import ChunkCache, FileReader, RemoteFiles
from fireflyer.ffrecord.ranges import _JOINED, Retry, read_ranges
from fireflyer.storage import FsspecStorage, Range, Storage

Encode = Callable[[Sequence[bytes]], bytes]
counter = itertools.count()


def made(n: int, seed: int = 0) -> list[bytes]:
    random = np.random.default_rng(seed)
    return [random.bytes(int(random.integers(0, 3000))) for _ in range(n)]


class Shaky:
    """A storage whose `read_many` is passed through `spoil(range, answer)`; counts requests and bytes."""

    def __init__(
        self,
        inner: Storage,
        spoil: Callable[[Range, bytes], bytes | StorageError] = lambda _, answer: answer,
    ) -> None:
        self.inner, self.spoil = inner, spoil
        self.calls, self.ranges, self.bytes = 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_many(self, ranges: Sequence[Range]) -> list[bytes | StorageError]:
        self.calls += 1
        self.ranges += len(ranges)
        answers: list[bytes | StorageError] = []
        for wanted, answer in zip(ranges, self.inner.read_many(ranges), strict=True):
            good = isinstance(answer, bytes)
            answers.append(self.spoil(wanted, answer) if good else answer)  # type: ignore[arg-type]
            self.bytes += len(answer) if isinstance(answer, bytes) else 0
        return answers


@pytest.fixture
def memory() -> FsspecStorage:
    return FsspecStorage(f"memory://remote-test-{next(counter)}")


@pytest.fixture(params=["no cache", "small chunks", "large chunks"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> ChunkCache | None:
    if request.param == "no cache":
        return None
    return ChunkCache(
        tmp_path / "cache", 1 << 24, 1000 if request.param == "small chunks" else 1 << 18
    )


@pytest.fixture(params=["memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://remote-test-{next(counter)}"
    return f"file://{tmp_path}/files"


def store(place: str, encode: Encode, parts: Sequence[Sequence[bytes]]) -> list[str]:
    storage = FsspecStorage(place)
    for number, samples in enumerate(parts):
        storage.write(f"{number}.ffr", [encode(samples)])
    return [f"{place}/{number}.ffr" for number in range(len(parts))]


def test_remote_batches_equal_local_ones(
    place: str, tmp_path: Path, encode: Encode, cache: ChunkCache | None
) -> None:
    parts = [made(40, 1), [], made(1, 2), [b"", b"x", b""], made(60, 3)]
    urls = store(place, encode, parts)
    whole = list(itertools.chain.from_iterable(parts))
    (local := tmp_path / "local").mkdir()
    for number, samples in enumerate(parts):
        (local / f"{number}.ffr").write_bytes(encode(samples))
    near = FileReader(local)
    random = np.random.default_rng(5)
    for _ in range(2):  # the second time the cache is warm
        far = RemoteFiles(urls, cache=cache)
        assert (far.n, len(far), far.fnames) == (len(whole), len(whole), urls)
        for batch in ([], [0], [7, 3, 7], range(len(whole)), random.integers(0, far.n, 300)):
            arena, ends = far.read_batch(batch)
            expected, expected_ends = near.read_batch(batch)
            assert arena.tobytes() == expected.tobytes()
            assert ends.tolist() == expected_ends.tolist()
            assert arena.flags.writeable
        assert [far.read_one(i).tobytes() for i in range(far.n)] == whole
        for number in range(len(parts)):
            assert far.get_offsets(number).tolist() == near.get_offsets(number).tolist()
            assert far.get_checksums(number).tolist() == near.get_checksums(number).tolist()
    assert RemoteFiles(place, cache=cache).fnames == urls
    assert [s.tobytes() for s in RemoteFiles(urls[::-1]).read([0, 60])] == [parts[4][0], b""]


def test_a_batch_is_one_request_and_neighbours_are_joined(
    memory: FsspecStorage, encode: Encode
) -> None:
    samples = [bytes([i]) * 1000 for i in range(250)] + [bytes(200_000), b"end"]
    memory.write("a.ffr", [encode(samples)])
    storage = Shaky(memory)
    reader = RemoteFiles(["a.ffr"], storage=storage)
    storage.calls = storage.ranges = storage.bytes = 0
    assert [s.tobytes() for s in reader.read([251, 3, 1, 2, 3])] == [
        samples[i] for i in (251, 3, 1, 2, 3)
    ]
    assert (storage.calls, storage.ranges, storage.bytes) == (1, 2, 3003)


def test_joined_ranges_have_a_bound(memory: FsspecStorage) -> None:
    memory.write("f", [bytes(3 * _JOINED)])
    storage = Shaky(memory)
    step = 1 << 20
    ranges = [("f", at, at + step) for at in range(0, 3 * _JOINED, step)]
    assert all(len(data) == step for data in read_ranges(storage, ranges, Retry()))
    assert (storage.calls, storage.ranges) == (1, 3)


def test_a_warm_cache_reads_headers_only(
    memory: FsspecStorage, encode: Encode, tmp_path: Path
) -> None:
    samples = made(2000)
    memory.write("a.ffr", [encode(samples)])
    storage = Shaky(memory)
    cache = ChunkCache(tmp_path / "cache", 1 << 24)
    RemoteFiles(["a.ffr"], storage=storage, cache=cache).read(range(2000))
    storage.bytes = storage.calls = 0
    again = RemoteFiles(["a.ffr"], storage=storage, cache=pickle.loads(pickle.dumps(cache)))
    assert [s.tobytes() for s in again.read(range(2000))] == samples
    assert storage.calls == 1
    assert storage.bytes <= (16 << 10) + 4096


def test_a_replaced_file_is_not_read_from_the_cache(
    memory: FsspecStorage, encode: Encode, tmp_path: Path
) -> None:
    cache = ChunkCache(tmp_path / "cache", 1 << 24)
    for content in (b"old!", b"new!"):  # same name, size and count
        memory.write("a.ffr", [encode([content] * 10)])
        reader = RemoteFiles(["a.ffr"], storage=memory, cache=cache)
        assert reader.read_one(5).tobytes() == content
    assert len(list((tmp_path / "cache").rglob("*.chunk"))) == 2, "each has chunks of its own"


def test_old_files_without_a_checksum_are_read_and_not_cached(
    memory: FsspecStorage, encode: Encode, tmp_path: Path
) -> None:
    cache = ChunkCache(tmp_path / "cache", 1 << 24)
    for content in (b"old!", b"new!"):
        memory.write("a.ffr", [bytes(4), encode([content] * 10)[4:]])
        with pytest.warns(UserWarning, match="no checksum of its metadata"):
            reader = RemoteFiles(["a.ffr"], storage=memory, cache=cache)
        assert reader.read_one(5).tobytes() == content
    assert cache.used_bytes() == 0


def test_transient_errors_short_answers_and_flips_are_ridden_out(
    memory: FsspecStorage, encode: Encode, cache: ChunkCache | None
) -> None:
    samples = made(200)
    memory.write("a.ffr", [encode(samples)])
    random = np.random.default_rng(1)
    seen: dict[Range, int] = {}

    def spoil(wanted: Range, answer: bytes) -> bytes | StorageError:
        """The first two answers for every range are bad, each in a way of its own."""
        seen[wanted] = seen.get(wanted, 0) + 1
        if seen[wanted] == 1:
            return Unavailable("connection reset")
        if seen[wanted] == 2:
            return answer[: int(random.integers(0, len(answer)))]
        return answer

    reader = RemoteFiles(["a.ffr"], storage=Shaky(memory, spoil), cache=cache, backoff_s=0.0)
    for batch in (range(0, 200, 3), [1, 5, 1], range(200)):
        assert [s.tobytes() for s in reader.read(batch)] == [samples[i] for i in batch]
    assert max(seen.values()) >= 3


def test_damage_on_the_way_is_fetched_again_and_not_kept(
    memory: FsspecStorage, encode: Encode, cache: ChunkCache | None
) -> None:
    samples = made(50)
    memory.write("a.ffr", [encode(samples)])
    damaged = [False]

    def spoil(_: Range, answer: bytes) -> bytes:
        if damaged[0]:
            damaged[0] = False
            return answer[:-1] + bytes([answer[-1] ^ 1])
        return answer

    storage = Shaky(memory, spoil)
    place = RemoteFiles(["a.ffr"], storage=memory).get_offsets(0)
    assert place[-1] > 1000
    reader = RemoteFiles(["a.ffr"], storage=storage, cache=cache)
    for index in range(49, -1, -1):  # so that the byte is in the first sample of a chunk to be read
        damaged[0] = True
        assert reader.read_one(index).tobytes() == samples[index]
        damaged[0] = False
        assert reader.read_one(index).tobytes() == samples[index]
    fresh = RemoteFiles(["a.ffr"], storage=memory, cache=cache)
    assert [s.tobytes() for s in fresh.read(range(50))] == samples


@pytest.mark.parametrize("cached", [False, True])
def test_every_flipped_byte_and_every_cut_is_a_typed_error_or_the_right_data(
    memory: FsspecStorage, encode: Encode, tmp_path: Path, cached: bool
) -> None:
    samples = [b"alpha", b"", b"gamma", b"d"]
    good = encode(samples)
    cache = ChunkCache(tmp_path / "cache", 1 << 24) if cached else None
    options: dict[str, Any] = {"storage": memory, "cache": cache, "backoff_s": 0.0}
    for index in range(len(good)):
        flipped = bytearray(good)
        flipped[index] ^= 1 << index % 8
        memory.write("a.ffr", [flipped])
        with pytest.raises((Corrupted, ConfigError), match=r"a\.ffr"):
            RemoteFiles(["a.ffr"], **options).read(range(4))
        memory.write("a.ffr", [good[:index]])
        with pytest.raises(Corrupted, match=r"a\.ffr"):
            RemoteFiles(["a.ffr"], **options).read(range(4))
    memory.write("a.ffr", [good])
    reader = RemoteFiles(["a.ffr"], **options)
    assert [s.tobytes() for s in reader.read(range(4))] == samples
    memory.write("a.ffr", [good[:-1]])
    if not cached:
        with pytest.raises(Corrupted, match="shorter than when"):
            reader.read([3])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"", "0 bytes"),
        (bytes(11), "11 bytes"),
        (bytes(12), "all zeros"),
        (bytes(500), "all zeros"),
        (b"\1\0\0\0" + (2**40).to_bytes(8, "little"), "do not fit"),
        (b"\1\0\0\0" + (-1).to_bytes(8, "little", signed=True), "do not fit"),
        (b"\0\0\0\0" + (2).to_bytes(8, "little") + b"\xff" * 24, "samples overlap"),
    ],
)
@pytest.mark.filterwarnings("ignore:record file")
def test_hostile_headers(memory: FsspecStorage, text: bytes, match: str) -> None:
    memory.write("a.ffr", [text])
    with pytest.raises(Corrupted, match=match):
        RemoteFiles(["a.ffr"], storage=memory)


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """A file system of fsspec that raises what its driver would."""

    protocol = "failing"
    cachable = False
    error: Exception = OSError("reset")
    remaining = 0

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if Failing.remaining > 0:
            Failing.remaining -= 1
            raise Failing.error
        return bytes(super().cat_file(path, start, end, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        if Failing.remaining > 0:
            Failing.remaining -= 1
            raise Failing.error
        return super().ls(path, detail=detail, **kwargs)

    def size(self, path: str) -> int:
        if Failing.remaining > 0:
            Failing.remaining -= 1
            raise Failing.error
        return int(super().size(path))


@pytest.fixture
def failing() -> Iterator[str]:
    fsspec.register_implementation("failing", Failing, clobber=True)
    yield f"failing://remote-test-{next(counter)}"
    Failing.remaining = 0


class DriverError(Exception):
    """Of a library that knows nothing of OSError."""


@pytest.mark.parametrize(
    "error", [ConnectionResetError("reset"), TimeoutError(), DriverError("503")]
)
def test_drivers_errors_are_repeated_then_unavailable(
    failing: str, encode: Encode, error: Exception
) -> None:
    [url] = store(failing, encode, [[b"one", b"two"]])
    Failing.error = error
    Failing.remaining = 4
    reader = RemoteFiles(url, attempts=5, backoff_s=0.0)
    Failing.remaining = 4
    assert reader.read_one(1).tobytes() == b"two"
    Failing.remaining = 5
    with pytest.raises(Unavailable, match=r"cannot read .*0\.ffr") as caught:
        reader.read_one(1)
    assert caught.value.retryable
    assert caught.value.__cause__ is error
    assert Failing.remaining == 0
    assert reader.read_one(0).tobytes() == b"one"
    Failing.remaining = 99
    with pytest.raises(Unavailable):
        RemoteFiles(url, attempts=2, backoff_s=0.0)


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), PermissionError("no")])
def test_what_will_not_pass_is_not_repeated(failing: str, encode: Encode, error: Exception) -> None:
    [url] = store(failing, encode, [[b"one"]])
    reader = RemoteFiles(url, backoff_s=0.0)
    Failing.error = error
    Failing.remaining = 3
    with pytest.raises(StorageError) as caught:
        reader.read_one(0)
    assert not caught.value.retryable
    assert Failing.remaining == 2


def test_a_server_that_ignores_ranges_is_named_and_not_asked_again(
    memory: FsspecStorage, encode: Encode
) -> None:
    whole = encode(made(200))
    memory.write("a.ffr", [whole])
    storage = Shaky(memory, lambda _wanted, _answer: whole)
    with pytest.raises(
        StorageError, match=rf"returned {len(whole)} bytes .* ignores ranges"
    ) as caught:
        RemoteFiles(["a.ffr"], storage=storage, attempts=9, backoff_s=0.0)
    assert type(caught.value) is StorageError
    assert storage.calls == 1


@pytest.mark.parametrize("directory", [False, True])
def test_a_place_that_does_not_answer_when_files_are_opened_is_asked_again(
    failing: str, encode: Encode, directory: bool
) -> None:
    [url] = store(failing, encode, [[b"one"]])
    Failing.error = ConnectionRefusedError("refused")
    Failing.remaining = 2
    opened = RemoteFiles(failing if directory else url, attempts=3, backoff_s=0.0)
    assert opened.read_one(0).tobytes() == b"one"
    Failing.remaining = 9
    with pytest.raises(Unavailable, match="refused"):
        RemoteFiles(failing if directory else url, attempts=3, backoff_s=0.0)
    assert Failing.remaining == 6


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    retry = Retry(attempts=5, backoff_s=0.2)
    for failed in range(1, 5):
        retry.pause(failed)
    for pause, most in zip(pauses, (0.2, 0.4, 0.8, 1.6), strict=True):
        assert most / 2 <= pause <= most
    with pytest.raises(ConfigError):
        Retry(attempts=0)


def test_names_and_indices_are_checked(memory: FsspecStorage, encode: Encode) -> None:
    memory.write("a.ffr", [encode([b"x"])])
    with pytest.raises(ConfigError, match="not a URL"):
        RemoteFiles("/local/a.ffr")
    with pytest.raises(ConfigError, match="does not end in"):
        RemoteFiles([f"{memory}/a.txt"])
    with pytest.raises(ConfigError, match=r"no '\*\.ffr' file"):
        RemoteFiles(f"{memory}/empty")
    with pytest.raises(ConfigError, match="cannot use nosuch://"):
        RemoteFiles("nosuch://bucket/a.ffr")
    with pytest.raises(StorageError, match="does not exist"):
        RemoteFiles(f"{memory}/b.ffr")
    reader = RemoteFiles(f"{memory}/a.ffr")
    for bad in (-1, 1, 2**63):
        with pytest.raises(IndexError):
            reader.read([bad])
    with pytest.raises(TypeError):
        reader.read([0.5])  # type: ignore[list-item]
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read([0])


def test_pickled_and_forked_readers_work_on(place: str, encode: Encode, tmp_path: Path) -> None:
    samples = made(30)
    urls = store(place, encode, [samples])
    cache = ChunkCache(tmp_path / "cache", 1 << 20)
    reader = RemoteFiles(urls, cache=cache, attempts=2)
    copy = pickle.loads(pickle.dumps(reader))
    assert [s.tobytes() for s in copy.read(range(30))] == samples
    assert copy.fnames == reader.fnames
    inside = RemoteFiles(["0.ffr"], storage=FsspecStorage(place))
    assert pickle.loads(pickle.dumps(inside)).read_one(3).tobytes() == samples[3]
    pid = os.fork()
    if pid == 0:
        right = [s.tobytes() for s in reader.read(range(30))] == samples
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
