"""A node's part of one attempt: its ranks, what was asked of it, and how it ended.

    starting ──all ranks known──> running ──over──> ended
        └────────────over─────────────────────────────^

`over` means that whatever process is left is to be killed: a rank failed, a deadline passed, an abort came,
or every rank has exited. The supervisor kills and reaps, tells the attempt what it reaped, and calls `finish`
once no process is left.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from fireflyer import allocator
from fireflyer._native.hai import SuspendPage
from fireflyer.hai.engines import RankExited, RankStarted
from fireflyer.hai.engines.journal import Journal, journal_path
from fireflyer.hai.engines.keepsake import keeper_path
from fireflyer.hai.engines.messages import Cause, Frozen, Part, PartEnded, RankSpec, Record
from fireflyer.hai.processes import describe_exit, kill_group


class Attempt:
    """Publishes a record only after it is in the journal."""

    def __init__(self, part: Part, publish: Callable[[Record], None]) -> None:
        self.part = part
        self.records: list[Record] = []
        self.over = False
        self.ended = False
        self.deadline: float | None = None
        """time.monotonic() at which what is left is killed."""
        self.suspend_grace_s: float | None = None
        self._publish = publish
        self._asked: str | None = None
        self._failure = ""
        self._failed_ns = 0
        self._late = ""
        self._highest: int | None = None
        self._running: dict[int, int] = {}  # pid -> rank
        self._returned_0 = 0
        self._journal: Journal | None = None
        self._page = SuspendPage.create(part.ranks)
        # Bound but not listening: the kernel gives this port to nobody, and SO_REUSEADDR lets rank 0 bind it.
        self._reservation: socket.socket | None = None
        self.port = part.port
        try:
            self._journal = Journal(journal_path(Path(part.directory), part.node))
            if not self.port:
                self._reservation = socket.socket()
                self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._reservation.bind((part.master, 0))
                self.port = self._reservation.getsockname()[1]
        except OSError as error:
            self.fail(f"{part.node} cannot prepare the attempt: {error}")

    # -- start -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Fails the attempt where its script or folder cannot be used."""
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
        """What to start, by local rank."""
        part = self.part
        return tuple(
            RankSpec(
                rank=part.first_rank + local,
                script=part.script,
                args=part.args,
                cwd=part.cwd,
                env=self._environment(local),
                log=os.path.join(part.directory, f"{part.first_rank + local}.log"),
            )
            for local in range(part.ranks)
        )

    def _environment(self, local: int) -> dict[str, str]:
        part = self.part
        return {
            "OMP_NUM_THREADS": "1",
            **allocator.KEEP,
            **part.env,
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
            "FIREFLYER_KEEPER": keeper_path(os.path.dirname(part.directory), part.node),
            # Through the supervisor's own descriptor: also a wrapper that closes inherited ones can open it.
            "FIREFLYER_CONTROL": f"{local}:/proc/{os.getpid()}/fd/{self._page.fd}",
        }

    def server_environment(self) -> dict[str, str]:
        """Of the task's fork server: what the loader and the interpreter read at start is the user's."""
        part = self.part
        names = {"FIREFLYER_TASK": part.task, "FIREFLYER_NODE": part.node, "OMP_NUM_THREADS": "1"}
        return {**part.env, **names}

    def started(self, rank: int, pid: int) -> None:
        self._running[pid] = rank
        self._record(
            RankStarted(
                task=self.part.task,
                attempt=self.part.attempt,
                rank=rank,
                node=self.part.node,
                pid=pid,
                monotonic_ns=time.monotonic_ns(),
                wall=time.time(),
            )
        )

    # -- requests ----------------------------------------------------------------------------------

    def freeze(self, grace_s: float) -> Frozen:
        if self._highest is None:
            self._highest = max(self._page.freeze())
        if not self.over and self._asked is None:
            self._asked = "suspend"
            self.suspend_grace_s = grace_s
            self.deadline = time.monotonic() + grace_s
        return Frozen(
            attempt=self.part.attempt, highest=self._highest, decision=self._page.decision
        )

    def decide(self, number: int) -> None:
        self._page.decide(number)

    def stop(self, grace_s: float) -> None:
        if self.over:
            return
        deadline = time.monotonic() + grace_s
        if self._asked == "stop" and self.deadline is not None:
            self.deadline = min(self.deadline, deadline)
            return
        self._asked = "stop"
        self.deadline = deadline
        if not self.records:
            self.over = True  # no rank has begun: the fork server is still importing
        elif grace_s > 0:
            for pid in self._running:
                kill_group(pid, signal.SIGTERM)

    def abort(self) -> None:
        """Another node failed."""
        self.over = True

    def fail(self, reason: str) -> None:
        """The attempt cannot go on; the first reason counts."""
        if not self._failed_ns:
            self._failure = reason
            self._failed_ns = time.monotonic_ns()
        self.over = True

    def expire(self) -> None:
        """The deadline has passed."""
        if self._running:
            left = ", ".join(str(r) for r in sorted(self._running.values()))
            self._late = f"rank {left} had to be killed after the grace"
        self.over = True

    # -- the end -----------------------------------------------------------------------------------

    def reaped(self, pid: int, code: int | None, number: int | None) -> bool:
        """A process ended; whether it was a rank of this attempt."""
        rank = self._running.pop(pid, None)
        if rank is None:
            return False
        part = self.part
        if code == 0:
            self._returned_0 += 1
        elif not self.over and self._asked != "stop":
            self.fail(f"rank {rank} on {part.node} {describe_exit(code, number)} (pid {pid})")
        self._record(
            RankExited(
                task=part.task,
                attempt=part.attempt,
                rank=rank,
                node=part.node,
                code=code,
                signal=number,
                suspended=self._page.acknowledged(rank - part.first_rank),
                monotonic_ns=time.monotonic_ns(),
                wall=time.time(),
            )
        )
        return True

    def all_exited(self) -> None:
        """Once every rank was started: when none runs any more, what they left behind is to go."""
        if not self._running:
            self.over = True

    def finish(self) -> None:
        """REQUIRES: no process of the attempt is left."""
        slots = range(self.part.ranks)
        page = self._page
        highest = self._highest
        if highest is None:
            highest = max(page.count(slot) for slot in slots)
        self.ended = True
        self.deadline = None
        self._record(
            PartEnded(
                node=self.part.node,
                cause=self._cause(),
                reason=self._failure or self._late,
                told=any(page.told(slot) or page.acknowledged(slot) for slot in slots),
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

    def _cause(self) -> Cause:
        if self._asked == "stop":
            return "stopped"
        if self._returned_0 == self.part.ranks:
            return "finished"
        if self._asked == "suspend":
            return "suspended"
        return "failed" if self._failed_ns else "aborted"

    def _record(self, event: RankStarted | RankExited | PartEnded) -> None:
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
