"""Writers of v2 that die, fail or meet: the file is absent or whole to its last commit, and goes on."""

import errno
import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests import draws
from tests.ffrecord.conftest import intercept

from fireflyer.errors import Corrupted, NoSpace, StorageError
from fireflyer.ffrecord import FileReader, FileWriter

Encode = Callable[..., bytes]
ROUNDS = 1000 if os.environ.get("FIREFLYER_SOAK") else draws.cases(100)
FIRST, SECOND = [b"alpha", b"", b"beta" * 9], [b"gamma", b"d" * 5000]


def contents(path: Path) -> list[bytes]:
    with FileReader(path) as reader:
        return [sample.tobytes() for sample in reader.read(range(reader.n))]


def add(path: Path, commits: Sequence[Sequence[bytes]]) -> FileWriter:
    writer = FileWriter.append(path) if path.exists() else FileWriter(path, version=2)
    for samples in commits:
        for sample in samples:
            writer.write_one(sample)
        writer.commit()
    return writer


def killed_at(step: int, portion: float, work: Callable[[], None]) -> bool:
    """Does `work` in a child that is killed at its system call number `step`; was it?

    A write is killed when this portion of its bytes is in the file, any other call before it begins.
    """
    child = os.fork()
    if child == 0:
        left = step
        write = os.pwritev

        def before(name: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "pwritev":
                    data = b"".join(args[1])
                    write(args[0], [data[: int(len(data) * portion)]], args[2])
                os.kill(os.getpid(), signal.SIGKILL)

        intercept(setattr, before)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status != 0


@pytest.mark.deadline(900)
def test_a_writer_killed_anywhere_leaves_whole_commits_and_the_next_goes_on(tmp_path: Path) -> None:
    """Each round goes on with what the one before has left; some begin a new file."""
    chance = random.Random(4)
    path = tmp_path / "a.ffr"
    expected: list[bytes] | None = None
    kills = 0
    for number in range(ROUNDS):
        if chance.random() < 0.1:
            path.unlink(missing_ok=True)
            expected = None
        commits = [
            [bytes([number % 256]) * chance.choice([0, 5, 4000, 700_000]) for _ in range(many)]
            for many in (chance.choice([1, 2, 130]) for _ in range(chance.randint(1, 3)))
        ]
        report, child_end = os.pipe()

        def work(commits: list[list[bytes]] = commits, end: int = child_end) -> None:
            writer = None
            for samples in commits:
                if writer is None:
                    writer = add(path, [samples])
                else:
                    for sample in samples:
                        writer.write_one(sample)
                    writer.commit()
                os.write(end, b".")
            assert writer is not None
            writer.close()

        kills += killed_at(chance.randint(1, 30), chance.random(), work)
        os.close(child_end)
        with os.fdopen(report, "rb") as pipe:
            returned = len(pipe.read())
        states = [expected] + [
            (expected or []) + [s for part in commits[: k + 1] for s in part]
            for k in range(len(commits))
        ]
        found = contents(path) if path.exists() else None
        assert found in states[returned : returned + 2]
        expected = found
        for entry in tmp_path.iterdir():
            if entry != path:
                entry.unlink()
    assert kills > ROUNDS // 3
    if path.exists():
        FileReader(path).validate()


def test_an_appender_killed_at_each_of_its_calls(tmp_path: Path, encode_v2: Encode) -> None:
    path = tmp_path / "a.ffr"
    states = [encode_v2([FIRST]), encode_v2([FIRST, SECOND])]
    for portion in (0.0, 0.5, 1.0):
        seen = []
        step = 1
        killed = True
        while killed:
            path.write_bytes(states[0])
            killed = killed_at(step, portion, lambda: add(path, [SECOND]).close())
            step += 1
            seen.append(contents(path))
            with FileWriter.append(path):
                pass
            assert path.read_bytes() in states
        switch = seen.index(FIRST + SECOND)
        assert seen == [FIRST] * switch + [FIRST + SECOND] * (len(seen) - switch)
        assert switch > 4


def test_the_slot_is_written_between_two_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encode_v2: Encode
) -> None:
    """What a slot names is on disk before it, and it is on disk before `commit` returns."""
    path = tmp_path / "a.ffr"
    calls: list[str] = []

    def before(name: str, args: tuple[Any, ...]) -> None:
        if name == "pwritev":
            name = "slot" if args[2] in (4096, 8192) else "write"
        calls.append(name)

    writer = add(path, [FIRST])
    intercept(monkeypatch.setattr, before)
    for sample in SECOND:
        writer.write_one(sample)
    writer.commit()
    monkeypatch.undo()
    writer.close()
    assert calls[-4:] == ["write", "fdatasync", "slot", "fdatasync"]
    assert path.read_bytes() == encode_v2([FIRST, SECOND])


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, NoSpace), (errno.EDQUOT, NoSpace), (errno.EIO, StorageError)]
)
def test_an_error_of_the_disk_at_any_call_is_typed_and_keeps_a_whole_commit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    encode_v2: Encode,
    call: str,
    code: int,
    kind: type[StorageError],
) -> None:
    path = tmp_path / "a.ffr"
    failed = True
    step = 0
    while failed:
        path.write_bytes(encode_v2([FIRST]))
        step += 1
        left = step

        def before(name: str, args: tuple[Any, ...]) -> None:
            nonlocal left
            left -= name == call
            if left == 0 and name == call:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            intercept(patch.setattr, before)
            error: StorageError | None = None
            try:
                add(path, [SECOND]).close()
            except StorageError as caught:
                error = caught
        failed = error is not None
        assert error is None or (type(error) is kind and "a.ffr" in str(error))
        with FileWriter.append(path):
            pass
        assert contents(path) in ([FIRST, FIRST + SECOND] if failed else [FIRST + SECOND])
    assert step > 2


