"""Base of the integrations' callbacks: options, the manager, and leaving after a save."""

import os
from collections.abc import Callable

from fireflyer.checkpoint.handle import SaveHandle
from fireflyer.checkpoint.manager import CheckpointManager
from fireflyer.checkpoint.memory.manager_tier import InMemory
from fireflyer.checkpoint.retention import Keep
from fireflyer.storage import Storage


class ManagerCallback:
    """First base class of a callback that saves through `manager`."""

    def __init__(
        self,
        directory: str | os.PathLike[str] | Storage,
        every: str | int | None = "5min",
        keep: int | Keep | None = 3,
        *,
        memory: bool | InMemory = False,
        should_suspend: Callable[[], bool] | None = None,
        on_suspend: Callable[[], object] | None = None,
    ) -> None:
        """
        Args:
            directory, every, keep, memory, should_suspend: see CheckpointManager.
            on_suspend: called once the state is durable after a suspend, e.g.
                `fireflyer.hai.suspended`, which ends the process.
        """
        super().__init__()
        self.manager = CheckpointManager(
            directory, every=every, keep=keep, memory=memory, should_suspend=should_suspend
        )
        self._on_suspend = on_suspend

    def _leave_if_asked(self, handle: SaveHandle, stop: Callable[[], object]) -> None:
        """Waits for the save after a suspend, and calls `stop` and then `on_suspend`."""
        if self.manager.suspending:
            handle.wait()
            stop()
            if self._on_suspend is not None:
                self._on_suspend()
