"""Queries of the pages to the controller and the database. Another user's task appears as `*`.

All queries run on the server's loop. Results that grow with the cluster are counted, paged, or read
in pieces, between which the loop serves other requests.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fireflyer.hai.controller.controller import Controller
from fireflyer.hai.controller.dispatch import masked
from fireflyer.hai.controller.series import check_scope, select
from fireflyer.hai.dashboard import profiles, tail
from fireflyer.hai.dashboard.charts import cluster_map, timeline, use_charts
from fireflyer.hai.dashboard.ledger_cache import Ledger, LedgerCache
from fireflyer.hai.dashboard.text_filters import title
from fireflyer.hai.database.history_queries import HistoryQueries, TaskSummary
from fireflyer.hai.database.samples import Samples
from fireflyer.hai.database.store import Store
from fireflyer.hai.ledger import Account, segments
from fireflyer.hai.model import PRIORITIES, TERMINAL, Event, NodeView, RankView, TaskView, WhyView
from fireflyer.hai.model.identity import MASKED, Identity
from fireflyer.hai.model.validations import Entry
from fireflyer.hai.scheduling.cluster import Job
from fireflyer.hai.validation.health import Health, health

DAY_S = 86_400.0

WINDOWS = {"1h": 3600.0, "24h": DAY_S, "7d": 7 * DAY_S}

USE_WINDOWS = {
    "6h": 6 * 3600.0, "24h": DAY_S, "7d": 7 * DAY_S, "30d": 30 * DAY_S, "1y": 365 * DAY_S,
}  # fmt: skip

PER_PAGE = 50
QUEUED_PER_PAGE = 25
"""Number of entries of the queue on a page. It is small because the explanation of each entry
examines every node."""

NODES_PER_PAGE = 100
RANKS = 64
"""Maximum number of a task's ranks that its page lists."""

EVENTS = 100
VALIDATIONS = 200
"""Maximum number of entries of a node's journal that its page reads."""

PIECE = 1000

_PRIORITIES = {level: name for name, level in PRIORITIES.items()}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the queue."""

    place: int
    task: str
    """Id; MASKED for another user's task."""
    name: str
    user: str
    demand: str
    priority: str
    since: float
    why: WhyView | None
    """Explanation; None for another user's task."""


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """Occupancy of the cluster."""

    unit: str
    held: int
    usable: int
    """Capacity of ready and suspect nodes, plus the part in use of other nodes."""
    nodes: dict[cluster_map.State, int]
    count: int


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Observation, and the action taken."""

    task: str
    wall: float
    node: str
    what: str
    text: str
    action: str


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a task's page."""

    view: TaskView
    why: WhyView
    over: bool
    timeline: timeline.Timeline | None
    account: Account | None
    unit: str
    events: tuple[Event, ...]
    ranks: tuple[RankView, ...]
    world: int
    log: tail.Tail | None
    profiles: tuple[profiles.Profile, ...]