def test_a_failed_sync_of_the_directory_keeps_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def before(name: str, args: tuple[Any, ...]) -> None:
        if name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        intercept(patch.setattr, before)
        with pytest.raises(StorageError):
            add(tmp_path / "a.ffr", [FIRST])
    assert contents(tmp_path / "a.ffr") == FIRST


def test_two_appenders_exclude_each_other(tmp_path: Path, encode_v2: Encode) -> None:
    path = tmp_path / "a.ffr"
    path.write_bytes(encode_v2([FIRST]))
    with FileWriter.append(path) as writer:
        with pytest.raises(StorageError, match=r"a\.ffr' is open for adding in another writer"):
            FileWriter.append(path)
        FileReader(path).close()
        writer.write_one(b"one")
    with FileWriter.append(path) as writer:
        writer.write_one(b"two")
    assert contents(path) == [*FIRST, b"one", b"two"]


def test_a_new_file_is_locked_from_its_first_commit_on(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    writer = add(path, [FIRST])
    with pytest.raises(StorageError, match="another writer"):
        FileWriter.append(path)
    writer.close()
    add(path, [SECOND]).close()
    assert contents(path) == FIRST + SECOND


def test_the_lock_of_a_closed_writer_does_not_live_on_in_a_child(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    writer = add(path, [FIRST])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    writer.close()
    add(path, [SECOND]).close()
    os.write(write, b".")
    assert os.waitpid(child, 0)[1] == 0
    assert contents(path) == FIRST + SECOND


def test_a_child_of_a_fork_neither_writes_nor_cuts_the_file_of_its_parent(tmp_path: Path) -> None:
    writer = add(tmp_path / "a.ffr", [FIRST])
    writer.write_one(b"x" * 3_000_000)
    child = os.fork()
    if child == 0:
        refused = 0
        attempts: list[Callable[[], None]] = [
            partial(writer.write_one, b"two"),
            writer.commit,
            writer.discard,
            writer.close,
        ]
        for attempt in attempts:
            try:
                attempt()
            except RuntimeError:
                refused += 1
        writer.__exit__(None, None, None)
        os._exit(0 if refused == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    writer.close()
    assert contents(tmp_path / "a.ffr") == [*FIRST, b"x" * 3_000_000]


def _fail_behind(writer: FileWriter) -> None:
    for _ in range(10):
        writer.write_one(bytes(300_000))
    raise KeyError


def test_discard_keeps_what_was_committed(tmp_path: Path, encode_v2: Encode) -> None:
    path = tmp_path / "a.ffr"
    writer = FileWriter(path, version=2)
    writer.write_one(b"one")
    writer.discard()
    assert os.listdir(tmp_path) == []
    writer = add(path, [FIRST])
    writer.write_one(b"x" * 3_000_000)
    writer.discard()
    assert path.read_bytes() == encode_v2([FIRST])
    with pytest.raises(KeyError), FileWriter.append(path) as writer:
        _fail_behind(writer)
    assert path.read_bytes() == encode_v2([FIRST])


def test_a_forgotten_appender_warns_and_keeps_what_was_committed(
    tmp_path: Path, encode_v2: Encode
) -> None:
    def forget() -> None:
        add(tmp_path / "a.ffr", [FIRST]).write_one(b"one")

    with pytest.warns(ResourceWarning, match="was not closed"):
        forget()
    assert (tmp_path / "a.ffr").read_bytes() == encode_v2([FIRST])


def test_commits_without_samples_add_nothing(tmp_path: Path, encode_v2: Encode) -> None:
    path = tmp_path / "a.ffr"
    add(path, [FIRST, [], []]).close()
    add(path, []).close()
    assert path.read_bytes() == encode_v2([FIRST])
    FileWriter(tmp_path / "b.ffr", version=2).close()
    assert (tmp_path / "b.ffr").read_bytes() == encode_v2([[]])


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_replaced_under_its_appender_is_an_error(
    tmp_path: Path, encode_v2: Encode, how: str
) -> None:
    path = tmp_path / "a.ffr"
    writer = add(path, [FIRST])
    writer.write_one(b"lost")
    if how == "deleted":
        path.unlink()
    else:
        with FileWriter(path, version=2) as other:
            other.write_one(b"new")
    with pytest.raises(StorageError, match=r"replaced or deleted .*a\.ffr'"):
        writer.commit()
    assert not path.exists() or contents(path) == [b"new"]


def test_a_full_disk_keeps_the_last_commit(tmp_path: Path, encode_v2: Encode) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        path = tmp_path / "a.ffr"
        add(path, [FIRST]).close()
        writer = FileWriter.append(path)
        with pytest.raises(NoSpace, match="No space left on device; free some space"):
            _fail_behind(writer)
        assert path.read_bytes() == encode_v2([FIRST])
        add(path, [SECOND]).close()
        assert path.read_bytes() == encode_v2([FIRST, SECOND])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_damaged_file_is_not_added_to(tmp_path: Path, encode_v2: Encode) -> None:
    path = tmp_path / "a.ffr"
    good = encode_v2([FIRST, SECOND])
    path.write_bytes(good[:-1])
    with pytest.raises(Corrupted, match="its last commit ends"):
        FileWriter.append(path)
    assert path.read_bytes() == good[:-1]
