"""Splits an optimizer's step into one step per bucket.

Only a *separable* optimizer is split: each parameter's update depends only on its own gradient and
state and its group's settings, and writes nothing else. All of `torch.optim` except LBFGS is
separable. Any other optimizer may combine gradients or count steps in ways that no test reveals in
time. Such an optimizer is split only if its attribute says that it is separable; otherwise it steps
all parameters at once.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fireflyer.errors import ConfigError
from fireflyer.haiscale.gradients import shared_memory, watched_state
from fireflyer.haiscale.reporting.times import Times
from fireflyer.log import get_logger
from fireflyer.torch_internals.core import pytree

Settings = list[dict[str, Any]]
"""Groups of the optimizer (learning rates, other settings, a list of parameters) at `step()`."""
_log = get_logger("haiscale")
_cut: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class PendingReduction(Protocol):
    """Reduction in flight for which pending parameters wait.

    Attributes:
        stepping: True if the script has called `optimizer.step()` since the reduction began.
    """

    stepping: bool

    @property
    def parameters(self) -> Collection[nn.Parameter]: ...

    def arrive(self) -> None: ...


def check_holds(optimizer: Optimizer, module: nn.Module) -> None:
    """Raises ConfigError if the optimizer holds none of the model's parameters."""
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
        optimizer: optimizer whose `step` is replaced until `release`.
        in_flight: returns the reductions in flight.
        settle: waits for all reductions; called before the optimizer's state is read or loaded.
        times: times to which steps are added.
        clears: returns True if a step sets the parameter's `grad` to None.

    Raises:
        ConfigError: the step cannot be split, or is already split for another model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        in_flight: Callable[[], Sequence[PendingReduction]],
        settle: Callable[[], None],
        times: Times,
        clears: Callable[[nn.Parameter], bool],
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
        self._in_flight, self._settle = in_flight, settle
        self._times, self._clears = times, clears
        self._settings: Settings = []
        own = type(optimizer).step
        self._apply: Callable[..., Any] = getattr(own, "__wrapped__", own)
        self._splits = is_separable(optimizer)
        self._whole_next = False
        self._applies = False
        shards = [p for p in self._parameters() if isinstance(p, DTensor)]
        self._shard_uses = max(map(shared_memory.uses, shards), default=0)
        self._told_shared = False
        if not self._splits:
            _log.warning(
                "optimizer.step() waits for all gradients, because %s is not of torch.optim: set its "
                "attribute separable = True if it updates each parameter from that parameter's own "
                "gradient and state",
                type(optimizer).__name__,
            )
        self._before = optimizer.__dict__.get("step")
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: settle()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: settle()),
        ]

        former = optimizer.step  # schedulers set attributes on it
        self._released = False

        @functools.wraps(getattr(former, "__func__", former))
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            if self._released:  # a scheduler that wrapped this function may still call it
                return self._apply(optimizer, closure)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._close()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers check this
            return loss

        self._step = MethodType(Optimizer.profile_hook_step(step), optimizer)
        optimizer.step = self._step  # type: ignore[method-assign]
        if self._splits:
            watched_state.watch(optimizer, lambda: None if self._applies else settle())

    def _close(self) -> None:
        """Implements the script's `optimizer.step()`: steps now, or marks what to step on arrival."""
        if any(one.stepping for one in self._in_flight()):
            self._settle()  # an earlier `step()` is not applied yet
        self._settings = self._copied_settings()
        later = self._later(self._in_flight())
        self.step(self._others(p for one in later for p in one.parameters))
        for one in later:
            one.stepping = True

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Steps only these parameters, from their gradients, with the settings of the last `step()`.

        Steps all parameters, with the present settings, if the step is not split.

        Raises:
            ConfigError: an optimizer with `separable = True` has changed a setting.
        """
        parameters = list(parameters)
        begun = self._times.clock()
        self._applies = True
        try:
            self._apply_settings(parameters, self._settings)
        finally:
            self._applies = False
        self._times.optimizer_s += self._times.clock() - begun
        for parameter in filter(self._clears, parameters):
            parameter.grad = None

    def _copied_settings(self) -> Settings:
        """Returns copies of the settings, including tensors, which a scheduler overwrites in place.

        The lists of parameters are also copied, because the script may change them after `step()`.
        """
        return [
            {
                name: list(value) if name == "params" else _copied(value)
                for name, value in group.items()
            }
            for group in self.optimizer.param_groups
        ]

    def _apply_settings(self, parameters: Iterable[nn.Parameter], settings: Settings) -> None:
        if self._whole_next:
            self._whole_next = False
            self._apply(self.optimizer)
            return
        wanted = {id(p) for p in parameters}
        whole = self.optimizer.param_groups
        parts = [
            {
                **{name: _copied(value) for name, value in kept.items() if name != "params"},
                "params": [p for p in kept["params"] if id(p) in wanted],
            }
            for kept in settings
        ]
        self.optimizer.param_groups = [part for part in parts if part["params"]]
        try:
            self._apply(self.optimizer)
        finally:
            self.optimizer.param_groups = whole
        if hasattr(self.optimizer, "separable"):
            for part, kept in zip(parts, settings, strict=False):
                self._check_unchanged(part, kept)

    def _check_unchanged(self, part: dict[str, Any], kept: dict[str, Any]) -> None:
        named = sorted(part.keys() - {"params"})
        changed = [name for name in named if not _equal(part[name], kept.get(name))]
        if changed:
            raise ConfigError(
                f"{type(self.optimizer).__name__} says separable = True, but its step changed "
                f"{changed[0]!r} of a group, which parameters share: remove the attribute"
            )

    def _others(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Returns the optimizer's parameters that are not among `parameters`."""
        known = {id(p) for p in parameters}
        return [p for p in self._parameters() if id(p) not in known]

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def held(self) -> set[int]:
        """Returns the ids of the optimizer's parameters."""
        return {id(p) for p in self._parameters()}

    def _later(self, away: Iterable[PendingReduction]) -> list[PendingReduction]:
        """Returns the reductions to step on arrival: the optimizer holds all their parameters.

        Some reductions are waited for at once: those with only some parameters in the optimizer,
        and those with a parameter that shares its memory with another name (`shared_memory`). If
        the step is not split, all are waited for. Reductions without a parameter in the optimizer
        are ignored.
        """
        if not self._splits:
            for one in away:
                one.arrive()
            self._whole_next = True
            return []
        held = self.held()
        wholly: list[PendingReduction] = []
        for one in away:
            inside = [id(p) in held for p in one.parameters]
            if all(inside) and not any(map(self._is_shared, one.parameters)):
                wholly.append(one)
            elif any(inside):
                one.arrive()
        return wholly

    def _is_shared(self, parameter: nn.Parameter) -> bool:
        alone = self._shard_uses if isinstance(parameter, DTensor) else shared_memory.ALONE
        shared = shared_memory.is_shared(parameter, alone)
        if shared and not self._told_shared:
            self._told_shared = True
            _log.info(
                "optimizer.step() waits for gradients of parameters whose memory the script holds by "
                "another name: a view, a state dict, an array, shared memory"
            )
        return shared

    def release(self) -> None:
        """Restores the optimizer's own `step`."""
        _cut.discard(self.optimizer)
        watched_state.end(self.optimizer)
        self._released = True
        for hook in self._hooks:
            hook.remove()
        if self.optimizer.__dict__.get("step") is not self._step:
            return
        if self._before is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self._before  # type: ignore[method-assign]


