"""`hfai.checkpoint` for those who come from it: `init` once, then `model.try_save` after each step."""

import os
from collections.abc import Callable
from typing import Any

import torch

from fireflyer.checkpoint import rng
from fireflyer.checkpoint.face import CheckpointManager
from fireflyer.checkpoint.inmemory import InMemory
from fireflyer.checkpoint.retention import Keep
from fireflyer.errors import ConfigError
from fireflyer.storage import Storage


class _Saver:
    """What `model.try_save` is; holds the parts whose state it saves by name."""

    def __init__(
        self,
        manager: CheckpointManager,
        parts: dict[str, Any],
        on_suspend: Callable[[], object] | None,
    ) -> None:
        self._manager = manager
        self._parts = parts
        self._on_suspend = on_suspend
        self._calls = 0

    def load(self) -> tuple[int, int, Any]:
        """(epoch, step, others) of the newest good checkpoint, whose state the parts now have.

        Raises:
            ConfigError: if it was saved with other parts.
        """
        state = self._manager.load()
        saved = state["parts"]
        if set(saved) != set(self._parts):
            raise ConfigError(
                f"the checkpoint of {', '.join(sorted(saved))} cannot be loaded into "
                f"{', '.join(sorted(self._parts))}: give init the same arguments as then"
            )
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        own = self._manager.loaded_per_rank()
        if own is not None:
            rng.restore(own)
        self._calls = state["calls"]
        return state["epoch"], state["step"], state["others"]

    def __call__(self, epoch: int, step: int, others: Any = None, force: bool = False) -> bool:
        """Saves if a suspend was signalled on any rank, or if `force`; all ranks call it alike.

        It returns once the checkpoint is durable; after a suspend `on_suspend` is called then, on
        every rank.

        Args:
            epoch, step: what `init` shall return next time.
            others: any state that a checkpoint may hold, returned with them.
            force: save now in any case.

        Returns:
            whether it has saved.
        """
        self._calls += 1
        asked = self._manager.should_save(self._calls)
        if not (asked or force):
            return False
        state = {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "epoch": epoch,
            "step": step,
            "others": others,
            "calls": self._calls,
        }
        self._manager.save(self._calls, state, per_rank=rng.capture()).wait()
        if self._manager.suspending and self._on_suspend is not None:
            self._on_suspend()
        return True


def init(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any | None = None,
    amp_scaler: Any | None = None,
    ckpt_path: str | os.PathLike[str] | Storage = "checkpoints",
    *,
    keep: int | Keep | None = 3,
    memory: bool | InMemory = False,
    should_suspend: Callable[[], bool] | None = None,
    on_suspend: Callable[[], object] | None = None,
) -> tuple[int, int, Any]:
    """Loads the newest checkpoint into what it is given, and gives the model its `try_save`.

    Weights, optimizer, scheduler, scaler and, for each rank, the random number generators
    are saved and restored. All ranks call it, after `init_process_group`.

    Args:
        model, optimizer, scheduler, amp_scaler: anything with `state_dict` and `load_state_dict`.
        ckpt_path: a directory that all ranks see, an fsspec URL, or a storage.
        keep: how many of the newest checkpoints stay; None keeps all.
        memory: each save is held in the memory of two nodes, too, as CheckpointManager has it.
        should_suspend: `fireflyer.hai.suspend_requested`, or any callable that tells whether this
            rank was asked to leave. None: `try_save` saves only when forced to.
        on_suspend: called when the state is durable, e.g. `fireflyer.hai.suspended`, which ends
            the process.

    Returns:
        (start_epoch, start_step, others) of the last `try_save`; (0, 0, None) if there is none.

    Raises:
        CheckpointError: if there are checkpoints, and none is good.
        ConfigError: if the newest was saved with other arguments.
    """
    manager = CheckpointManager(ckpt_path, keep=keep, memory=memory, should_suspend=should_suspend)
    given = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "amp_scaler": amp_scaler,
    }
    parts = {name: part for name, part in given.items() if part is not None}
    saver = _Saver(manager, parts, on_suspend)
    start = (0, 0, None) if manager.latest() is None else saver.load()
    model.try_save = saver  # type: ignore[assignment]  # a method for this one model, as in hfai
    return start