class PageQueries:
    """Queries of one server.

    Args:
        controller: current state.
        store: store of the same server.
    """

    def __init__(self, controller: Controller, store: Store) -> None:
        self._controller = controller
        self._cluster = controller.dispatch.cluster
        self._browsing = HistoryQueries(store.database)
        self._ledger_cache = LedgerCache(self._browsing)
        self._health: tuple[int, Health] | None = None
        self._samples = Samples(store.database)

    # -- the cluster -------------------------------------------------------------------------------

    def nodes(self, who: Identity) -> list[NodeView]:
        """Returns all nodes, with other users' tasks masked."""
        found = self._controller.dispatch.nodes()
        if who.only is None:
            return found
        return [self._masked(node, who.only) for node in found]

    def _masked(self, node: NodeView, user: str) -> NodeView:
        jobs = self._cluster.jobs
        return masked(node, lambda task: task in jobs and jobs[task].user == user)

    def own(self, who: Identity) -> set[str]:
        """Returns the reader's unfinished tasks."""
        return {job.id for job in self._cluster.jobs.values() if job.user == who.user}

    @staticmethod
    def occupancy(nodes: list[NodeView]) -> Occupancy:
        """Returns the occupancy of these nodes: in GPUs if every node has a GPU count, else in
        nodes."""
        by_gpu = bool(nodes) and all(node.gpus for node in nodes)
        held = usable = 0
        for node in nodes:
            size = node.gpus if by_gpu else 1
            taken = node.gpus - node.free if by_gpu else int(bool(node.tasks))
            held += taken
            usable += size if node.state in ("ready", "suspect") else taken
        states = Counter(cluster_map.state_of(node) for node in nodes)
        unit = "GPU" if by_gpu else "node"
        return Occupancy(unit=unit, held=held, usable=usable, nodes=dict(states), count=len(nodes))

    def use(
        self, scope: str, window: str, who: Identity, only: Sequence[str] = ()
    ) -> list[use_charts.Drawn]:
        """Returns the charts of a scope ("cluster", "node:n0", "user:ada", "task:t7", "rank:t7/0")
        over a window (a key of USE_WINDOWS). If `only` has titles, returns only those charts.

        Raises:
            ConfigError: the text is not a scope, or names another user.
            NoSuchTask: the reader has no such task.
        """
        check_scope(self._controller, scope, who)
        now = time.time()
        view = select(self._samples, scope, USE_WINDOWS[window], now)
        return use_charts.draw(view, self._unit(), now, only)

    def use_of_task(self, task: TaskPage) -> list[use_charts.Drawn]:
        """Returns the charts of a task from its submission to its end, or now."""
        line = task.timeline
        until = line.end if task.over and line is not None else time.time()
        seconds = max(until - task.view.created, 60.0)
        series = select(self._samples, f"task:{task.view.id}", seconds, until)
        return use_charts.draw(series, self._unit(), None)

    def _unit(self) -> str:
        nodes = self._cluster.nodes.values()
        return "GPU" if nodes and all(node.gpus for node in nodes) else "node"

    async def ledger(self, window: str) -> Ledger | None:
        """Returns the ledger of a window (a key of WINDOWS); None while the history is being read."""
        gpus = {node.name: node.gpus for node in self._cluster.nodes.values()}
        return await self._ledger_cache.ledger(WINDOWS[window], gpus)

    def faults(self, who: Identity, limit: int, node: str | None = None) -> list[Fault]:
        """Returns the newest observations, newest first: of all tasks for an operator, else of the
        user's own tasks. If a node is given, returns only its observations, including passed
        checks."""
        found: list[Fault] = []
        action = ""
        most = 10 * limit if node is None else 1000
        for event in reversed(self._controller.faults.recent(most, who.only).events):
            detail = event.detail
            if event.kind == "acted":
                action = str(detail["action"])
                continue
            passed = node is None and detail.get("passed")
            if not passed and node in (None, detail.get("node")):
                found.append(
                    Fault(
                        task=event.task, wall=event.wall, node=str(detail.get("node", "")),
                        what=str(detail.get("what", "")), text=str(detail.get("text", "")),
                        action=action,
                    )
                )  # fmt: skip
            action = ""
        return found[:limit]

    # -- validations -------------------------------------------------------------------------------

    def node_names(self) -> list[str]:
        """Returns the names of all nodes."""
        return list(self._cluster.nodes)

    async def health(self) -> Health:
        """Returns the evaluation of the newest results of all nodes. A thread computes the
        evaluation, which is cached until the next result."""
        monitor = self._controller.validation
        if self._health is None or self._health[0] != monitor.entries:
            entries = monitor.entries
            latest = {name: s.latest for name, s in monitor.states.items() if s.latest is not None}
            ordered = {name: latest[name] for name in cluster_map.in_order(latest)}
            self._health = entries, await asyncio.to_thread(health, ordered)
        return self._health[1]

    def validating(self) -> dict[str, str]:
        """Returns the reason of each validation that runs or waits, by node."""
        states = self._controller.validation.states
        return {name: state.trigger for name, state in states.items() if state.task}

    async def validations(self, node: str) -> list[Entry]:
        """Returns the newest entries of a node's journal, oldest first."""
        return await asyncio.to_thread(self._controller.validation.history, node, VALIDATIONS)

    # -- tasks -------------------------------------------------------------------------------------

    def check_owner(self, task: str, who: Identity) -> None:
        """Rejects a task that the reader may not see.

        Raises:
            NoSuchTask: the task belongs to another user, or does not exist.
        """
        self._controller.check_owner(task, who.only)

    def named(self, tasks: tuple[str, ...]) -> dict[str, TaskSummary]:
        """Returns the tasks with these ids, except masked tasks."""
        return self._browsing.some([task for task in tasks if task != MASKED])

    def counts(self, who: Identity) -> dict[str, int]:
        """Counts the reader's unfinished tasks by state."""
        return self._browsing.counts(who.only)

    def tasks(
        self, who: Identity, states: tuple[str, ...], user: str, before: int | None, limit: int
    ) -> list[TaskSummary]:
        """Returns tasks, newest first."""
        wanted = who.only if who.only is not None else (user or None)
        return self._browsing.page(states=states, user=wanted, before=before, limit=limit)

    async def queue(self, who: Identity, first: int, limit: int) -> tuple[list[Waiting], int]:
        """Returns entries of the queue from `first` (0: the head), and the number of all
        entries."""
        jobs = self._cluster.in_order()
        shown = jobs[first : first + limit]
        mine = [job.id for job in shown if who.only in (None, job.user)]
        lines = self._browsing.some(mine)
        found = []
        for place, job in enumerate(shown, first + 1):
            line = lines.get(job.id)
            why = None
            if line is not None:
                why = self._controller.dispatch.why(job.id, "queued", line.reason)
                await asyncio.sleep(0)
            found.append(_waiting(place, job, line, why))
        return found, len(jobs)

    async def task(self, name: str, rank: int, attempt: int | None) -> TaskPage:
        """Returns the content of a task's page.

        Raises:
            TaskError: no such task.
        """
        controller = self._controller
        view = controller.view(name)
        events: list[Event] = []
        while more := self._browsing.of_task(
            name, after=events[-1].seq if events else 0, until=1 << 62, limit=PIECE
        ):
            events += more
            await asyncio.sleep(0)
        now = time.time()
        ledger = await self.ledger("7d")
        drawn = timeline.timeline(events, segments(events, now), now)
        world = view.spec.nodes * view.spec.ranks_per_node
        log = None
        if view.attempt and 0 <= rank < world and (attempt is None or 1 <= attempt <= view.attempt):
            log = tail.read(controller.logs.find(name, rank, attempt), rank)
        return TaskPage(
            view=view,
            why=controller.why(name),
            over=view.state in TERMINAL,
            timeline=drawn,
            account=None if ledger is None else ledger.accounting.tasks.get(name),
            unit="" if ledger is None else ledger.accounting.unit,
            events=tuple(self._browsing.newest_of(name, EVENTS)),
            ranks=view.ranks[:RANKS],
            world=world,
            log=log,
            profiles=profiles.of_task(view),
        )

    def profile_file(self, task: str, attempt: int, name: str) -> Path:
        """Returns a file of a profile.

        Raises:
            TaskError: no such task, attempt or file.
        """
        return profiles.find(self._controller.view(task), attempt, name)


def _waiting(place: int, job: Job, line: TaskSummary | None, why: WhyView | None) -> Waiting:
    each = f" × {job.gpus} GPUs" if job.gpus else ""
    brief = None if line is None else line.brief
    return Waiting(
        place=place,
        task=MASKED if line is None else job.id,
        name="" if brief is None else title(brief),
        user=MASKED if line is None else job.user,
        demand=f"{job.nodes} {'node' if job.nodes == 1 else 'nodes'}{each}",
        priority=_PRIORITIES.get(job.level, str(job.level)),
        since=job.since,
        why=why,
    )
