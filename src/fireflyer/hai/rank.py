"""What a rank sees of the platform.

Outside a task everything has its plain meaning, so a script runs unchanged by `python` and `torchrun`.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from fireflyer import pulse
from fireflyer._native.hai import SuspendPage
from fireflyer.errors import StorageError, TaskError


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The task this process is a rank of."""

    id: str
    """E.g. "t17"; empty outside a task."""
    attempt: int
    """From 1; 0 outside a task."""
    rank: int
    world_size: int
    local_rank: int
    """Index of the rank on its node."""
    local_world_size: int
    node: str
    incarnation: int
    """0: one of the attempt's first ranks; n: the n-th newcomer in its place (elastic tasks)."""
    directory: Path
    """Of the task: a folder an attempt, and `output`. The working directory outside a task."""
    output: Path
    """The same folder for all attempts and ranks. The working directory outside a task."""


def task() -> Task:
    """Who this process is; the rank and world size also under torchrun."""
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
    """This rank's place in the suspend page, mapped at the first question."""

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
                    "this process is no rank of a running task; unset it to run outside"
                ) from error
            self._index = int(index)
        return self._page

    def _first_call(self) -> bool:
        page = self.page()
        mine = pulse.writer()
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
        with contextlib.suppress(OSError):  # without a supervisor this process ends, too
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
    """This rank is a member of its elastic attempt: tells the supervisor of a newcomer.

    Raises:
        TaskError: as `suspend_requested`.
    """
    _slot.join()


def between() -> None:
    """Members form anew, each at its own place of a step: from now on `suspend_requested()` is False, until
    `begun` says in which step the rank is.

    Raises:
        TaskError: as `suspend_requested`.
    """
    _slot.set_apart()


_GENERATIONS, _STEPS, _CALLS = 1 << 16, 1 << 28, 1 << 18


def begun(generation: int, steps: int) -> None:
    """A step of an elastic task begins, on all members of the generation: the calls of `suspend_requested()`
    from here to the next step are numbered by (generation, steps, which call of the step).

    Args:
        generation: of the membership, below 2**16.
        steps: that have begun in this generation, from 1, below 2**28.

    Raises:
        TaskError: as `suspend_requested`.
    """
    count = min(generation, _GENERATIONS - 1) * _STEPS + min(steps, _STEPS - 1)
    _slot.begin(count * _CALLS)


def suspend_requested() -> bool:
    """Whether to save and leave now; ask once a step, on every rank.

    The n-th call returns the same on every rank of the task, so all may act on it together; in an elastic
    task (`elastic`), the n-th of a step. While a
    suspend is being agreed on a call waits some milliseconds; otherwise it never blocks. False outside
    a task.

    Raises:
        TaskError: if the environment names a task that this process is not a rank of.
    """
    return _slot.call()


def heartbeat(step: int | None = None, *, busy_s: float | None = None) -> None:
    """Tells the platform that this rank makes progress; call it once a step. Outside a task it does nothing.

    It costs a few microseconds and no system call. A question of `suspend_requested()` and one of a
    `CheckpointManager` (`should_save`) are heartbeats too.

    Args:
        step: the step that begins now. Steps and their times are what stragglers are found by.
        busy_s: seconds that this rank itself worked for the step before, without what it waited for others.
            Ranks that wait for each other in every step all take the same time by the clock: without `busy_s`
            no straggler is seen among them.
    """
    pulse.beat(step, busy_s)


def saved(step: int) -> None:
    """Tells the platform that the state up to `step` is durable, for who saves without a `CheckpointManager`:
    work after the last save counts as lost when a fault comes (docs/hai-ledger.md)."""
    pulse.saved(step)


def suspended() -> NoReturn:
    """Tells the platform that this rank has saved its state, and ends the process with status 0.

    Raises:
        SystemExit: always; exit handlers and `finally` blocks run.
        TaskError: outside the main thread, which alone can end the process.
    """
    if threading.current_thread() is not threading.main_thread():
        raise TaskError(
            "suspended() was called in a thread; call it in the main thread of the rank"
        )
    _slot.acknowledge()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(0)
