"""Leader election: a lease in PostgreSQL lets one server lead. (With SQLite, the home's lock does.)

    take     if the lease has expired by the database's clock: write term + 1, holder, a new expiry
    renew    every third of the lease, on a separate connection, from a separate thread
    fence    first in each write: check that the term is still ours, and lock its row FOR KEY SHARE
             until the commit. A takeover changes the key (the term), so the takeover waits for that
             commit; later writes of the old term fail
    end      if a server was stopped amid a write, its lease expires while its transaction is open.
             The next server ends that session, which it finds by the term in the session's name.
             The database's limit for idle transactions does not suffice: it misses a client that
             stops between statements of a pipeline
    alive    before each transaction and each engine call: check that the lease has not expired by
             our own clock. The lease counts from the moment before the renewal was sent

A leader that cannot renew in time must not act. From that moment on `alive` raises, in every
thread. If the process has not ended by itself `LEAVE_S` seconds later, it is killed, because its
loop may be stuck in a frozen connection. The lease follows Gray and Cheriton, "Leases"
(SOSP 1989); the term is Chubby's sequencer.
"""

import os
import socket
import threading
import time
from collections.abc import Callable

import sqlalchemy as sa

from fireflyer.errors import FireflyerError, Stale
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.schema import leader
from fireflyer.log import get_logger

LEASE_S = 10.0
LEAVE_S = 2.0

_log = get_logger("hai")

_TAKE = sa.text(
    "UPDATE leader SET term = term + 1, holder = :holder,"
    " expires = extract(epoch FROM clock_timestamp()) + :lease"
    " WHERE expires <= extract(epoch FROM clock_timestamp()) RETURNING term"
)
_RENEW = sa.text(
    "UPDATE leader SET expires = extract(epoch FROM clock_timestamp()) + :lease"
    " WHERE term = :term RETURNING term"
)
_SESSION = sa.text("SELECT set_config('application_name', 'fireflyer term ' || :term, false)")
_END = sa.text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity, leader"
    " WHERE datname = current_database() AND application_name = 'fireflyer term ' || term"
    " AND expires <= extract(epoch FROM clock_timestamp())"
)
_RELEASE = sa.text("UPDATE leader SET expires = 0 WHERE term = :term")
_FENCE = sa.text("SELECT term FROM leader WHERE term = :term FOR KEY SHARE")


class Leader:
    """The lease, held from `take` to `release` or until it is lost.

    Args:
        database: an open PostgreSQL database.
        lease_s: time that other servers wait for a leader that does not renew its lease.
    """

    def __init__(self, database: Database, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._lease_s = lease_s
        self.holder = f"{socket.gethostname()}:{os.getpid()}"
        self.term = 0
        self._until = 0.0
        self._over = False
        self.lost: Callable[[Exception], None] = lambda _error: None
        """Called once, by another thread, when the lease is lost."""
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def take(self) -> str | None:
        """Tries once to take the lease. Returns None if this server now leads; two threads then
        renew and watch the lease. Otherwise returns the leader's name, for messages."""
        asked = time.monotonic()
        with self._database.another_connection() as connection:
            connection.execute(sa.text("SET lock_timeout = '2s'"))
            values = {"holder": self.holder, "lease": self._lease_s}
            try:
                term = connection.execute(_TAKE, values).scalar_one_or_none()
            except sa.exc.OperationalError:  # a transaction of the former leader is still open
                connection.execute(_END)
                term = None
            if term is None:
                row = connection.execute(sa.select(leader)).one()
                return f"{row.holder}, term {row.term}"
        self.term, self._until = term, asked + self._lease_s
        self._database.alive, self._database.fence = self.alive, self._fence
        with self._database.reading() as session:
            session.execute(_SESSION, {"term": str(term)})
        for work in (self._renew, self._watch):
            thread = threading.Thread(target=work, daemon=True, name=f"leader {work.__name__}")
            thread.start()
            self._threads.append(thread)
        _log.info("this server is the leader: %s, term %d", self.holder, self.term)
        return None

    def release(self) -> None:
        """Lets the next server lead at once; does nothing if the lease is lost. REQUIRES: this
        server no longer acts."""
        leads = self._left() > 0
        self._ending.set()
        if not leads:
            return
        for thread in self._threads:
            thread.join(self._lease_s)
        try:
            with self._database.another_connection() as connection:
                connection.execute(_RELEASE, {"term": self.term})
        except FireflyerError as error:
            _log.warning("could not release the lease: %s", error)

    def alive(self) -> None:
        """Raises Stale if this server must no longer act."""
        if self._left() <= 0:
            raise self._stale()

    def _left(self) -> float:
        """Returns the seconds for which no other server can lead."""
        return 0.0 if self._over else self._until - time.monotonic()

    def _stale(self) -> Stale:
        return Stale(
            f"this server ({self.holder}, term {self.term}) is no longer the leader: its lease in "
            f"{self._database.name} was not renewed in time; attempts continue"
        )

    def _fence(self, connection: sa.Connection) -> None:
        if connection.execute(_FENCE, {"term": self.term}).scalar_one_or_none() is None:
            self._over = True
            raise self._stale()

    def _renew(self) -> None:
        while not self._ending.is_set() and self._left() > 0:
            try:
                with self._database.another_connection() as connection:
                    while not self._ending.wait(self._lease_s / 3):
                        asked = time.monotonic()
                        values = {"term": self.term, "lease": self._lease_s}
                        if connection.execute(_RENEW, values).scalar_one_or_none() is None:
                            self._over = True
                            return
                        self._until = asked + self._lease_s
            except (FireflyerError, sa.exc.SQLAlchemyError) as error:
                _log.warning("the lease could not be renewed: %s", error)
                self._ending.wait(self._lease_s / 10)

    def _watch(self) -> None:
        """Ends the process if the lease is lost and the process has not ended by itself."""
        while (left := self._left()) > 0:
            if self._ending.wait(min(left, self._lease_s / 10)):
                return
        error = self._stale()
        _log.error("%s", error)
        self.lost(error)
        if not self._ending.wait(LEAVE_S):
            os._exit(1)
