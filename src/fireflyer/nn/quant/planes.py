"""Integers of few bits as bit planes, and their products by counting ones (native).

Layout: plane i holds bit i of each integer. A row of a plane consists of 64-bit words; column k is
bit k % 64 of word k // 64; columns past the end are 0. `Panels` holds eight rows side by side, word
by word.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fireflyer.errors import ConfigError
from fireflyer.nn import native
from fireflyer.nn.quant.dorefa import levels
from fireflyer.nn.quant.layers import Linear

_WORD = 64
_PANEL = 8
_MOST_BITS = 8


def pack(integers: Tensor, bits: int) -> Tensor:
    """Returns the planes (bits, rows, words) int64 of unsigned integers (rows, columns).

    Raises:
        ConfigError: `bits` is not 1 to 8, or an integer does not fit.
    """
    if not 1 <= bits <= _MOST_BITS:
        raise ConfigError(f"invalid bits '{bits}': expected 1 to {_MOST_BITS}")
    if integers.numel() and not 0 <= int(integers.min()) <= int(integers.max()) < 2**bits:
        raise ConfigError(f"an integer does not fit in {bits} bits")
    rows, columns = integers.shape
    words = -(-columns // _WORD)
    values = integers.detach().to(torch.uint8).numpy()
    planes = np.zeros((bits, rows, words * _WORD // 8), np.uint8)
    for bit in range(bits):
        packed = np.packbits(values >> bit & 1, axis=1, bitorder="little")
        planes[bit, :, : packed.shape[1]] = packed
    return torch.from_numpy(planes.view(np.int64))


@dataclass(frozen=True)
class Panels:
    """Right operand of a product.

    Attributes:
        words: (planes, panels, words, 8) int64.
        rows: number of rows of the packed integers.
    """

    words: Tensor
    rows: int

    @classmethod
    def of(cls, planes: Tensor) -> "Panels":
        """Converts planes from `pack` to panels of eight rows."""
        count, rows, words = planes.shape
        padded = torch.zeros(count, -(-rows // _PANEL) * _PANEL, words, dtype=torch.int64)
        padded[:, :rows] = planes
        panels = padded.view(count, -1, _PANEL, words).transpose(-1, -2).contiguous()
        return cls(panels, rows)


def bit_product(a: Tensor, b: Panels) -> Tensor:
    """Returns the int32 dot products of all pairs of rows of packed integers: (rows a, rows b).

    The product is exact while sums stay below 2^31.

    Raises:
        ConfigError: the rows have different numbers of words.
    """
    if a.shape[2] != b.words.shape[2]:
        raise ConfigError(f"rows of {a.shape[2]} and {b.words.shape[2]} words have no product")
    return native.bit_product(a.contiguous(), b.words, a.shape[1])[:, : b.rows]


class BitLinear(nn.Module):
    """Inference of a trained `Linear` of few bits on bit planes.

    Values equal those of the layer in training up to rounding in float32; sums are exact.

    Raises:
        ConfigError: the layer's weights or activations have more than 8 bits.
    """

    scale: Tensor
    words: Tensor
    bias: Tensor | None

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        bits = layer.bits
        if max(bits.weights, bits.activations) > _MOST_BITS:
            raise ConfigError(f"invalid bits '{bits}': expected at most {_MOST_BITS}")
        with torch.no_grad():
            weight = bits.of_weight(layer.weight)
            scale = weight.abs().max().clamp_min(torch.finfo(weight.dtype).tiny)
            integers = ((weight / scale + 1) / 2 * levels(bits.weights)).round().to(torch.int64)
        panels = Panels.of(pack(integers, bits.weights))
        self.bits, self.rows = bits, panels.rows
        self.register_buffer("words", panels.words)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Returns the layer's output (..., out) for x (..., in), which is clipped to [0, 1]."""
        most, weights = levels(self.bits.activations), levels(self.bits.weights)
        flat = x.detach().reshape(-1, x.shape[-1])
        integers = (flat.clamp(0, 1) * most).round().to(torch.uint8)
        product = bit_product(pack(integers, self.bits.activations), Panels(self.words, self.rows))
        sums = integers.sum(1, keepdim=True, dtype=torch.int32)
        y = (product * (2 / weights) - sums) * (self.scale / most)
        y = y if self.bias is None else y + self.bias
        return y.view(*x.shape[:-1], self.rows)
