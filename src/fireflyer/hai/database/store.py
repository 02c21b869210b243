"""The platform's state: tasks, attempts, and the append-only history, in SQLite or PostgreSQL.

Each transition is one transaction that writes the new state and its events together. Tasks that
arrive together share a transaction. Every commit is synced, so an acknowledged task survives the
death of the server and a power failure.

One thread uses a store.
"""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from fireflyer.errors import NoSuchTask
from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.schema import FAULTS
from fireflyer.hai.database.schema import attempt as _attempt
from fireflyer.hai.database.schema import audit as _audit
from fireflyer.hai.database.schema import event as _event
from fireflyer.hai.database.schema import quota as _quota
from fireflyer.hai.database.schema import task as _task
from fireflyer.hai.lifecycle import ACTIVE, Launch, Note, Step, Task
from fireflyer.hai.model import TERMINAL, Event, Lease, TaskSpec, TaskState
from fireflyer.hai.model.identity import Quota

_TASK = re.compile(r"t[1-9][0-9]{0,14}", re.ASCII)
LISTED = [
    _task.c[name]
    for name in ("id", "spec", "state", "reason", "attempt", "restarts", "created", "user")
]
"""Columns of a task in a list."""
_SPEC = msgspec.json.Decoder(TaskSpec)
_ADD = _task.insert().returning(_task.c.id, sort_by_parameter_order=True)


class Moment(msgspec.Struct, frozen=True):
    """Time of an observation."""

    monotonic_ns: int
    wall: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the attempt table."""

    nodes: tuple[str, ...]
    devices: tuple[tuple[int, ...], ...]
    launched: bool
    outcome: str | None


class Row(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One row of the task table."""

    task: str
    spec: TaskSpec
    state: TaskState
    reason: str
    attempt: int
    restarts: int
    created: float
    user: str = ""
    """User that submitted the task."""


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A new task, not yet in the database."""

    spec: TaskSpec
    secret: str
    step: Step
    """First step of the task; its `task` has no id yet."""
    when: Moment
    user: str = ""
    line: dict[str, Any] | None = None
    """Audit row to write with the task; the store sets the row's `object`. None: no row."""


