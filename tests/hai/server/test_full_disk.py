"""A disk without a free byte: tasks are stopped, suspended and ended, and the history is whole."""

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.hai.server.conftest import Server

from fireflyer.errors import NoSpace
from fireflyer.hai.database import reserve
from fireflyer.hai.database.connection import Database
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.engine import RankStarted
from fireflyer.hai.server.process import _End
from fireflyer.hai.supervisor.journal import Journal, read_journal
from fireflyer.hai.supervisor.messages import Record

MakeSpec = Callable[..., TaskSpec]


def fill(folder: Path) -> None:
    """Writes until the file system has no byte left."""
    descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for size in (1 << 16, 1):
        with contextlib.suppress(OSError):
            while os.write(descriptor, bytes(size)):
                pass
    os.close(descriptor)
    assert os.statvfs(folder).f_bfree == 0


@pytest.fixture
def full(small_disk: Path, tmp_path: Path, forks: Any) -> Any:
    """A server of a home on a small disk; its pretended engine keeps its files elsewhere."""
    server = Server(small_disk / "home", forks)
    server.home.mkdir(mode=0o700)
    (tmp_path / "engine").mkdir()
    (server.home / "engine").symlink_to(tmp_path / "engine")
    yield server
    server.kill()


@pytest.mark.parametrize("small_disk", ["12m"], indirect=True)
def test_tasks_stop_suspend_and_end_without_a_free_byte(
    full: Server, small_disk: Path, spec: MakeSpec
) -> None:
    full.start(nodes=3)
    client = full.client
    for number in (1, 2, 3):
        client.submit(spec("hold"))
        client.wait(f"t{number}", {"running"})
    fill(small_disk)
    with pytest.raises(NoSpace, match="free some disk space; running tasks can still be stopped"):
        client.submit(spec("hold"))
    client.suspend("t1")
    client.wait("t1", {"suspended"})
    client.stop("t2")
    client.wait("t2", {"stopped"})
    client.shutdown()
    assert full.wait() == 0
    (small_disk / "filler").unlink()
    full.start(nodes=3)
    assert [view.state for view in client.tasks()] == ["suspended", "stopped", "stopped"]


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
@pytest.mark.parametrize("again", [False, True])
def test_a_journal_takes_the_outcome_without_a_free_byte(small_disk: Path, again: bool) -> None:
    path = small_disk / "n0.journal"
    event = RankStarted(
        task="t1", attempt=1, rank=0, node="n0", pid=9, monotonic_ns=1, wall=1.0, incarnation=0
    )
    records = [Record(attempt=1, seq=number, event=event) for number in range(300)]
    starts, ends = records[:200], records[200:300:2]
    journal = Journal(path)
    for record in starts:
        journal.append(record)
    if again:
        journal.close()
        assert path.read_bytes().endswith(b"}\n")
        with path.open("ab") as file:
            file.write(b'{"torn')
        journal = Journal(path, again=True)
    fill(small_disk)
    for record in ends:
        journal.append(record)
    assert read_journal(path) == [*starts, *ends]
    journal.close()
    assert read_journal(path) == [*starts, *ends]


@pytest.mark.parametrize("small_disk", ["12m"], indirect=True)
def test_a_thousand_writes_need_no_free_byte(small_disk: Path) -> None:
    with contextlib.closing(Database(small_disk / "hai.sqlite")) as database:
        with database.writing() as connection:
            connection.exec_driver_sql("CREATE TABLE line (words TEXT)")
        fill(small_disk)
        for _ in range(1000):
            with database.writing() as connection:
                connection.exec_driver_sql("INSERT INTO line VALUES (?)", ("w" * 500,))
        with pytest.raises(NoSpace, match="free some space"), database.writing() as connection:
            connection.exec_driver_sql("INSERT INTO line VALUES (?)", ("w" * (8 << 20),))
        with database.reading() as connection:
            count = connection.exec_driver_sql("SELECT count(*) FROM line").scalar_one()
        assert count == 1000


def test_the_end_needs_no_word_in_a_database_that_takes_none() -> None:
    calls = []

    class Unwritable:
        async def stop_all(self, *, at_once: bool = False) -> None:
            raise NoSpace("cannot write hai.sqlite: database or disk is full; free some space")

        async def abandon(self) -> None:
            calls.append("abandon")

    async def end() -> None:
        ending = _End(Unwritable(), keep=False)  # type: ignore[arg-type]
        ending.ask(keep=False)
        await ending.wait()

    asyncio.run(end())
    assert calls == ["abandon"]


def test_free_pages_are_made_again_once_half_are_used(tmp_path: Path) -> None:
    with contextlib.closing(Database(tmp_path / "hai.sqlite")) as database:
        assert not reserve.short(database._driver())
        size = (tmp_path / "hai.sqlite-wal").stat().st_size
        assert size > reserve.PAGES * 4096
        filler = bytes(4096 * reserve.PAGES)
        with database.writing() as connection:
            connection.exec_driver_sql("CREATE TABLE used (filler BLOB)")
            connection.exec_driver_sql("INSERT INTO used VALUES (?)", (filler,))
        assert reserve.short(database._driver())
        for _ in range(reserve.CHECK_EVERY):
            with database.writing() as connection:
                connection.exec_driver_sql("UPDATE schema_version SET version = version")
        assert not reserve.short(database._driver())
