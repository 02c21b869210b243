"""Operators that keep less memory for backward than torch's, and low-bit training.

Where torch keeps a tensor, these operators keep one bit per element, or a recipe: a function that
computes the tensor again.

`to_hfai` replaces torch's modules in a model, and `set_replace_torch` replaces functions of
torch.nn.functional. `saved` counts the bytes that a forward keeps. `functional` has the operators,
and `quant` has weights, activations and gradients of few bits.
"""

from fireflyer.extras import need_torch

need_torch(__name__)

from fireflyer.nn import functional, quant  # noqa: E402
from fireflyer.nn.convert import set_replace_torch, to_hfai, to_torch  # noqa: E402
from fireflyer.nn.memory import Saved, saved  # noqa: E402

__all__ = ["Saved", "functional", "quant", "saved", "set_replace_torch", "to_hfai", "to_torch"]
