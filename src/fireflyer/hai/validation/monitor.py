"""Validation monitor: validates nodes, on the controller's event loop.

    due (policy)      -> a task on the node, outside the queue (`Dispatch`)
    the task ended    -> journal, observations for the fault rules, which may drain the node
    a drained node    -> retest; returns to service if the checks that drained it pass

The journal outlives the server, so a new server continues where the old one ended.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from fireflyer.errors import ConfigError, FireflyerError, NoSuchNode, TaskError
from fireflyer.hai.database.store import Row
from fireflyer.hai.faults.rules import Decision
from fireflyer.hai.lifecycle import Request
from fireflyer.hai.model import PINNED, TERMINAL, NodeView, TaskSpec, TaskView
from fireflyer.hai.model.admission import MAX_REASON
from fireflyer.hai.model.observations import Observation, Validator, kind
from fireflyer.hai.model.validations import (
    Ended,
    Entry,
    Finding,
    Returned,
    Started,
    Suspected,
    Trigger,
)
from fireflyer.hai.validation import script
from fireflyer.hai.validation.journal import Journal
from fireflyer.hai.validation.policy import (
    NodeState,
    drained_by_rule,
    due,
    fold,
    may_return,
    peers_of,
)
from fireflyer.hai.validation.script import RESULT, Order
from fireflyer.hai.validation.settings import ValidationSettings, load
from fireflyer.log import get_logger

LOOK_S = 5.0
"""Maximum seconds between two checks for due validations."""

GRACE_S = 10.0

_log = get_logger("hai")


class Platform(Protocol):
    """Part of the controller that validations use."""

    def observed(self, found: Validator) -> Decision: ...
    async def submit(self, spec: TaskSpec) -> TaskView: ...
    def request(self, name: str, what: Request) -> TaskView: ...
    def unmark(self, node: str) -> None: ...
    @property
    def closing(self) -> bool: ...
    async def undrain_engine(self, node: str) -> None: ...
    async def news(self, known: int, wait_s: float) -> int: ...


class ValidationMonitor:
    """Validations of one server."""

    def __init__(
        self,
        home: Path,
        tasks: Path,
        platform: Platform,
        nodes: Callable[[], list[NodeView]],
        row: Callable[[str], Row],
        now: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            home: folder of `validator.toml` and the journal.
            tasks: folder of the tasks' folders.
            nodes: returns all nodes.
            row: returns the row of a task.
        """
        self._home = home
        self._tasks = tasks
        self._platform = platform
        self._nodes = nodes
        self._row = row
        self._now = now
        self._journal = Journal(home)
        self._requested: dict[str, asyncio.Future[str]] = {}
        self._settings = load(home)
        self.states: dict[str, NodeState] = {}
        self.entries = 0
        """Entries that this server added."""
        for entry in self._journal.read():
            fold(self.states, entry)

    def _add(self, entry: Entry) -> None:
        self._journal.add(entry)
        fold(self.states, entry)
        self.entries += 1

    def history(self, node: str, most: int) -> list[Entry]:
        """Returns the newest entries of a node, oldest first. Reads the journal from disk, so call
        this method in a thread."""
        return self._journal.of(node, most)

    def suspected(self, node: str, found: Observation | None, action: str) -> None:
        """Records a fault that the rules blame on a node. `found` None: the fault is the end of an
        attempt."""
        check = found.check if isinstance(found, Validator) else ""
        what = "exit" if found is None else kind(found)
        entry = Suspected(
            node=node, wall=self._now(), kind=what, check=check, drained=action == "drain node"
        )
        self._add(entry)

    def request(self, node: str) -> "asyncio.Future[str]":
        """Requests a validation of a node as soon as the node is idle.

        Returns:
            Future that gets the id of the validation task.

        Raises:
            NoSuchNode: no such node.
        """
        if all(node != each.name for each in self._nodes()):
            raise NoSuchNode(f"there is no node {node!r}; `fireflyer nodes` lists them")
        future = self._requested.get(node)
        if future is None or future.done():
            future = self._requested[node] = asyncio.get_running_loop().create_future()
        return future

    async def watch(self) -> None:
        """Starts and ends validations until the server closes, then waits to be cancelled."""
        known = 0
        while not self._platform.closing:
            try:
                await self.look()
            except (FireflyerError, OSError) as error:
                _log.warning("validation: %s", error)
            known = await self._platform.news(known, LOOK_S)
        await asyncio.Event().wait()

    async def look(self) -> None:
        """Checks the running validation, then starts the next validation that is due."""
        for node, state in list(self.states.items()):
            if state.task:
                await self._follow(node, state)
        try:
            self._settings = load(self._home)
        except ConfigError as error:
            _log.warning("validation: %s; the previous settings stay", error)
        found = due(self._nodes(), self.states, list(self._requested), self._settings, self._now())
        if found is not None:
            await self._start(*found)

    async def _start(self, node: str, trigger: Trigger) -> None:
        settings: ValidationSettings = self._settings
        order = Order(
            checks=settings.checks, limits=settings.limits,
            peers=peers_of(node, settings.peers), secret_file=settings.secret_file,
        )  # fmt: skip
        spec = TaskSpec(
            script=script.__file__, args=(msgspec.json.encode(order).decode(),),
            name=f"validate {node} ({trigger})", cwd=str(self._home), start="exec",
            priority="low", max_restarts=0, max_node_faults=0, grace_s=GRACE_S,
            labels={PINNED: node},
        )  # fmt: skip
        task = await self._platform.submit(spec)
        self._add(Started(node=node, wall=self._now(), task=task.id, trigger=trigger))
        asked = self._requested.pop(node, None)
        if asked is not None and not asked.done():
            asked.set_result(task.id)

    async def _follow(self, node: str, state: NodeState) -> None:
        """Records the end of a validation whose task is over. Stops a validation that is still
        queued, if its node is down or other tasks use its node."""
        task = state.task
        try:
            row = self._row(task)
        except TaskError:
            self._add(self._ended(node, state, (), f"task {task} is gone"))
            return
        if row.state == "queued":
            taken = any(each.name == node and (each.tasks or each.state == "down")
                        for each in self._nodes())  # fmt: skip
            if taken:
                self._platform.request(task, "stop")
            return
        if row.state not in TERMINAL:
            return
        findings, error = self._result(row)
        ended = self._ended(node, state, findings, error)
        causes = state.causes
        self._add(ended)
        if not findings:
            _log.warning("validation of %s gave no result: %s", node, error)
            return
        for found in ended.failed:
            self._observe(node, found.name, f"{found.reason}", passed=False)
        if not ended.failed:
            ran = sum(found.status == "passed" for found in findings)
            rest = f"{ran} passed, {len(findings) - ran} not run"
            self._observe(node, "validation", rest, passed=True)
        await self._maybe_return(node, state, ended, causes)

    def _ended(
        self, node: str, state: NodeState, findings: tuple[Finding, ...], error: str
    ) -> Ended:
        return Ended(
            node=node, wall=self._now(), task=state.task, trigger=state.trigger,
            findings=findings, error=error,
        )  # fmt: skip

    def _observe(self, node: str, check: str, result: str, *, passed: bool) -> None:
        found = Validator(node=node, check=check, passed=passed, result=result[:MAX_REASON])
        self._platform.observed(found)

    def _result(self, row: Row) -> tuple[tuple[Finding, ...], str]:
        """Returns the findings that the task wrote, or the reason why it wrote none."""
        if row.state != "finished":
            return (), f"task {row.task} {row.state}: {row.reason}"
        try:
            data = (self._tasks / row.task / "output" / RESULT).read_bytes()
            findings = msgspec.json.decode(data, type=tuple[Finding, ...])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            return (), f"task {row.task} left no readable result: {error}"
        return findings, "" if findings else "no check ran"

    async def _maybe_return(
        self, node: str, state: NodeState, ended: Ended, causes: tuple[Suspected, ...]
    ) -> None:
        if not self._settings.returns:
            return
        if not any(each.name == node and drained_by_rule(each, state) for each in self._nodes()):
            return
        reason = may_return(ended, causes)
        if reason:
            _log.warning("%s stays drained: %s", node, reason)
            return
        self._platform.unmark(node)
        await self._platform.undrain_engine(node)
        self._add(Returned(node=node, wall=self._now()))
        _log.info("%s passed its validation and is back in service", node)
