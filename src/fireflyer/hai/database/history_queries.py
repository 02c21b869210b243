"""Queries of the dashboard's pages on the history: tasks by page, counts, and events for the
ledger.

Each query is bounded by its limit or walks an index. Queries run on the database's thread only.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence

import msgspec
import sqlalchemy as sa

from fireflyer.hai.database.connection import Database
from fireflyer.hai.database.schema import event as _event
from fireflyer.hai.database.schema import task as _task
from fireflyer.hai.database.store import LISTED, chosen_rows, event_of
from fireflyer.hai.model import TERMINAL, Event, TaskState

SILENT = ("rank_started", "leased", "acted")
"""Kinds of events that the ledger ignores; most such events occur once for each rank of each
attempt."""


class Brief(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """Part of a spec that lists show."""

    script: str
    name: str = ""
    nodes: int = 1
    ranks_per_node: int = 1
    gpus: int = 0
    gpu_type: str = ""
    priority: str = "normal"
    group: str = ""
    labels: dict[str, str] = {}


_BRIEF = msgspec.json.Decoder(Brief)


class TaskSummary(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """A task in a list."""

    task: str
    brief: Brief
    state: TaskState
    reason: str
    attempt: int
    restarts: int
    created: float
    user: str


class HistoryQueries:
    """Reader of one database.

    Args:
        database: an open database; the caller closes it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def following(
        self, *, live: bool, user: str | None, states: Collection[str], after: str, limit: int
    ) -> list[TaskSummary]:
        """Returns the tasks that `Store.rows` returns, without most of their specs.

        Raises:
            NoSuchTask: `after` is not a task id.
        """
        query = chosen_rows(live=live, user=user, states=states, after=after, limit=limit)
        with self._database.reading() as connection:
            return [_line(*row) for row in connection.execute(query)]

    def page(
        self, *, states: Iterable[str] = (), user: str | None = None, before: int | None, limit: int
    ) -> list[TaskSummary]:
        """Returns at most `limit` tasks, newest first.

        Args:
            states: only tasks in these states; empty: all.
            user: only this user's tasks; None: all users'.
            before: only tasks submitted before this task's number.
            limit: maximum number of tasks.
        """
        query = sa.select(*LISTED).order_by(_task.c.id.desc()).limit(limit)
        wanted = tuple(states)
        if wanted:
            query = query.where(_task.c.state.in_(wanted))
        if user is not None:
            query = query.where(_task.c.user == user)
        if before is not None:
            query = query.where(_task.c.id < before)
        with self._database.reading() as connection:
            return [_line(*row) for row in connection.execute(query)]

    def some(self, tasks: Sequence[str]) -> dict[str, TaskSummary]:
        """Returns the tasks with these ids; unknown ids are left out."""
        numbers = [int(task[1:]) for task in tasks]
        query = sa.select(*LISTED).where(_task.c.id.in_(numbers))
        with self._database.reading() as connection:
            return {f"t{row.id}": _line(*row) for row in connection.execute(query)}

    def counts(self, user: str | None = None) -> dict[str, int]:
        """Returns the number of tasks that are not over, by state."""
        query = sa.select(_task.c.state, sa.func.count()).group_by(_task.c.state)
        query = query.where(_task.c.state.not_in(TERMINAL))
        if user is not None:
            query = query.where(_task.c.user == user)
        with self._database.reading() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def live(self, before: float) -> list[int]:
        """Returns the numbers of the tasks that are not over and were submitted before a moment."""
        query = sa.select(_task.c.id).where(_task.c.state.not_in(TERMINAL))
        query = query.where(_task.c.created < before).order_by(_task.c.id)
        with self._database.reading() as connection:
            return list(connection.execute(query).scalars())

    # -- events ------------------------------------------------------------------------------------

    def first_since(self, wall: float) -> int:
        """Returns the seq of the first event at or after a moment. Bisects the events, which
        assumes that the wall clock was not set back."""
        with self._database.reading() as connection:
            last = connection.execute(sa.select(sa.func.max(_event.c.seq))).scalar_one() or 0

            def wall_at(seq: int) -> float:
                query = sa.select(_event.c.wall).where(_event.c.seq >= seq)
                return float(connection.execute(query.order_by(_event.c.seq).limit(1)).scalar_one())

            return bisect_left(range(last + 1), wall, lo=1, key=wall_at) if last else 1

    def history(self, after: int, limit: int) -> tuple[list[Event], int]:
        """Reads the next `limit` events with a seq above `after`. Returns those that the ledger
        needs, and the seq to continue from."""
        with self._database.reading() as connection:
            following = sa.select(_event.c.seq).where(_event.c.seq > after)
            seqs = following.order_by(_event.c.seq).limit(limit).subquery()
            last = connection.execute(sa.select(sa.func.max(seqs.c.seq))).scalar_one()
            if last is None:
                return [], after
            query = sa.select(_event).where(_event.c.seq > after, _event.c.seq <= last)
            query = query.where(_event.c.kind.not_in(SILENT)).order_by(_event.c.seq)
            return [event_of(row) for row in connection.execute(query)], int(last)

    def of_task(self, task: str, *, after: int = 0, until: int, limit: int) -> list[Event]:
        """Returns at most `limit` of a task's events for the ledger, with a seq above `after` and
        up to `until`."""
        query = sa.select(_event).where(_event.c.task == int(task[1:]))
        query = query.where(_event.c.seq > after, _event.c.seq <= until)
        query = query.where(_event.c.kind.not_in(SILENT)).limit(limit)
        query = query.order_by(_event.c.attempt, _event.c.seq)
        with self._database.reading() as connection:
            return [event_of(row) for row in connection.execute(query)]

    def newest_of(self, task: str, limit: int) -> list[Event]:
        """Returns the newest events of a task, oldest first."""
        query = sa.select(_event).where(_event.c.task == int(task[1:]))
        query = query.order_by(_event.c.attempt.desc(), _event.c.seq.desc()).limit(limit)
        with self._database.reading() as connection:
            return [event_of(row) for row in reversed(connection.execute(query).all())]


def _line(
    id: int, spec: str, state: TaskState, reason: str, attempt: int, restarts: int, created: float,
    user: str,
) -> TaskSummary:  # fmt: skip
    """Builds a task of a list from the columns LISTED."""
    return TaskSummary(
        task=f"t{id}", brief=_BRIEF.decode(spec), state=state, reason=reason, attempt=attempt,
        restarts=restarts, created=created, user=user,
    )  # fmt: skip
