"""Port of the `hfai.checkpoint` interface: `init` once, then `model.try_save` after each step."""

import os
from collections.abc import Callable
from typing import Any

import torch

from fireflyer.checkpoint import rng
from fireflyer.checkpoint.integrations.origin import check_origin
from fireflyer.checkpoint.manager import CheckpointManager
from fireflyer.checkpoint.memory.manager_tier import InMemory
from fireflyer.checkpoint.retention import Keep
from fireflyer.checkpoint.state.plain_types import plain
from fireflyer.errors import ConfigError
from fireflyer.storage import Storage


class _Saver:
    """The function `model.try_save`; holds, by name, the parts whose state it saves."""

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
        """Loads the newest good checkpoint into the parts; returns (epoch, step, others).

        Raises:
            ConfigError: if the checkpoint was saved with other parts.
            CheckpointError: if there is no good checkpoint, or another integration saved it.
        """
        state = self._manager.load()
        check_origin(state, __name__)
        saved = state["parts"]
        if set(saved) != set(self._parts):
            raise ConfigError(
                f"cannot load the checkpoint of {', '.join(sorted(saved))} into "
                f"{', '.join(sorted(self._parts))}: pass init the same arguments as for the save"
            )
        for name, part in self._parts.items():
            part.load_state_dict(saved[name])
        own = self._manager.loaded_per_rank()
        if own is not None:
            rng.restore(own)
        self._calls = state["calls"]
        return state["epoch"], state["step"], state["others"]

    def __call__(self, epoch: int, step: int, others: Any = None, force: bool = False) -> bool:
        """Saves if any rank received a suspend, or if `force` is set; all ranks make equal calls.

        The call returns once the checkpoint is durable. After a suspend it also calls `on_suspend`
        on every rank before it returns.

        Args:
            epoch, step: values that `init` returns at the next start.
            others: any state that a checkpoint can hold; `init` returns it, too.
            force: save in any case.

        Returns:
            True if the call saved.
        """
        self._calls += 1
        asked = self._manager.should_save(self._calls)
        if not (asked or force):
            return False
        state = {
            "parts": {name: plain(part.state_dict()) for name, part in self._parts.items()},
            "epoch": epoch,
            "step": step,
            "others": plain(others),
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
    """Loads the newest checkpoint into the given objects, and adds `try_save` to the model.

    Saves and restores weights, optimizer, scheduler, scaler and each rank's random number
    generators. All ranks call this function, after `init_process_group`.

    Args:
        model, optimizer, scheduler, amp_scaler: objects with `state_dict` and `load_state_dict`.
        ckpt_path: a directory that all ranks share, an fsspec URL or a storage.
        keep: the number of newest checkpoints to keep, or a `Keep` with more rules; None keeps all.
        memory: hold each save also in the memory of two nodes; see CheckpointManager.
        should_suspend: `fireflyer.hai.suspend_requested`, or any callable that returns True if this
            rank is asked to leave. None: `try_save` saves only with `force`.
        on_suspend: called once the state is durable, e.g. `fireflyer.hai.suspended`, which ends the
            process.

    Returns:
        (start_epoch, start_step, others) as passed to the `try_save` that wrote the loaded
        checkpoint; (0, 0, None) if there is no checkpoint.

    Raises:
        CheckpointError: if there are checkpoints, but none is good or another integration saved the
            newest.
        ConfigError: if the newest checkpoint was saved with other arguments.
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
    model.try_save = saver  # type: ignore[assignment]  # a method of this one model, as in hfai
    return start
