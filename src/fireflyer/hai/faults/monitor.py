"""Fault monitor: records observations with the rules' decisions, and carries the decisions out.

Each controller has one fault monitor, on its loop. Only the controller changes a task's state.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fireflyer.errors import NoSuchNode, TaskError
from fireflyer.hai.database.node_marks import Mark
from fireflyer.hai.database.store import Moment, Store
from fireflyer.hai.faults import classifier
from fireflyer.hai.faults.rules import Decision, Faults, Rule
from fireflyer.hai.lifecycle import Note, Task, Verdict
from fireflyer.hai.model.engine import Engine, EngineEvent, GangEnded, NodeObserved, RankExited
from fireflyer.hai.model.observations import Observation, Validator
from fireflyer.log import get_logger

_log = get_logger("hai")


class FaultMonitor:
    """Handler of the faults that one controller reports."""

    def __init__(
        self,
        rules: tuple[Rule, ...],
        store: Store,
        engine: Engine,
        tasks: Mapping[str, Task],
        directory: Callable[[str, int], Path],
        call: Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None],
        notify: Callable[[], None],
        drain: Callable[[str, Mark], None],
    ) -> None:
        """
        Args:
            rules: the table of fault rules.
            store: where history lines are written.
            engine: the engine that runs the gangs.
            tasks: the controller's current tasks.
            directory: returns the directory of an attempt of a task.
            call: queues an engine call behind the earlier calls of a task.
            notify: wakes the requests that wait for a change.
            drain: marks a node; raises NoSuchNode for an unknown node.
        """
        self.classifier = classifier.FaultClassifier(
            rules, store.newest_faults(2 * classifier.REMEMBERED)
        )
        self._store = store
        self._engine = engine
        self._tasks = tasks
        self._directory = directory
        self._call = call
        self._notify = notify
        self._drain = drain
        self.suspected: Callable[[str, Observation | None, str], None] = lambda *_: None
        """Called with the node, the observation (None: the end of an attempt) and the action, for
        each fault that the rules blame on a node."""

    def recent(self, limit: int, user: str | None = None) -> Faults:
        """Returns the rules in force and the newest observations, of all tasks or of one user's."""
        events = self._store.newest_faults(limit, user)
        return Faults(rules=self.classifier.rules, events=tuple(events))

    def ended(self, task: Task, event: GangEnded) -> tuple[Verdict, tuple[Note, ...]]:
        """Returns the rules' verdict on the end of an attempt, and the history lines to write
        before the lines of the end itself."""
        ranks = self._store.rank_events(event.task, event.attempt)
        where = self._directory(event.task, event.attempt)
        verdict, notes = self.classifier.ended(task, event, ranks, where)
        for node in sorted(verdict.avoid):
            self.suspected(node, None, "restart elsewhere")
        return verdict, notes

    def lost(self, event: EngineEvent) -> tuple[tuple[Note, ...], Callable[[], None]]:
        """Handles a rank's loss if the elastic attempt continues. Returns the history lines to
        write with the event's own lines, and a callback that carries out the decision. Call the
        callback once all these lines are written."""
        if not (isinstance(event, RankExited) and event.lost):
            return (), lambda: None
        found = classifier.loss(event, self._directory(event.task, event.attempt))
        decision = self.classifier.observed(event.task, event.attempt, found)
        notes = (classifier.observed(found), classifier.acted(decision, found.node))
        return notes, partial(self._act, event.task, event.attempt, found, decision)

    def node_observed(self, event: NodeObserved) -> None:
        """Handles an observation that a supervisor read from the kernel log. A later server may
        receive the same observation again; a repetition has no effect."""
        if not self.classifier.knows(event.task, event.attempt, event.observation):
            self.notice(event.task, event.attempt, event.observation)

    def observed(self, found: Validator) -> Decision:
        """Accepts the result of a check of a node, and carries out the rules' decision.

        Raises:
            NoSuchNode: no such node.
        """
        if all(found.node != node.name for node in self._engine.nodes()):
            raise NoSuchNode(f"there is no node {found.node!r}; `fireflyer nodes` lists them")
        holder = next((t for t in self._tasks.values() if found.node in t.placement), None)
        at = self._store.last_on(found.node) if holder is None else (holder.id, holder.attempt)
        found = msgspec.structs.replace(found, wall=time.time())
        name, attempt = at or ("", 0)
        return self.notice(name, attempt, found)

    def notice(self, name: str, attempt: int, found: Observation) -> Decision:
        """Decides about an observation, records observation and decision, and carries out the
        decision. `name` "": the node had no task."""
        decision = self.classifier.observed(name, attempt, found)
        if name:
            notes = (classifier.observed(found), classifier.acted(decision, found.node))
            self._store.note(name, attempt, notes, Moment(time.monotonic_ns(), time.time()))
        self._act(name, attempt, found, decision)
        return decision

    def _act(self, name: str, attempt: int, found: Observation, decision: Decision) -> None:
        _log.info("%s attempt %d: %s: %s", name, attempt, found.text(), decision.action)
        if decision.action in ("restart elsewhere", "drain node") and found.node:
            self.suspected(found.node, found, decision.action)
        if decision.action == "drain node" and found.node:
            self.drain(found.node, f"{found.text()} (rule {decision.rule})")
        task = self._tasks.get(name)
        ends = decision.end or decision.action == "stop task"
        if ends and task is not None and task.placement and task.attempt == attempt:
            self._call(name, partial(self._engine.fail, name, attempt, found.text()))
        self._notify()

    def drain(self, node: str, reason: str) -> None:
        """Drains a node, so that no new task starts there."""
        _log.warning("draining %s: %s", node, reason)
        try:
            self._drain(node, Mark(health="drained", reason=reason))
        except TaskError as error:
            _log.warning("could not drain %s: %s", node, error)

    async def watch(self) -> None:
        """Reads the logs and heartbeats of running attempts until cancelled."""
        while True:
            running = [task for task in self._tasks.values() if task.state == "running"]
            specs = {task.id: self._store.row(task.id).spec for task in running}
            for task in running:
                await self._look(task.id, task.attempt)
            await asyncio.sleep(classifier.period_s(specs.values()))

    async def _look(self, name: str, attempt: int) -> None:
        spec = self._store.row(name).spec
        world = spec.nodes * spec.ranks_per_node
        logs = spec.watchdog_s > 0
        directory = self._directory(name, attempt)
        reading = await asyncio.to_thread(classifier.read_attempt, directory, world, logs=logs)
        task = self._tasks.get(name)
        if task is None or task.state != "running" or task.attempt != attempt:
            return
        for found in self.classifier.look(task, spec, reading, time.monotonic(), time.time()):
            self.notice(name, attempt, found)
