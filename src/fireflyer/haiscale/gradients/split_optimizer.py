"""Splits an optimizer's step into one step per bucket.

Works for every optimizer that updates each parameter from its own gradient and state: all of
`torch.optim` except LBFGS.
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
"""Settings of the optimizer's groups (learning rates and others) at the time of `step()`."""
_cut: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class PendingReduction(Protocol):
    """A reduction in flight that pending parameters wait for."""

    @property
    def parameters(self) -> Collection[nn.Parameter]: ...

    def arrive(self) -> None: ...


AnyAway = TypeVar("AnyAway", bound=PendingReduction)


def check_holds(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises ConfigError for an optimizer of another model's parameters."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = list(module.named_parameters())
    if not any(id(p) in held for _, p in named):
        names = ", ".join(name for name, _ in named[:3]) + (", ..." if len(named) > 3 else "")
        raise ConfigError(
            f"optimizer= has none of this model's parameters ({names}): create it from them, "
            f"{type(optimizer).__name__}(model.parameters(), ...)"
        )


class SplitOptimizer:
    """Replacement for `optimizer.step`.

    Args:
        optimizer: its `step` is replaced until `release`.
        close: called once per step, by the script's `optimizer.step()`.
        settle: called before the optimizer's state is read or loaded.

    Raises:
        ConfigError: the step cannot be split, or is split already for another model.
    """

    def __init__(
        self, optimizer: Optimizer, close: Callable[[], None], settle: Callable[[], None]
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("LBFGS needs all gradients at once: use it without optimizer=")
        if optimizer in _cut:
            raise ConfigError(
                "optimizer= belongs to another wrapped model: wrap both in one nn.ModuleList, give each "
                "an optimizer of its own, or end the other with reducer.stop()"
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

        former = optimizer.step  # schedulers set attributes on it
        self._released = False

        @functools.wraps(getattr(former, "__func__", former))
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._released:  # called all the same if a scheduler has wrapped it
                return self._apply(optimizer, closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            close()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this
            return loss

        self._step = MethodType(Optimizer.profile_hook_step(step), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]

    def settings(self) -> Settings:
        """Returns copies, also of tensors, because a scheduler overwrites those in place."""
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]

    def apply(self, parameters: Iterable[nn.Parameter], settings: Settings) -> None:
        """Steps only these parameters, from their gradients, with the given settings."""
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
        """Returns the optimizer's other parameters."""
        known = {id(p) for p in parameters}
        groups = self.optimizer.param_groups
        return [p for group in groups for p in group["params"] if id(p) not in known]

    def held(self) -> set[int]:
        """Returns the ids of the optimizer's parameters."""
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def later(self, away: Iterable[AnyAway]) -> list[AnyAway]:
        """Returns reductions to step on arrival: the optimizer holds all their parameters.

        It waits here for a reduction of which the optimizer holds only some parameters. It ignores
        one of which the optimizer holds none.
        """
        held, wholly = self.held(), []
        for one in away:
            inside = [id(p) in held for p in one.parameters]
            if all(inside):
                wholly.append(one)
            elif any(inside):
                one.arrive()
        return wholly

    def release(self) -> None:
        """Restores the optimizer's own `step`."""
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
