"""Modules under torch's names with which `to_hfai` replaces torch's modules.

Each is a subclass without additional state: parameters, buffers, hooks and state dicts do not
change. A module is converted by a change of its class.
"""

from functools import partial
from typing import Any

from torch import Tensor, autocast, float32, nn
from torch.nn.functional import batch_norm as torch_batch_norm
from torch.nn.functional import linear as torch_linear
from torch.nn.modules.lazy import LazyModuleMixin

from fireflyer.nn import functional
from fireflyer.nn.pointwise import lowered, run_again
from fireflyer.nn.recipe import Recipe, attach, keep, source
from fireflyer.torch_internals.core import BatchNorm, is_transformed

MARKS = ("fireflyer_strict", "fireflyer_again")
"""Attributes that `to_hfai` sets in a module."""


class _Strict(nn.Module):
    fireflyer_strict = False


class Keeping(nn.Module):
    """Mixin of operators with one input that keep the input's recipe: linear layers,
    convolutions."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = keep(super().forward, lowered(input))
        return result


class Recomputed(nn.Module):
    """Mixin of operators with one input whose output is computed again from the input."""

    def forward(self, input: Tensor) -> Tensor:
        function = super().forward
        result: Tensor = keep(function, input)
        if is_transformed() or not result.requires_grad:
            return result
        return attach(result, Recipe(function, source(input)))


class RecomputedNorm(nn.Module):
    """Mixin of norms that consist of several torch operators.

    Only the input is kept, and backward runs the forward again.
    """

    def forward(self, input: Tensor) -> Tensor:
        function, parameters = super().forward, tuple(self.parameters(False))
        result = run_again(function, input, parameters)
        if is_transformed() or not result.requires_grad:
            return result
        recipe = Recipe(lambda value, *_: function(value), source(input), *parameters)
        return attach(result, recipe)


class CastingRmsNorm(RecomputedNorm):
    """Mixin of Llama's norm, which computes in float32: weight * (h * rsqrt(mean(h^2) + eps)).

    That norm uses a float32 input twice without a copy, so the input's gradient has two summands.
    Autograd adds them one after the other to the input's other gradients. `rms_norm` does the same.
    A repeated forward would first add the two summands to each other, so its bits would differ. An
    input of another dtype is cast, and its gradient has one summand.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight, eps = getattr(self, "weight", None), getattr(self, "variance_epsilon", None)
        if (
            is_transformed()
            or eps is None
            or not isinstance(weight, Tensor)
            or input.dtype != float32
        ):
            return super().forward(input)
        if weight.dtype != float32 or weight.shape != input.shape[-1:]:
            return super().forward(input)
        with autocast(input.device.type, enabled=False):
            return functional.rms_norm(input, weight.shape, weight, eps)


class GatedMlp(nn.Module):
    """Mixin of Llama's MLP: down(silu(gate(x)) * up(x)) by `swiglu`."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.act_fn, nn.SiLU):
            return super().forward(x)  # type: ignore[no-any-return]
        result: Tensor = self.down_proj(functional.swiglu(self.gate_proj(x), self.up_proj(x)))  # type: ignore[operator]
        return result


class ReLU(_Strict, nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return functional.relu(input, self.inplace, strict=self.fireflyer_strict)


class ReLU6(_Strict, nn.ReLU6):
    def forward(self, input: Tensor) -> Tensor:
        return functional.relu6(input, self.inplace, strict=self.fireflyer_strict)


class LeakyReLU(_Strict, nn.LeakyReLU):
    def forward(self, input: Tensor) -> Tensor:
        return functional.leaky_relu(
            input, self.negative_slope, self.inplace, strict=self.fireflyer_strict
        )


class Dropout(_Strict, nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return functional.dropout(
            input, self.p, self.training, self.inplace, strict=self.fireflyer_strict
        )


class GELU(nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, self.approximate)


class SiLU(nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        return functional.silu(input, self.inplace)


class LayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(_Strict, nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(
            x, self.normalized_shape, self.weight, self.eps, strict=self.fireflyer_strict
        )


class MaxPool2d(_Strict, nn.MaxPool2d):
    def forward(self, input: Tensor) -> Any:
        return functional.max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation,
            self.ceil_mode, self.return_indices, strict=self.fireflyer_strict,
        )  # fmt: skip


class _BatchNorm(BatchNorm):
    """Attaches a recipe while the statistics come from the batch: then the recipe needs no other
    state."""

    def forward(self, input: Tensor) -> Tensor:
        result = keep(super().forward, input)
        batch = self.training or self.running_mean is None
        if is_transformed() or not batch or not result.requires_grad or result.dtype != input.dtype:
            return result
        scale = self.weight.detach().clone() if self.affine else None
        shift = self.bias.detach().clone() if self.affine else None
        again = partial(_normalized, scale, shift, self.eps)
        return attach(result, Recipe(again, source(input)))


def _normalized(scale: Tensor | None, shift: Tensor | None, eps: float, value: Tensor) -> Tensor:
    return torch_batch_norm(value, None, None, scale, shift, training=True, eps=eps)


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    pass


class Linear(Keeping, nn.Linear):
    """Linear layer. If `fireflyer_again` is set, operators that take the output compute that output
    again."""

    fireflyer_again = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.fireflyer_again or is_transformed():
            return super().forward(input)
        x = lowered(input)
        result: Tensor = keep(nn.Linear.forward.__get__(self), x)
        return attach(result, Recipe(_product, source(x), *self.parameters(False), costly=True))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch_linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Conv1d(Keeping, nn.Conv1d):
    pass


class Conv2d(Keeping, nn.Conv2d):
    pass


class Conv3d(Keeping, nn.Conv3d):
    pass


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    getattr(nn, ours.__name__): ours
    for ours in (
        *(ReLU, ReLU6, LeakyReLU, Dropout, GELU, SiLU, LayerNorm, RMSNorm, MaxPool2d),
        *(BatchNorm1d, BatchNorm2d, BatchNorm3d, Linear, Conv1d, Conv2d, Conv3d),
    )
}
"""Our classes by torch's classes."""

