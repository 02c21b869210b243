"""Splits an optimizer's step into one step per bucket.

Works for every optimizer that updates each parameter from its own gradient and state: all of
`torch.optim` except LBFGS. An optimizer of another origin makes its first step at once, which shows
whether a step writes values that parameters share, such as a counter in a group. Then no step of it
is split.
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
from fireflyer.log import get_logger

Settings = list[dict[str, Any]]
"""Settings of the optimizer's groups (learning rates and others) at the time of `step()`."""
_log = get_logger("haiscale")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
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
        self._torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
        self._splits: bool | None = True if self._torchs else None  # None: no step has shown it yet
        self._whole_next = False
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
        """Steps only these parameters, from their gradients, with the given settings.

        Steps all parameters, with the present settings, if `later` has found that the step is not
        split. Parts of an earlier step stay parts.
        """
        if self._whole_next:
            self._whole_next = False
            self._apply_whole()
            return
        wanted = {id(p) for p in parameters}
        whole = self.optimizer.param_groups
        parts = [
            {
                **{name: _copied(value) for name, value in kept.items()},
                "params": [p for p in group["params"] if id(p) in wanted],
            }
            for kept, group in zip(settings, whole, strict=False)
        ]
        before = [] if self._torchs else [_marks(part) for part in parts]
        self.optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            self._apply(self.optimizer)
        finally:
            self.optimizer.param_groups = whole
        for part, marks, group in zip(parts, before, whole, strict=False):
            for name in [name for name, mark in _marks(part).items() if marks.get(name) != mark]:
                group[name] = part[name]
                self._end_splitting()

    def _apply_whole(self) -> None:
        before = self._shared()
        self._apply(self.optimizer)
        if self._splits is None and before == self._shared():
            self._splits = True
        elif self._splits is None:
            self._end_splitting()

    def _shared(self) -> list[dict[str, Any]]:
        """Returns marks of the values that the steps of all parameters share."""
        held = self.held()
        common = {
            str(key): value for key, value in self.optimizer.state.items() if id(key) not in held
        }
        apart = ("param_groups", "state", "step")
        own = {name: value for name, value in vars(self.optimizer).items() if name not in apart}
        return [_marks(values) for values in (*self.optimizer.param_groups, common, own)]

    def _end_splitting(self) -> None:
        if self._splits is not False:
            self._splits = False
            name = type(self.optimizer).__name__
            _log.warning(
                "a step of %s writes values that its parameters share: optimizer.step() waits for all "
                "gradients from now on",
                name,
            )

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
        one of which the optimizer holds none. It waits for all if the step is not split.
        """
        if not self._splits:
            for one in away:
                one.arrive()
            self._whole_next = True
            return []
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


def _marks(values: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns, by name, what differs if a value was changed: plain leaves, versions of tensors."""
    return {
        name: [_mark(leaf) for leaf in pytree.tree_leaves(value)]
        for name, value in values.items()
        if name != "params"
    }


def _mark(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return id(leaf), leaf._version
    return (type(leaf), repr(leaf)) if isinstance(leaf, _PLAIN) else id(leaf)


def _copied(setting: Any) -> Any:
    if isinstance(setting, torch.Tensor | tuple | list | dict):
        return pytree.tree_map_only(torch.Tensor, _copy, setting)
    return setting


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
