"""An optimizer's step, cut into one step a bucket.

Works for whatever updates each parameter from its own gradient and state: all of `torch.optim` but LBFGS.
"""

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from types import MethodType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fireflyer.errors import ConfigError

Settings = list[dict[str, Any]]
"""What each of the optimizer's groups said of learning rates and the like when `step()` was called."""
_cut: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Away(Protocol):
    """A reduction that pending parameters wait for."""

    @property
    def parameters(self) -> Collection[nn.Parameter]: ...

    def arrive(self) -> None: ...


AnyAway = TypeVar("AnyAway", bound=Away)


def check_holds(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises ConfigError for an optimizer of another model's parameters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = list(module.named_parameters())
    if not any(id(p) in held for _, p in named):
        names = ", ".join(name for name, _ in named[:3]) + (", ..." if len(named) > 3 else "")
        raise ConfigError(
            f"optimizer= has none of this model's parameters ({names}): make it of them, "
            f"{type(optimizer).__name__}(model.parameters(), ...)"
        )


class SplitOptimizer:
    """Takes the place of `optimizer.step`.

    Args:
        optimizer: whose `step` is replaced until `release`.
        close: called by the script's `optimizer.step()`, once a step.
        settle: called before the optimizer's state is read or loaded.

    Raises:
        ConfigError: its step cannot be cut, or is cut already, for another model.
    """

    def __init__(
        self, optimizer: Optimizer, close: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS looks at all gradients at once: use it without optimizer=")
        if optimizer in _cut:
            raise ConfigError(
                "optimizer= is that of another wrapped model: wrap both in one nn.ModuleList, give each "
                "an optimizer of its own, or end the other by reducer.stop()"
            )
        _cut.add(optimizer)
        self.optimizer = optimizer
        own = type(optimizer).step
        self._apply: Callable[..., Any] = getattr(own, "__wrapped__", own)
        self._before = optimizer.__dict__.get("step")
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: settle()),
        ]

        former = optimizer.step  # schedulers leave marks on it
        self._released = False

        @functools.wraps(getattr(former, "__func__", former))
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._released:  # and yet called: a scheduler has wrapped it
                return self._apply(optimizer, closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            close()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler asks
            return loss

        self._step = MethodType(Optimizer.profile_hook_step(step), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]

    def settings(self) -> Settings:
        """Copies, of tensors too: a scheduler fills those anew."""
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
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

    def held(self) -> set[int]:
        """The ids of the optimizer's parameters."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def later(self, away: Iterable[AnyAway]) -> list[AnyAway]:
        """Those that the optimizer steps when they have arrived: it has all their parameters. What has only
        some of them for it arrives here; what has none is not its business."""
        held, wholly = self.held(), []
        for one in away:
            inside = [id(p) in held for p in one.parameters]
            if all(inside):
                wholly.append(one)
            elif any(inside):
                one.arrive()
        return wholly

    def release(self) -> None:
        """The optimizer is as it was."""
        _cut.discard(self.optimizer)
        self._released = True
        for hook in self._hooks:
            hook.remove()
        if self.optimizer.__dict__.get("step") is not self._step:
            return
        if self._before is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._before  # type: ignore[method-assign]


def _copied(setting: Any) -> Any:
    if isinstance(setting, torch.Tensor | tuple | list | dict):
        return pytree.tree_map_only(torch.Tensor, _copy, setting)
    return setting


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
