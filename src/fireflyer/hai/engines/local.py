"""The `local` engine: runs gangs as supervised processes of this machine, on N virtual nodes.

An attempt does not depend on the engine's process: supervisors and ranks keep running when the
engine dies. `recover` restores an attempt from the supervisors' sockets and journals.
docs/guide/hai.md draws the process tree.
"""

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from fireflyer.errors import Corrupted, NoSuchNode
from fireflyer.hai.engines.gang import GangState, Now, decide
from fireflyer.hai.engines.inventory import Device, divide
from fireflyer.hai.engines.link import Link, connect, spawn
from fireflyer.hai.engines.zygotes import Zygotes
from fireflyer.hai.forkserver import DEFAULT_PRELOAD
from fireflyer.hai.model.engine import EngineEvent, Gang, Node, NodesChanged
from fireflyer.hai.processes import orphans
from fireflyer.hai.supervisor import cgroups
from fireflyer.hai.supervisor.imports import start_of
from fireflyer.hai.supervisor.journal import journal_path, members_path, read_journal
from fireflyer.hai.supervisor.keeper_activation import KEEPER_SUFFIX
from fireflyer.hai.supervisor.kernel_log import chosen
from fireflyer.hai.supervisor.messages import (
    Attach,
    Attached,
    Condemn,
    Decide,
    End,
    Enlist,
    Freeze,
    Frozen,
    Launch,
    Launched,
    Newcomer,
    Part,
    Record,
)
from fireflyer.log import get_logger

_log = get_logger("hai")


def _now() -> Now:
    return Now(time.monotonic_ns(), time.time())


