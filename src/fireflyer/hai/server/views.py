"""Tasks as users see them: what is on disk with what the running server knows on top."""

import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fireflyer.hai.database.store import Row, Store
from fireflyer.hai.faults.desk import Desk
from fireflyer.hai.home import Home
from fireflyer.hai.lifecycle import Task
from fireflyer.hai.model import RankView, TaskView
from fireflyer.hai.server.dispatch import Dispatch


class Views:
    """The tasks of one controller.

    Args:
        home: whose.
        store: what is on disk.
        tasks: the controller's, as of any moment.
        dispatch: knows what queued ones wait for.
        desk: knows how far ranks are.
    """

    def __init__(
        self, home: Home, store: Store, tasks: Mapping[str, Task], dispatch: Dispatch, desk: Desk
    ) -> None:
        self._home = home
        self._store = store
        self._tasks = tasks
        self._dispatch = dispatch
        self._desk = desk

    def writing(self) -> list[Path]:
        """The folders of attempts whose ranks may write logs."""
        live = [task for task in self._tasks.values() if task.placement]
        return [self._home.tasks / task.id / str(task.attempt) for task in live]

    def task(self, row: Row) -> TaskView:
        """One task as of now."""
        reason = row.reason
        task = self._tasks.get(row.task)
        if task is not None and task.state == "queued" and not reason:
            reason = self._dispatch.waiting_for(task.id)
        lease = self._store.lease(row.task, row.attempt) if row.attempt else None
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
            ranks=self._ranks(row),
            directory=str(self._home.tasks / row.task),
            created=row.created,
            user=row.user,
        )

    def _ranks(self, row: Row) -> tuple[RankView, ...]:
        attempt = self._store.attempt(row.task, row.attempt) if row.attempt else None
        if attempt is None:
            return ()
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
        pace = partial(self._desk.step_of, row.task, row.attempt)
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
    """How a rank ended, e.g. "exit 0", "SIGKILL", "suspended" or "lost", with its node."""
    if detail["suspended"]:
        return "suspended"
    if detail["signal"] is None:
        return "lost" if detail["code"] is None else f"exit {detail['code']}"
    try:
        return signal.Signals(detail["signal"]).name
    except ValueError:
        return f"signal {detail['signal']}"
