"""A node's part of one attempt: its ranks, the requests it got, and how it ended.

    starting ──all ranks known──> running ──over──> ended
        └────────────over─────────────────────────────^

`over` means that all remaining processes must be killed: a rank failed, a deadline passed, the
engine aborted the part, or every rank has exited. The supervisor kills and reaps processes, reports
them to the attempt, and calls `finish` once no process is left.

A newcomer is a rank that is started later and joins the running ranks. In an elastic attempt whose
ranks accept newcomers, the end of a rank is no failure: the other ranks continue, and the engine
may start a newcomer in its place. A part whose ranks are all gone ends as `vacant`. Newcomers open
such a part again (`again`), with the same journal.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec.structs import replace

from fireflyer import allocator, heartbeat
from fireflyer._native.hai import SuspendPage
from fireflyer.errors import Corrupted
from fireflyer.hai.model.engine import NodeObserved, RankExited, RankJoined, RankStarted
from fireflyer.hai.model.observations import (
    KernelObservation,
    Memory,
    Network,
    OutOfMemory,
)
from fireflyer.hai.processes import catches, describe_exit, kill, kill_group, tell_state
from fireflyer.hai.sampling.usage import (
    SAMPLE_S,
    Sampler,
    next_sample,
    open_nvml,
    usage_path,
)
from fireflyer.hai.supervisor.cgroups import Cgroup, note_path
from fireflyer.hai.supervisor.imports import MARK, has_loaded_torch
from fireflyer.hai.supervisor.journal import Journal, journal_path, members_path, read_journal
from fireflyer.hai.supervisor.keeper_activation import keeper_path
from fireflyer.hai.supervisor.messages import (
    Cause,
    Frozen,
    Newcomer,
    Part,
    PartEnded,
    RankSpec,
    Record,
)

LOOK_S = 5.0
"""Seconds after a rank's start at which its imports are assumed to be complete."""

EXPLAINS_S = 60.0
"""If a rank ends at most this many seconds after a kill for the memory limit, the error names the
kill."""

STACKS_S = 1.0
"""Seconds within which ranks must write their stacks before they are killed."""


