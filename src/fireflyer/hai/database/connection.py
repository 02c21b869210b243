"""One connection to the platform's database, SQLite or PostgreSQL. Opens the database, migrates it
to the newest version, runs transactions, and translates their errors into FireflyerErrors.

    SQLite       a file in the home, mode 0600; write-ahead log, every commit synced; `reserve.py`
                 reserves space, so that tasks can end while the disk is full. The home's lock keeps
                 other servers away.
    PostgreSQL   through psycopg; synchronous_commit=on. `leader.py` keeps other servers away.

A write consists, in order, of: fence (checks that the leader's lease holds), the caller's
statements, the pending audit line, commit. One thread uses a database.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.pool import NullPool, StaticPool

from fireflyer.errors import ConfigError, Corrupted, NoSpace, StorageError, Unavailable
from fireflyer.hai.database import reserve
from fireflyer.hai.database.schema import PRODUCT, VERSION, schema_version

CONNECT_S = 10

_MIGRATING = 0x46466C79
"""Key of the advisory lock under which a PostgreSQL database is migrated."""


class PostgreSQL(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a PostgreSQL database. Content of database.json in the home."""

    url: str
    """postgresql://USER@HOST:PORT/NAME, without a password."""
    password_file: str = ""
    """File with the password in its first line; empty: libpq finds the password (PGPASSFILE,
    ~/.pgpass)."""


def parse_url(text: str) -> sa.URL:
    """Returns the URL of a PostgreSQL database.

    Raises:
        ConfigError: the text is not such a URL, or contains a password.
    """
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigError("invalid --database: expected postgresql://USER@HOST:PORT/NAME") from None
    if url.drivername not in ("postgresql", "postgresql+psycopg"):
        raise ConfigError(f"invalid --database {url.drivername}://...: expected postgresql://...")
    if url.password is not None or {"password", "passfile"} & url.query.keys():
        raise ConfigError(
            "--database must not contain a password, which all users of this machine could read: put it "
            "into a file (--database-password-file FILE, or PGPASSFILE)"
        )
    return url.set(drivername="postgresql+psycopg")


