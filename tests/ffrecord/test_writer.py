"""A record file is there whole or not at all, whatever happens to its writer."""

import errno
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.ffrecord.conftest import intercept
from tests.waiting import LIMIT_S

from fireflyer.errors import ConfigError, NoSpace, StorageError
from fireflyer.ffrecord import FileReader, FileWriter

SAMPLES = [b"alpha", b"", b"x" * (1 << 20), b"beta" * 9, b"y" * (3 << 20), b"last"]
Encode = Callable[[Sequence[bytes]], bytes]
announced = pytest.mark.parametrize("announce", [True, False], ids=["n given", "n unknown"])


def write(path: Path, samples: Sequence[bytes], announce: bool) -> None:
    with FileWriter(path, len(samples) if announce else None) as writer:
        for sample in samples:
            writer.write_one(sample)


def killed_at(step: int, path: Path, announce: bool) -> bool:
    """Writes in a child that is killed just before its system call number `step`; was it?"""
    child = os.fork()
    if child == 0:
        left = step

        def before(name: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        intercept(setattr, before)
        write(path, SAMPLES, announce)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.sample(2)
@announced
@pytest.mark.parametrize("existing", [None, [b"old"]], ids=["new", "replaced"])
def test_a_writer_killed_before_any_of_its_system_calls_leaves_a_whole_file_or_none(
    tmp_path: Path, encode: Encode, announce: bool, existing: list[bytes] | None
) -> None:
    path = tmp_path / "a.ffr"
    outcomes = []
    step = 1
    while True:
        if existing is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(encode(existing))
        killed = killed_at(step, path, announce)
        step += 1
        content = path.read_bytes() if path.exists() else None
        outcomes.append(content)
        for entry in tmp_path.iterdir():
            if entry != path:
                with pytest.raises(ConfigError, match="does not end in"):
                    FileReader(entry)
                entry.unlink()
        if not killed:
            break
    before = None if existing is None else encode(existing)
    switch = outcomes.index(encode(SAMPLES))
    assert set(outcomes[:switch]) == {before}
    assert set(outcomes[switch:]) == {encode(SAMPLES)}
    assert 6 < switch < len(outcomes)


@announced
def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announce: bool
) -> None:
    calls: list[str] = []

    def before(name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync":
            name += " directory" if os.path.isdir(f"/proc/self/fd/{args[0]}") else " file"
        calls.append(name)

    intercept(monkeypatch.setattr, before)
    write(tmp_path / "a.ffr", SAMPLES, announce)
    last_write = max(i for i, name in enumerate(calls) if name in ("pwritev", "copy_file_range"))
    durable = [name for name in calls[last_write + 1 :] if name not in ("close", "open", "unlink")]
    assert durable == ["fsync file", "replace", "fsync directory"]


@announced
@pytest.mark.parametrize("call", ["pwritev", "fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, StorageError)]
)
def test_an_error_of_the_disk_is_typed_and_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    announce: bool,
    call: str,
    code: int,
    kind: type[StorageError],
) -> None:
    def before(name: str, args: tuple[Any, ...]) -> None:
        if name == call:
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        intercept(patch.setattr, before)
        with pytest.raises(StorageError, match=r"a\.ffr.*" + os.strerror(code)) as caught:
            write(tmp_path / "a.ffr", SAMPLES, announce)
    assert type(caught.value) is kind
    assert os.listdir(tmp_path) == []


@announced
def test_a_full_disk_is_no_space_and_the_old_file_stays(
    small_disk: Path, encode: Encode, announce: bool
) -> None:
    path = small_disk / "a.ffr"
    write(path, [b"old"], announce)
    with pytest.raises(NoSpace, match="No space left on device; free some space"):
        write(path, [bytes(300_000)] * 5, announce)
    assert os.listdir(small_disk) == ["a.ffr"]
    assert path.read_bytes() == encode([b"old"])
    write(path, [bytes(300_000)], announce)
    assert FileReader(path).read_one(0).size == 300_000


def test_a_disk_that_fills_up_in_close_is_no_space(small_disk: Path) -> None:
    """Without n the samples need their space twice for a moment."""
    writer = FileWriter(small_disk / "a.ffr")
    writer.write_one(bytes(700_000))
    with pytest.raises(NoSpace):
        writer.close()
    assert os.listdir(small_disk) == []
    writer.close()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_where_the_kernel_cannot_copy_the_bytes_are_the_same(
    tmp_path: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    write(tmp_path / "a.ffr", SAMPLES, False)
    assert (tmp_path / "a.ffr").read_bytes() == encode(SAMPLES)


def test_short_writes_and_short_copies_go_on(
    tmp_path: Path, encode: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, copy = os.pwritev, os.copy_file_range
    sizes = iter(range(1, 1 << 30))

    def short_write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return pwritev(fd, [buffers[0][: 1 << next(sizes)]], offset)

    def short_copy(source: int, to: int, count: int, at: int, offset: int) -> int:
        return copy(source, to, min(count, 700_001), at, offset)

    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "copy_file_range", short_copy)
    write(tmp_path / "a.ffr", SAMPLES, False)
    assert (tmp_path / "a.ffr").read_bytes() == encode(SAMPLES)


def test_a_wrong_count_is_an_error_and_makes_no_file(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "a.ffr", 2)
    writer.write_one(b"one")
    assert (writer.n, writer.count) == (2, 1)
    with pytest.raises(ConfigError, match="only 1 of 2 announced samples"):
        writer.close()
    writer.close()
    writer = FileWriter(tmp_path / "a.ffr", 1)
    writer.write_one(b"one")
    with pytest.raises(ConfigError, match="more than the announced 1 samples"):
        writer.write_one(b"two")
    with pytest.raises(ValueError, match="closed"):
        writer.write_one(b"three")
    with pytest.raises(ConfigError, match="cannot hold -1"):
        FileWriter(tmp_path / "a.ffr", -1)
    assert os.listdir(tmp_path) == []


@announced
def test_an_exception_in_the_block_discards(tmp_path: Path, announce: bool) -> None:
    def fail_in(writer: FileWriter) -> None:
        with writer:
            writer.write_one(b"one")
            raise KeyError

    writer = FileWriter(tmp_path / "a.ffr", 1 if announce else None)
    with pytest.raises(KeyError):
        fail_in(writer)
    writer.discard()
    assert os.listdir(tmp_path) == []


def test_a_forgotten_writer_warns_and_leaves_nothing(tmp_path: Path) -> None:
    """The original aborted the process here."""

    def forget() -> None:
        FileWriter(tmp_path / "a.ffr", 3).write_one(b"one")
        gc.collect()

    with pytest.warns(ResourceWarning, match="was not closed: the file does not exist"):
        forget()
    assert os.listdir(tmp_path) == []


def test_a_closed_writer_is_closed_for_good(tmp_path: Path, encode: Encode) -> None:
    writer = FileWriter(tmp_path / "a.ffr")
    writer.write_one(b"one")
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write_one(b"two")
    writer.discard()
    writer.close()
    assert (tmp_path / "a.ffr").read_bytes() == encode([b"one"])


def test_the_buffer_may_change_after_write_one(tmp_path: Path) -> None:
    buffer = bytearray(b"first")
    with FileWriter(tmp_path / "a.ffr", 2) as writer:
        writer.write_one(buffer)
        buffer[:] = b"other"
        writer.write_one(buffer)
    assert [s.tobytes() for s in FileReader(tmp_path / "a.ffr").read([0, 1])] == [
        b"first",
        b"other",
    ]


def test_a_child_of_a_fork_neither_writes_nor_ends_the_file_of_its_parent(
    tmp_path: Path, encode: Encode
) -> None:
    writer = FileWriter(tmp_path / "a.ffr")
    writer.write_one(b"one")
    child = os.fork()
    if child == 0:
        refused = 0
        attempts: list[Callable[[], None]] = [
            partial(writer.write_one, b"two"),
            writer.close,
            writer.discard,
        ]
        for attempt in attempts:
            try:
                attempt()
            except RuntimeError:
                refused += 1
        writer.__exit__(None, None, None)
        writer.__exit__(KeyError, KeyError(), None)
        ended = weakref.ref(writer)
        del attempts, attempt, writer
        os._exit(0 if refused == 3 and ended() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    writer.write_one(b"three")
    writer.close()
    assert (tmp_path / "a.ffr").read_bytes() == encode([b"one", b"three"])


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    start = threading.Barrier(4)
    with FileWriter(tmp_path / "a.ffr", 4 * 200) as writer, ThreadPoolExecutor(4) as pool:

        def work(seed: int) -> None:
            start.wait(LIMIT_S)
            for i in range(200):
                writer.write_one(bytes([seed]) * (i * 97 % 30_000))

        list(pool.map(work, range(4)))
    reader = FileReader(tmp_path / "a.ffr")
    reader.validate()
    sizes: dict[int, list[int]] = {seed: [] for seed in range(4)}
    for sample in reader.read(range(reader.n)):
        if sample.size:
            assert (sample == sample[0]).all()
            sizes[int(sample[0])].append(sample.size)
    assert list(sizes.values()) == [[size for i in range(200) if (size := i * 97 % 30_000)]] * 4


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write(tmp_path / "a.ffr", [b"one"], False)
    finally:
        os.umask(before)
    assert (tmp_path / "a.ffr").stat().st_mode & 0o777 == 0o640


def test_a_writer_cannot_be_pickled(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer, pytest.raises(TypeError):
        pickle.dumps(writer)


def test_a_target_that_cannot_be_replaced_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "a.ffr").mkdir()
    with pytest.raises(StorageError, match=r"a\.ffr.*directory"):
        write(tmp_path / "a.ffr", [b"one"], True)
    assert os.listdir(tmp_path) == ["a.ffr"]
