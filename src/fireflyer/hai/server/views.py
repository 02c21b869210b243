"""Task views for users: rows on disk, completed with the state of the running server."""

import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fireflyer.hai.database.store import Attempt, Row, Store
from fireflyer.hai.faults.classifier import FaultClassifier
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import Task
from fireflyer.hai.model import PER_ANSWER, Listing, RankView, TaskView
from fireflyer.hai.server.dispatch import Dispatch


class Views:
    """Views of the tasks of one controller.

    Args:
        home: home of the tasks.
        store: tasks on disk.
        tasks: the controller's live tasks; the controller keeps them current.
        dispatch: explains what queued tasks wait for.
        classifier: knows the last step of each rank.
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
        self._folder = str(home.tasks)
        self._store = store
        self._tasks = tasks
        self._dispatch = dispatch
        self._classifier = classifier

    def writing(self) -> list[Path]:
        """Returns the folders of attempts whose ranks may write logs."""
        live = [task for task in self._tasks.values() if task.placement]
        return [self._home.tasks / task.id / str(task.attempt) for task in live]

    def task(self, row: Row) -> TaskView:
        """Returns the current view of a task."""
        reason = row.reason
        task = self._tasks.get(row.task)
        if task is not None and task.state == "queued" and not reason:
            reason = self._dispatch.waiting_for(task.id)
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
            directory=str(self._home.tasks / row.task),
            created=row.created,
            user=row.user,
        )

    def chosen(self, listing: Listing, after: str) -> list[TaskView]:
        """Returns at most PER_ANSWER tasks of a list after `after`, in order of submission."""
        found: list[Row] = []
        more = True
        while more and len(found) < PER_ANSWER:
            rows = self._store.rows(
                live=listing.live, user=listing.user, states=listing.states, after=after,
                limit=PER_ANSWER,
            )  # fmt: skip
            found += [row for row in rows if listing.accepts(row.spec.labels)]
            more = len(rows) == PER_ANSWER
            after = rows[-1].task if rows else after
        view = self.brief if listing.brief else self.task
        return [view(row) for row in found[:PER_ANSWER]]

    def brief(self, row: Row) -> TaskView:
        """Returns a view without ranks, members and faults."""
        task = self._tasks.get(row.task)
        reason = row.reason
        if task is not None and task.state == "queued" and not reason:
            reason = self._dispatch.waiting_for(task.id)
        return TaskView(
            id=row.task, spec=row.spec, state=row.state, reason=reason, attempt=row.attempt,
            generation=0, members=(), restarts=row.restarts, ranks=(),
            directory=f"{self._folder}/{row.task}", created=row.created, user=row.user,
            nodes=() if task is None else task.placement,
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
