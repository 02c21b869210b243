"""Interface between a rank and the platform.

Outside a task every function returns a default or has no effect, so a script runs unchanged under
`python` and `torchrun`.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from fireflyer import heartbeat as beats
from fireflyer._native.hai import SuspendPage
from fireflyer.errors import StorageError, TaskError


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task of which this process is a rank."""

    id: str
    """For example "t17"; empty outside a task."""
    attempt: int
    """Attempt number, from 1; 0 outside a task."""
    rank: int
    world_size: int
    local_rank: int
    """Index of the rank on its node."""
    local_world_size: int
    node: str
    incarnation: int
    """0: one of the attempt's first ranks; n: the n-th newcomer in this rank's place (elastic
    tasks)."""
    directory: Path
    """The task's directory, with a folder per attempt and `output`. Outside a task: the working
    directory."""
    output: Path
    """Folder shared by all attempts and ranks. Outside a task: the working directory."""


def task() -> Task:
    """Returns this process's task; rank and world size are also set under torchrun."""
    environment = os.environ
    directory = environment.get("FIREFLYER_TASK_DIR")
    return Task(
        id=environment.get("FIREFLYER_TASK", ""),
        attempt=int(environment.get("FIREFLYER_ATTEMPT", "0")),
        rank=int(environment.get("RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", "1")),
        node=environment.get("FIREFLYER_NODE", ""),
        incarnation=int(environment.get("FIREFLYER_INCARNATION", "0")),
        directory=Path(directory) if directory else Path.cwd(),
        output=Path(directory, "output") if directory else Path.cwd(),
    )


class _Slot:
    """This rank's slot in the suspend page, mapped at the first use."""

    def __init__(self) -> None:
        self._page: SuspendPage | None = None
        self._index = 0
        self.call: Callable[[], bool] = self._first_call

    def page(self) -> SuspendPage | None:
        control = os.environ.get("FIREFLYER_CONTROL")
        if self._page is None and control:
            index, _, path = control.partition(":")
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._page = SuspendPage.map(descriptor)
                finally:
                    os.close(descriptor)
            except (OSError, StorageError) as error:
                raise TaskError(
                    f"the suspend page {control!r} of FIREFLYER_CONTROL cannot be opened ({error}): "
                    "this process is not a rank of a running task; unset the variable to run outside a task"
                ) from error
            self._index = int(index)
        return self._page

    def _first_call(self) -> bool:
        page = self.page()
        mine = beats.writer()
        index = self._index
        if page is None:
            self.call = lambda: False
        elif mine is None:
            self.call = lambda: page.call(index)
        else:
            beat = mine.beat

            def call() -> bool:
                beat()
                return page.call(index)

            self.call = call
        return self.call()

    def acknowledge(self) -> None:
        page = self.page()
        if page is not None:
            page.acknowledge(self._index)

    def set_apart(self) -> None:
        page = self.page()
        if page is not None:
            page.set_apart(self._index)

    def join(self) -> None:
        page = self.page()
        if page is None or "FIREFLYER_NEWS" not in os.environ or page.joined(self._index):
            return
        page.join(self._index)
        # If the supervisor is gone, this process is killed anyway.
        with contextlib.suppress(OSError):
            pipe = os.open(os.environ["FIREFLYER_NEWS"], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(pipe, b"j")
            finally:
                os.close(pipe)

    def begin(self, count: int) -> None:
        page = self.page()
        if page is not None:
            page.begin(self._index, count)


_slot = _Slot()


def joined() -> None:
    """Marks this rank a member of its elastic attempt, and reports a newcomer to the supervisor.

    Raises:
        TaskError: as `suspend_requested`.
    """
    _slot.join()


def between() -> None:
    """Marks that the members are forming a new group, each at its own point of a step.
    `suspend_requested()` returns False from now on, until `begun` sets the rank's step.

    Raises:
        TaskError: as `suspend_requested`.
    """
    _slot.set_apart()


_GENERATIONS, _STEPS, _CALLS = 1 << 16, 1 << 28, 1 << 18


def begun(generation: int, steps: int) -> None:
    """Begins a step of an elastic task, on all members of the generation. Until the next step,
    calls of `suspend_requested()` are numbered by (generation, steps, call within the step).

    Args:
        generation: generation of the membership, below 2**16.
        steps: number of steps begun in this generation, from 1, below 2**28.

    Raises:
        TaskError: as `suspend_requested`.
    """
    count = min(generation, _GENERATIONS - 1) * _STEPS + min(steps, _STEPS - 1)
    _slot.begin(count * _CALLS)


def suspend_requested() -> bool:
    """Returns whether to save and exit now; call this function once a step, on every rank.

    The n-th call returns the same on every rank of the task, so all ranks may act on it together.
    In an elastic task (`elastic`), the n-th call of a step returns the same on every rank. A call
    waits some milliseconds while the ranks agree on a suspend; otherwise it never blocks. Returns
    False outside a task.

    Raises:
        TaskError: the environment names a task, but this process is not a rank of the task.
    """
    return _slot.call()


def heartbeat(
    step: int | None = None, *, busy_s: float | None = None, loss: float | None = None
) -> None:
    """Tells the platform that this rank makes progress; call this function once a step. Outside a
    task it has no effect.

    A call costs a few microseconds and no system call. Calls of `suspend_requested()` and of
    `should_save` of a `CheckpointManager` are heartbeats too.

    Args:
        step: the step that begins now. The platform detects stragglers by the times of steps.
        busy_s: seconds that this rank itself worked in the previous step, without waiting for other
            ranks. Ranks that wait for each other in every step all take the same wall time, so
            without `busy_s` a straggler among them is not detected.
        loss: loss of the previous step, as a number; the dashboard draws the loss of rank 0.
            Reading the loss from a GPU waits for the GPU, so pass it only every few steps.
    """
    beats.beat(step, busy_s, loss)


def saved(step: int) -> None:
    """Tells the platform that the state up to `step` is durable. A `CheckpointManager` calls this
    function itself. Work after the last save counts as lost if a fault occurs
    (docs/operate/hai-ledger.md)."""
    beats.saved(step)


def suspended() -> NoReturn:
    """Tells the platform that this rank has saved its state, and ends the process with status 0.

    Raises:
        SystemExit: always; exit handlers and `finally` blocks run.
        TaskError: outside the main thread, which alone can end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise TaskError(
            "suspended() was called outside the main thread; call it in the main thread of the rank"
        )
    _slot.acknowledge()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(0)
