"""The shell: hears observations, writes them down with what the rules say, and has it done.

One for each controller, on its loop; all that changes a task's state stays with the controller.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.errors import TaskError
from fireflyer.hai.database.marks import Mark
from fireflyer.hai.database.store import Moment, Store
from fireflyer.hai.engines import Engine, EngineEvent, GangEnded, NodeObserved, RankExited
from fireflyer.hai.faults import desk
from fireflyer.hai.faults.observations import Observation, Validator
from fireflyer.hai.faults.rules import Decision, Faults, Rule
from fireflyer.hai.lifecycle import Note, Task, Verdict
from fireflyer.log import get_logger

KINDS = ("observed", "acted")
"""The events of this module."""

_log = get_logger("hai")


class Attendant:
    """Hears of faults."""

    def __init__(
        self,
        rules: tuple[Rule, ...],
        store: Store,
        engine: Engine,
        tasks: Mapping[str, Task],
        directory: Callable[[str, int], Path],
        call: Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None],
        tell: Callable[[], None],
        drain: Callable[[str, Mark], None],
    ) -> None:
        """
        Args:
            rules: the table.
            store: where lines of history go.
            engine: what runs the gangs.
            tasks: the controller's, as of any moment.
            directory: of an attempt of a task.
            call: has an engine call made behind the earlier ones of a task.
            tell: wakes whoever waits for news.
            drain: marks a node; raises TaskError for one that there is not.
        """
        self.desk = desk.Desk(rules, store.newest(KINDS, 2 * desk.REMEMBERED))
        self._store = store
        self._engine = engine
        self._tasks = tasks
        self._directory = directory
        self._call = call
        self._tell = tell
        self._drain = drain

    def recent(self, limit: int, user: str | None = None) -> Faults:
        """The rules in force and the newest observations, of all tasks or of one user's."""
        events = self._store.newest(KINDS, limit, user)
        return Faults(rules=self.desk.rules, events=tuple(events))

    def ended(self, task: Task, event: GangEnded) -> tuple[Verdict, tuple[Note, ...]]:
        """What the rules say of the end of an attempt, and the lines of history that go before it."""
        ranks = self._store.rank_events(event.task, event.attempt)
        return self.desk.ended(task, event, ranks, self._directory(event.task, event.attempt))

    def lost(self, event: EngineEvent) -> tuple[tuple[Note, ...], Callable[[], None]]:
        """Where an elastic attempt goes on without a rank: the lines of history that go with the event's own,
        and what does as they say, once they are written."""
        if not (isinstance(event, RankExited) and event.lost):
            return (), lambda: None
        found = desk.loss(event, self._directory(event.task, event.attempt))
        decision = self.desk.observed(event.task, event.attempt, found)
        notes = (desk.observed(found), desk.acted(decision, found.node))
        return notes, partial(self._act, event.task, event.attempt, found, decision)

    def heard(self, event: NodeObserved) -> None:
        """A supervisor has read its kernel's log; heard again, by a later server, it says nothing."""
        if not self.desk.knows(event.task, event.attempt, event.observation):
            self.notice(event.task, event.attempt, event.observation)

    def observed(self, found: Validator) -> Decision:
        """Takes in the result of a check of a node, and does what the rules say.

        Raises:
            TaskError: no such node.
        """
        if all(found.node != node.name for node in self._engine.nodes()):
            raise TaskError(f"there is no node {found.node!r}; `fireflyer nodes` lists them")
        holder = next((t for t in self._tasks.values() if found.node in t.placement), None)
        at = self._store.last_on(found.node) if holder is None else (holder.id, holder.attempt)
        found = msgspec.structs.replace(found, wall=time.time())
        name, attempt = at or ("", 0)
        return self.notice(name, attempt, found)

    def notice(self, name: str, attempt: int, found: Observation) -> Decision:
        """Decides about an observation, writes both down, and does it. Name "": the node had no task."""
        decision = self.desk.observed(name, attempt, found)
        if name:
            notes = (desk.observed(found), desk.acted(decision, found.node))
            self._store.note(name, attempt, notes, Moment(time.monotonic_ns(), time.time()))
        self._act(name, attempt, found, decision)
        return decision

    def _act(self, name: str, attempt: int, found: Observation, decision: Decision) -> None:
        _log.info("%s attempt %d: %s: %s", name, attempt, found.text(), decision.action)
        if decision.action == "drain node" and found.node:
            self.drain(found.node, f"{found.text()} (rule {decision.rule})")
        task = self._tasks.get(name)
        ends = decision.end or decision.action == "stop task"
        if ends and task is not None and task.placement and task.attempt == attempt:
            self._call(name, partial(self._engine.fail, name, attempt, found.text()))
        self._tell()

    def drain(self, node: str, reason: str) -> None:
        """Nothing new is placed on the node from now on."""
        _log.warning("draining %s: %s", node, reason)
        try:
            self._drain(node, Mark(health="drained", reason=reason))
        except TaskError as error:
            _log.warning("%s is not drained: %s", node, error)

    async def watch(self) -> None:
        """Looks at the logs and pulses of running attempts, for ever."""
        while True:
            running = [task for task in self._tasks.values() if task.state == "running"]
            specs = {task.id: self._store.row(task.id).spec for task in running}
            for task in running:
                await self._look(task.id, task.attempt)
            await asyncio.sleep(desk.period_s(specs.values()))

    async def _look(self, name: str, attempt: int) -> None:
        spec = self._store.row(name).spec
        world = spec.nodes * spec.ranks_per_node
        logs = spec.watchdog_s > 0
        directory = self._directory(name, attempt)
        sight = await asyncio.to_thread(desk.read_sight, directory, world, logs=logs)
        task = self._tasks.get(name)
        if task is None or task.state != "running" or task.attempt != attempt:
            return
        for found in self.desk.look(task, spec, sight, time.monotonic(), time.time()):
            self.notice(name, attempt, found)
