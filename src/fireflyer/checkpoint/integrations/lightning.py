"""Lightning integration: `callbacks=[FireflyerCheckpoint(...)]` saves and resumes."""

from collections.abc import Callable
from typing import Any

from fireflyer.checkpoint import rng
from fireflyer.checkpoint.integrations.manager_callback import ManagerCallback
from fireflyer.checkpoint.integrations.origin import check_origin
from fireflyer.checkpoint.state.plain_types import numbers, plain
from fireflyer.errors import ConfigError

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
    from lightning.pytorch.plugins.io import CheckpointIO
except ImportError as error:
    raise ConfigError(
        "fireflyer.checkpoint.integrations.lightning needs the package lightning: "
        "pip install 'lightning>=2.6'"
    ) from error

_NEWEST = "fireflyer:newest"


class FireflyerCheckpoint(ManagerCallback, Checkpoint):  # type: ignore[misc]  # untyped here
    """Saves the contents of Lightning's own checkpoints and each rank's random number generators.

    Training does not wait for the storage. Saves follow an optimizer step. A save that is due at an
    epoch's last batch follows the epoch's validation. The last step of a fit is always saved. All
    ranks take part, as in Lightning's hooks. With `should_suspend`, training stops once the save is
    durable.
    """

    _checked_step = _held = -1
    _due = _stops = _mid_epoch = False
    _rng: dict[str, Any] | None = None

    @property
    def newest(self) -> str | None:
        """Newest good checkpoint for `trainer.fit(ckpt_path=)`. None if there is no checkpoint;
        with None, training starts anew."""
        return None if self.manager.latest() is None else _NEWEST

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Registers `newest` as a path from which Lightning can load."""
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, _ManagerIO):
            trainer.strategy.checkpoint_io = _ManagerIO(io, self._load)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Restored before Lightning makes the data loaders' iterators, because these draw the order
        # of the epoch's samples from the generators.
        if self._rng is not None:
            rng.restore(self._rng)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The data loaders' iterators exist now and have drawn the order of the epoch's samples. A
        # save within an epoch holds the generators' states after that draw, so the states are
        # restored again.
        if self._rng is not None and self._mid_epoch:
            rng.restore(self._rng)
        self._rng = None
        self._stops = False
        self._checked_step = self._held = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._checked_step:
            return  # gradients are being accumulated, and no checkpoint holds these
        self._checked_step = trainer.global_step
        # After a fit stops within an epoch, Lightning counts that epoch as finished, so the state is
        # saved before the stop.
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
        # Lightning has no public method that returns the checkpoint on every rank: save_checkpoint
        # writes it on rank 0 only.
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        state = {"lightning": plain(checkpoint), "mid_epoch": mid_epoch}
        handle = self.manager.save(
            trainer.global_step,
            state,
            per_rank=rng.capture(),
            metrics=numbers(trainer.callback_metrics),
        )
        self._leave_if_asked(handle, lambda: setattr(trainer, "should_stop", True))

    def _load(self) -> dict[str, Any]:
        state = self.manager.load()
        check_origin(state, __name__)
        self._rng, self._mid_epoch = self.manager.loaded_per_rank(), state["mid_epoch"]
        checkpoint: dict[str, Any] = state["lightning"]
        return checkpoint


class _ManagerIO(CheckpointIO):  # type: ignore[misc]  # untyped here
    """Wrapper of a CheckpointIO that can also load from the path of the newest checkpoint."""

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