class Attempt:
    """A node's part of one attempt. A record is published only after it is in the journal."""

    def __init__(
        self, part: Part, publish: Callable[[Record], None], news: str = "", *, again: bool = False
    ) -> None:
        """`news`: path of the pipe on which newcomers report that they are members. `again`: True
        for a part that newcomers open again."""
        self.part = part
        self.records: list[Record] = []
        self.over = False
        self.ended = False
        self.deadline: float | None = None
        """time.monotonic() at which the remaining processes are killed."""
        self.look_at: float | None = None
        """time.monotonic() at which `look_at_ranks` is due."""
        self.sample_at: float | None = None
        """time.monotonic() at which `sample` is due."""
        self.suspend_grace_s: float | None = None
        self.vacant = False
        """True if the part is over because no rank is left, although not all ranks returned 0."""
        self._publish = publish
        self._news = news
        self._asked: str | None = None
        self._failure = ""
        self._failed_ns = 0
        self._late = ""
        self._condemned = ""
        self._highest: int | None = None
        self._running: dict[int, int] = {}  # pid -> rank
        self._incarnation: dict[int, int] = {}  # rank -> last incarnation that was started
        self._unknown: set[int] = set()  # running newcomers not known to be members
        self._returned_0: set[int] = set()
        self._signalled: set[int] = set()  # pids that got SIGTERM as a request to save
        self._journal: Journal | None = None
        self._sampler: Sampler | None = None
        self._cgroup: Cgroup | None = None
        self._out_of_memory = (
            "",
            0.0,
        )  # text of the last kill for the memory limit, and its time.monotonic()
        self._page = SuspendPage.create(part.ranks)
        # This socket is bound but does not listen: no other process gets its port, and SO_REUSEADDR
        # lets rank 0 bind the port.
        self._reservation: socket.socket | None = None
        self.port = part.port
        path = journal_path(Path(part.directory), part.node)
        try:
            self._journal = Journal(path, again=again)
            if again:
                self._restore(read_journal(path))
            if part.limits.folders:
                self._cgroup = Cgroup(part.limits, note_path(Path(part.directory), part.node))
            if not self.port:
                self._reservation = socket.socket()
                self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._reservation.bind((part.master, 0))
                self.port = self._reservation.getsockname()[1]
        except (OSError, Corrupted) as error:
            self.fail(f"{part.node} cannot prepare the attempt: {error}")

    def _restore(self, records: list[Record]) -> None:
        """Restores the records of an earlier part; ranks without a recorded exit count as lost."""
        self.records = records
        running: dict[int, RankStarted] = {}
        joined: set[int] = set()
        for event in (record.event for record in records):
            if isinstance(event, PartEnded | NodeObserved):
                continue
            rank = event.rank
            self._incarnation[rank] = event.incarnation
            if isinstance(event, RankStarted):
                running[rank] = event
                joined -= {rank} if event.incarnation else set()
            elif isinstance(event, RankJoined):
                joined.add(rank)
            else:
                running.pop(rank, None)
                if event.code == 0:
                    self._returned_0.add(rank)
        for rank in sorted(running):
            member = not self._incarnation[rank] or rank in joined
            self._exited(rank, None, None, joined=member, lost=True)

    # -- start -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Fails the attempt if its script or folder cannot be used."""
        script, cwd = self.part.script, self.part.cwd
        if not os.path.exists(script):
            self.fail(f"the script {script} does not exist")
        elif not os.path.isfile(script):
            self.fail(f"the script {script} is not a file")
        elif not os.access(script, os.R_OK):
            self.fail(f"the script {script} cannot be read: permission denied")
        elif not os.path.isdir(cwd):
            self.fail(f"the working directory {cwd} does not exist")
        elif not os.access(cwd, os.X_OK):
            self.fail(f"the working directory {cwd} cannot be entered: permission denied")

    def specs(self) -> tuple[RankSpec, ...]:
        """Returns the specs of the attempt's first ranks, by local rank."""
        part = self.part
        return tuple(self._spec(part.first_rank + local, 0) for local in range(part.ranks))

    def enlist(self, newcomers: tuple[Newcomer, ...]) -> tuple[RankSpec, ...]:
        """Returns the specs of newcomers, except newcomers that were started before."""
        running = set(self._running.values())
        fresh = [
            n for n in newcomers
            if n.incarnation > self._incarnation.get(n.rank, 0) and n.rank not in running
        ]  # fmt: skip
        for newcomer in fresh:
            self._incarnation[newcomer.rank] = newcomer.incarnation
            self._page.renew(newcomer.rank - self.part.first_rank)
        return tuple(self._spec(newcomer.rank, newcomer.incarnation) for newcomer in fresh)

    def _spec(self, rank: int, incarnation: int) -> RankSpec:
        part = self.part
        return RankSpec(
            rank=rank,
            incarnation=incarnation,
            script=part.script,
            args=part.args,
            cwd=part.cwd,
            env=self._environment(rank - part.first_rank, incarnation),
            log=os.path.join(part.directory, f"{rank}.log"),
            entrances=() if self._cgroup is None else self._cgroup.entrances,
        )

    def _environment(self, local: int, incarnation: int) -> dict[str, str]:
        part = self.part
        elastic: dict[str, str] = {}
        if part.elastic:
            members = str(members_path(Path(part.directory)))
            elastic = {"FIREFLYER_DOORS": members, "FIREFLYER_INCARNATION": str(incarnation)}
            if incarnation:
                elastic |= {"FIREFLYER_JOIN": members, "FIREFLYER_NEWS": self._news}
        return {**self._common_environment(local), **elastic}

    def _common_environment(self, local: int) -> dict[str, str]:
        part = self.part
        return {
            "OMP_NUM_THREADS": "1",
            **allocator.KEEP,
            **part.env,
            **devices_environment(part),
            "PYTHONUNBUFFERED": "1",
            "RANK": str(part.first_rank + local),
            "WORLD_SIZE": str(part.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(part.ranks),
            "MASTER_ADDR": part.master,
            "MASTER_PORT": str(self.port),
            "FIREFLYER_NODE": part.node,
            "FIREFLYER_TASK": part.task,
            "FIREFLYER_ATTEMPT": str(part.attempt),
            "FIREFLYER_SECRET": part.secret,
            "FIREFLYER_TASK_DIR": os.path.dirname(part.directory),
            "FIREFLYER_PULSE": os.path.join(part.directory, f"{part.first_rank + local}.pulse"),
            "FIREFLYER_STACKS": os.path.join(part.directory, f"{part.first_rank + local}.stacks"),
            "FIREFLYER_KEEPER": keeper_path(os.path.dirname(part.directory), part.node),
            # This path of the suspend page leads through the supervisor's own descriptor, so a rank
            # can open the page even if a wrapper has closed inherited descriptors.
            "FIREFLYER_CONTROL": f"{local}:/proc/{os.getpid()}/fd/{self._page.fd}",
        }

    def started(self, spec: RankSpec, pid: int) -> None:
        self._running[pid] = spec.rank
        if self.sample_at is None:
            self.sample_at = time.monotonic() + SAMPLE_S
        if self.part.start == "exec" and not spec.incarnation:
            self.look_at = time.monotonic() + LOOK_S
        if spec.incarnation:
            self._unknown.add(spec.rank)
        self._record(
            RankStarted(
                task=self.part.task,
                attempt=self.part.attempt,
                rank=spec.rank,
                incarnation=spec.incarnation,
                node=self.part.node,
                pid=pid,
                monotonic_ns=time.monotonic_ns(),
                wall=time.time(),
            )
        )
        if self._asked == "stop":
            kill_group(pid, signal.SIGTERM)

    def sample(self) -> None:
        """Samples the use of the hardware by the ranks."""
        part, now = self.part, time.monotonic()
        if self._sampler is None:
            path = usage_path(Path(part.directory), part.node)
            self._sampler = Sampler(path, part.node, part.sampled, open_nvml(part.sampled))
        self._sampler.sample(self._running, now)
        self._read_kills(None, None)
        self.sample_at = next_sample(self.sample_at or now)

    def look_at_ranks(self) -> None:
        """Creates the file MARK in the task's folder if a rank has loaded torch, so that the next
        attempt starts by fork."""
        self.look_at = None
        if any(has_loaded_torch(pid) for pid in self._running):
            with contextlib.suppress(OSError):
                Path(self.part.directory).parent.joinpath(MARK).touch(mode=0o600)

    def not_started(self, specs: Iterable[RankSpec]) -> None:
        """Records the end of newcomers that cannot be started, or that are no longer wanted."""
        for spec in specs:
            self._exited(spec.rank, None, None, joined=False)

    def read_members(self) -> None:
        """Records newcomers that have been admitted."""
        part = self.part
        for rank in sorted(self._unknown):
            if self._page.joined(rank - part.first_rank):
                self._unknown.remove(rank)
                self._record(
                    RankJoined(
                        task=part.task,
                        attempt=part.attempt,
                        rank=rank,
                        incarnation=self._incarnation[rank],
                        node=part.node,
                        monotonic_ns=time.monotonic_ns(),
                        wall=time.time(),
                    )
                )

    # -- requests ----------------------------------------------------------------------------------

    def freeze(self, grace_s: float) -> Frozen:
        if self._highest is None:
            self._highest = max(self._page.freeze())
        if self.look_at is not None:
            self.look_at_ranks()
        if not self.over and self._asked is None:
            self._asked = "suspend"
            self.suspend_grace_s = grace_s
            self.deadline = time.monotonic() + grace_s
        return Frozen(
            attempt=self.part.attempt, highest=self._highest, decision=self._page.decision
        )

    def decide(self, number: int) -> None:
        """Sets the number of the first call of `suspend_requested()` that returns true.

        If no rank of the gang has ever called `suspend_requested()`, ranks with a handler for
        SIGTERM get SIGTERM, because such ranks save on SIGTERM under Slurm. Other ranks get no
        signal until the grace period is over, because a rank may be about to make its first call.
        """
        self._page.decide(number)
        if number > 1 or self._asked != "suspend" or self.over:
            return
        for pid in self._running:
            if pid not in self._signalled and catches(pid, signal.SIGTERM):
                self._signalled.add(pid)
                kill(pid, signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        if self.over:
            return
        deadline = time.monotonic() + grace_s
        if self._asked == "stop" and self.deadline is not None:
            self.deadline = min(self.deadline, deadline)
            return
        self._asked = "stop"
        self.deadline = deadline
        if not self._running:
            self.over = True  # no rank has started: the fork server is still importing
        elif grace_s > 0:
            for pid in self._running:
                kill_group(pid, signal.SIGTERM)

    def abort(self) -> None:
        """Ends the part because another node failed or a newer attempt fences this attempt."""
        self.over = True

    def condemn(self, reason: str) -> None:
        """Fails the attempt for this reason, after its ranks have written their stacks."""
        if self.over or self._asked is not None or self._condemned:
            return
        self._condemned = reason
        for pid, rank in self._running.items():
            path = os.path.join(self.part.directory, f"{rank}.stacks")
            with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
                file.write(tell_state(pid))
            kill(pid, heartbeat.STACKS_SIGNAL)
        self.deadline = time.monotonic() + STACKS_S

    def observed(self, found: KernelObservation) -> None:
        """Records an observation from the kernel's log. If the observation names a process of this
        attempt, adds the process's rank. Ignores a kill for the memory limit of another task, and a
        kill for this task's limit if the cgroup reports the same kill."""
        if self.ended:
            return
        if isinstance(found, OutOfMemory) and found.limited:
            own = self._cgroup is not None and self._cgroup.memory_mib
            if own or found.pid not in self._running:
                return
        if not isinstance(found, Network | Memory):
            found = replace(found, rank=None if found.pid is None else self._running.get(found.pid))
        self._record_observation(found)

    def _record_observation(self, found: KernelObservation) -> None:
        part = self.part
        self._record(
            NodeObserved(
                task=part.task,
                attempt=part.attempt,
                node=part.node,
                observation=found,
                monotonic_ns=time.monotonic_ns(),
                wall=found.wall,
            )
        )

    def fail(self, reason: str) -> None:
        """Fails the attempt; the first reason counts."""
        if not self._failed_ns:
            self._failure = reason
            self._failed_ns = time.monotonic_ns()
        self.over = True

    def expire(self) -> None:
        """Ends the part because its deadline has passed."""
        if self._condemned and self._asked is None:
            self.fail(self._condemned)
        elif self._running:
            left = ", ".join(str(r) for r in sorted(self._running.values()))
            self._late = f"rank {left} had to be killed after the grace period"
        self.over = True

    # -- the end -----------------------------------------------------------------------------------

    def dying(self, pid: int) -> None:
        """Kills the process group of a rank that has ended and is not yet reaped. Only elastic
        attempts need this, because their other ranks continue."""
        if pid in self._running and self.part.elastic:
            kill_group(pid, signal.SIGKILL)

    def reaped(self, pid: int, code: int | None, number: int | None) -> bool:
        """Records the exit of a process; returns whether it was a rank of this attempt."""
        rank = self._running.pop(pid, None)
        if rank is None:
            return False
        self.read_members()
        killed = number == signal.SIGKILL
        memory = self._read_kills(rank if killed else None, pid if killed else None)
        if code == 0:
            self._returned_0.add(rank)
        elif not self.over and self._asked != "stop" and not self._may_lose():
            how = describe_exit(code, number)
            reason = f"rank {rank} on {self.part.node} {how} (pid {pid})"
            self.fail(f"{memory}; {reason}" if memory else reason)
        lost = code != 0 and not self.over and self._asked is None
        self._exited(rank, code, number, joined=rank not in self._unknown, lost=lost)
        self._unknown.discard(rank)
        return True

    def _read_kills(self, rank: int | None, pid: int | None) -> str:
        """Records the kernel's kills for the memory limit since the last call. Returns text that
        explains the end of a rank by such a kill, else "". `rank`, `pid`: a rank that SIGKILL
        ended, and its process; None: no such rank."""
        group, (text, when) = self._cgroup, self._out_of_memory
        if group is None or not group.killed():
            return text if time.monotonic() < when + EXPLAINS_S else ""
        part = self.part
        found = OutOfMemory(
            node=part.node, wall=time.time(), pid=pid or 0, rank=rank, limited=True,
            limit_mib=group.memory_mib,
        )  # fmt: skip
        self._record_observation(found)
        self._out_of_memory = (found.text(), time.monotonic())
        return found.text()

    def _may_lose(self) -> bool:
        """Returns whether the other ranks continue without a lost rank, because newcomers can
        connect."""
        return self.part.elastic and members_path(Path(self.part.directory)).exists()

    def _exited(
        self, rank: int, code: int | None, number: int | None, *, joined: bool, lost: bool = False
    ) -> None:
        part = self.part
        self._record(
            RankExited(
                task=part.task,
                attempt=part.attempt,
                rank=rank,
                incarnation=self._incarnation.get(rank, 0),
                joined=joined,
                lost=lost and joined,
                node=part.node,
                code=code,
                signal=number,
                suspended=self._page.acknowledged(rank - part.first_rank),
                monotonic_ns=time.monotonic_ns(),
                wall=time.time(),
            )
        )

    def all_exited(self) -> None:
        """Ends the part if no rank runs, so that remaining processes are killed. REQUIRES: all
        ranks were started."""
        if not self._running:
            self.over = True
            all_0 = len(self._returned_0) == self.part.ranks
            self.vacant = self.part.elastic and self._asked is None and not all_0

    def finish(self) -> None:
        """Records the end of the part. REQUIRES: no process of the attempt is left."""
        slots = range(self.part.ranks)
        page = self._page
        highest = self._highest
        if highest is None:
            highest = max(page.count(slot) for slot in slots)
        self.ended = True
        self.deadline = self.look_at = self.sample_at = None
        self.remove_cgroup()
        if self._sampler is not None:
            self._sampler.write()
        self._record(
            PartEnded(
                node=self.part.node,
                cause=self._cause(),
                reason=self._failure or self._late,
                told=bool(self._signalled)
                or any(page.told(slot) or page.acknowledged(slot) for slot in slots),
                highest=highest,
                failed_ns=self._failed_ns,
                monotonic_ns=time.monotonic_ns(),
                wall=time.time(),
            )
        )
        if self._journal is not None:
            self._journal.close()
        if self._reservation is not None:
            self._reservation.close()

    def remove_cgroup(self) -> None:
        """Removes the cgroup. REQUIRES: no process of the attempt is left."""
        if self._cgroup is not None:
            self._cgroup.remove()

    def _cause(self) -> Cause:
        if self._asked == "stop":
            return "stopped"
        if len(self._returned_0) == self.part.ranks:
            return "finished"
        if self._asked == "suspend":
            return "suspended"
        if self._failed_ns:
            return "failed"
        return "vacant" if self.vacant else "aborted"

    def _record(
        self, event: RankStarted | RankJoined | RankExited | NodeObserved | PartEnded
    ) -> None:
        record = Record(attempt=self.part.attempt, seq=len(self.records) + 1, event=event)
        if self._journal is not None:
            try:
                self._journal.append(record)
            except OSError as error:
                self._journal.close()
                self._journal = None
                self.fail(f"{self.part.node} cannot write its journal: {error.strerror}")
        self.records.append(record)
        self._publish(record)


def devices_environment(part: Part) -> dict[str, str]:
    """Returns the variables that make only the ranks' own GPUs visible to them."""
    if part.devices is None:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(part.devices)}


def server_environment(part: Part) -> dict[str, str]:
    """Returns the environment of the task's fork server. It includes the user's variables, because
    the dynamic loader and the interpreter read them at their start."""
    return {
        **part.env,
        "FIREFLYER_TASK": part.task,
        "FIREFLYER_TASK_DIR": os.path.dirname(part.directory),
        "FIREFLYER_NODE": part.node,
        "OMP_NUM_THREADS": "1",
    }
