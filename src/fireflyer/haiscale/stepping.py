"""An optimizer's step, cut into one step a bucket.

Works for whatever updates each parameter from its own gradient and state: all of `torch.optim` but LBFGS.
"""

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fireflyer.errors import ConfigError

Settings = list[dict[str, Any]]
"""What each of the optimizer's groups said of learning rates and the like when `step()` was called."""


class SplitOptimizer:
    """Takes the place of `optimizer.step`.

    Args:
        optimizer: whose `step` is replaced until `release`.
        close: called by the script's `optimizer.step()`, once a step.
        settle: called before the optimizer's state is read or loaded.

    Raises:
        ConfigError: its step cannot be cut.
    """

    def __init__(
        self, optimizer: Optimizer, close: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS looks at all gradients at once: use it without optimizer=")
        self.optimizer = optimizer
        own = type(optimizer).step
        self._apply: Callable[[Optimizer], Any] = getattr(own, "__wrapped__", own)
        self._before = optimizer.__dict__.get("step")
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: settle()),
        ]

        @functools.wraps(getattr(optimizer.step, "__func__", own))  # schedulers leave marks on it
        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            close()
            self._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks
            return loss

        optimizer.step = MethodType(Optimizer.profile_hook_step(step), optimizer)  # type: ignore[method-assign]

    def settings(self) -> Settings:
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def apply(self, parameters: Iterable[nn.Parameter], settings: Settings) -> None:
        """Steps these parameters alone, from their gradients, as the settings say."""
        wanted = {id(p) for p in parameters}
        whole = self.optimizer.param_groups
        parts = [
            {**kept, "params": [p for p in group["params"] if id(p) in wanted]}
            for kept, group in zip(settings, whole, strict=False)
        ]
        self.optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            self._apply(self.optimizer)
        finally:
            self.optimizer.param_groups = whole

    def others(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """What the optimizer has besides these."""
        known = {id(p) for p in parameters}
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if id(p) not in known]

    def release(self) -> None:
        """The optimizer is as it was."""
        for hook in self._hooks:
            hook.remove()
        if self._before is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._before  # type: ignore[method-assign]
