"""Lightning saves and resumes through a CheckpointManager: `callbacks=[FireflyerCheckpoint(...)]`."""

import os
from collections.abc import Callable
from typing import Any

from fireflyer.checkpoint import rng
from fireflyer.checkpoint.face import CheckpointManager
from fireflyer.checkpoint.inmemory import InMemory
from fireflyer.checkpoint.plain import numbers, plain
from fireflyer.checkpoint.retention import Keep
from fireflyer.errors import ConfigError
from fireflyer.storage import Storage

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.plugins.io import CheckpointIO
except ImportError as error:
    raise ConfigError(
        "fireflyer.checkpoint.lightning needs the package lightning: pip install 'lightning>=2.6'"
    ) from error

_NEWEST = "fireflyer:newest"


class FireflyerCheckpoint(Checkpoint):  # type: ignore[misc]  # untyped here
    """Saves what Lightning's own checkpoints hold, and each rank's random number generators, without waiting
    for the storage.

    Saves come after an optimizer step; one that is due at an epoch's last batch comes after its
    validation. The last step of a fit is always saved. On all ranks, as Lightning's hooks do. With
    `should_suspend`, training stops after the save, once it is durable.
    """

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
            directory, every, keep, memory, should_suspend: as CheckpointManager has them.
            on_suspend: called when the state is durable after a suspend, e.g.
                `fireflyer.hai.suspended`, which ends the process.
        """
        super().__init__()
        self.manager = CheckpointManager(
            directory, every=every, keep=keep, memory=memory, should_suspend=should_suspend
        )
        self._on_suspend = on_suspend
        self._looked_at = self._held = -1
        self._due = self._stops = False
        self._mid_epoch = False
        self._rng: dict[str, Any] | None = None

    @property
    def newest(self) -> str | None:
        """For `trainer.fit(ckpt_path=)`: the newest good checkpoint; None, to start anew, without one."""
        return None if self.manager.latest() is None else _NEWEST

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes `newest` known as a path to load from."""
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, _ManagerIO):
            trainer.strategy.checkpoint_io = _ManagerIO(io, self._load)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Ahead of the data loaders' iterators, which draw their order at an epoch's start ...
        if self._rng is not None:
            rng.restore(self._rng)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # ... and again after them in the middle of one, where they did so long ago.
        if self._rng is not None and self._mid_epoch:
            rng.restore(self._rng)
        self._rng = None
        self._stops = False
        self._looked_at = self._held = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._looked_at:
            return  # gradients are being accumulated, which no checkpoint holds
        self._looked_at = trainer.global_step
        # The epoch that a fit breaks off counts as over for Lightning afterwards: so save within it.
        stops = trainer.global_step == trainer.max_steps or (
            trainer.should_stop and not self._stops
        )
        self._stops = trainer.should_stop
        self._due = self.manager.should_save(trainer.global_step) or stops
        if self._due and not trainer.is_last_batch:
            self._save(trainer, mid_epoch=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._due:
            self._save(trainer, mid_epoch=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._held:
            self._save(trainer, mid_epoch=False)
        self.manager.wait()

    def _save(self, trainer: Trainer, mid_epoch: bool) -> None:
        self._due, self._held = False, trainer.global_step
        # Lightning has no public way to a checkpoint on every rank: save_checkpoint hands it to rank 0.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        state = {"lightning": plain(checkpoint), "mid_epoch": mid_epoch}
        handle = self.manager.save(
            trainer.global_step,
            state,
            per_rank=rng.capture(),
            metrics=numbers(trainer.callback_metrics),
        )
        if self.manager.suspending:
            handle.wait()
            trainer.should_stop = True
            if self._on_suspend is not None:
                self._on_suspend()

    def _load(self) -> dict[str, Any]:
        state = self.manager.load()
        self._rng, self._mid_epoch = self.manager.loaded_per_rank(), state["mid_epoch"]
        checkpoint: dict[str, Any] = state["lightning"]
        return checkpoint


class _ManagerIO(CheckpointIO):  # type: ignore[misc]  # untyped here
    """Another CheckpointIO that knows one path more."""

    def __init__(self, inner: CheckpointIO, load: Callable[[], dict[str, Any]]) -> None:
        self._inner = inner
        self._load = load

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        self._inner.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if path == _NEWEST:
            return self._load()
        loaded: dict[str, Any] = self._inner.load_checkpoint(path, map_location, weights_only)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        self._inner.remove_checkpoint(path)

    def teardown(self) -> None:
        self._inner.teardown()
