"""Keeps the planner's cluster in step with the tasks: the adapter between `lifecycle.py` and
`planner.py`.

The controller passes each task's new value. `Dispatch` turns the value into events of the cluster
and requests plans. Node marks (such as drained, with the reason) and windows are stored in the
database, so they outlive the server. Times are wall-clock seconds that never decrease: if the wall
clock is set back, the times stand still.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from fireflyer.errors import ConfigError, NoSuchNode, TaskError
from fireflyer.hai import lifecycle
from fireflyer.hai.controller.metrics import Gauges
from fireflyer.hai.controller.pinned_jobs import PinnedJobs
from fireflyer.hai.database.node_marks import Mark, Marks
from fireflyer.hai.lifecycle import ACTIVE, Action, Task
from fireflyer.hai.model import (
    PINNED,
    PRIORITIES,
    TERMINAL,
    Event,
    NodeView,
    TaskSpec,
    TaskState,
    WhyView,
    WindowView,
)
from fireflyer.hai.model.devices import in_words, matches
from fireflyer.hai.model.engine import Node as EngineNode
from fireflyer.hai.model.identity import MASKED
from fireflyer.hai.model.identity import Quota as Limit
from fireflyer.hai.scheduling import why
from fireflyer.hai.scheduling.cluster import AUTO, Cluster, Job, Node, Phase, Window
from fireflyer.hai.scheduling.planner import plan
from fireflyer.hai.scheduling.quotas import limits
from fireflyer.hai.scheduling.usable import large_enough
from fireflyer.units import format_mib

RECALLED = ("submitted", "queued", "starting", "running", "suspending", "gang_ended")
"""Kinds of events from which the costs and the attained service of a recovered task are
restored."""

_FREE = {"ready": "free"}


class Clock:
    """Wall clock that never goes back."""

    def __init__(self, read: Callable[[], float] = time.time) -> None:
        self._read = read
        self._last = 0.0

    def __call__(self) -> float:
        self._last = max(self._last, self._read())
        return self._last


class Dispatch:
    """The queue and the nodes of one server.

    Args:
        policy: a name of `policies.POLICIES`.
        marks: persistent node marks and windows.

    Raises:
        ConfigError: no such policy.
    """

    def __init__(self, policy: str, marks: Marks, clock: Callable[[], float] | None = None) -> None:
        self.policy = policy
        self.cluster = Cluster(policy=policy)
        self.now = clock or Clock()
        self._marks = marks
        self._engine: dict[str, EngineNode] = {}
        self._pinned = PinnedJobs(self.cluster)
        self._more = False
        """True if the last plan only launched validation tasks, so the queue must still be planned."""
        for window in marks.windows():
            self.cluster.set_window(window)

    # -- nodes -------------------------------------------------------------------------------------

    def set_nodes(self, nodes: Iterable[EngineNode]) -> None:
        """Sets the engine's current nodes; nodes that the engine no longer has are down."""
        self.cluster.advance(self.now())
        self._engine = {node.name: node for node in nodes}
        marks = self._marks.all()
        for name in [*self._engine, *(self.cluster.nodes.keys() - self._engine.keys())]:
            self._set(name, marks.get(name))

    def _set(self, name: str, mark: Mark | None) -> None:
        found = self._engine.get(name)
        if mark is not None and mark.until is not None and mark.until <= self.now():
            mark = None
        if found is None:
            node = Node(name=name, health="down", reason="the engine no longer lists this node")
        else:
            node = Node(
                name=name, gpus=found.gpus, gpu_type=found.gpu_type.lower(),
                indexed=found.indexed, memory_mib=found.memory_mib, whole=found.whole,
                zone=found.zone, leaf=found.leaf,
                health="ready" if found.state == "up" else found.state, reason=found.reason,
            )  # fmt: skip
            if mark is not None and found.state != "down":
                node = msgspec.structs.replace(
                    node, health=mark.health, reason=mark.reason, until=mark.until
                )
        if node != self.cluster.nodes.get(name):
            self.cluster.set_node(node)

    def mark(self, name: str, mark: Mark | None) -> None:
        """Marks a node as drained or suspect, or removes its mark; the change is on disk on return.

        Raises:
            NoSuchNode: no such node.
        """
        if name not in self._engine:
            names = ", ".join(list(self._engine)[:5])
            raise NoSuchNode(
                f"unknown node {name!r}: expected e.g. {names}; `fireflyer nodes` lists them"
            )
        self._marks.put(name, mark)
        self._set(name, mark)

    def unheld(self) -> str:
        """Returns a text that says which limits of tasks are not enforced, and why; "" if all
        limits are enforced."""
        return next((node.unheld for node in self._engine.values() if node.unheld), "")

    def nodes(self) -> list[NodeView]:
        """Returns all nodes in the engine's order."""
        self.cluster.advance(self.now())
        return [self._node_view(self.cluster.nodes[name]) for name in self._engine]

    def _node_view(self, node: Node) -> NodeView:
        jobs = self.cluster.jobs_on(node.name)
        place = self.cluster.places[node.name]
        free = self.cluster.capacity.free[place] if node.gpus else int(not jobs)
        holders: list[str | None] = [None] * (node.gpus if node.indexed else 0)
        for job in jobs:
            for device in dict(zip(job.placement, job.devices, strict=False)).get(node.name, ()):
                if device < len(holders):
                    holders[device] = job.id
        return NodeView(
            name=node.name, gpu_type=node.gpu_type, devices=tuple(holders),
            task=jobs[0].id if jobs else None, tasks=tuple(job.id for job in jobs),
            state=node.health, reason=node.reason, until=node.until, gpus=node.gpus, free=free,
            memory_bytes=node.memory_mib << 20,
            free_memory_bytes=max(self.cluster.capacity.memory[place], 0) << 20,
            leaf=node.leaf, zone=node.zone,
            unheld=self._engine[node.name].unheld,
        )  # fmt: skip

    # -- windows -----------------------------------------------------------------------------------

    def add_window(self, asked: WindowView) -> WindowView:
        """Adds a maintenance window or reservation; it is on disk on return.

        Raises:
            ConfigError: the window names no node or an unknown node, has no length, or is over.
        """
        unknown = [name for name in asked.nodes if name not in self._engine]
        if unknown or not asked.nodes:
            wrong = f"unknown node {', '.join(unknown)}" if unknown else "a window needs nodes"
            raise ConfigError(f"{wrong}; `fireflyer nodes` lists them")
        if not asked.begin < asked.end or asked.end <= self.now():
            raise ConfigError("invalid window: expected an end after the start and in the future")
        window = Window(
            id="", nodes=frozenset(asked.nodes), begin=asked.begin, end=asked.end,
            reason=asked.reason, user=asked.user, group=asked.group,
        )  # fmt: skip
        window = self._marks.add_window(window)
        self.cluster.set_window(window)
        return _window_view(window)

    def remove_window(self, name: str) -> None:
        """Removes a window.

        Raises:
            TaskError: no such window.
        """
        if name not in self.cluster.windows:
            raise TaskError(f"no window {name!r}; see `fireflyer window list`")
        self._marks.remove_window(name)
        self.cluster.remove_window(name)

    def windows(self) -> list[WindowView]:
        """Returns the windows that are not over, sorted by begin."""
        self.cluster.advance(self.now())
        found = sorted(self.cluster.windows.values(), key=lambda window: (window.begin, window.id))
        return [_window_view(window) for window in found]

    # -- quotas ------------------------------------------------------------------------------------

    def set_quotas(self, rows: Iterable[Limit]) -> None:
        """Replaces all limits with the limits of `rows`."""
        wanted = limits(rows)
        cluster = self.cluster
        for user, level, group in {**cluster.quotas, **wanted}:
            limit = wanted.get((user, level, group))
            if limit != cluster.quotas.get((user, level, group)):
                cluster.set_quota(user, level, group, limit)

    def gauges(self) -> Gauges:
        """Counts queued tasks by priority and nodes by state."""
        names = {level: name for name, level in PRIORITIES.items()}
        queued = [job for job in self.cluster.jobs.values() if job.phase == "queued"]
        found = Gauges()
        found.queued = {"normal": 0, **Counter(names[job.level] for job in queued)}
        states = [
            "busy" if node.tasks else _FREE.get(node.state, node.state) for node in self.nodes()
        ]
        found.nodes = {"busy": 0, "free": 0, **Counter(states)}
        return found

    # -- tasks -------------------------------------------------------------------------------------

    def recover(self, task: Task, spec: TaskSpec, events: list[Event]) -> None:
        """Adopts an unfinished task of an earlier server, with its history."""
        if task.state in TERMINAL:
            return
        job = _job(task, spec)
        _recall(job, events, lambda node: job.gpus or self._gpus(node))
        phase: dict[str, Phase] = {
            "queued": "queued",
            "suspended": "held",
            "suspending": "suspending",
        }
        job.phase = phase.get(task.state, "starting" if task.state == "starting" else "running")
        if task.stopping:
            job.phase = "suspending"
        job.placement, job.devices = task.placement, task.devices
        job.previous = task.previous
        job.attempt = task.attempt
        for name in job.placement:
            if name not in self.cluster.nodes:
                self._set(name, None)
        if PINNED in spec.labels:
            self._pinned.add(job, spec.labels[PINNED], self.now())
        else:
            self.cluster.adopt(job, self.now())

    def _gpus(self, node: str) -> int:
        found = self._engine.get(node)
        return found.gpus or 1 if found is not None else 1

    def submit(self, task: Task, spec: TaskSpec) -> None:
        """Adds a new task to the queue."""
        if PINNED in spec.labels:
            self._pinned.add(_job(task, spec), spec.labels[PINNED], self.now())
        else:
            self.cluster.submit(_job(task, spec), self.now())

    def follow(self, before: Task, task: Task) -> None:
        """Passes a task's new value to the cluster."""
        cluster, now = self.cluster, self.now()
        job = cluster.jobs.get(task.id)
        if job is None:
            return
        if task.state in TERMINAL:
            cluster.remove(task.id, now)
            self._pinned.forget(task.id)
        elif before.state in ACTIVE and task.state in ACTIVE:
            if task.state == "suspending" or task.stopping:
                cluster.suspending(task.id, now)
            elif task.state == "running" and before.state == "starting":
                cluster.running(task.id, now)
        elif task.state == "suspended" and before.state != "suspended":
            cluster.hold(task.id, now)
            self._pinned.pause(task.id)
        elif task.state == "queued" and before.state != "queued":
            job.previous = task.previous
            job.avoid = task.avoid
            if task.id in self._pinned.nodes:
                cluster.hold(task.id, now)
                self._pinned.wait(task.id)
            else:
                cluster.requeue(task.id, now)
        job.previous = task.previous

    def plan(self) -> list[Action]:
        """Returns the actions due now; the caller commits each one and then passes it to
        `apply`."""
        pinned = self._pinned.launches()
        self._more = bool(pinned)
        return [*pinned] or plan(self.cluster, self.now())

    def apply(self, action: Action) -> None:
        """Applies one action of the plan to the cluster, after it was committed."""
        self.cluster.apply(action, self.now())

    def wait_s(self) -> float | None:
        """Returns the seconds until time alone may change the plan; None: never."""
        now = self.now()
        if self._more:
            return 0.0
        when = self.cluster.next_look(now)
        return None if when is None else when - now

    def why(self, task: str, state: TaskState, reason: str) -> WhyView:
        """Explains what a task waits for, or why it is in its state."""
        job = self.cluster.jobs.get(task)
        if state == "queued" and task in self._pinned.nodes:
            reason = reason or self.waits()(task)
        if job is None or job.phase != "queued":
            return WhyView(task=task, state=state, text=reason or state, policy=self.policy)
        found = why.explain(self.cluster, job, self.now())
        text = f"{found.text} ({reason})" if reason else found.text
        return WhyView(
            task=task, state=state, text=text, rule=found.rule, ahead=found.ahead, earliest=found.earliest,
            policy=self.policy,
        )  # fmt: skip

    def waits(self) -> Callable[[str], str]:
        """Returns a function that explains as text why a queued task does not run yet. The function
        is valid until the next event or plan."""
        texts = why.Texts(self.cluster, self.now())

        def reason(task: str) -> str:
            if task in self._pinned.nodes:
                return f"waits until {self._pinned.nodes[task]} is idle, to validate it"
            return texts.text(self.cluster.jobs[task])

        return reason

    def check(self, spec: TaskSpec, user: str = "") -> None:
        """Rejects a task that the nodes can never hold or the user's quota never allows.

        Raises:
            TaskError: the task requests more than the nodes or the quota allow.
        """
        count = len(self._engine)
        if spec.nodes > count:
            raise TaskError(
                f"the task asks for {lifecycle.count(spec.nodes, 'node')} and this server has {count}; "
                "start the server with more (fireflyer up --nodes N) or ask for fewer"
            )
        job = _job(Task(id="", order=0, user=user, nodes=0, world=0, max_restarts=0), spec)
        large = large_enough(self.cluster, job)
        if not self.cluster.topology.enough(spec.nodes, large):
            if large.bit_count() >= spec.nodes:
                raise TaskError(
                    f"the task asks for {lifecycle.count(spec.nodes, 'node')}, but a gang uses at most two "
                    "zones and no two zones have enough such nodes (`fireflyer nodes`); ask for fewer"
                )
            each = [in_words(spec.gpus, spec.gpu_type)] if spec.gpus else []
            each += [f"{format_mib(spec.memory_mib)} of memory"] if spec.memory_mib else []
            raise TaskError(
                f"the task asks for {lifecycle.count(spec.nodes, 'node')} with {' and '.join(each)} each; "
                f"this server has {lifecycle.count(large.bit_count(), 'such node')} (`fireflyer nodes`); "
                f"ask for less{self._known_types(spec)}{self._most_memory(spec)}"
            )
        if job.priority != AUTO and self.cluster.forbidden(job):
            job.level = job.priority
            raise TaskError(f"{why.behind_quota(self.cluster, job)}; ask for less")

    def _most_memory(self, spec: TaskSpec) -> str:
        """Returns a hint with the largest memory of a node, for a task that asks for more."""
        sizes = [node.memory_mib for node in self.cluster.nodes.values()]
        if not all(sizes) or spec.memory_mib <= max(sizes):  # 0: not known
            return ""
        return f". Its nodes have at most {format_mib(max(sizes))} of memory"

    def _known_types(self, spec: TaskSpec) -> str:
        """Returns a hint with the GPU types of the nodes, for a task that asks for another type."""
        known = {node.gpu_type for node in self.cluster.nodes.values() if node.gpu_type}
        if not spec.gpu_type or any(matches(spec.gpu_type, kind) for kind in known):
            return ""
        return f". Its GPUs: {', '.join(sorted(known)) or 'of no known type'}"


