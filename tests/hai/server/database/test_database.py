"""The database of both kinds: its versions, its words for failures, its durability."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import psycopg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from tests.hai.server.database.postgres import Postgres

from fireflyer.errors import ConfigError, Corrupted, StorageError, Unavailable
from fireflyer.hai.controller.controller import now
from fireflyer.hai.database import schema
from fireflyer.hai.database.connection import Database, PostgreSQL, parse_url
from fireflyer.hai.database.node_marks import Mark, Marks
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.store import NewTask, Store
from fireflyer.hai.lifecycle import Launch, Note, Step, Task
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.identity import Quota
from fireflyer.hai.sampling.series import METRICS, point
from fireflyer.hai.scheduling.cluster import Window

Open = Callable[[Path | PostgreSQL], Database]

VERSION_1 = Path(__file__).with_name("version1.sql")
"""A database as the program made it before it had users: a task that runs, one that is queued."""

SPEC = TaskSpec(script="/x.py", cwd="/")


def add(store: Store, user: str = "") -> str:
    fresh = Task(id="", order=0, nodes=1, world=1, max_restarts=3)
    step = Step(task=fresh, notes=(Note("submitted"), Note("queued")))
    made = NewTask(spec=SPEC, secret="5ecret", step=step, when=now(), user=user)
    return store.add([made])[0].task


def test_the_migrations_make_the_tables_of_the_schema(database: Database) -> None:
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        found = compare_metadata(context, schema.metadata)
        version = connection.execute(sa.select(schema.schema_version.c.version)).scalar_one()
    assert found == []
    assert version == schema.VERSION


def test_a_second_open_changes_nothing(place: Path | PostgreSQL, opened: Open) -> None:
    store = Store(opened(place))
    name = add(store, "ada")
    again = Store(opened(place))
    assert [(row.task, row.user, row.spec) for row in again.rows(live=True)] == [
        (name, "ada", SPEC)
    ]


def test_a_long_queue_is_read_in_few_statements(place: Path | PostgreSQL, opened: Open) -> None:
    database = opened(place)
    store = Store(database)
    names = [add(store) for _ in range(20)]
    statements: list[str] = []
    engine = database.connection.engine
    sa.event.listen(engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    assert [task.id for task, _ in store.load()] == names
    histories = store.of_live(["queued", "running"])
    kinds = {name: [event.kind for event in found] for name, found in histories.items()}
    assert kinds == {name: ["queued"] for name in names}
    assert len(statements) <= 4, statements


def test_a_database_of_version_1_opens_with_all_that_it_had(tmp_path: Path, opened: Open) -> None:
    path = tmp_path / "hai.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript(VERSION_1.read_text())
    store = Store(opened(path))
    assert [(row.task, row.state, row.user) for row in store.rows(live=False)] == [
        ("t1", "running", ""),
        ("t2", "queued", ""),
    ]
    running, queued = (task for task, _ in store.load())
    assert (running.placement, running.started) == (("n0",), frozenset({0}))
    assert queued.state == "queued"
    assert [event.kind for event in store.events(0, "t1", 10)] == [
        "submitted", "queued", "starting", "rank_started", "running",
    ]  # fmt: skip
    assert add(store) == "t3"
    database = opened(path)
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, schema.metadata) == []


def test_a_database_of_version_3_gets_devices_and_samples(
    place: Path | PostgreSQL, opened: Open
) -> None:
    old = opened(place)
    store = Store(old)
    name = add(store)
    task = Task(id=name, order=0, nodes=1, world=1, max_restarts=3, state="starting", attempt=1)
    launch = Launch(name, 1, ("n0",), ((2, 3),))
    store.write(Step(task=task, notes=(Note("starting"),), actions=(launch,)), now())
    with old.writing() as connection:
        for step in (
            "DROP TABLE sample",
            "DROP INDEX event_by_fault",
            "ALTER TABLE attempt DROP COLUMN devices",
            "UPDATE schema_version SET version = 3",
            "UPDATE alembic_version SET version_num = '0003'",
        ):
            connection.execute(sa.text(step))
    old.close()
    database = opened(place)
    found = Store(database).attempt(name, 1)
    assert found is not None
    assert (found.nodes, found.devices) == (("n0",), ()), "its devices are not known"
    samples = Samples(database)
    samples.add(60.0, {"cluster": point(held=1)})
    (read,) = samples.read("cluster", 60, 60.0, 60.0)[1]
    assert read[METRICS.index("held")] == 1
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, schema.metadata) == []


def test_a_newer_database_is_refused(place: Path | PostgreSQL, opened: Open) -> None:
    with opened(place).writing() as connection:
        connection.execute(schema.schema_version.update().values(version=1000))
    with pytest.raises(StorageError, match=r"written by a newer Fireflyer \(schema 1000"):
        Database(place)


def test_another_programs_database_is_refused(postgresql: PostgreSQL) -> None:
    with psycopg.connect(postgresql.url) as connection:
        connection.execute("CREATE TABLE song (title text)")
    with pytest.raises(Corrupted, match="database of another program"):
        Database(postgresql)


@pytest.mark.parametrize("table", ["event", "audit"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET wall = 0", "DELETE FROM {}"])
def test_the_history_and_the_audit_log_are_append_only(
    database: Database, table: str, statement: str
) -> None:
    store = Store(database)
    row = dict.fromkeys(("user", "token", "address", "action", "object", "outcome"), "x")
    with database.along(schema.audit, row | {"wall": 1.0}):
        add(store)
    with pytest.raises(StorageError, match="is append-only"), database.writing() as connection:
        connection.execute(sa.text(statement.format(table)))
    assert len(store.events(0, None, 10)) == 2


def test_a_transition_is_whole_or_not_at_all(database: Database) -> None:
    store = Store(database)
    name = add(store)
    task, _ = store.load()[0]
    step = Step(
        task=msgspec.structs.replace(task, state="starting", attempt=1, placement=("n0",)),
        notes=(Note("starting", {"nodes": ["n0"]}),),
        actions=(Launch(name, 1, ("n0",)),),
    )
    store.write(step, now())
    with pytest.raises(StorageError):
        store.write(step, now())  # the attempt is there already
    assert [event.kind for event in store.events(0, None, 10)] == [
        "submitted",
        "queued",
        "starting",
    ]
    assert store.load()[0][0].placement == ("n0",)
    assert add(store) == "t2" or database.shared  # a sequence of PostgreSQL may leave numbers out


def test_the_last_attempt_on_a_node_is_found(database: Database) -> None:
    store = Store(database)
    name = add(store)
    for attempt, node in enumerate(("n0", "n1", "n0", "n1"), 1):
        task = msgspec.structs.replace(store.load()[0][0], state="starting", attempt=attempt)
        step = Step(task=task, notes=(), actions=(Launch(name, attempt, (node,)),))
        store.write(step, now())
    assert store.last_on("n0") == (name, 3)
    assert store.last_on("n1") == (name, 4)
    assert store.last_on("n2") is None


def test_marks_and_windows_outlive_the_database_and_are_fenced(
    opened: Open, place: Path | PostgreSQL
) -> None:
    database = opened(place)
    marks = Marks(database)
    marks.put("n0", Mark(health="drained", reason="fan", until=1e9))
    marks.put("n1", Mark(health="suspect", reason="ecc"))
    marks.put("n0", Mark(health="drained", reason="fan 2"))
    marks.put("n1", None)
    windows = [Window(id="", nodes=frozenset({"n0"}), begin=1.0, end=2.0, group="g")] * 2
    assert [marks.add_window(window).id for window in windows] == ["w1", "w2"]
    marks.remove_window("w1")

    def stale(_connection: sa.Connection) -> None:
        raise StorageError("another leads")

    database.fence = stale
    for act in (
        lambda: marks.put("n2", Mark(health="drained", reason="late")),
        lambda: marks.add_window(windows[0]),
        lambda: marks.remove_window("w2"),
    ):
        with pytest.raises(StorageError, match="another leads"):
            act()
    again = Marks(opened(place))
    assert again.all() == {"n0": Mark(health="drained", reason="fan 2")}
    assert again.windows() == [msgspec.structs.replace(windows[0], id="w2")]


def test_quotas_are_listed_in_order(database: Database) -> None:
    rows = [("b", "", "", 4, None), ("", "g", "high", None, 2), ("a", "", "", 0, 0)]
    with database.writing() as connection:
        for user, group, priority, gpus, nodes in rows:
            values = {"user": user, "group": group, "priority": priority}
            values |= {"gpus": gpus, "nodes": nodes}  # type: ignore[dict-item]
            connection.execute(schema.quota.insert().values(values))
    assert Store(database).quotas() == [
        Quota(group="g", priority="high", nodes=2),
        Quota(user="a", gpus=0, nodes=0),
        Quota(user="b", gpus=4),
    ]


# -- PostgreSQL alone --------------------------------------------------------------------------------


def test_commits_are_synchronous_whatever_the_servers_default_is(postgresql: PostgreSQL) -> None:
    with psycopg.connect(postgresql.url, autocommit=True) as connection:
        name = connection.info.dbname
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    with contextlib.closing(Database(postgresql)) as database, database.reading() as connection:
        assert connection.execute(sa.text("SHOW synchronous_commit")).scalar_one() == "on"


@pytest.mark.quick
def test_what_was_acknowledged_survives_a_kill_of_the_database(own_postgres: Postgres) -> None:
    own_postgres.create("kept")
    where = PostgreSQL(url=own_postgres.url("kept"))
    lost: list[Exception] = []
    with contextlib.closing(Database(where)) as database:
        database.lost = lost.append
        store = Store(database)
        names = [add(store) for _ in range(5)]
        own_postgres.kill()
        with pytest.raises(Unavailable, match="attempts continue, and a server manages them again"):
            add(store)
        assert [type(error) for error in lost] == [Unavailable]
    with pytest.raises(Unavailable, match="no connection to postgresql"):
        Database(where)
    own_postgres.start()
    with contextlib.closing(Database(where)) as database:
        assert [row.task for row in Store(database).rows(live=True)] == names


def test_who_may_not_in_is_told_so_without_the_password(
    own_postgres: Postgres, tmp_path: Path
) -> None:
    own_postgres.create("locked")
    with psycopg.connect(own_postgres.url("postgres"), autocommit=True) as connection:
        connection.execute("CREATE ROLE eve LOGIN PASSWORD 'right'")
        connection.execute("ALTER DATABASE locked OWNER TO eve")
    own_postgres.require_passwords()
    url = own_postgres.url("locked").replace("fireflyer@", "eve@")
    file = tmp_path / "password"
    file.write_text("wr0ng-passw0rd\n")
    with pytest.raises(ConfigError, match="rejected this user") as caught:
        Database(PostgreSQL(url=url, password_file=str(file)))
    assert "wr0ng" not in str(caught.value)
    file.write_text("right\n")
    Database(PostgreSQL(url=url, password_file=str(file))).close()
    with pytest.raises(ConfigError, match="cannot read the database's password"):
        Database(PostgreSQL(url=url, password_file=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://ada:5ecret@db/hai", "must not contain a password"),
        ("postgresql://ada@db/hai?password=5ecret", "must not contain a password"),
        ("mysql://ada@db/hai", "expected postgresql://"),
        ("nonsense", "expected postgresql://USER@HOST:PORT/NAME"),
        ("postgresql://ada@db:port/hai", "expected postgresql://USER@HOST:PORT/NAME"),
    ],
)
def test_a_url_that_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_url(url)
    assert "5ecret" not in str(caught.value)


def test_text_that_a_database_cannot_hold_is_refused_and_the_connection_stays(
    place: Path | PostgreSQL, opened: Open
) -> None:
    database = opened(place)
    ended: list[Exception] = []
    database.lost = ended.append
    query = sa.select(schema.task.c.id).where(schema.task.c.user == "a\0b")
    if isinstance(place, PostgreSQL):
        with pytest.raises(ConfigError, match="NUL"), database.reading() as connection:
            connection.execute(query)
    with database.reading() as connection:
        assert connection.execute(sa.select(schema.task.c.id)).all() == []
    assert ended == []
