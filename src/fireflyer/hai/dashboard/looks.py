"""What the pages show, read from the controller and the database. A user sees own tasks; another's is `*`.

All of it runs on the server's loop: what grows with the cluster is counted, paged, or read in pieces between
which others are served.
"""

import asyncio
import time
from collections import Counter

import msgspec

from fireflyer.hai.dashboard import clustermap, tail, timeline
from fireflyer.hai.dashboard.books import Bookkeeper, Ledger
from fireflyer.hai.dashboard.words import title
from fireflyer.hai.database.browsing import Browsing, Line
from fireflyer.hai.database.store import Store
from fireflyer.hai.identity import MASKED, Identity
from fireflyer.hai.ledger import Account, segments
from fireflyer.hai.model import PRIORITIES, TERMINAL, Event, NodeView, RankView, TaskView, WhyView
from fireflyer.hai.scheduling.cluster import Job
from fireflyer.hai.server.controller import Controller

DAY_S = 86_400.0

WINDOWS = {"1h": 3600.0, "24h": DAY_S, "7d": 7 * DAY_S}

PER_PAGE = 50
QUEUED_PER_PAGE = 25
"""Each of them is explained, which looks at every node."""

NODES_PER_PAGE = 100
RANKS = 64
"""Ranks of a task that its page lists."""

EVENTS = 100
PIECE = 1000

_PRIORITIES = {level: name for name, level in PRIORITIES.items()}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A place in the queue."""

    place: int
    task: str
    """MASKED: another user's."""
    name: str
    user: str
    demand: str
    priority: str
    since: float
    why: WhyView | None
    """None: another user's."""


class Occupancy(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the cluster is taken."""

    unit: str
    held: int
    usable: int
    """Of nodes that are ready or suspect, and what is held of others."""
    nodes: dict[clustermap.State, int]
    count: int


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One observation, and what was done about it."""

    task: str
    wall: float
    node: str
    what: str
    text: str
    action: str


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """All about one task."""

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


class Looks:
    """Of one server.

    Args:
        controller: knows what is now.
        store: of the same server.
    """

    def __init__(self, controller: Controller, store: Store) -> None:
        self._controller = controller
        self._cluster = controller.dispatch.cluster
        self._browsing = Browsing(store.database)
        self._books = Bookkeeper(self._browsing)

    # -- the cluster -------------------------------------------------------------------------------

    def nodes(self, who: Identity) -> list[NodeView]:
        """All nodes, with other users' tasks masked."""
        found = self._controller.dispatch.nodes()
        if who.only is None:
            return found
        return [self._masked(node, who.only) for node in found]

    def _masked(self, node: NodeView, user: str) -> NodeView:
        jobs = self._cluster.jobs
        tasks = tuple(t if t in jobs and jobs[t].user == user else MASKED for t in node.tasks)
        return msgspec.structs.replace(node, task=tasks[0] if tasks else None, tasks=tasks)

    def own(self, who: Identity) -> set[str]:
        """The reader's tasks that are not over."""
        return {job.id for job in self._cluster.jobs.values() if job.user == who.user}

    @staticmethod
    def occupancy(nodes: list[NodeView]) -> Occupancy:
        """Of these nodes; in GPUs where all say how many they have."""
        by_gpu = bool(nodes) and all(node.gpus for node in nodes)
        held = usable = 0
        for node in nodes:
            size = node.gpus if by_gpu else 1
            taken = node.gpus - node.free if by_gpu else int(bool(node.tasks))
            held += taken
            usable += size if node.state in ("ready", "suspect") else taken
        states = Counter(clustermap.state_of(node) for node in nodes)
        unit = "GPU" if by_gpu else "node"
        return Occupancy(unit=unit, held=held, usable=usable, nodes=dict(states), count=len(nodes))

    async def ledger(self, window: str) -> Ledger | None:
        """Of a key of WINDOWS; None while the history is being read."""
        gpus = {node.name: node.gpus for node in self._cluster.nodes.values()}
        return await self._books.ledger(WINDOWS[window], gpus)

    def faults(self, who: Identity, limit: int, node: str | None = None) -> list[Fault]:
        """The newest observations, newest first: of the reader's tasks, of all for an operator. With a node:
        of it alone, checks that it passed, too."""
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

    # -- tasks -------------------------------------------------------------------------------------

    def check_owner(self, task: str, who: Identity) -> None:
        """Refuses a task that the reader does not see.

        Raises:
            NoSuchTask: it is another's, or there is none.
        """
        self._controller.check_owner(task, who.only)

    def named(self, tasks: tuple[str, ...]) -> dict[str, Line]:
        """These tasks; what is masked is left out."""
        return self._browsing.some([task for task in tasks if task != MASKED])

    def counts(self, who: Identity) -> dict[str, int]:
        """The reader's tasks that are not over, by state."""
        return self._browsing.counts(who.only)

    def tasks(
        self, who: Identity, states: tuple[str, ...], user: str, before: int | None, limit: int
    ) -> list[Line]:
        """Tasks, newest first."""
        wanted = who.only if who.only is not None else (user or None)
        return self._browsing.page(states=states, user=wanted, before=before, limit=limit)

    async def queue(self, who: Identity, first: int, limit: int) -> tuple[list[Waiting], int]:
        """Places of the queue from `first` (0: the head) on, and how many there are."""
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
        """One task.

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
        books = await self.ledger("7d")
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
            account=None if books is None else books.books.tasks.get(name),
            unit="" if books is None else books.books.unit,
            events=tuple(self._browsing.newest_of(name, EVENTS)),
            ranks=view.ranks[:RANKS],
            world=world,
            log=log,
        )


def _waiting(place: int, job: Job, line: Line | None, why: WhyView | None) -> Waiting:
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
