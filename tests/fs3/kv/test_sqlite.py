"""What the engine `sqlite` promises beyond the interface: durability, ownership, typed errors."""

import os
import random
import signal
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest
from tests.conftest import fork_child

from fireflyer.errors import Corrupted, NoSpace, StorageError, Unavailable
from fireflyer.fs3.kv import SqliteEngine, Transaction, run
from fireflyer.fs3.kv.transaction import counter

THREADS = 4


def kept(path: Path) -> list[int]:
    """How far each thread of `acknowledge` got, by the store; each wrote 0, 1, 2, ... in order."""
    engine = SqliteEngine(path)
    reached = []
    for thread in range(THREADS):
        rows = run(engine, lambda t, n=thread: t.get_range(b"%d-" % n, b"%d." % n))  # type: ignore[misc]
        assert [key for key, _ in rows] == [b"%d-%06d" % (thread, i) for i in range(len(rows))]
        reached.append(len(rows))
    total = run(engine, lambda t: counter(t.get(b"total")))
    assert total == sum(reached)
    engine.close()
    return reached


def acknowledge(path: Path, pipe: int, offsets: list[int]) -> None:
    """Commits rows from several threads and says each one's number when it is acknowledged."""
    engine = SqliteEngine(path)

    def work(thread: int) -> None:
        for number in range(offsets[thread], 1_000_000):

            def body(t: Transaction, key: bytes = b"%d-%06d" % (thread, number)) -> None:
                t.set(key, os.urandom(200))
                t.add(b"total", 1)

            run(engine, body)
            os.write(pipe, b"%d %d\n" % (thread, number))

    for thread in range(1, THREADS):
        threading.Thread(target=work, args=(thread,), daemon=True).start()
    work(0)


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "kv.sqlite"
    rng = random.Random(1)
    offsets = [0] * THREADS
    for _ in range(12):
        read, write = os.pipe()
        pid = fork_child(lambda write=write, done=offsets: acknowledge(path, write, done))  # type: ignore[misc]
        os.close(write)
        wanted, said = rng.randint(1, 150), b""
        while said.count(b"\n") < wanted:
            more = os.read(read, 4096)
            assert more, "the writer ended"
            said += more
        os.kill(pid, signal.SIGKILL)
        while more := os.read(read, 4096):
            said += more
        os.waitpid(pid, 0)
        os.close(read)
        last = list(offsets)
        for line in said.decode().splitlines():
            thread, number = map(int, line.split())
            last[thread] = number + 1
        offsets = kept(path)
        assert all(stored >= acked for stored, acked in zip(offsets, last, strict=True))
        # A thread awaits its answer before the next row, so at most one is beyond.
        assert all(stored <= acked + 1 for stored, acked in zip(offsets, last, strict=True))
    assert sum(offsets) > 100


def test_a_full_disk_is_no_space_and_what_was_acknowledged_stays(small_disk: Path) -> None:
    engine = SqliteEngine(small_disk / "kv.sqlite")
    acknowledged = 0

    def fill() -> None:
        nonlocal acknowledged
        while True:
            key = b"k%06d" % acknowledged
            run(engine, lambda t, key=key: t.set(key, bytes(5000)))  # type: ignore[misc]
            acknowledged += 1

    with pytest.raises(NoSpace, match="free some and try again"):
        fill()
    assert len(run(engine, lambda t: t.get_range(b"k", b"l"))) == acknowledged > 10
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    run(engine, lambda t: t.set(b"more", b""))
    engine.close()
    again = SqliteEngine(small_disk / "kv.sqlite")
    assert len(run(again, lambda t: t.get_range(b"k", b"l"))) == acknowledged
    assert run(again, lambda t: t.get(b"more")) == b""
    again.close()


