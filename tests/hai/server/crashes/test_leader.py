"""Of the servers with one PostgreSQL at most one acts."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import sqlalchemy as sa
from tests.hai.server.conftest import Forks, Server
from tests.hai.server.database.postgres import Postgres
from tests.hai.server.http.proxy import Proxy
from tests.waiting import LIMIT_S, until

from fireflyer.errors import PeerLost, Stale, Unavailable
from fireflyer.hai.database import schema
from fireflyer.hai.database.connection import Database, PostgreSQL
from fireflyer.hai.database.leader import Leader
from fireflyer.hai.model import TaskSpec

MakeSpec = Callable[..., TaskSpec]

LEASE_S = 2.5
"""Short, for tests that wait for its end."""


@pytest.fixture
def pair(tmp_path: Path, forks: Forks) -> Iterator[tuple[Server, Server]]:
    """Two servers that can be, of one home, as on two machines that share it."""
    found = Server(tmp_path / "home", forks), Server(tmp_path / "home", forks)
    yield found
    for server in found:
        if server.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGCONT)
            server.kill()


def options(where: PostgreSQL, waiting: Path, lease_s: float = 60.0) -> dict[str, Any]:
    database = msgspec.to_builtins(where)
    return {"database": database, "lease_s": lease_s, "stand_by": str(waiting)}


def row(where: PostgreSQL) -> tuple[int, str]:
    with psycopg.connect(where.url) as connection:
        found = connection.execute("SELECT term, holder FROM leader").fetchone()
    assert found is not None
    return found


def at_rest(place: PostgreSQL) -> contextlib.closing[Database]:
    return contextlib.closing(Database(place))


def test_one_leads_and_the_next_one_once_it_is_given_back(postgresql: PostgreSQL) -> None:
    with at_rest(postgresql) as first, at_rest(postgresql) as second:
        old, new = Leader(first, 60), Leader(second, 60)
        assert old.take() is None
        assert new.take() == f"{old.holder}, term 1"
        old.release()
        assert new.take() is None
        assert (old.term, new.term) == (1, 2)
        new.release()


def test_writes_of_an_old_term_fail_and_change_nothing(postgresql: PostgreSQL) -> None:
    with at_rest(postgresql) as first, at_rest(postgresql) as second:
        old, new = Leader(first, 60), Leader(second, 60)
        assert old.take() is None
        with first.writing() as connection:
            connection.execute(schema.user_group.insert().values(name="a", created=0))
        with psycopg.connect(postgresql.url) as connection:
            connection.execute("UPDATE leader SET expires = 0")  # as if its time had passed
        assert new.take() is None
        with pytest.raises(Stale, match="is no longer the leader"), first.writing() as connection:
            connection.execute(schema.user_group.insert().values(name="b", created=0))
        with pytest.raises(Stale), first.reading():
            pass
        with second.reading() as connection:
            names = connection.execute(sa.select(schema.user_group.c.name)).scalars().all()
        assert names == ["a"]
        old._ending.set()
        new.release()


def test_taking_over_waits_for_the_commit_of_the_old_leader(postgresql: PostgreSQL) -> None:
    with at_rest(postgresql) as first, at_rest(postgresql) as second:
        old, new = Leader(first, 60), Leader(second, 60)
        assert old.take() is None
        found: list[str | None] = []
        with first.writing() as connection:
            connection.execute(schema.user_group.insert().values(name="late", created=0))
            with psycopg.connect(postgresql.url) as other:
                other.execute("UPDATE leader SET expires = 0")
            taking = threading.Thread(target=lambda: found.append(new.take()))
            taking.start()
            waits_for_lock(postgresql)
            assert found == []
        taking.join(LIMIT_S)
        assert found == [None]
        with second.reading() as connection:
            assert connection.execute(sa.select(schema.user_group.c.name)).scalars().all() == [
                "late"
            ]
        old._ending.set()
        new.release()


def test_taking_over_from_one_that_was_stopped_between_statements_of_a_pipeline(
    postgresql: PostgreSQL,
) -> None:
    with (
        contextlib.closing(Database(postgresql, lease_s=1)) as first,
        at_rest(postgresql) as second,
    ):
        old, new = Leader(first, 60), Leader(second, 60)
        assert old.take() is None

        def replaced() -> None:
            with psycopg.connect(postgresql.url) as other:
                other.execute("UPDATE leader SET expires = 0")
            until(lambda: new.take() is None)

        with pytest.raises(Unavailable, match="no connection"):
            write_in_pipeline(first, replaced)
        assert new.term == 2
        with second.reading() as connection:
            assert connection.execute(sa.select(schema.user_group)).all() == []
        old._ending.set()
        new.release()


def write_in_pipeline(database: Database, stopped: Callable[[], None]) -> None:
    """Calls `stopped` between two statements of a write whose end (Sync) has not been sent."""
    with database.writing() as writing:
        writing.execute(schema.user_group.insert().values(name="never", created=0))
        driver: Any = writing.connection.driver_connection
        with driver.pipeline():
            assert driver.execute("SELECT 1").fetchone() == (1,)
            stopped()
            driver.execute("SELECT 2").fetchone()


def waits_for_lock(where: PostgreSQL) -> None:
    """Returns once a session of this database waits for a lock."""
    with psycopg.connect(where.url, autocommit=True) as connection:
        query = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = %s"
        )
        while connection.execute(query, [connection.info.dbname]).fetchone() == (0,):
            pass


def test_a_renewal_does_not_wait_for_a_transaction_of_the_leader(postgresql: PostgreSQL) -> None:
    with at_rest(postgresql) as database:
        one = Leader(database, 60)
        assert one.take() is None
        with database.writing(), psycopg.connect(postgresql.url) as other:
            other.execute("SET lock_timeout = '5s'")
            done = other.execute("UPDATE leader SET expires = expires + 1 WHERE term = 1")
            assert done.rowcount == 1
        one.release()


def test_the_lease_runs_out_by_the_holders_own_clock(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_rest(postgresql) as database:
        one = Leader(database, 60)
        assert one.take() is None
        one.alive()
        one._ending.set()
        ahead = time.monotonic() + 61
        monkeypatch.setattr("fireflyer.hai.database.leader.time.monotonic", lambda: ahead)
        with pytest.raises(Stale):
            one.alive()


def test_the_second_server_stands_by_and_takes_over_from_a_killed_one(
    pair: tuple[Server, Server], postgresql: PostgreSQL, spec: MakeSpec, tmp_path: Path
) -> None:
    first, second = pair
    said = options(postgresql, tmp_path / "waiting", LEASE_S)
    first.start(**said)
    acknowledged = [first.client.submit(spec("hold")).id for _ in range(4)]
    first.client.wait("t2", {"running"}, LIMIT_S)
    with second.starting(**said) as ready:
        until((tmp_path / "waiting").exists)
        assert first.client.nodes()
        first.kill()
        with pytest.raises(PeerLost):
            first.client.tasks()
        assert ready.read(), second.output()
    assert row(postgresql)[0] == 2
    views = second.client.tasks()
    assert [view.id for view in views] == acknowledged
    assert [(view.state, view.attempt) for view in views[:2]] == [("running", 1)] * 2
    assert second.launches() == ["t1.1", "t2.1"]
    second.client.stop("t1")
    second.client.wait("t3", {"running"}, LIMIT_S)


def test_an_orderly_end_hands_over_at_once(
    pair: tuple[Server, Server], postgresql: PostgreSQL, tmp_path: Path
) -> None:
    first, second = pair
    said = options(postgresql, tmp_path / "waiting")
    first.start(**said)
    with second.starting(**said) as ready:
        until((tmp_path / "waiting").exists)
        first.client.shutdown()
        assert ready.read(), second.output()  # long before the lease of 60 s would have run out
    assert row(postgresql)[0] == 2


def test_a_leader_whose_connection_freezes_ends_and_the_other_one_leads(
    pair: tuple[Server, Server],
    postgres_of_session: Postgres,
    postgresql: PostgreSQL,
    spec: MakeSpec,
    tmp_path: Path,
) -> None:
    proxy = Proxy(postgres_of_session.port)
    through = postgresql.url.replace(f":{postgres_of_session.port}/", f":{proxy.port}/")
    first, second = pair
    try:
        first.start(**options(PostgreSQL(url=through), tmp_path / "unused", LEASE_S))
        first.client.submit(spec("hold"))
        first.client.wait("t1", {"running"}, LIMIT_S)
        (tmp_path / "home" / "database.json").unlink()  # it names the way through the proxy
        with second.starting(**options(postgresql, tmp_path / "waiting", LEASE_S)) as ready:
            until((tmp_path / "waiting").exists)
            proxy.freeze()
            assert first.wait() == 1
            assert "is no longer the leader" in first.output()
            assert ready.read(), second.output()
        assert second.client.task("t1").state == "running"
        assert second.launches() == ["t1.1"]
    finally:
        proxy.close()


def test_a_standby_waits_while_a_leader_that_was_stopped_stays_in_the_home(
    pair: tuple[Server, Server], postgresql: PostgreSQL, spec: MakeSpec, tmp_path: Path
) -> None:
    first, second = pair
    said = options(postgresql, tmp_path / "waiting", LEASE_S)
    first.start(**said)
    first.client.submit(spec("hold"))
    first.client.wait("t1", {"running"}, LIMIT_S)
    with second.starting(**said) as ready:
        until((tmp_path / "waiting").exists)
        os.kill(first.pid, signal.SIGSTOP)
        until(lambda: row(postgresql)[0] == 2)  # the standby has the lease, and not the home
        (tmp_path / "waiting").unlink()
        until((tmp_path / "waiting").exists)
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait() == 1
        assert ready.read(), second.output()
    assert second.client.task("t1").attempt == 1
    assert second.launches() == ["t1.1"]


def test_a_leader_that_was_stopped_for_too_long_acts_no_more(
    pair: tuple[Server, Server], postgresql: PostgreSQL, spec: MakeSpec, tmp_path: Path
) -> None:
    first, _ = pair
    first.start(**options(postgresql, tmp_path / "unused", LEASE_S))
    first.client.submit(spec("hold"))
    first.client.wait("t1", {"running"}, LIMIT_S)
    os.kill(first.pid, signal.SIGSTOP)
    with at_rest(postgresql) as database:
        other = Leader(database, 60)
        while other.take() is not None:
            pass
        events = row(postgresql)
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait() == 1
        assert "is no longer the leader" in first.output()
        assert row(postgresql) == events
        assert first.launches() == ["t1.1"]
        other.release()


def test_a_database_that_goes_ends_the_server_with_its_reason_and_attempts_run_on(
    server: Server, own_postgres: Postgres, spec: MakeSpec, tmp_path: Path
) -> None:
    own_postgres.create("hai")
    said = options(PostgreSQL(url=own_postgres.url("hai")), tmp_path / "unused", 5.0)
    server.start(**said)
    server.client.submit(spec("hold"))
    server.client.wait("t1", {"running"}, LIMIT_S)
    own_postgres.kill()
    assert server.wait() == 1
    assert "attempts continue" in server.output()
    own_postgres.start()
    server.start(**said)
    view = server.client.task("t1")
    assert (view.state, view.attempt, view.restarts) == ("running", 1, 0)
    assert server.launches() == ["t1.1"]


def test_a_home_with_tasks_in_sqlite_does_not_change_its_database(
    server: Server, postgresql: PostgreSQL, tmp_path: Path
) -> None:
    server.start()
    server.client.shutdown()
    with server.starting(**options(postgresql, tmp_path / "unused")) as ready:
        assert ready.read() == b""
    assert server.wait() == 1
    assert "has its tasks in hai.sqlite" in server.output()


def test_the_home_remembers_its_database(server: Server, postgresql: PostgreSQL, spec: MakeSpec,
    tmp_path: Path) -> None:  # fmt: skip
    server.start(**options(postgresql, tmp_path / "unused"))
    server.client.submit(spec("finish"))
    server.client.wait("t1", {"finished"}, LIMIT_S)
    server.client.shutdown()
    server.start()
    assert server.client.task("t1").state == "finished"
    assert not server.client.home.database.exists()