class Database:
    """An open database at the newest version of its tables.

    Args:
        where: the file of a SQLite database, created with mode 0600 when missing, or a PostgreSQL
            database.
        lease_s: PostgreSQL only: the database server ends a transaction that is idle for more
            than this number of seconds.

    Raises:
        Corrupted: the file is not a database, or is a database of another program.
        StorageError: the database cannot be opened, or a newer Fireflyer wrote it.
        Unavailable: PostgreSQL does not answer.
        ConfigError: the URL cannot be used, or PostgreSQL refuses the user.
    """

    def __init__(self, where: Path | PostgreSQL, lease_s: float = 10.0) -> None:
        self.where = where
        self.fence: Callable[[sa.Connection], None] = lambda _connection: None
        """Called first in every write; raises if this server must no longer write."""
        self.alive: Callable[[], None] = lambda: None
        """Called before every transaction, also a read; raises if this server must no longer
        act."""
        self.lost: Callable[[Exception], None] = lambda _error: None
        """Called when the connection is lost."""
        self._pending: dict[str, Any] | None = None
        self._pending_table: sa.Table | None = None
        self._writes = 0
        if isinstance(where, Path):
            self.name = str(where)
            self._engine = _open_sqlite(where)
        else:
            self.name = parse_url(where.url).render_as_string()
            self._engine = _open_postgresql(where, lease_s)
        try:
            with self._translated():
                self.connection = self._engine.connect()
            self._migrate()
            if isinstance(where, Path):
                driver = self._driver()
                # Only after `_migrate` accepted the database: another program's database must
                # stay unchanged.
                driver.execute("PRAGMA journal_mode=WAL")
                reserve.hold(driver)
        except BaseException:
            self._engine.dispose()
            raise

    def _driver(self) -> Any:
        driver = self.connection.connection.driver_connection
        assert driver is not None
        return driver

    def check_space(self) -> None:
        """Rejects a new task that would use disk space that running tasks need to end.

        Raises:
            NoSpace: the disk of a SQLite database is nearly full.
        """
        if self.shared:
            return
        left = _left(self.name)
        if left < reserve.NEW_TASK_BYTES:
            raise NoSpace(
                f"the disk of {self.name} has {left} bytes left, too few for a new task: free some disk "
                "space; running tasks can still be stopped"
            )

    @property
    def shared(self) -> bool:
        """Returns whether other machines can reach the database."""
        return isinstance(self.where, PostgreSQL)

    def close(self) -> None:
        self.connection.close()
        self._engine.dispose()

    @contextmanager
    def another_connection(self) -> Iterator[sa.Connection]:
        """Opens a separate connection for another thread; each statement is a transaction."""
        with self._translated(), self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    # -- transactions ------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        self.alive()
        with self._translated(), self.connection.begin():
            yield self.connection

    @contextmanager
    def writing(self) -> Iterator[sa.Connection]:
        """Runs one transaction; the pending audit line becomes part of it."""
        self.alive()
        with self._translated(), self.connection.begin():
            self.fence(self.connection)
            yield self.connection
            if self._pending_table is not None and self._pending is not None:
                self.connection.execute(self._pending_table.insert(), self._pending)
        self._pending = None
        if not self.shared:
            self._writes += 1
            if self._writes % reserve.CHECK_EVERY == 0 and reserve.short(self._driver()):
                reserve.hold(self._driver())

    @contextmanager
    def along(self, table: sa.Table, row: dict[str, Any]) -> Iterator[Callable[[], bool]]:
        """Adds this row to the next write. Yields a function that returns whether the row was
        written."""
        self._pending_table, self._pending = table, row
        try:
            yield lambda: self._pending is None
        finally:
            self._pending = None

    def name_object(self, name: str) -> None:
        """Sets the object of the pending audit line, if it was unknown before the write."""
        if self._pending is not None and not self._pending["object"]:
            self._pending["object"] = name

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sa.exc.DBAPIError as error:
            found = self._in_words(error)
            if isinstance(found, Unavailable):
                self.lost(found)
            raise found from None

    def _in_words(self, error: sa.exc.DBAPIError) -> StorageError | ConfigError:
        text = " ".join(str(error.orig).split())
        if self.shared:
            state = getattr(error.orig, "sqlstate", None) or ""
            if state.startswith("53"):
                return NoSpace(f"{self.name} is out of space: {text}")
            if state.startswith("28") or "authentication failed" in text or "no password" in text:
                return ConfigError(f"{self.name} rejected this user: {text}")
            if isinstance(error, sa.exc.DataError):  # the connection is usable; the data is wrong
                return ConfigError(f"{self.name} rejected a value: {text}")
            if error.connection_invalidated or state[:2] in ("", "08", "57", "25"):
                return Unavailable(
                    f"no connection to {self.name}: {text}; attempts continue, and a server manages "
                    "them again once the database answers"
                )
            return StorageError(f"{self.name}: {text}")
        if "full" in text or ("I/O error" in text and _left(self.name) < 1 << 16):
            return NoSpace(f"cannot write {self.name}: {text}; free some space")
        if "malformed" in text or "not a database" in text:
            return Corrupted(
                f"{self.name} is damaged or not a database: {text}; move it away or choose another home"
            )
        return StorageError(f"{self.name}: {text}")

    # -- versions ----------------------------------------------------------------------------------

    def _migrate(self) -> None:
        with self._translated(), self.connection.begin():
            if self.shared:
                lock = sa.select(sa.func.pg_advisory_xact_lock(_MIGRATING))
                self.connection.execute(lock)
            tables = set(sa.inspect(self.connection).get_table_names())
            version = self._version(tables) if tables else 0
            if version > VERSION:
                raise StorageError(
                    f"{self.name} was written by a newer Fireflyer (schema {version}, this one "
                    f"knows {VERSION}); upgrade, or choose another home"
                )
            if version < VERSION:
                from fireflyer.hai.database.upgrade import migrate

                migrate(self.connection, version, "alembic_version" in tables)

    def _version(self, tables: set[str]) -> int:
        found = None
        if schema_version.name in tables:
            found = self.connection.execute(sa.select(schema_version)).one_or_none()
        if found is None or found.product != PRODUCT:
            raise Corrupted(
                f"{self.name} is a database of another program; move it away or choose another home"
            )
        return int(found.version)


def _left(path: str) -> int:
    """Returns the free bytes on the disk of a file."""
    found = os.statvfs(os.path.dirname(path))
    return found.f_bavail * found.f_frsize


def _open_sqlite(path: Path) -> sa.Engine:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from None
    url = sa.URL.create("sqlite", database=str(path))
    engine = sa.create_engine(url, poolclass=StaticPool, hide_parameters=True)
    sa.event.listen(engine, "connect", _configure_sqlite)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _configure_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions, also for DDL
    cursor = connection.cursor()
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _open_postgresql(where: PostgreSQL, lease_s: float) -> sa.Engine:
    url = parse_url(where.url)
    idle_ms = max(int(lease_s * 1000), 1000)
    arguments: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "application_name": "fireflyer",
        "options": f"-c synchronous_commit=on -c idle_in_transaction_session_timeout={idle_ms}",
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": idle_ms,
    }
    if where.password_file:
        try:
            lines = Path(where.password_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the database's password from {where.password_file}: {error}"
            ) from None
        arguments["password"] = lines[0] if lines else ""
    try:
        return sa.create_engine(
            url, poolclass=NullPool, hide_parameters=True, connect_args=arguments
        )
    except ModuleNotFoundError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'fireflyer[postgresql]'") from None