def masked(node: NodeView, own: Callable[[str], bool]) -> NodeView:
    """Returns a node on which other users' tasks are MASKED."""
    tasks = tuple(task if own(task) else MASKED for task in node.tasks)
    devices = tuple(task if task is None or own(task) else MASKED for task in node.devices)
    first = tasks[0] if tasks else None
    return msgspec.structs.replace(node, task=first, tasks=tasks, devices=devices)


def priority_of(spec: TaskSpec) -> int:
    """Returns the number of a spec's priority."""
    return AUTO if spec.priority == "auto" else PRIORITIES[spec.priority]


def _job(task: Task, spec: TaskSpec) -> Job:
    return Job(
        id=task.id, order=task.order, nodes=spec.nodes, gpus=spec.gpus,
        gpu_type=spec.gpu_type, memory_mib=spec.memory_mib,
        user=task.user, group=spec.group, priority=priority_of(spec),
        estimate_s=spec.expected_s or None, avoid=task.avoid,
    )  # fmt: skip


def _recall(job: Job, events: list[Event], weight: Callable[[str], int]) -> None:
    """Restores a job's costs and attained service from its history."""
    launched = asked = 0.0
    nodes: tuple[str, ...] = ()
    for event in events:
        match event.kind:
            case "submitted":
                job.submitted = event.wall
            case "queued":
                job.since = event.wall
            case "starting":
                launched, nodes = event.wall, tuple(event.detail["nodes"])
                asked = 0.0
                job.launched_at = job.since = event.wall
            case "running":
                job.restart_s = event.wall - launched
                job.started_at = job.since = event.wall
            case "suspending":
                asked = asked or event.wall
                job.since = asked
                job.preemptions += bool(event.detail.get("preempted"))
            case "gang_ended":
                if asked:
                    job.checkpoint_s = event.wall - asked
                job.attained += (event.wall - launched) * sum(map(weight, nodes))


def _window_view(window: Window) -> WindowView:
    return WindowView(
        id=window.id, nodes=tuple(sorted(window.nodes)), begin=window.begin, end=window.end,
        reason=window.reason, user=window.user, group=window.group,
    )  # fmt: skip
