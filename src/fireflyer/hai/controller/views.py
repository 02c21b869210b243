"""Task views for users: rows on disk, completed with the state of the running server."""

import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fireflyer.hai.controller.dispatch import Dispatch
from fireflyer.hai.database.history_queries import HistoryQueries, TaskSummary
from fireflyer.hai.database.store import Attempt, Row, Store
from fireflyer.hai.faults.classifier import FaultClassifier
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import Task
from fireflyer.hai.model import (
    LINES_PER_ANSWER,
    PER_ANSWER,
    Listing,
    RankView,
    TaskLine,
    TaskSpec,
    TaskView,
)
from fireflyer.units import format_mib

Listed = TypeVar("Listed", Row, TaskSummary)
Listed_co = TypeVar("Listed_co", Row, TaskSummary, covariant=True)


class Views:
    """Views of the tasks of one controller.

    Args:
        home: home of the tasks.
        store: tasks on disk.
        tasks: the controller's live tasks; the controller keeps them current.
        dispatch: explains what queued tasks wait for.
        classifier: tells the last step of each rank.
    """

    def __init__(
        self,
        home: Home,
        store: Store,
        tasks: Mapping[str, Task],
        dispatch: Dispatch,
        classifier: FaultClassifier,
    ) -> None:
        self._home = home
        self._store = store
        self._history = HistoryQueries(store.database)
        self._tasks = tasks
        self._dispatch = dispatch
        self._classifier = classifier

    def writing(self) -> list[Path]:
        """Returns the folders of attempts whose ranks may write logs."""
        live = [task for task in self._tasks.values() if task.placement]
        return [self._home.tasks / task.id / str(task.attempt) for task in live]

    def task(self, row: Row) -> TaskView:
        """Returns the current view of a task."""
        return self._view(row, self._dispatch.waits())

    def _view(self, row: Row, waits: Callable[[str], str]) -> TaskView:
        reason = row.reason
        task = self._tasks.get(row.task)
        if task is not None and task.state == "queued" and not reason:
            reason = waits(task.id)
        lease = self._store.lease(row.task, row.attempt) if row.attempt else None
        attempt = self._store.attempt(row.task, row.attempt) if row.attempt else None
        node_faults, avoid = self._store.faults(row.task) if row.attempt else (0, ())
        return TaskView(
            id=row.task,
            spec=row.spec,
            state=row.state,
            reason=reason,
            attempt=row.attempt,
            generation=0 if lease is None else lease.generation,
            members=() if lease is None else lease.members,
            restarts=row.restarts,
            node_faults=min(node_faults, row.spec.max_node_faults),
            avoid=avoid,
            ranks=() if attempt is None else self._ranks(row, attempt),
            nodes=() if attempt is None else attempt.nodes,
            devices=() if attempt is None else attempt.devices,
            limits=limits_in_words(row.spec, self._dispatch.unheld()),
            directory=str(self._home.tasks / row.task),
            created=row.created,
            user=row.user,
        )

    def chosen(self, listing: Listing, after: str) -> list[TaskView]:
        """Returns at most PER_ANSWER tasks of a list, in order of submission, from the first task
        after `after` on; "": from the first of all."""
        rows = _accepted(listing, after, self._store.rows, lambda row: row.spec.labels, PER_ANSWER)
        waits = self._dispatch.waits()
        return [self._view(row, waits) for row in rows]

    def lines(self, listing: Listing, after: str) -> list[TaskLine]:
        """Returns at most LINES_PER_ANSWER tasks of a list, in order of submission, from the first
        task after `after` on; "": from the first of all."""
        following, most = self._history.following, LINES_PER_ANSWER
        found = _accepted(listing, after, following, lambda each: each.brief.labels, most)
        waits = self._dispatch.waits()
        return [self._line(each, waits) for each in found]

    def _line(self, found: TaskSummary, waits: Callable[[str], str]) -> TaskLine:
        task, brief = self._tasks.get(found.task), found.brief
        reason = found.reason
        if task is not None and task.state == "queued" and not reason:
            reason = waits(task.id)
        return TaskLine(
            id=found.task, name=brief.name or os.path.basename(brief.script), state=found.state,
            created=found.created, user=found.user, reason=reason, nodes=brief.nodes,
            ranks_per_node=brief.ranks_per_node, gpus=brief.gpus, gpu_type=brief.gpu_type,
            attempt=found.attempt, restarts=found.restarts,
            placement=() if task is None else task.placement,
            devices=() if task is None else task.devices,
        )  # fmt: skip

    def _ranks(self, row: Row, attempt: Attempt) -> tuple[RankView, ...]:
        pids: dict[int, int] = {}
        ends: dict[int, str] = {}
        incarnations: dict[int, int] = {}
        outside: set[int] = set()
        for event in self._store.rank_events(row.task, row.attempt):
            rank, incarnation = event.detail["rank"], event.detail.get("incarnation", 0)
            if event.kind == "rank_started":
                pids[rank], incarnations[rank] = event.detail["pid"], incarnation
                ends.pop(rank, None)
                outside |= {rank} if incarnation else set()
            elif event.kind == "rank_joined":
                outside.discard(rank)
            elif incarnation >= incarnations.get(rank, 0):
                ends[rank] = describe_exit(event.detail)
        over = "lost" if attempt.outcome is not None else None
        directory = self._home.tasks / row.task / str(row.attempt)
        pace = partial(self._classifier.step_of, row.task, row.attempt)
        return tuple(
            RankView(
                step=pace(rank)[0],
                slower=pace(rank)[1],
                rank=rank,
                node=attempt.nodes[rank // row.spec.ranks_per_node],
                pid=pids.get(rank),
                ended=ends.get(rank, over),
                log=str(directory / f"{rank}.log"),
                incarnation=incarnations.get(rank, 0),
                member=rank not in outside,
            )
            for rank in range(row.spec.nodes * row.spec.ranks_per_node)
        )


class _Chooser(Protocol[Listed_co]):
    """Query of tasks in order of submission, with the arguments of `Store.rows`."""

    def __call__(
        self, *, live: bool, user: str | None, states: Collection[str], after: str, limit: int
    ) -> Sequence[Listed_co]: ...


def _accepted(
    listing: Listing,
    after: str,
    query: _Chooser[Listed],
    labels: Callable[[Listed], Mapping[str, str]],
    limit: int,
) -> list[Listed]:
    """Returns at most `limit` tasks that match the query and the listing's labels, from the first
    such task after `after` on; "": from the first of all."""
    found: list[Listed] = []
    more = True
    while more and len(found) < limit:
        rows = query(
            live=listing.live, user=listing.user, states=listing.states, after=after, limit=limit
        )
        found += [row for row in rows if listing.accepts(labels(row))]
        more = len(rows) == limit
        after = rows[-1].task if rows else after
    return found[:limit]


def limits_in_words(spec: TaskSpec, unheld: str) -> str:
    """Returns the limits of a task as text; "" if the task has no limits. `unheld`: text about the
    limits that are not enforced."""
    asked = [format_mib(spec.memory_mib)] if spec.memory_mib else []
    asked += [f"{spec.cpus} core{'s' if spec.cpus > 1 else ''}"] if spec.cpus else []
    if not asked:
        return ""
    text = f"{' and '.join(asked)} on each node"
    return f"{text}; {unheld}" if unheld else text


def describe_exit(detail: dict[str, Any]) -> str:
    """Describes how a rank ended, e.g. "exit 0", "SIGKILL", "suspended" or "lost"."""
    if detail["suspended"]:
        return "suspended"
    if detail["signal"] is None:
        return "lost" if detail["code"] is None else f"exit {detail['code']}"
    try:
        return signal.Signals(detail["signal"]).name
    except ValueError:
        return f"signal {detail['signal']}"
