"""What several parts' tests share: gangs of ranks forked from this process."""

import contextlib
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# Forked children hang in torch's thread pool if the parent ever used one.
os.environ["OMP_NUM_THREADS"] = "1"

# What this machine's kernel says is no part of a test.
os.environ["FIREFLYER_KERNEL_LOG"] = "off"

# A shell's background jobs ignore it, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DEADLINE_S = 90.0


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """What a test runs in this process may send the log to its standard error; the next test has another."""
    log = logging.getLogger("fireflyer")
    handlers, level = log.handlers[:], log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)


def leave_group(result: object) -> None:
    """A rank that has done its part says goodbye: a process that merely ends has died."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or isinstance(result, BaseException) or not distributed.is_initialized():
        return
    distributed.destroy_process_group()


def fork_child(body: Callable[[], None]) -> int:
    """Runs `body` in a forked child, which exits 1 where it raises; returns the child's number."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:  # noqa: BLE001  # the parent asserts on the status
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def die_at_call(names: Sequence[str], call: int) -> None:
    """From now on this process kills itself at its `call`-th call of these (in `os`); a write is halved."""
    count = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call:
                if name in ("write", "pwrite"):
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return called

    for name in names:
        setattr(os, name, wrap(name, getattr(os, name)))


class Gang:
    """Forked ranks, each running `body(rank, world)`; the result or the exception comes back by a pipe."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self._pipes: list[int] = []

    def start(self, body: Callable[[int, int], Any], world: int, nodes: int) -> None:
        for rank in range(world):
            read, write = os.pipe()
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.environ.update(
                        RANK=str(rank),
                        WORLD_SIZE=str(world),
                        MASTER_ADDR="127.0.0.1",
                        FIREFLYER_NODE=f"n{rank * nodes // world}",
                    )
                    try:
                        result: Any = body(rank, world)
                    except BaseException as error:  # noqa: BLE001  # carried to the parent
                        traceback.print_exc()
                        result = error
                    leave_group(result)
                    with os.fdopen(write, "wb") as pipe:
                        pickle.dump(result, pipe)
                    status = 0
                finally:
                    os._exit(status)
            os.close(write)
            self.pids.append(pid)
            self._pipes.append(read)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def result(self, rank: int, limit_s: float = DEADLINE_S) -> Any:
        """What the rank returned, the exception it ended with, or None if it was killed."""
        data = b""
        deadline = time.monotonic() + limit_s
        while True:
            ready, _, _ = select.select([self._pipes[rank]], [], [], deadline - time.monotonic())
            if not ready:
                raise TimeoutError(f"rank {rank} did not end within {limit_s:.0f} s")
            if not (more := os.read(self._pipes[rank], 1 << 16)):
                return pickle.loads(data) if data else None
            data += more

    def results(self, limit_s: float = DEADLINE_S) -> list[Any]:
        """Every rank's result; the first exception among them is raised."""
        results = [self.result(rank, limit_s) for rank in range(len(self.pids))]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes:
            os.close(pipe)
        self.pids.clear()
        self._pipes.clear()


StartGang = Callable[..., Gang]


@pytest.fixture
def start_gang() -> Iterator[StartGang]:
    """start_gang(body, world, nodes=1): ranks spread over `nodes` virtual nodes; killed at the end."""
    gangs: list[Gang] = []

    def start(body: Callable[[int, int], Any], world: int, nodes: int = 1) -> Gang:
        gang = Gang()
        gangs.append(gang)
        gang.start(body, world, nodes)
        return gang

    yield start
    for gang in gangs:
        gang.close()


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    """A path for one torch FileStore."""
    return str(tmp_path / "store")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
