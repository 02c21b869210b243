"""Accepts new tasks in groups.

Tasks that arrive while the loop is busy with earlier tasks share one transaction, one disk sync and
one plan. Each request is answered after its commit.

    submit      queues the task, with a future
    write       once a turn of the loop: checks, one transaction, `committed`, the answers

Check and transaction are one step of the loop, so the checked state cannot change in between. If a
transaction fails, none of its tasks is accepted: each request gets the error, and memory stays as
it was.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from fireflyer.errors import TaskError
from fireflyer.hai import lifecycle
from fireflyer.hai.controller.dispatch import Dispatch
from fireflyer.hai.database.store import Moment, NewTask, Row, Store
from fireflyer.hai.lifecycle import Task
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.model.admission import check
from fireflyer.hai.workspaces.tasks import Workspaces

Line = dict[str, Any]
"""Row for the audit log, without the column `object`: the store adds the id of the task."""

GROUP = 256
"""Maximum number of tasks in one transaction; a larger transaction would delay the loop."""


class _Arrival(msgspec.Struct):
    spec: TaskSpec
    user: str
    line: Line | None
    written: "asyncio.Future[Row]"


class SubmissionQueue:
    """Queue of submitted tasks. Used only on the event loop.

    Args:
        store: store that the tasks are written to.
        workspaces: checks that a task's workspace and environment are stored.
        dispatch: checks a task against the nodes and the user's quota.
        committed: called with the tasks of one transaction once they are on disk.
    """

    def __init__(
        self,
        store: Store,
        workspaces: Workspaces,
        dispatch: Dispatch,
        committed: Callable[[Sequence[tuple[NewTask, Row]]], None],
    ) -> None:
        self._store = store
        self._workspaces = workspaces
        self._dispatch = dispatch
        self._committed = committed
        self._arrived: list[_Arrival] = []
        self.closed = False
        """True if every task is rejected because the server is shutting down."""

    async def submit(self, spec: TaskSpec, user: str, line: Line | None) -> Row:
        """Submits a task and returns its row; the task is on disk on return.

        Raises:
            ConfigError: a field of the spec is invalid.
            TaskError: the task requests more than the nodes or the user's quota can ever provide,
                or the server is shutting down.
            NoSpace: the disk is nearly full.
            StorageError: the task cannot be written.
        """
        loop = asyncio.get_running_loop()
        arrival = _Arrival(spec, user, line, loop.create_future())
        if not self._arrived:
            loop.call_soon(self._write)
        self._arrived.append(arrival)
        return await arrival.written

    def _write(self) -> None:
        group, self._arrived = self._arrived[:GROUP], self._arrived[GROUP:]
        if self._arrived:
            asyncio.get_running_loop().call_soon(self._write)
        admitted: list[tuple[_Arrival, NewTask]] = []
        for arrival in group:
            try:
                admitted.append((arrival, self._admit(arrival)))
            except Exception as error:  # noqa: BLE001  # the request gets every error
                _refuse(arrival, error)
        if not admitted:
            return
        try:
            rows = self._store.add([fresh for _, fresh in admitted])
            self._committed([(fresh, row) for (_, fresh), row in zip(admitted, rows, strict=True)])
        except Exception as error:  # noqa: BLE001  # each request gets every error
            for arrival, _ in admitted:
                _refuse(arrival, error)
            return
        for (arrival, _), row in zip(admitted, rows, strict=True):
            if not arrival.written.done():  # the request may have been cancelled
                arrival.written.set_result(row)

    def _admit(self, arrival: _Arrival) -> NewTask:
        spec, user = arrival.spec, arrival.user
        check(spec)
        self._store.database.check_space()
        self._workspaces.admit(spec, user)
        if self.closed:
            raise TaskError("the server is shutting down and accepts no more tasks")
        self._dispatch.check(spec, user)
        task = Task(
            id="", order=0, user=user, nodes=spec.nodes, world=spec.nodes * spec.ranks_per_node,
            max_restarts=spec.max_restarts, max_node_faults=spec.max_node_faults,
        )  # fmt: skip
        about = {
            "user": user, "group": spec.group, "gpus": spec.gpus, "gpu_type": spec.gpu_type,
            "priority": "" if spec.priority == "normal" else spec.priority,
        }  # fmt: skip
        step = lifecycle.admit(task, {name: value for name, value in about.items() if value})
        return NewTask(
            spec=spec, secret=secrets.token_hex(32), step=step, user=user,
            line=arrival.line, when=Moment(time.monotonic_ns(), time.time()),
        )  # fmt: skip


def _refuse(arrival: _Arrival, error: Exception) -> None:
    if not arrival.written.done():
        arrival.written.set_exception(error)
