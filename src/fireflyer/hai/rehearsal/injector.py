"""Injects the events of a rehearsal on the local engine: calls of the client, and signals to ranks
and supervisors, which are processes of this user on this machine."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from fireflyer.errors import ConfigError, TaskError
from fireflyer.hai.client import Client
from fireflyer.hai.model import RankView, TaskView
from fireflyer.hai.rehearsal.plan import Planned

STOPPED_MS, RUNNING_MS = 75, 25
"""Duty cycle of a slow node, in milliseconds: its processes run a quarter of the time."""


class Injector:
    """Injector of events for one task.

    Args:
        client: the platform.
        task: task id.

    Raises:
        ConfigError: the home's tasks do not run on this machine's local engine.
    """

    def __init__(self, client: Client, task: str) -> None:
        check_engine(client)
        self._client = client
        self._task = task
        self._slowing: list[subprocess.Popen[bytes]] = []

    def make(self, planned: Planned) -> None:
        """Injects one event. The effects of the event may follow after this method returns.

        Raises:
            TaskError: the event cannot be injected, because the task or the rank has ended.
            FireflyerError: the platform refuses the request, or cannot be reached.
        """
        match planned.kind:
            case "suspend":
                self._client.suspend(self._task)
            case "resume":
                self._client.resume(self._task)
            case "kill-rank":
                with self._rank(planned) as (_, pidfd):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            case "kill-node":
                self._kill_node(planned)
            case "freeze-rank":
                with self._rank(planned) as (_, pidfd):
                    self._slow([pidfd], planned.lasts_s * 1e3 + 1.0, 0.0, planned.lasts_s)
            case "slow-node":
                with contextlib.ExitStack() as stack:
                    ranks = self._on_node(planned)
                    pidfds = [stack.enter_context(self._held(rank)) for rank in ranks]
                    self._slow(pidfds, STOPPED_MS, RUNNING_MS, planned.lasts_s)

    def close(self) -> None:
        """Continues all stopped processes; returns when all helper processes have exited."""
        for helper in self._slowing:
            helper.communicate()  # closes the helper's standard input

    def _slow(
        self, pidfds: list[int], stopped_ms: float, running_ms: float, lasts_s: float
    ) -> None:
        command = [sys.executable, "-P", "-m", "fireflyer.hai.rehearsal.slowdown"]
        command += [str(stopped_ms), str(running_ms), str(lasts_s), *map(str, pidfds)]
        helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pidfds,
            start_new_session=True,
        )  # fmt: skip
        self._slowing.append(helper)
        assert helper.stdout is not None
        if not helper.stdout.readline():
            raise TaskError(
                f"the helper that slows processes did not start (status {helper.wait()})"
            )

    def _kill_node(self, planned: Planned) -> None:
        """Kills the node's supervisor. The guard then kills all remaining processes of the node, as
        if the node was lost."""
        with self._held(self._on_node(planned)[0]) as rank:
            supervisor = _parent(_pid_of(rank))
            with _opened(supervisor) as pidfd:
                if _parent(_pid_of(rank)) != supervisor:
                    raise TaskError("the rank has ended meanwhile")
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    @contextlib.contextmanager
    def _rank(self, planned: Planned) -> Iterator[tuple[RankView, int]]:
        rank = self._client.task(self._task).ranks[planned.index]
        with self._held(rank) as pidfd:
            yield rank, pidfd

    def _on_node(self, planned: Planned) -> list[RankView]:
        view: TaskView = self._client.task(self._task)
        size = view.spec.ranks_per_node
        ranks = view.ranks[planned.index * size : (planned.index + 1) * size]
        running = [rank for rank in ranks if rank.pid is not None and rank.ended is None]
        if not running:
            raise TaskError(f"no rank runs on node {planned.index} of the task")
        return running

    @contextlib.contextmanager
    def _held(self, rank: RankView) -> Iterator[int]:
        """Opens a pidfd of a running rank: a process whose parent is the supervisor of this
        task."""
        if rank.pid is None or rank.ended is not None:
            raise TaskError(f"rank {rank.rank} does not run")
        with _opened(rank.pid) as pidfd:
            command = _command(_parent(rank.pid))
            expected = [b"fireflyer.hai.supervisor", self._task.encode(), rank.node.encode()]
            if command[-3:] != expected:
                raise TaskError(f"rank {rank.rank} has ended meanwhile")
            yield pidfd


def check_engine(client: Client) -> None:
    """Rejects a home whose tasks do not run on this machine.

    Raises:
        ConfigError: the engine is not the local one.
    """
    engine = client.home.read_engine().engine
    if engine != "local":
        raise ConfigError(
            f"--rehearse needs the local engine, but this home uses the engine {engine}"
        )


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[int]:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise TaskError(f"process {pid} has ended meanwhile") from None
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            stat = file.read()
    except OSError:
        raise TaskError(f"process {pid} has ended meanwhile") from None
    return int(stat[stat.rindex(")") :].split()[2])


def _command(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().rstrip(b"\0").split(b"\0")
    except OSError:
        return []