class Store:
    """The database of one server.

    Args:
        where: an open database, which the caller closes; or the file of a SQLite database, created
            with mode 0600 when missing, which the store opens and closes.

    Raises:
        Corrupted: the file is not a database, or is a database of another program.
        StorageError: the database cannot be opened, or a newer Fireflyer wrote it.
    """

    def __init__(self, where: Path | Database) -> None:
        self._owned = isinstance(where, Path)
        self.database = Database(where) if isinstance(where, Path) else where

    def close(self) -> None:
        if self._owned:
            self.database.close()

    # -- writing -----------------------------------------------------------------------------------

    def add(self, tasks: Sequence[NewTask]) -> list[Row]:
        """Writes new tasks with their first events and their audit lines, all of them or none."""
        with self.database.writing() as connection:
            values = [_first_values(fresh) for fresh in tasks]
            numbers = connection.execute(_ADD, values).scalars().all()
            lines: list[dict[str, Any]] = []
            events: list[dict[str, Any]] = []
            for number, fresh in zip(numbers, tasks, strict=True):
                events += _event_values(number, 0, fresh.step.notes, fresh.when)
                if fresh.line is not None:
                    lines.append({**fresh.line, "object": f"t{number}"})
            self._note(connection, events)
            if lines:
                connection.execute(_audit.insert(), lines)
        return [
            Row(
                task=f"t{number}", spec=fresh.spec, state=fresh.step.task.state,
                reason=fresh.step.task.reason, attempt=0, restarts=0, created=fresh.when.wall,
                user=fresh.user,
            )
            for number, fresh in zip(numbers, tasks, strict=True)
        ]  # fmt: skip

    def write(self, step: Step, when: Moment) -> None:
        """Writes one transition in one transaction: the task's row, its attempt's row and its
        events."""
        task = step.task
        number = _number(task.id)
        with self.database.writing() as connection:
            values: dict[str, Any] = {
                "state": task.state,
                "reason": task.reason,
                "attempt": task.attempt,
                "restarts": task.restarts,
                "stopping": task.stopping,
            }
            for action in step.actions:
                if isinstance(action, Launch):
                    values["warm"] = True
                    row: dict[str, Any] = {"task": number, "number": action.attempt}
                    row |= {"nodes": _dump(action.nodes), "devices": _dump(action.devices)}
                    row["launched"] = False
                    connection.execute(_attempt.insert(), row)
            connection.execute(_task.update().where(_task.c.id == number).values(values))
            for note in step.notes:
                if note.kind == "gang_ended":
                    at = (_attempt.c.task == number) & (_attempt.c.number == task.attempt)
                    outcome = note.detail["outcome"]
                    connection.execute(_attempt.update().where(at).values(outcome=outcome))
            self._note(connection, _event_values(number, task.attempt, step.notes, when))

    def _note(self, connection: sa.Connection, events: list[dict[str, Any]]) -> None:
        if events:
            connection.execute(_event.insert(), events)

    def launched(self, task: str, attempt: int) -> None:
        """Records that the engine has accepted the launch of this attempt."""
        at = (_attempt.c.task == _number(task)) & (_attempt.c.number == attempt)
        with self.database.writing() as connection:
            connection.execute(_attempt.update().where(at).values(launched=True))

    def released(self, task: str, attempt: int) -> None:
        """Records that the engine keeps no warm processes for the task. Does nothing if a newer
        attempt has started since."""
        at = (_task.c.id == _number(task)) & (_task.c.attempt == attempt)
        with self.database.writing() as connection:
            connection.execute(_task.update().where(at).values(warm=False))

    # -- reading -----------------------------------------------------------------------------------

    def load(self) -> list[tuple[Task, TaskSpec]]:
        """Returns the scheduler's view of the tasks that are not over or must still be released."""
        wanted = _task.c.state.not_in(TERMINAL) | _task.c.warm
        with self.database.reading() as connection:
            rows = connection.execute(sa.select(_task).where(wanted).order_by(_task.c.id)).all()
            return [self._revive(connection, row) for row in rows]

    def _revive(self, connection: sa.Connection, row: sa.Row[Any]) -> tuple[Task, TaskSpec]:
        spec = msgspec.json.decode(row.spec, type=TaskSpec)
        active = row.state in ACTIVE
        begun = row.attempt > 0  # a task without an attempt is restored from its row alone
        last = self._find_attempt(connection, row.id, row.attempt) if begun else None
        faults, avoid = self._faults(connection, row.id) if begun else (0, ())
        ranks: dict[str, set[int]] = {"rank_started": set(), "rank_exited": set()}
        newcomers: set[tuple[str, int, int]] = set()
        if active:
            for event in self._rank_events(connection, row.id, row.attempt):
                detail = msgspec.json.decode(event.detail)
                if incarnation := detail.get("incarnation", 0):
                    newcomers.add((event.kind, detail["rank"], incarnation))
                else:
                    ranks[event.kind].add(detail["rank"])
        nodes = last.nodes if last is not None else ()
        task = Task(
            id=f"t{row.id}",
            order=row.id,
            nodes=spec.nodes,
            world=spec.nodes * spec.ranks_per_node,
            max_restarts=spec.max_restarts,
            state=row.state,
            reason=row.reason,
            attempt=row.attempt,
            restarts=row.restarts,
            placement=nodes if active else (),
            devices=last.devices if active and last is not None else (),
            previous=nodes if row.warm and not active else (),
            preempted=row.state == "suspending" and self._makes_room(connection, row.id),
            stopping=row.stopping,
            unsure=active and last is not None and not last.launched,
            started=frozenset(ranks["rank_started"]),
            exited=frozenset(ranks["rank_exited"]),
            newcomers=frozenset(newcomers),
            lease=self._last_lease(connection, row.id, row.attempt) if active else None,
            max_node_faults=spec.max_node_faults,
            node_faults=faults,
            avoid=frozenset(avoid),
            user=row.user,
        )
        return task, spec

    def _faults(self, connection: sa.Connection, task: int) -> tuple[int, tuple[str, ...]]:
        """Returns the number of a task's attempts that node and network faults ended, and the nodes
        that the task avoids."""
        at = (_event.c.task == task) & (_event.c.kind == "acted")
        query = sa.select(_event.c.detail).where(at)
        details = [msgspec.json.decode(d) for d in connection.execute(query).scalars()]
        ends = [detail for detail in details if detail.get("ended")]
        avoid = {node for detail in ends for node in detail["avoid"]}
        return sum(detail["cause"] != "script" for detail in ends), tuple(sorted(avoid))

    def _makes_room(self, connection: sa.Connection, task: int) -> bool:
        """Returns whether the scheduler caused the last suspend."""
        at = (_event.c.task == task) & (_event.c.kind == "suspending")
        query = sa.select(_event.c.detail).where(at).order_by(_event.c.seq.desc()).limit(1)
        detail = connection.execute(query).scalar_one()
        return bool(msgspec.json.decode(detail).get("preempted"))

    def _last_lease(self, connection: sa.Connection, task: int, attempt: int) -> Lease | None:
        at = (_event.c.task == task) & (_event.c.attempt == attempt) & (_event.c.kind == "leased")
        query = sa.select(_event.c.detail).where(at).order_by(_event.c.seq.desc()).limit(1)
        detail = connection.execute(query).scalar_one_or_none()
        return None if detail is None else msgspec.json.decode(detail, type=Lease)

    def _find_attempt(self, connection: sa.Connection, task: int, number: int) -> Attempt | None:
        at = (_attempt.c.task == task) & (_attempt.c.number == number)
        row = connection.execute(sa.select(_attempt).where(at)).one_or_none()
        if row is None:
            return None
        nodes = msgspec.json.decode(row.nodes, type=tuple[str, ...])
        devices = msgspec.json.decode(row.devices, type=tuple[tuple[int, ...], ...])
        return Attempt(nodes=nodes, devices=devices, launched=row.launched, outcome=row.outcome)

    def _rank_events(
        self, connection: sa.Connection, task: int, attempt: int
    ) -> Sequence[sa.Row[Any]]:
        at = (_event.c.task == task) & (_event.c.attempt == attempt)
        kinds = _event.c.kind.in_(("rank_started", "rank_joined", "rank_exited"))
        return connection.execute(sa.select(_event).where(at & kinds).order_by(_event.c.seq)).all()

    def rows(
        self,
        *,
        live: bool,
        user: str | None = None,
        states: Collection[str] = (),
        after: str = "",
        limit: int | None = None,
    ) -> list[Row]:
        """Returns at most `limit` tasks in order of submission, from the first task after `after`
        on; "": from the first of all. `live`: only tasks that are not over; `user` and `states`:
        only tasks of this user and in these states.

        Raises:
            NoSuchTask: `after` is not a task id.
        """
        query = chosen_rows(live=live, user=user, states=states, after=after, limit=limit)
        with self.database.reading() as connection:
            return [_row(*row) for row in connection.execute(query)]

    def row(self, task: str) -> Row:
        """Returns one task.

        Raises:
            NoSuchTask: no such task.
        """
        with self.database.reading() as connection:
            row = connection.execute(
                sa.select(*LISTED).where(_task.c.id == _number(task))
            ).one_or_none()
        if row is None:
            raise unknown(task)
        return _row(*row)

    def secret(self, task: str) -> str:
        with self.database.reading() as connection:
            query = sa.select(_task.c.secret).where(_task.c.id == _number(task))
            return str(connection.execute(query).scalar_one())

    def attempt(self, task: str, number: int) -> Attempt | None:
        """Returns one attempt of a task, or None."""
        with self.database.reading() as connection:
            return self._find_attempt(connection, _number(task), number)

    def lease(self, task: str, attempt: int) -> Lease | None:
        """Returns the last lease that was granted in an attempt, or None."""
        with self.database.reading() as connection:
            return self._last_lease(connection, _number(task), attempt)

    def faults(self, task: str) -> tuple[int, tuple[str, ...]]:
        """Returns the number of a task's attempts that node and network faults ended, and the nodes
        that the task avoids."""
        with self.database.reading() as connection:
            return self._faults(connection, _number(task))

    def note(self, task: str, attempt: int, notes: Sequence[Note], when: Moment) -> None:
        """Writes history lines that change no state."""
        with self.database.writing() as connection:
            self._note(connection, _event_values(_number(task), attempt, notes, when))

    def newest_faults(self, limit: int, user: str | None = None) -> list[Event]:
        """Returns the newest events `observed` and `acted`, oldest first; only of `user`'s tasks if
        given."""
        query = sa.select(_event).where(FAULTS).order_by(_event.c.seq.desc())
        if user is not None:
            query = query.join(_task).where(_task.c.user == user)
        with self.database.reading() as connection:
            rows = connection.execute(query.limit(limit)).all()
        return [event_of(row) for row in reversed(rows)]

    def last_on(self, node: str) -> tuple[str, int] | None:
        """Returns the newest task that had a node, and the number of its last attempt there; None:
        no task had the node."""
        at = _attempt.c.nodes.contains(_dump(node), autoescape=True)
        query = sa.select(_attempt.c.task, _attempt.c.number).where(at)
        query = query.order_by(_attempt.c.task.desc(), _attempt.c.number.desc()).limit(1)
        with self.database.reading() as connection:
            row = connection.execute(query).first()
        return None if row is None else (f"t{row.task}", row.number)

    def rank_events(self, task: str, attempt: int) -> list[Event]:
        """Returns the rank_started, rank_joined and rank_exited events of one attempt."""
        with self.database.reading() as connection:
            rows = self._rank_events(connection, _number(task), attempt)
        return [event_of(row) for row in rows]

    def events(
        self, after: int, task: str | None, limit: int, user: str | None = None
    ) -> list[Event]:
        """Returns at most `limit` events with a seq above `after`, in order; only of `task`, or of
        `user`'s tasks, if given."""
        query = sa.select(_event).where(_event.c.seq > after).order_by(_event.c.seq).limit(limit)
        if user is not None:
            query = query.join(_task).where(_task.c.user == user)
        if task is not None:
            query = query.where(_event.c.task == _number(task))
        with self.database.reading() as connection:
            return [event_of(row) for row in connection.execute(query)]

    def of_live(self, kinds: Sequence[str]) -> dict[str, list[Event]]:
        """Returns the events of these kinds of each task that is not over."""
        wanted = _task.c.state.not_in(TERMINAL) & _event.c.kind.in_(kinds)
        query = sa.select(_event).join(_task).where(wanted).order_by(_event.c.seq)
        found: dict[str, list[Event]] = {}
        with self.database.reading() as connection:
            for row in connection.execute(query):
                event = event_of(row)
                found.setdefault(event.task, []).append(event)
        return found

    def quotas(self) -> list[Quota]:
        """Returns all limits that were set, in order of user, group, priority."""
        query = sa.select(_quota).order_by(_quota.c.user, _quota.c.group, _quota.c.priority)
        with self.database.reading() as connection:
            return [Quota(**row._mapping) for row in connection.execute(query)]

    def last_seq(self) -> int:
        """Returns the seq of the newest event; 0 before the first."""
        with self.database.reading() as connection:
            return connection.execute(sa.select(sa.func.max(_event.c.seq))).scalar_one() or 0


