"""Workspaces for the controller: checks of new tasks, and preparation of their attempts."""

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Mapping
from functools import partial
from pathlib import Path
from posixpath import join, normpath
from typing import Any

import msgspec

from fireflyer.hai.home import Home
from fireflyer.hai.model import TaskSpec
from fireflyer.hai.workspaces.blob_store import BlobStore, Pruned
from fireflyer.hai.workspaces.containment import check_inside
from fireflyer.hai.workspaces.materialize import place_task
from fireflyer.hai.workspaces.venvs import Venvs

FOLDER = "workspace"
"""Folder with a task's own copy of its workspace, in the task's folder."""


class Paths(msgspec.Struct, frozen=True):
    """Paths of an attempt."""

    script: str
    cwd: str
    python: str
    """Interpreter of the ranks; empty: the platform's."""

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Returns the inherited environment, with the programs of the task's Python environment
        first in PATH."""
        if not self.python:
            return dict(inherited)
        bin = os.path.dirname(self.python)
        path = os.pathsep.join(filter(None, (bin, inherited.get("PATH", ""))))
        return {**inherited, "PATH": path, "VIRTUAL_ENV": os.path.dirname(bin)}


class Workspaces:
    """Workspaces and environments of a home."""

    def __init__(self, home: Home, in_use: Callable[[], Collection[TaskSpec]]) -> None:
        """`in_use`: returns the specs of all unfinished tasks."""
        self.store = BlobStore(home.path / "workspaces")
        self.venvs = Venvs(home.path / "venvs")
        self._tasks = home.tasks
        self._in_use = in_use

    def admit(self, spec: TaskSpec, user: str = "") -> None:
        """Rejects a task whose workspace or lock file is not stored, or whose workspace lacks the
        script.

        Raises:
            WorkspaceError: the workspace or the lock file is not stored.
            ConfigError: the workspace has no such script or folder.
        """
        if spec.venv:
            self.venvs.use(spec.venv)
        if spec.workspace:
            check_inside(spec, self.store.use(spec.workspace, user))

    async def prepare(self, task: str, spec: TaskSpec, log: Path, user: str = "") -> None:
        """Prepares the workspace and the environment of an attempt. May be cancelled at any point.

        Args:
            task: id of the task.
            spec: spec of the task.
            log: log of rank 0, to which the creation of an environment writes its output.
            user: owner of the task.

        Raises:
            FireflyerError: the workspace or the environment cannot be created.
        """
        if spec.workspace:
            folder = self._tasks / task / FOLDER
            place = partial(place_task, self.store, spec.workspace, user, folder)
            placing = asyncio.create_task(asyncio.to_thread(place))
            try:
                await asyncio.shield(placing)
            except asyncio.CancelledError:
                # A thread cannot be cancelled. The next attempt uses the copy that this thread
                # completes.
                await asyncio.wait({placing})
                raise
        if spec.venv:
            await self.venvs.make(spec.venv, log)

    def paths(self, task: str, spec: TaskSpec) -> Paths:
        """Returns the paths of the attempts of a task."""
        python = str(self.venvs.python(spec.venv)) if spec.venv else ""
        if not spec.workspace:
            return Paths(spec.script, spec.cwd, python)
        folder = str(self._tasks / task / FOLDER)
        return Paths(join(folder, spec.script), normpath(join(folder, spec.cwd)), python)

    def in_use(self) -> tuple[set[str], set[str]]:
        """Returns the ids of the workspaces and of the lock files that tasks still need."""
        specs = self._in_use()
        return {spec.workspace for spec in specs}, {spec.venv for spec in specs}

    def prune(self, before: float, keep: tuple[set[str], set[str]]) -> Pruned:
        """Removes workspaces and environments last used before this moment, except the ids in
        `keep`."""
        found = self.store.prune(before, keep[0])
        return msgspec.structs.replace(found, venvs=self.venvs.prune(before, keep[1]))


async def finish_unless(
    call: Coroutine[Any, Any, None],
    unwanted: Callable[[], bool],
    news: Callable[[], Coroutine[Any, Any, Any]],
) -> bool:
    """Runs a coroutine to its end, or cancels it once it is unwanted.

    Args:
        call: coroutine that may be cancelled at any point.
        unwanted: returns whether to cancel; called at the start and after every change.
        news: waits for the next change.

    Returns:
        True if the call has returned, False if it was cancelled.

    Raises:
        Exception: the error of the coroutine.
    """
    running = asyncio.create_task(call)
    try:
        while not (running.done() or unwanted()):
            waiting = asyncio.create_task(news())
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait({running})
    if running.cancelled():
        return False
    running.result()
    return True