MIXINS: dict[str, type[nn.Module]] = {
    "transformers.pytorch_utils.Conv1D": Keeping,
    "transformers.activations.GELUActivation": Recomputed,
    "transformers.activations.GELUTanh": Recomputed,
    "transformers.activations.NewGELUActivation": Recomputed,
    "transformers.activations.SiLUActivation": Recomputed,
    "transformers.activations.QuickGELUActivation": Recomputed,
    **{
        f"transformers.models.{name.lower()}.modeling_{name.lower()}.{name}{part}": mixin
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
        for part, mixin in (("MLP", GatedMlp), ("RMSNorm", CastingRmsNorm))
    },
}
"""Mixins by the names of other packages' classes."""

_MIXED: dict[type[nn.Module], type[nn.Module]] = {}


def counterpart(module: nn.Module) -> type[nn.Module] | None:
    """Returns our class for a module; None if there is none, or if the module overrides
    `forward`."""
    theirs = type(module)
    if uninitialized(module):
        return None
    if theirs in CLASSES:
        return CLASSES[theirs]
    name = f"{theirs.__module__}.{theirs.__qualname__}"
    if name in MIXINS:
        return _mixed(MIXINS[name], theirs)
    for base, ours in CLASSES.items():
        if isinstance(module, base) and theirs.forward is base.forward:
            return _mixed(ours, theirs)
    return None


def uninitialized(module: nn.Module) -> bool:
    """Returns True if a module changes its class when it sees its first input."""
    return isinstance(module, LazyModuleMixin)


def overrides(module: nn.Module) -> bool:
    """Returns True if a module's class derives from a class that we replace but overrides
    `forward`."""
    theirs = type(module)
    return any(isinstance(module, base) and theirs.forward is not base.forward for base in CLASSES)


def is_ours(module: nn.Module) -> bool:
    return type(module) in _ORIGINALS


def original(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module had before `to_hfai`."""
    return _ORIGINALS[type(module)]


def _mixed(ours: type[nn.Module], theirs: type[nn.Module]) -> type[nn.Module]:
    if theirs not in _MIXED:

        def reduce(self: nn.Module, _protocol: int) -> Any:
            return _again_mixed, (ours, theirs), self.__dict__

        names = {"__module__": theirs.__module__, "__reduce_ex__": reduce}
        mixed = type(theirs.__name__, (ours, theirs), names)
        _MIXED[theirs] = mixed
        _ORIGINALS[mixed] = theirs
    return _MIXED[theirs]


def _again_mixed(ours: type[nn.Module], theirs: type[nn.Module]) -> nn.Module:
    mixed = _mixed(ours, theirs)
    return mixed.__new__(mixed)


_ORIGINALS = {ours: theirs for theirs, ours in CLASSES.items()}
