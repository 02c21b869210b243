"""Quantisation of a weight to 4-bit integers in groups, with rounding to the nearest.

Columns are stored in `order`, so that each group is contiguous. With act-order, columns whose
activations are of similar size share a scale.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from fireflyer.errors import ConfigError

LEVELS = 15
"""Greatest 4-bit integer."""


@dataclass(frozen=True)
class Quantized:
    """Weight (out, in) in 4 bits. Its column `order[j]` is `(q[:, j] - zero) * scale`, where q are
    the 4-bit integers in `packed`.

    Attributes:
        packed: (out, in / 2) uint8; byte j holds stored column 2j in its low four bits and 2j + 1
            in its high four bits.
        scales: (out, in / group), in the weight's dtype.
        zeros: (out, in / group) uint8, 0 to 15.
        order: (in,) int64: for each stored position, the column of the weight that is stored there.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return 2 * self.packed.shape[1] // self.scales.shape[1]

    def stored(self) -> torch.Tensor:
        """Returns the weight with its columns in stored order, so no column moves."""
        numbers = torch.stack((self.packed & 15, self.packed >> 4), -1)
        numbers = numbers.view(*self.scales.shape, self.group).to(self.scales.dtype)
        zeros = self.zeros.to(self.scales.dtype)
        return ((numbers - zeros.unsqueeze(-1)) * self.scales.unsqueeze(-1)).flatten(1)

    def dequantize(self) -> torch.Tensor:
        """Returns the weight with its columns in their original order."""
        stored = self.stored()
        result = torch.empty_like(stored)
        result[:, self.order] = stored
        return result

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `x` (..., in) times the transposed weight, plus `bias`: (..., out)."""
        return functional.linear(x[..., self.order], self.stored(), bias)

    def rows(self, index: torch.Tensor) -> "Quantized":
        """Returns the weight's part for the outputs in `index`."""
        return Quantized(self.packed[index], self.scales[index], self.zeros[index], self.order)

    def places(self, first: int, count: int) -> "Quantized":
        """Returns the weight's part at a range of stored positions.

        `order` of the part still has column numbers of the whole weight.

        Raises:
            ConfigError: the range cuts a group.
        """
        if first % self.group or count % self.group:
            raise ConfigError(
                f"groups of {self.group} columns do not divide places {first} to {first + count}: "
                "use smaller groups or fewer ranks"
            )
        half = slice(first // 2, (first + count) // 2)
        groups = slice(first // self.group, (first + count) // self.group)
        return Quantized(
            self.packed[:, half].contiguous(),
            self.scales[:, groups].contiguous(),
            self.zeros[:, groups].contiguous(),
            self.order[first : first + count],
        )


def quantize(
    weight: torch.Tensor, group: int = 128, activations: torch.Tensor | None = None
) -> Quantized:
    """Rounds a weight to 4 bits, with a scale and a zero point for each group and output.

    Args:
        weight: (out, in), floating.
        group: number of columns per group; even, and divides `in`.
        activations: (in,) size of each input, for example its mean square. Groups take columns by
            decreasing size (act-order). None keeps the order of the columns.

    Raises:
        ConfigError: `group` does not divide a row or is odd, or a value is NaN or infinite.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ConfigError(
            f"invalid weight {tuple(weight.shape)} {weight.dtype}: expected (out, in), floating"
        )
    columns = weight.shape[1]
    if not isinstance(group, int) or group < 2 or group % 2 or columns % group:
        raise ConfigError(
            f"invalid group {group!r}: expected an even divisor of the {columns} columns of a row"
        )
    if not weight.isfinite().all():
        raise ConfigError("cannot quantize a weight with NaN or infinite values")
    order = torch.arange(columns)
    if activations is not None:
        if activations.shape != (columns,) or not activations.isfinite().all():
            raise ConfigError(f"invalid activations: expected {columns} finite sizes")
        order = activations.argsort(descending=True, stable=True)
    wide = weight.detach()[:, order].double().unflatten(1, (-1, group))
    low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
    scales = ((high - low) / LEVELS).to(weight.dtype)
    divisors = torch.where(scales > 0, scales, 1).double()
    zeros = (-low / divisors).round().clamp(0, LEVELS)
    numbers = (wide / divisors.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    numbers = numbers.clamp(0, LEVELS).to(torch.uint8).flatten(1)
    packed = numbers[:, ::2] | (numbers[:, 1::2] << 4)
    return Quantized(packed, scales, zeros.to(torch.uint8), order)