def test_a_file_has_one_owner(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    with pytest.raises(Unavailable, match=f"process {os.getpid()} uses this metadata"):
        SqliteEngine(tmp_path / "kv.sqlite")
    engine.close()
    SqliteEngine(tmp_path / "kv.sqlite").close()


def test_a_lock_of_another_program_is_unavailable(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    engine._writer.execute("PRAGMA busy_timeout = 10")
    other = sqlite3.connect(tmp_path / "kv.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="another program holds a lock"):
        run(engine, lambda t: t.set(b"a", b""))
    other.execute("ROLLBACK")
    other.close()
    run(engine, lambda t: t.set(b"a", b""))
    engine.close()


def test_a_file_that_may_not_be_written_is_a_storage_error(public_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    SqliteEngine(public_path / "kv.sqlite").close()

    def body() -> None:
        os.chmod(public_path / "kv.sqlite.lock", 0o666)
        os.chmod(public_path / "kv.sqlite", 0o444)
        os.setuid(65534)
        with pytest.raises(StorageError, match="check its owner and its mode"):
            SqliteEngine(public_path / "kv.sqlite")
        with pytest.raises(StorageError, match="cannot be opened"):
            SqliteEngine(public_path / "other.sqlite")

    _, status = os.waitpid(fork_child(body), 0)
    assert status == 0


def test_a_file_of_something_else_is_corrupted_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"a text, not a database" * 100)
    with pytest.raises(Corrupted):
        SqliteEngine(text)
    assert text.read_bytes() == b"a text, not a database" * 100
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE t (a)")
    other.close()
    with pytest.raises(Corrupted, match="not metadata of this version"):
        SqliteEngine(tmp_path / "other.sqlite")


def test_a_closed_engine_refuses_and_open_transactions_can_still_end(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    t, idle = engine.begin(), engine.begin()
    t.set(b"a", b"")
    engine.close()
    engine.close()
    idle.end()
    with pytest.raises(StorageError, match="closed"):
        engine.commit_many([t])
    with pytest.raises(StorageError, match="closed"):
        engine.begin()


def test_a_failing_disk_ends_all_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    run(engine, lambda t: t.set(b"a", b"1"))

    def fails(*_: object) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("fireflyer.fs3.kv.sqlite.write", fails)
        with pytest.raises(StorageError, match="disk I/O error"):
            run(engine, lambda t: t.set(b"a", b"2"))
    with pytest.raises(StorageError, match="disk I/O error"):
        run(engine, lambda t: t.set(b"a", b"3"))
    assert run(engine, lambda t: t.get(b"a")) == b"1"
    engine.close()


def test_the_log_starts_over_though_somebody_always_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fireflyer.fs3.kv.sqlite.LOG_PAGES", 256)
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    finished = threading.Event()

    def read() -> None:
        while not finished.is_set():
            t = engine.begin()
            t.get_many([b"0", b"1", b"2"])
            t.end()

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(200):
        run(engine, lambda t, n=number: t.set(b"%d" % (n % 50), os.urandom(100_000)))  # type: ignore[misc]
    finished.set()
    for reader in readers:
        reader.join()
    assert (tmp_path / "kv.sqlite-wal").stat().st_size < 8 << 20
    engine.close()


def test_who_commits_while_another_has_begun_alone_waits_for_it(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    order: list[str] = []

    def other() -> None:
        run(engine, lambda t: t.set(b"a", (t.get(b"a") or b"") + b" other"))
        order.append("other")

    (mine,) = engine.begin_many(1, [b"a"])
    thread = threading.Thread(target=other)
    thread.start()
    while not engine._queue:
        assert thread.is_alive()
    mine.set(b"a", (mine.get(b"a") or b"") + b"mine")
    order.append("mine")
    engine.commit_many([mine])
    thread.join()
    assert order == ["mine", "other"]
    assert run(engine, lambda t: t.get(b"a")) == b"mine other"  # it conflicted, and was run again
    engine.close()


def test_rows_that_a_leader_knows_follow_what_is_committed(tmp_path: Path) -> None:
    engine = SqliteEngine(tmp_path / "kv.sqlite")
    rng = random.Random(3)
    model: dict[bytes, bytes] = {}
    for turn in range(400):
        key = b"%02d" % rng.randrange(40)
        low, high = sorted(b"%02d" % rng.randrange(40) for _ in range(2))

        def body(t: Transaction, key: bytes = key, turn: int = turn) -> bytes | None:
            found = t.get(key)
            t.set(key, b"%d" % turn + bytes(turn % 3 * 1000))  # some are too long to be kept
            return found

        assert run(engine, body) == model.get(key)
        model[key] = b"%d" % turn + bytes(turn % 3 * 1000)
        if turn % 7 == 0:
            run(engine, lambda t, low=low, high=high: t.clear_range(low, high))  # type: ignore[misc]
            model = {key: value for key, value in model.items() if not low <= key < high}
        elif turn % 7 == 3:
            run(engine, lambda t, key=low: t.clear(key))  # type: ignore[misc]
            model.pop(low, None)
    assert run(engine, lambda t: t.get_range(b"0", b"9")) == sorted(model.items())
    engine.close()
