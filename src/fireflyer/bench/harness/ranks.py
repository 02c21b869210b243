"""Shared engine of the collective benchmarks: ranks as processes, one clock, interleaved rounds.

The ranks are forked from a process with one thread and never outlive it. A `Session` is one rank's
context: our group, a gloo group that also synchronizes the ranks, and the clock. Wall time lasts
from the first rank's start to the last rank's end; all ranks use the machine's monotonic clock. CPU
time is the sum over all ranks and all their threads.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing import connection, get_context
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fireflyer.errors import ConfigError, FireflyerError

ROUND_S = 0.05  # target time per candidate and round; at least LEAST_CALLS calls run in any case
LEAST_CALLS = 2
MOST_CALLS = 5000
SETTLED_S = 0.2  # a first call longer than this predicts the next calls well enough
_PR_SET_PDEATHSIG = 1


class Timing(NamedTuple):
    """Microseconds per call."""

    wall: float
    cpu: float


Run = Callable[
    [int], Timing
]  # runs this many calls and times them; every rank gets the same numbers


def on_ranks(ranks: int, body: Callable[[int], Any]) -> Any:
    """Runs `body(rank)` in `ranks` forked processes and returns rank 0's result.

    Raises:
        ConfigError: a rank raised ConfigError, because the options cannot work on any rank.
        FireflyerError: a rank raised an error or died; the message names the first such rank. No
            process of a rank remains.
    """
    context = get_context("fork")
    sys.stdout.flush()
    sys.stderr.flush()
    processes, pipes = [], []
    try:
        for rank in range(ranks):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(body, rank, os.getpid(), send))
            process.start()
            send.close()
            processes.append(process)
            pipes.append(receive)
        result = _collect(pipes)
        for process in processes:
            process.join()
        return result
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _child(body: Callable[[int], Any], rank: int, parent: int, send: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also receives it, and ends the ranks
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    torch.set_num_threads(1)
    try:
        result = body(rank)
    except Exception as error:  # noqa: BLE001  # sent to the parent
        known = isinstance(error, ConfigError)
        send.send((False, error if known else f"rank {rank}: {type(error).__name__}: {error}"))
    else:
        send.send((True, result if rank == 0 else None))


def _collect(pipes: list[connection.Connection]) -> Any:
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    result = None
    while waiting:
        for pipe in connection.wait(list(waiting)):
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                raise FireflyerError(f"bench: rank {rank} died") from None
            if not good:
                raise value if isinstance(value, ConfigError) else FireflyerError(f"bench: {value}")
            if rank == 0:
                result = value
    return result


class Session:
    """One rank's groups and clock, as a context manager; entering and leaving are collective.

    Attributes:
        gloo: the peer's group; it also synchronizes the ranks, because its waits sleep.
        store: the ranks' store, for their addresses.
    """

    def __init__(self, store_path: str, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.store = dist.FileStore(store_path, ranks)
        dist.init_process_group("hfreduce", store=self.store, rank=rank, world_size=ranks)
        self.gloo: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._cores = sorted(os.sched_getaffinity(0))

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.barrier()
            dist.destroy_process_group()

    def barrier(self) -> None:
        dist.barrier(group=self.gloo)

    def total(self, number: int) -> int:
        """Returns the sum of all ranks' numbers, on every rank."""
        together = torch.tensor([number])
        dist.all_reduce(together, group=self.gloo)
        return int(together)

    def _spread(self) -> None:
        """Pins this thread to a core and then releases it.

        When a thread wakes another thread, the kernel often moves the woken thread to the same core.
        Two ranks that wake each other in turn then share that core. Without this method each
        candidate would inherit the placement of the previous candidate.
        """
        os.sched_setaffinity(0, {self._cores[self.rank % len(self._cores)]})
        os.sched_setaffinity(0, self._cores)

    def time(
        self, call: Callable[[], object], calls: int, first: Callable[[], object] | None = None
    ) -> Timing:
        """Times `calls` calls on every rank.

        The ranks start together, on separate cores if there are enough.

        Args:
            first: called once before the calls, not timed.
        """
        self.barrier()
        self._spread()
        if first is not None:
            first()
        begin, cpu = time.monotonic(), time.process_time()
        for _ in range(calls):
            call()
        end, cpu = time.monotonic(), time.process_time() - cpu
        bounds = torch.tensor([-begin, end], dtype=torch.float64)
        together = torch.tensor([cpu], dtype=torch.float64)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self.gloo)
        dist.all_reduce(together, group=self.gloo)
        return Timing(float(bounds.sum()) / calls * 1e6, float(together) / calls * 1e6)


def interleave(
    candidates: Mapping[str, Run], rounds: int, least: int = LEAST_CALLS
) -> dict[str, list[Timing]]:
    """Runs every candidate once per round, in order, with enough calls to last about ROUND_S.

    Work before the first round (mapping memory, opening connections) is not counted.
    """
    calls = {}
    for name, run in candidates.items():
        first = run(1)
        if first.wall < SETTLED_S * 1e6:
            first = run(1)
        calls[name] = max(least, min(MOST_CALLS, int(ROUND_S * 1e6 / max(first.wall, 1.0))))
    timings: dict[str, list[Timing]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            timings[name].append(run(calls[name]))
    return timings


def reason_against(call: Callable[[], object]) -> str | None:
    """Makes a call and returns the error text with which the library rejects it, or None. Every rank
    calls this."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0][:120]
    return None