def make_folders(gang: Gang) -> None:
    """Creates the folders of the task, the attempt and the output."""
    for folder in (gang.directory.parent, gang.directory, gang.directory.parent / "output"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


async def decided(gang: Gang) -> Gang:
    """Returns the gang with a definite start method; "auto" is decided by the script's imports."""
    if gang.start != "auto":
        return gang
    start = await asyncio.to_thread(start_of, gang.script, gang.directory.parent)
    return replace(gang, start=start)


class _Run:
    """Attempt that this engine follows."""

    def __init__(self, gang: Gang) -> None:
        self.gang = gang
        self.state = GangState(gang)
        self.lock = asyncio.Lock()
        """Held by launch, suspend, stop and the reopening of a part, so that a stop finds either
        all parts opened or none."""
        self.aborted: set[str] = set()
        self.done = asyncio.Event()


class LocalEngine:
    """`Engine` over the processes of this machine; lives in one asyncio loop."""

    def __init__(
        self,
        nodes: int,
        *,
        devices: Sequence[Device] = (),
        preload: tuple[str, ...] = DEFAULT_PRELOAD,
        base: cgroups.Base | None = None,
    ) -> None:
        """Creates `nodes` virtual nodes "n0", "n1", ..., each with all memory of the machine and a
        share of its `devices`; fork servers import `preload` before they fork. `base`: folder of
        the tasks' cgroups; None: tasks have no cgroups.

        Raises:
            ValueError: `nodes` is less than 1.
            ConfigError: the devices are of more types than there are nodes.
        """
        if nodes < 1:
            raise ValueError(f"an engine has at least one node, not {nodes}")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
        shares = divide(devices, nodes)
        self._base = base or cgroups.Base()
        self._nodes = [
            Node(
                name=f"n{i}", memory_mib=memory, gpus=len(share),
                gpu_type=share[0].kind if share else "", unheld=self._base.unheld(),
            )
            for i, share in enumerate(shares)
        ]  # fmt: skip
        self._devices = {f"n{i}": share for i, share in enumerate(shares)} if devices else {}
        """GPUs by node; empty: the machine has no GPUs, or their number is not known."""
        self._preload = preload
        self._zygotes = Zygotes(preload)
        self._links: dict[tuple[str, str], Link] = {}
        self._runs: dict[tuple[str, int], _Run] = {}
        self._events: asyncio.Queue[EngineEvent | NodesChanged | None] = asyncio.Queue()
        self._guards: set[int] = set()  # pidfds of this process's children
        self._openings: set[asyncio.Task[None]] = set()

    def nodes(self) -> list[Node]:
        return list(self._nodes)

    async def drain(self, node: str, reason: str) -> None:
        self._mark(node, "drained", reason)

    async def undrain(self, node: str) -> None:
        self._mark(node, "up", "")

    def _mark(self, name: str, state: Literal["up", "drained"], reason: str) -> None:
        changed = [
            replace(n, state=state, reason=reason) if n.name == name else n for n in self._nodes
        ]
        if name not in {node.name for node in changed}:
            raise NoSuchNode(f"there is no node {name!r}; `fireflyer nodes` lists them")
        if changed != self._nodes:
            self._nodes = changed
            self._events.put_nowait(NodesChanged())

    async def events(self) -> AsyncIterator[EngineEvent | NodesChanged]:
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        await self._zygotes.close()
        for opening in self._openings:
            opening.cancel()
        await asyncio.gather(*self._openings, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))
        self._links.clear()
        loop = asyncio.get_running_loop()
        for pidfd in self._guards:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._guards.clear()
        self._events.put_nowait(None)

    # -- launch and recovery -----------------------------------------------------------------------

    async def prepare(self, gang: Gang) -> None:
        """Prepares a zygote (`forkserver/zygote.py`) if zygotes fork the gang's fork servers."""
        gang = await decided(gang)
        if gang.start == "fork" and self._preload:
            await self._zygotes.prepare(gang)

    async def launch(self, gang: Gang) -> None:
        key = (gang.task, gang.attempt)
        if key in self._runs:
            return
        older = [r for (task, n), r in self._runs.items() if task == gang.task and n < gang.attempt]
        run = self._runs[key] = _Run(gang)
        async with run.lock:
            for other in older:
                other.state.aborting = True
                self._follow(other)
                await other.done.wait()
            try:
                run.gang = await decided(run.gang)
                await self._open_parts(run)
            except (OSError, ValueError) as error:
                run.state.refuse(f"cannot start: {error}")
            run.state.sealed(_now())
            self._follow(run)

    async def _open_parts(self, run: _Run) -> None:
        gang = run.gang
        make_folders(gang)
        links = await asyncio.gather(*(self._link(gang, node) for node in gang.nodes))
        port = 0
        for index, (node, link) in enumerate(zip(gang.nodes, links, strict=True)):
            if run.state.aborting:
                return
            run.state.opened(node)
            if link is None or link.gone.is_set():
                self._node_died(run, node)
                return
            link.attempt = gang.attempt
            launch = Launch(part=self._part(gang, index, port))
            try:
                if port:
                    link.send(launch)
                    continue
                launched = await link.ask(launch, gang.attempt, Launched)
            except ValueError:  # the request is too long for a frame, so it was not sent
                run.state.not_opened(node)
                raise
            if launched is None:
                raise ConnectionResetError(f"the supervisor on {node} ended; see its log")
            port = launched.port

    def _part(self, gang: Gang, index: int, port: int) -> Part:
        assert gang.start != "auto"  # `decided` has replaced "auto"
        return Part(
            task=gang.task,
            attempt=gang.attempt,
            node=gang.nodes[index],
            script=gang.script,
            args=gang.args,
            cwd=gang.cwd,
            env=gang.env,
            first_rank=index * gang.ranks_per_node,
            ranks=gang.ranks_per_node,
            world_size=len(gang.nodes) * gang.ranks_per_node,
            start=gang.start,
            secret=gang.secret,
            directory=str(gang.directory),
            port=port,
            preload=self._preload,
            elastic=gang.elastic,
            python=gang.python,
            devices=self._visible(gang, index),
            sampled=self._sampled(gang, index),
            kernel_log=chosen(),
            limits=self._limits(gang, gang.nodes[index]),
        )

    def _limits(self, gang: Gang, node: str) -> cgroups.Limits:
        """Returns the limits of the ranks of a node, with the cgroup that enforces them."""
        mark = hashlib.sha256(str(gang.directory).encode()).hexdigest()[:8]
        name = f"{cgroups.PREFIX}{mark}-{gang.task}-{gang.attempt}-{node}"
        asked = {"memory": gang.memory_mib, "cpu": gang.cpus}
        folders = self._base.below(name)
        return cgroups.Limits(
            gang.memory_mib, gang.cpus, {each: folders[each] for each in folders if asked[each]}
        )

    def _own(self, gang: Gang, index: int) -> list[Device] | None:
        """Returns the GPUs of the ranks of a node; None: no GPUs of the machine are known."""
        share = self._devices.get(gang.nodes[index])
        if share is None:
            return None
        own = gang.devices[index] if gang.devices else ()
        return [share[device] for device in own if device < len(share)]

    def _visible(self, gang: Gang, index: int) -> tuple[str, ...] | None:
        """Returns the GPUs that the ranks of a node see; None: all GPUs that the server sees."""
        own = self._own(gang, index)
        return None if own is None else tuple(device.name for device in own)

    def _sampled(self, gang: Gang, index: int) -> tuple[int, ...]:
        own = self._own(gang, index) or []
        return tuple(device.index for device in own if device.index is not None)

    async def recover(self, gang: Gang) -> None:
        key = (gang.task, gang.attempt)
        if key in self._runs:
            return
        run = self._runs[key] = _Run(gang)
        async with run.lock:
            run.gang = await decided(run.gang)
            for node in gang.nodes:
                run.state.opened(node)
            answers = await asyncio.gather(*(self._attach(run, node) for node in gang.nodes))
            for node, answer in zip(gang.nodes, answers, strict=True):
                if answer is None:
                    self._sweep(run, node)
                if answer is None or not answer.known:
                    self._determine_end(run, node, f"{node} has no processes of the attempt")
            graces = [a.grace_s for a in answers if a is not None and a.grace_s is not None]
            run.state.leaving |= bool(graces)
            run.state.sealed(_now())
            self._follow(run)
        if graces:  # the server may have died between Freeze and Decide of the suspend
            await self.suspend(gang.task, gang.attempt, graces[0])

    def _enlist(self, run: _Run, link: Link, newcomers: tuple[Newcomer, ...]) -> None:
        gang, node = run.gang, link.node
        run.state.reopened(node)
        link.attempt = gang.attempt
        part = self._part(gang, gang.nodes.index(node), 0)
        link.send(Enlist(part=part, newcomers=newcomers))

    async def _reopen(self, run: _Run, node: str, newcomers: tuple[Newcomer, ...]) -> None:
        """Starts newcomers on a node whose supervisor is gone."""
        async with run.lock:
            state = run.state
            link: Link | None = None
            if not (state.aborting or state.leaving):
                why = "the supervisor died during its start"
                try:
                    link = await self._link(run.gang, node)
                except OSError as error:
                    why = str(error)
                if link is None:
                    why = f"cannot launch on {node} again: {why}"
                    state.lost(node, why, _now(), joinable=True)
            if link is not None and not state.aborting:
                self._enlist(run, link, newcomers)
            else:
                state.withdraw(node, _now())
        self._follow(run)

    async def _attach(self, run: _Run, node: str) -> Attached | None:
        gang = run.gang
        link = self._find(gang, node)
        if link is None:
            return None
        link.attempt = gang.attempt
        return await link.ask(Attach(attempt=gang.attempt), gang.attempt, Attached)

    # -- requests ----------------------------------------------------------------------------------

    async def suspend(self, task: str, attempt: int, grace_s: float) -> None:
        run = self._runs.get((task, attempt))
        if run is None:
            return
        async with run.lock:
            run.state.leaving = True
            if run.state.aborting:
                return
            answers = await self._freeze(run, Freeze(attempt=attempt, grace_s=grace_s))
            if run.state.aborting or not answers:
                return
            frozen = list(answers.values())
            frozen += [
                Frozen(attempt=attempt, highest=part.highest, decision=0)
                for part in run.state.parts.values()
                if part.node not in answers
            ]
            number = decide(frozen)
            for link in self._open_links(run):
                if link.node in answers:
                    link.send(Decide(attempt=attempt, number=number))

    async def _freeze(self, run: _Run, freeze: Freeze) -> dict[str, Frozen]:
        """Sends the request to all nodes with an open part. Returns the answers by node, without
        nodes that are lost meanwhile."""
        answers: dict[str, Frozen] = {}
        while links := [link for link in self._open_links(run) if link.node not in answers]:
            asked = (link.ask(freeze, freeze.attempt, Frozen) for link in links)
            for link, answer in zip(links, await asyncio.gather(*asked), strict=True):
                if answer is not None:
                    answers[link.node] = answer
        return answers

    async def stop(self, task: str, attempt: int, grace_s: float) -> None:
        run = self._runs.get((task, attempt))
        if run is None:
            return
        async with run.lock:
            run.state.leaving = True
            for link in self._open_links(run):
                link.send(End(attempt=attempt, how="stop", grace_s=grace_s))

    async def fail(self, task: str, attempt: int, reason: str) -> None:
        run = self._runs.get((task, attempt))
        if run is None:
            return
        async with run.lock:
            for link in self._open_links(run):
                link.send(Condemn(attempt=attempt, reason=reason))

    async def release(self, task: str, directory: Path | None = None) -> None:
        for run in [run for (name, _), run in self._runs.items() if name == task]:
            async with run.lock:
                run.state.leaving = True
        for path in directory.glob("*.sock") if directory is not None else ():
            if (task, path.stem) not in self._links and not path.name.endswith(KEEPER_SUFFIX):
                self._connect(task, path.parent, path.stem)
        links = [link for (name, _), link in self._links.items() if name == task]
        await asyncio.gather(*(link.leave() for link in links))
        for key in [key for key in self._runs if key[0] == task]:
            del self._runs[key]

    def _open_links(self, run: _Run) -> list[Link]:
        nodes = [node for node in run.gang.nodes if node in run.state.open]
        links = [self._links.get((run.gang.task, node)) for node in nodes]
        return [link for link in links if link is not None]

    # -- supervisors -------------------------------------------------------------------------------

    async def _link(self, gang: Gang, node: str) -> Link | None:
        """Returns a link to the task's supervisor on the node. Starts a supervisor if there is
        none; returns None if the supervisor died at once."""
        link = self._find(gang, node)
        # A supervisor of an earlier server may be exiting; only an answer proves that it keeps
        # running.
        while link is not None and not link.gone.is_set():
            answer = await link.ask(Attach(attempt=gang.attempt), gang.attempt, Attached)
            if answer is not None and not link.gone.is_set():
                return link
        if not (gang.start == "fork" and await self._zygotes.fork_tree(gang, node)):
            self._adopt(spawn(gang.task, gang.directory.parent, node))
        return self._find(gang, node)

    def _find(self, gang: Gang, node: str) -> Link | None:
        task = gang.task
        return self._links.get((task, node)) or self._connect(task, gang.directory.parent, node)

    def _connect(self, task: str, directory: Path, node: str) -> Link | None:
        try:
            stream = connect(directory, node)
        except FileNotFoundError:
            return None
        if stream is None:
            return None

        def on_gone() -> None:
            del self._links[task, node]
            for run in [r for (name, _), r in self._runs.items() if name == task]:
                if node in run.state.open:
                    self._node_died(run, node)

        link = Link(stream, directory, node, lambda n, r: self._on_record(task, n, r), on_gone)
        self._links[task, node] = link
        return link

    def _adopt(self, pid: int) -> None:
        """Reaps a guard, a child of this process, when it ends."""
        pidfd = os.pidfd_open(pid)
        self._guards.add(pidfd)
        asyncio.get_running_loop().add_reader(pidfd, self._reap, pidfd)

    def _reap(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        self._guards.remove(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)

    # -- events of the nodes -----------------------------------------------------------------------

    def _on_record(self, task: str, node: str, record: Record) -> None:
        run = self._runs.get((task, record.attempt))
        if run is not None:
            self._record(run, node, record)
            self._follow(run)

    def _record(self, run: _Run, node: str, record: Record) -> None:
        run.state.record(record, node)

    def _node_died(self, run: _Run, node: str) -> None:
        self._sweep(run, node)
        self._determine_end(run, node, f"the supervisor of {node} died")

    def _sweep(self, run: _Run, node: str) -> None:
        """Kills processes of the task that are left on the node, and removes their cgroup. REQUIRES:
        neither guard nor supervisor is left. If both were killed at the same time, processes that
        ranks had detached survive, and ranks may still be dying."""
        folder = str(run.gang.directory.parent)
        left = orphans.end({"FIREFLYER_TASK_DIR": folder, "FIREFLYER_NODE": node})
        if left:
            _log.warning("%s on %s: the kernel does not end %s", run.gang.task, node, left)
        cgroups.remove(cgroups.note_path(run.gang.directory, node))

    def _determine_end(self, run: _Run, node: str, why: str, *, innocent: bool = False) -> None:
        """Determines from its journal how a part without processes ended. If the journal does not
        tell, the part counts as lost."""
        try:
            for record in read_journal(journal_path(run.gang.directory, node)):
                self._record(run, node, record)
        except (Corrupted, OSError) as error:
            why = f"{why}; {error}"
        joinable = members_path(run.gang.directory).exists()
        run.state.lost(node, why, _now(), joinable=joinable, innocent=innocent)
        self._follow(run)

    def _follow(self, run: _Run) -> None:
        """Emits the events, starts the newcomers and sends the aborts that the state asks for."""
        for event in run.state.take():
            self._events.put_nowait(event)
        for node, newcomers in run.state.newcomers().items():
            link = self._links.get((run.gang.task, node))
            if link is not None and not link.gone.is_set():
                self._enlist(run, link, newcomers)
            else:
                opening = asyncio.create_task(self._reopen(run, node, newcomers))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
        if run.state.aborting:
            for link in self._open_links(run):
                if link.node not in run.aborted:
                    run.aborted.add(link.node)
                    link.send(End(attempt=run.gang.attempt, how="abort", grace_s=0.0))
        if run.state.ended is not None:
            run.done.set()
