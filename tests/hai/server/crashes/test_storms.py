"""Two servers of one PostgreSQL under load, while servers and the database are killed at seeded points."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import psycopg
import pytest
from tests.hai.server.conftest import Forks, Server
from tests.hai.server.crashes.test_crashes import SOAK, Storm, check_history, settle
from tests.hai.server.crashes.test_leader import LEASE_S, options, row
from tests.hai.server.database.postgres import Postgres
from tests.waiting import until

from fireflyer.hai.database.connection import Database, PostgreSQL
from fireflyer.hai.model import TaskSpec

MakeSpec = Callable[..., TaskSpec]

WITNESS = """
CREATE TABLE witness (number bigserial, term bigint, backend int, kind text);
CREATE FUNCTION bear_witness() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO witness (term, backend, kind) SELECT term, pg_backend_pid(), TG_TABLE_NAME FROM leader;
    RETURN NULL;
END $$;
CREATE TRIGGER of_event AFTER INSERT ON event FOR EACH ROW EXECUTE FUNCTION bear_witness();
CREATE TRIGGER of_task AFTER INSERT OR UPDATE ON task FOR EACH ROW EXECUTE FUNCTION bear_witness();
"""
"""Which session wrote under which term: every server writes through one session."""


class Pair:
    """Two servers of one home and one database; one leads, the other one waits for its end."""

    def __init__(self, home: Path, forks: Forks, where: PostgreSQL) -> None:
        self.leader, self.next = Server(home, forks), Server(home, forks)
        self._where = where
        self._waiting = home.parent
        self._ready: BinaryIO | None = None
        self._starts = 0

    def start(self) -> None:
        """Both, from nothing."""
        self.leader.start(**self._options())
        self._start_next()

    def _options(self) -> dict[str, Any]:
        self._starts += 1
        return options(self._where, self._waiting / f"waiting{self._starts}", LEASE_S)

    def _start_next(self) -> None:
        said = self._options()
        self._ready = self.next.starting(**said)
        until(Path(said["stand_by"]).exists)

    def _swap(self) -> None:
        """The next one leads; a new one waits."""
        assert self._ready is not None
        with self._ready as ready:
            assert ready.read(), self.next.output()
        self.leader, self.next = self.next, self.leader
        self._start_next()

    def kill_leader(self) -> None:
        self.leader.kill()
        self._swap()

    def stop_leader_until_it_is_replaced(self) -> None:
        """As a machine that was suspended: it wakes up in the term of another one."""
        term = row(self._where)[0]
        os.kill(self.leader.pid, signal.SIGSTOP)
        until(lambda: row(self._where)[0] != term)
        os.kill(self.leader.pid, signal.SIGCONT)
        assert self.leader.wait() == 1
        self._swap()

    def lose_database(self, postgres: Postgres) -> None:
        """Both servers end by themselves, and are started again."""
        postgres.kill()
        assert (self.leader.wait(), self.next.wait()) == (1, 1), self.leader.output()
        assert self._ready is not None
        self._ready.close()
        postgres.start()
        self.start()

    def close(self) -> None:
        for server in (self.leader, self.next):
            if server.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.pid, signal.SIGCONT)
                server.kill()
        if self._ready is not None:
            self._ready.close()


@pytest.fixture
def pair(tmp_path: Path, forks: Forks, own_postgres: Postgres) -> Iterator[Pair]:
    own_postgres.create("hai")
    where = PostgreSQL(url=own_postgres.url("hai"))
    Database(where).close()
    with psycopg.connect(where.url) as connection:
        connection.execute(WITNESS)
    found = Pair(tmp_path / "home", forks, where)
    yield found
    found.close()


def check_witness(url: str) -> None:
    """No session wrote under two terms, no two sessions under one, and a term that was over did not write."""
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT term, backend FROM witness ORDER BY number").fetchall()
    runs = [pair for at, pair in enumerate(found) if not at or found[at - 1] != pair]
    terms = [term for term, _ in runs]
    assert terms == sorted(set(terms)), runs
    assert len(runs) > 1


@pytest.mark.deadline(600 if SOAK else 480)
@pytest.mark.parametrize("seed", range(1, 5) if SOAK else [1])
def test_two_servers_and_a_database_under_kills(
    pair: Pair, own_postgres: Postgres, spec: MakeSpec, seed: int
) -> None:
    chance = random.Random(seed)
    blows = [pair.kill_leader, pair.stop_leader_until_it_is_replaced]
    blows += [partial(pair.lose_database, own_postgres)]
    blows = [blow for blow in blows for _ in range(4 if SOAK else 1)]
    chance.shuffle(blows)
    pair.start()
    storm = Storm(pair.leader, spec, seed)
    clients = [threading.Thread(target=storm.run) for _ in range(6)]
    for client in clients:
        client.start()
    try:
        for blow in blows:
            with storm.changed:
                goal = storm.calls + chance.randrange(5, 60)
                assert storm.changed.wait_for(partial(storm.reached, goal), 60)
            blow()
    finally:
        storm.ending = True
        for client in clients:
            client.join()
    views, events = settle(pair.leader)
    check_history(events, views, pair.leader.launches(), gaps=True)
    storm.check(views)
    check_witness(own_postgres.url("hai"))
