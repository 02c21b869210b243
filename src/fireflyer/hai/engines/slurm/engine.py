"""The `slurm` engine: gangs on the nodes of a Slurm partition. docs/operate/hai-slurm.md lists its
guarantees.

Slurm starts the supervisors, one per node, in one job per task. The supervisors then get the same
requests over TCP that the local engine sends over Unix sockets. A job may wait long in Slurm, so
`launch` and `recover` continue in the background. A `Pending` keeps a stop or suspend that arrives
meanwhile.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from fireflyer.errors import NoSuchNode, ProtocolMismatch
from fireflyer.hai.engines.clocks import translated
from fireflyer.hai.engines.local import LocalEngine, _now, _Run, decided, make_folders
from fireflyer.hai.engines.membership import Outcome
from fireflyer.hai.engines.remote import RemoteLink, reach
from fireflyer.hai.engines.slurm.cli import Slurm, share_of
from fireflyer.hai.engines.slurm.jobs import Job, Jobs, PartitionNodes
from fireflyer.hai.engines.slurm.pending import Background, Ended, Pending, retry_while_unreachable
from fireflyer.hai.forkserver import DEFAULT_PRELOAD
from fireflyer.hai.model.engine import EngineEvent, Gang, NodesChanged
from fireflyer.hai.supervisor.journal import journal_path
from fireflyer.hai.supervisor.messages import Attach, Attached, Launched, Leave, Record, Start
from fireflyer.hai.supervisor.parts import part_path, read_announcement, write_part
from fireflyer.log import get_logger

JOBS_S = 2.0
"""Interval in seconds of background queries for jobs."""
NODES_S = 5.0
"""Interval in seconds of queries for nodes."""
ANSWER_S = 60.0
"""Seconds within which the supervisors of a running job must answer."""
LEAVE_S = 5.0
"""Seconds within which supervisors must exit before their job is cancelled."""

_log = get_logger("hai")


class SlurmEngine(LocalEngine):
    """`Engine` over a partition of a Slurm cluster; lives in one asyncio loop."""

    def __init__(
        self, home: Path, partition: str = "", *, preload: tuple[str, ...] = DEFAULT_PRELOAD
    ) -> None:
        """Connects to Slurm and reads the nodes.

        Args:
            home: the platform's folder, shared by the nodes. The names of jobs contain a hash of
                the folder's path, which distinguishes the jobs of several homes.
            partition: name; empty: the cluster's default.
            preload: as for the local engine.

        Raises:
            ConfigError: Slurm cannot be used, or has no such partition.
        """
        self._slurm = Slurm(partition)
        self._places = PartitionNodes(self._slurm)
        super().__init__(len(self._places.nodes), preload=preload)
        self._nodes = self._places.nodes
        mark = hashlib.sha256(str(home).encode()).hexdigest()[:8]
        self._jobs = Jobs(self._slurm, f"fireflyer-{mark}-")
        self._starts: dict[tuple[str, int], Pending] = {}
        self._work = Background(lambda: self._events.put_nowait(None))
        self._watching = False
        self._nodes_at = 0.0
        """time.monotonic() of the next query for nodes."""

    @property
    def partition(self) -> str:
        """Name of the partition that the nodes belong to."""
        return self._slurm.partition

    async def events(self) -> AsyncIterator[EngineEvent | NodesChanged]:
        self._watch()
        async for event in super().events():
            yield event
        if self._work.error is not None:
            raise self._work.error

    async def close(self) -> None:
        await self._work.cancel()  # first, because these tasks create links
        await super().close()
        await self._work.cancel()  # again: links that end start tasks

    # -- launch and recovery -----------------------------------------------------------------------

    async def prepare(self, gang: Gang) -> None:
        """Does nothing: the job starts all processes of a node."""

    async def launch(self, gang: Gang) -> None:
        self._begin(gang, self._launch)

    async def recover(self, gang: Gang) -> None:
        self._begin(gang, self._recover)

    def _begin(self, gang: Gang, work: Callable[[Gang, Pending], Awaitable[None]]) -> None:
        gang = replace(gang, elastic=False)  # only the local engine starts newcomers
        key = (gang.task, gang.attempt)
        if key in self._runs or key in self._starts:
            return
        self._watch()
        start = self._starts[key] = Pending()

        async def whole() -> None:
            await work(gang, start)
            del self._starts[key]  # stop and suspend now act on the attempt itself
            start.done.set()
            if start.asked == "stopped":
                await self.stop(*key, start.grace_s)
            elif start.asked == "suspended":
                await self.suspend(*key, start.grace_s)

        self._work.start(whole())

    async def _launch(self, gang: Gang, start: Pending) -> None:
        for (task, attempt), older in list(self._starts.items()):
            if task == gang.task and attempt < gang.attempt:
                older.ask("stopped", 0.0)
                await older.done.wait()
        await super().launch(gang)

    async def _open_parts(self, run: _Run) -> None:
        gang = run.gang
        start = self._starts[gang.task, gang.attempt]
        make_folders(gang)
        self._write_parts(gang)
        try:
            job = await self._job(gang, start)
            links = await self._reach(gang, job, start)
        except Ended as ended:
            run.state.never_starts(ended.outcome, ended.reason)
        else:
            await self._start_parts(run, job, links)

    async def _recover(self, gang: Gang, start: Pending) -> None:
        run = self._runs[gang.task, gang.attempt] = _Run(gang)
        grace: float | None = None
        async with run.lock:
            gang = run.gang = await decided(gang)
            try:
                job = await retry_while_unreachable(lambda: self._jobs.find(gang.task), start)
                if job is None or job.nodes != set(gang.nodes):
                    text = "; ".join(
                        f"{node} has no processes of the attempt" for node in gang.nodes
                    )
                    raise Ended("lost", text)
                self._write_parts(gang)
                links = await self._reach(gang, job, start)
                grace = await self._start_parts(run, job, links)
            except Ended as ended:
                self._determine_ends(run, ended)
            run.state.sealed(_now())
            self._follow(run)
        if grace is not None:  # the server may have died between Freeze and Decide of the suspend
            await self.suspend(gang.task, gang.attempt, grace)

    def _determine_ends(self, run: _Run, ended: Ended) -> None:
        """Determines how a gang without supervisors ended: from the journals of its parts, unless
        no part was started."""
        gang = run.gang
        if not any(journal_path(gang.directory, node).exists() for node in gang.nodes):
            run.state.never_starts(ended.outcome, ended.reason)
            return
        for node in gang.nodes:
            run.state.opened(node)
        for node in gang.nodes:
            self._determine_end(run, node, f"{node} has no processes of the attempt")

    def _write_parts(self, gang: Gang) -> None:
        master = self._places.address(gang.nodes[0])
        for index, node in enumerate(gang.nodes):
            part = self._part(gang, index, 0)
            part = replace(part, master=master, address=self._places.address(node))
            write_part(gang.directory, part)

    async def _job(self, gang: Gang, start: Pending) -> Job:
        """Returns the task's job on the gang's nodes, submitted if necessary. First ends an older
        job on other nodes."""

        async def get() -> Job:
            job = await self._jobs.find(gang.task)
            if job is not None and job.alive and job.nodes == set(gang.nodes):
                return job
            if job is not None:
                await self._end(gang.task, job)
            own = (node for node in self._nodes if node.name in gang.nodes)
            share = share_of(
                gang.gpus, gang.memory_mib, own, cpus=gang.cpus, typed=bool(gang.gpu_type)
            )
            return await self._jobs.submit(gang.task, gang.nodes, share, gang.directory)

        return await retry_while_unreachable(get, start)

    async def _reach(self, gang: Gang, job: Job, start: Pending) -> dict[str, RemoteLink | None]:
        """Returns links to all supervisors of the job; None for a dead supervisor."""
        links: dict[str, RemoteLink | None] = {}
        deadline: float | None = None
        pause, looked = 0.02, time.monotonic()
        while True:
            missing = [node for node in gang.nodes if node not in links]
            await asyncio.gather(*(self._connect_to(gang, job, node, links) for node in missing))
            if len(links) == len(gang.nodes):
                return links
            await start.pause(pause)
            pause = min(1.2 * pause, 0.25)
            if time.monotonic() < looked + 2 * pause and start.asked is None:
                continue
            await self._jobs.refresh()
            looked = time.monotonic()
            if job.over:
                self._jobs.forget(gang.task)
                kind: Outcome = "failed" if job.state == "FAILED" else "lost"
                text = f"{job} ended before its supervisors answered"
                raise Ended(start.asked or kind, text)
            if job.state == "PENDING":
                unfit = [n for n in self._places.unfit if n.name in gang.nodes]
                if start.asked is not None or unfit:
                    await self._end(gang.task, job)
                    text = "; ".join(f"{node.name} is {node.reason}" for node in unfit)
                    raise Ended(start.asked or "lost", text or "before Slurm had started the job")
            else:
                deadline = deadline or looked + ANSWER_S
                if looked > deadline:
                    await self._end(gang.task, job)
                    text = f"no supervisor answered on {', '.join(missing)} for {ANSWER_S:.0f} s"
                    raise Ended(start.asked or "lost", text)

    async def _connect_to(
        self, gang: Gang, job: Job, node: str, links: dict[str, RemoteLink | None]
    ) -> None:
        """Puts a link to the supervisor into `links`, or None if the supervisor is dead. Adds no
        entry if the state of the supervisor is unknown."""
        task, directory = gang.task, gang.directory.parent
        link = self._links.get((task, node))
        if isinstance(link, RemoteLink):
            links[node] = link
            return
        where = read_announcement(directory, node, job.id)
        if where is None:
            return
        try:
            stream = await reach(where, gang.secret)
        except (ConnectionRefusedError, ProtocolMismatch):
            job.left.discard(node)
            links[node] = None
            return
        except OSError:  # includes TimeoutError
            return

        def on_gone() -> None:
            del self._links[task, node]
            job.left.discard(node)
            self._work.start(self._lose(task, job, node))

        links[node] = self._links[task, node] = RemoteLink(
            stream, directory, node, where, gang.secret,
            lambda name, record: self._on_record(task, name, record), on_gone,
        )  # fmt: skip

    async def _start_parts(
        self, run: _Run, job: Job, links: dict[str, RemoteLink | None]
    ) -> float | None:
        """Starts the parts that do not run yet. Returns the grace period in seconds of a suspend in
        progress; None: no suspend is in progress."""
        gang = run.gang
        reached = [link for link in links.values() if link is not None]
        for link in reached:
            link.attempt = gang.attempt
        attach = Attach(attempt=gang.attempt)
        found = await asyncio.gather(*(ln.ask(attach, gang.attempt, Attached) for ln in reached))
        answers = {ln.node: a for ln, a in zip(reached, found, strict=True) if a is not None}
        old = {node for node in gang.nodes if node not in answers or answers[node].known}
        for node in old:
            run.state.opened(node)
        for node in old - set(answers):
            self._determine_end(run, node, self._why(job, node), innocent=self._innocent(job, node))
        port = 0
        for node in gang.nodes if len(old) < len(gang.nodes) else ():
            target = links[node]
            if run.state.aborting or target is None:
                break
            run.state.opened(node)
            if target.gone.is_set():
                self._determine_end(
                    run, node, self._why(job, node), innocent=self._innocent(job, node)
                )
                break
            begin = Start(attempt=gang.attempt, port=port)
            if port:
                target.send(begin)
                continue
            launched = await target.ask(begin, gang.attempt, Launched)
            if launched is None:
                break  # the part is open, so it counts as lost
            port = launched.port
        graces = [a.grace_s for a in answers.values() if a.known and a.grace_s is not None]
        return graces[0] if graces else None

    # -- requests ----------------------------------------------------------------------------------

    async def suspend(self, task: str, attempt: int, grace_s: float) -> None:
        start = self._starts.get((task, attempt))
        if start is not None:
            start.ask("suspended", grace_s)
        else:
            await super().suspend(task, attempt, grace_s)

    async def stop(self, task: str, attempt: int, grace_s: float) -> None:
        start = self._starts.get((task, attempt))
        if start is not None:
            start.ask("stopped", grace_s)
        else:
            await super().stop(task, attempt, grace_s)

    async def release(self, task: str, directory: Path | None = None) -> None:
        for (name, _), start in list(self._starts.items()):
            if name == task:
                start.ask("stopped", 0.0)
                await start.done.wait()
        with contextlib.suppress(Ended):  # if Slurm rejects the query, this engine has no job
            job = await retry_while_unreachable(lambda: self._jobs.find(task), Pending())
            if job is not None:
                await self._end(task, job)
        for key in [key for key in self._runs if key[0] == task]:
            await self._runs[key].done.wait()
            del self._runs[key]

    async def drain(self, node: str, reason: str) -> None:
        await self._scontrol(node, "drain", reason)

    async def undrain(self, node: str) -> None:
        await self._scontrol(node, "resume", "")

    async def _scontrol(self, node: str, state: Literal["drain", "resume"], reason: str) -> None:
        if node not in {known.name for known in self._nodes}:
            raise NoSuchNode(f"there is no node {node!r}; `fireflyer nodes` lists them")
        await asyncio.to_thread(self._slurm.mark, node, state, reason)
        await self._refresh_nodes()
        self._nodes_at = 0.0  # query again soon: a resumed node must first respond

    async def _end(self, task: str, job: Job) -> None:
        """Ends a task's job; returns once no process of the job is left."""
        links = [link for (name, _), link in self._links.items() if name == task]
        for link in links:
            link.send(Leave())
        gone = len(links) == len(job.nodes) and await self._jobs.until(lambda: job.over, LEAVE_S)
        if not gone:
            await self._jobs.end(job)
        for link in links:
            if isinstance(link, RemoteLink):
                link.give_up()
                await link.gone.wait()
        self._jobs.forget(task)

    # -- events of the nodes -----------------------------------------------------------------------

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._work.start(self._look())

    async def _look(self) -> None:
        """Polls Slurm for changes that the connections to supervisors do not show."""
        while True:
            if self._jobs.any():
                await self._jobs.refresh()
            broken = [k for k, link in self._links.items() if not link.connected]
            if broken or time.monotonic() >= self._nodes_at:
                self._nodes_at = time.monotonic() + NODES_S
                await self._refresh_nodes()
            down = {node.name for node in self._nodes if node.state == "down"}
            for (task, node), link in list(self._links.items()):
                job = self._jobs.of(task)
                over = (task, node) in broken and (job is None or job.over)
                if isinstance(link, RemoteLink) and (over or node in down):
                    link.give_up()
            await asyncio.sleep(JOBS_S)

    async def _refresh_nodes(self) -> None:
        if await self._places.look():
            self._nodes = self._places.nodes
            self._events.put_nowait(NodesChanged())

    async def _lose(self, task: str, job: Job, node: str) -> None:
        """Handles the loss of a node's supervisor; Slurm may know the reason."""
        await self._jobs.refresh()
        if job.state != "RUNNING":
            await self._refresh_nodes()
        for run in [r for (name, _), r in self._runs.items() if name == task]:
            if node in run.state.open:
                self._determine_end(
                    run, node, self._why(job, node), innocent=self._innocent(job, node)
                )

    def _innocent(self, job: Job, node: str) -> bool:
        """Returns whether Slurm ended the complete job and this node is not down. Only a node that
        is down counts as faulty."""
        down = any(known.name == node and known.state == "down" for known in self._nodes)
        return not down and job.state not in ("RUNNING", "PENDING")

    def _why(self, job: Job, node: str) -> str:
        for known in self._nodes:
            if known.name == node and known.state == "down":
                return f"{node} is {known.reason}"
        if job.state not in ("RUNNING", "COMPLETED", "PENDING"):
            return f"the supervisor of {node} died with {job}"
        return f"the supervisor of {node} died"

    def _record(self, run: _Run, node: str, record: Record) -> None:
        super()._record(run, node, translated(record, _now()))

    def _follow(self, run: _Run) -> None:
        super()._follow(run)
        if run.state.ended is not None:
            for node in run.gang.nodes:
                part_path(run.gang.directory, node).unlink(missing_ok=True)