def chosen_rows(
    *, live: bool, user: str | None, states: Collection[str], after: str, limit: int | None
) -> sa.Select[Any]:
    """Returns the query of `Store.rows`: the columns LISTED, in order of submission.

    Raises:
        NoSuchTask: `after` is not a task id.
    """
    query = sa.select(*LISTED).order_by(_task.c.id).limit(limit)
    if after:
        query = query.where(_task.c.id > _number(after))
    if user is not None:
        query = query.where(_task.c.user == user)
    if live:
        query = query.where(_task.c.state.not_in(TERMINAL))
    if states:
        query = query.where(_task.c.state.in_(states))
    return query


def unknown(task: str) -> NoSuchTask:
    return NoSuchTask(f"no task {task!r} here; `fireflyer ps --all` lists them")


def _number(task: str) -> int:
    """Returns the row number of a task id.

    Raises:
        NoSuchTask: the text is not a task id.
    """
    if not _TASK.fullmatch(task):
        raise unknown(task)
    return int(task[1:])


def _first_values(fresh: NewTask) -> dict[str, Any]:
    return {
        "spec": _dump(fresh.spec),
        "secret": fresh.secret,
        "state": fresh.step.task.state,
        "reason": fresh.step.task.reason,
        "attempt": 0,
        "restarts": 0,
        "stopping": False,
        "warm": False,
        "created": fresh.when.wall,
        "user": fresh.user,
    }


def _event_values(
    task: int, attempt: int, notes: Sequence[Note], when: Moment
) -> list[dict[str, Any]]:
    return [
        {
            "task": task,
            "attempt": attempt,
            "kind": note.kind,
            "detail": _dump(note.detail),
            "monotonic_ns": when.monotonic_ns,
            "wall": when.wall,
        }
        for note in notes
    ]


def _dump(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _row(
    id: int, spec: str, state: TaskState, reason: str, attempt: int, restarts: int, created: float,
    user: str,
) -> Row:  # fmt: skip
    """Builds a row from the columns LISTED."""
    return Row(
        task=f"t{id}", spec=_SPEC.decode(spec), state=state, reason=reason, attempt=attempt,
        restarts=restarts, created=created, user=user,
    )  # fmt: skip


def event_of(row: sa.Row[Any]) -> Event:
    """Builds an event from a row of its table."""
    return Event(
        seq=row.seq,
        task=f"t{row.task}",
        attempt=row.attempt,
        kind=row.kind,
        detail=msgspec.json.decode(row.detail),
        monotonic_ns=row.monotonic_ns,
        wall=row.wall,
    )