def is_separable(optimizer: Optimizer) -> bool:
    """Returns True if steps of single parameters, in any order, equal one step of all parameters.

    This holds for the classes of `torch.optim`, for their subclasses that add only a constructor,
    and for optimizers whose attribute `separable` is True.
    """
    kinds = type(optimizer).__mro__
    torchs = next(kind for kind in kinds if _is_torchs(kind))
    added = [value for kind in kinds[: kinds.index(torchs)] for value in vars(kind).items()]
    untouched = all(name == "__init__" or not _is_code(value) for name, value in added)
    separable: bool = getattr(optimizer, "separable", torchs is not Optimizer and untouched)
    return separable


def _is_torchs(code: Any) -> bool:
    module = getattr(code, "__module__", None)
    return f"{module}.".startswith("torch.optim.")


def _is_code(value: Any) -> bool:
    """Returns True if a class attribute is code of the class itself. Torch's wrapped `step`, which
    torch stores in the class, does not count."""
    if callable(value):
        return not _is_torchs(inspect.unwrap(value))
    return hasattr(value, "__get__")


def _equal(one: Any, other: Any) -> bool:
    some, others = pytree.tree_leaves(one), pytree.tree_leaves(other)
    return len(some) == len(others) and all(map(_same, some, others))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def _copied(setting: Any) -> Any:
    if isinstance(setting, torch.Tensor | tuple | list | dict):
        return pytree.tree_map_only(torch.Tensor, _copy, setting)
    return setting


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
