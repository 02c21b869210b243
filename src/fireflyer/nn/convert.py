"""Replacement of torch's operators in a model or in torch.nn.functional, and its reversal."""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from fireflyer.errors import ConfigError
from fireflyer.nn import functional, modules
from fireflyer.nn.memory import Saved, saved

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Replaced:
    """Report of a replacement.

    Attributes:
        counts: number of replaced modules by class.
        left: names of modules that were not replaced, because they override `forward`.
        lazy: names of modules that were not replaced, because they have seen no input yet.
        before: bytes kept for backward by torch's modules; None without example inputs.
        after: bytes kept for backward by our modules; None without example inputs.
    """

    counts: Counter[str]
    left: tuple[str, ...]
    lazy: tuple[str, ...] = ()
    before: Saved | None = None
    after: Saved | None = None

    def __str__(self) -> str:
        count = ", ".join(f"{number} {name}" for name, number in sorted(self.counts.items()))
        lines = [f"to_hfai: replaced {count or 'nothing'}"]
        lines += [f"to_hfai: not replaced, it overrides forward: {name}" for name in self.left]
        lines += [f"to_hfai: not replaced, it has seen no input yet: {name}" for name in self.lazy]
        if self.before and self.after:
            was, now = self.before.bytes, self.after.bytes
            share = f" ({now / was:.2f}x)" if was else ""
            lines.append(f"to_hfai: kept for backward: {_size(was)} before, {_size(now)}{share}")
            for name, size in sorted(self.before.modules.items(), key=lambda pair: -pair[1])[:10]:
                rest = self.after.modules.get(name, 0)
                lines.append(f"  {name or '(model)'}: {_size(size)}, {_size(rest)}")
        return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def to_hfai(
    model: M,
    verbose: bool = False,
    *,
    strict: bool = False,
    recompute_linear: bool = False,
    example: Sequence[object] = (),
) -> M:
    """Replaces torch's modules in `model`, in place, by our modules; `to_torch` undoes this.

    Parameters, buffers, hooks and the state dict do not change. Modules that override `forward` are
    not replaced.

    Args:
        verbose: print the replaced modules and those not replaced on stderr; with `example`, also
            the bytes that a forward keeps, before and after, by module.
        strict: raise where an operator would fall back to torch's operator.
        recompute_linear: do not keep the outputs of linear layers for the activations after them;
            backward computes these products again.
        example: inputs of the model, for two forward passes whose results are dropped.

    Returns:
        The model itself.
    """
    before = saved(model, *example) if verbose and example else None
    counts: Counter[str] = Counter()
    left, lazy = [], []
    for name, module in model.named_modules():
        if modules.is_ours(module):
            continue
        if "forward" in vars(module) and modules.counterpart(module) is not None:
            left.append(f"{name} ({type(module).__name__})")
        elif (ours := modules.counterpart(module)) is not None:
            counts[type(module).__name__] += 1
            module.__class__ = ours
            module.__dict__.update(zip(modules.MARKS, (strict, recompute_linear), strict=True))
        elif modules.uninitialized(module):
            lazy.append(f"{name} ({type(module).__name__})")
        elif modules.overrides(module):
            left.append(f"{name} ({type(module).__name__})")
    if verbose:
        after = saved(model, *example) if example else None
        print(Replaced(counts, tuple(left), tuple(lazy), before, after), file=sys.stderr)  # noqa: T201
    return model


def to_torch(model: M) -> M:
    """Undoes `to_hfai`, in place; returns the model.

    Raises:
        ConfigError: a module's class has changed since `to_hfai`, for example by torch's
            `fully_shard`.
    """
    for name, module in model.named_modules():
        if modules.is_ours(module):
            module.__class__ = modules.original(module)
            for mark in modules.MARKS:
                module.__dict__.pop(mark, None)
        elif modules.MARKS[0] in module.__dict__:
            raise ConfigError(
                f"{name}: its class became {type(module).__name__} after to_hfai: undo that first"
            )
    return model


NAMES = (
    *("conv1d", "conv2d", "conv3d", "dropout", "gelu", "layer_norm", "leaky_relu", "linear"),
    *("linear_cross_entropy", "max_pool2d", "relu", "relu6", "rms_norm", "silu"),
)
"""Functions of torch.nn.functional that `set_replace_torch` replaces."""

_STRICT_NAMES = {
    *("dropout", "leaky_relu", "linear_cross_entropy", "max_pool2d", "relu", "relu6", "rms_norm")
}
_theirs: dict[str, object] = {}


class Replacement:
    """Replacement that `set_replace_torch` made; a context that undoes the replacement at its
    end."""

    def __enter__(self) -> "Replacement":
        return self

    def __exit__(self, *_: object) -> None:
        set_replace_torch(False)


def set_replace_torch(replace: bool = True, *, strict: bool = False) -> Replacement:
    """Replaces functions of torch.nn.functional by our functions for the whole process.

    Two kinds of code are not affected: functions that a program imported by name before, and
    modules that call functions such as `torch.relu`.

    Args:
        replace: False restores torch's functions.
        strict: raise where an operator would fall back to torch's operator.
    """
    target = torch.nn.functional
    for name, function in _theirs.items():
        setattr(target, name, function)
    _theirs.clear()
    for name in NAMES if replace else ():
        _theirs[name] = getattr(target, name)
        ours = getattr(functional, name)
        setattr(
            target, name, partial(ours, strict=True) if strict and name in _STRICT_NAMES else ours
        )
    return Replacement()
