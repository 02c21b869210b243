"""Layers whose weights, inputs and gradients have few bits in training.

Source of the recurrent layers: arXiv 1611.10176.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.nn.quant.dorefa import (
    FULL,
    By,
    Scale,
    equalize,
    levels,
    quantize_activations,
    quantize_gradients,
    quantize_weights,
    rounded,
)


@dataclass(frozen=True)
class Bits:
    """Numbers of bits of a layer; 32 leaves values unchanged.

    Attributes:
        weights: bits of the weights, 1 to 16.
        activations: bits of the layer's input, and of a recurrent layer's state.
        gradients: bits of the gradient of the layer's output.
        balanced: the argument `by` of `equalize` for the weights; None quantises them by DoReFa.
        scale: as for `equalize`.

    Raises:
        ConfigError: a number is neither 1 to 16 nor 32.
    """

    weights: int = FULL
    activations: int = FULL
    gradients: int = FULL
    balanced: By | None = None
    scale: Scale = "max"

    def __post_init__(self) -> None:
        for number in (self.weights, self.activations, self.gradients):
            if number != FULL:
                levels(number)

    def of_weight(self, weight: Tensor) -> Tensor:
        """Returns the quantised weight."""
        if self.balanced is not None:
            return equalize(weight, self.weights, self.balanced, self.scale)
        return quantize_weights(weight, self.weights)


class Linear(nn.Linear):
    """Linear layer of few bits; clips its input to [0, 1]."""

    def __init__(self, inside: int, outside: int, bits: Bits, bias: bool = True) -> None:
        super().__init__(inside, outside, bias)
        self.bits = bits

    def forward(self, input: Tensor) -> Tensor:
        x = quantize_activations(input, self.bits.activations)
        y = functional.linear(x, self.bits.of_weight(self.weight), self.bias)
        return quantize_gradients(y, self.bits.gradients)


class Conv2d(nn.Conv2d):
    """Convolution of few bits, zero-padded; clips its input to [0, 1]."""

    def __init__(
        self, inside: int, outside: int, kernel: int, bits: Bits, *, stride: int = 1,
        padding: int = 0, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(inside, outside, kernel, stride, padding, bias=bias)
        self.bits = bits

    def forward(self, input: Tensor) -> Tensor:
        x = quantize_activations(input, self.bits.activations)
        weight = self.bits.of_weight(self.weight)
        y = functional.conv2d(x, weight, self.bias, self.stride, self.padding)
        return quantize_gradients(y, self.bits.gradients)


class Recurrent(nn.Module):
    """One layer of LSTM or GRU, time first, with weights and states of few bits.

    States lie between -1 and 1 and are quantised on that range. The state dict is that of
    `torch.nn.LSTM(inside, width)` or `GRU`.

    Raises:
        ConfigError: `kind` is neither "LSTM" nor "GRU".
    """

    def __init__(self, kind: Literal["LSTM", "GRU"], inside: int, width: int, bits: Bits) -> None:
        super().__init__()
        if kind not in ("LSTM", "GRU"):
            raise ConfigError(f"invalid kind '{kind}': expected LSTM or GRU")
        self.kind, self.width, self.bits = kind, width, bits
        gates = 4 if kind == "LSTM" else 3
        self.weight_ih_l0 = nn.Parameter(torch.empty(gates * width, inside))
        self.weight_hh_l0 = nn.Parameter(torch.empty(gates * width, width))
        self.bias_ih_l0 = nn.Parameter(torch.empty(gates * width))
        self.bias_hh_l0 = nn.Parameter(torch.empty(gates * width))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)

    def forward(self, input: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Runs the layer over time.

        Args:
            input: (time, batch, inside).
            state: (batch, width), for LSTM (2, batch, width): h and c; default zeros.

        Returns:
            Outputs (time, batch, width), and the last state.
        """
        first = self.bits.of_weight(self.weight_ih_l0)
        second = self.bits.of_weight(self.weight_hh_l0)
        given = functional.linear(input, first, self.bias_ih_l0)
        pair = state if state is not None and self.kind == "LSTM" else None
        h = input.new_zeros(input.shape[1], self.width) if state is None else state
        h, c = (pair[0], pair[1]) if pair is not None else (h, torch.zeros_like(h))
        outputs = []
        for now in given:
            inner = functional.linear(h, second, self.bias_hh_l0)
            h, c = (
                self._lstm(now + inner, c) if self.kind == "LSTM" else (self._gru(now, inner, h), c)
            )
            outputs.append(h)
        return torch.stack(outputs), h if self.kind == "GRU" else torch.stack((h, c))

    def _lstm(self, gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return self._state(o.sigmoid() * c.tanh()), c

    def _gru(self, now: Tensor, inner: Tensor, h: Tensor) -> Tensor:
        (r, z, n), (r_, z_, n_) = now.chunk(3, -1), inner.chunk(3, -1)
        reset, keep = (r + r_).sigmoid(), (z + z_).sigmoid()
        fresh = (n + reset * n_).tanh()
        return self._state(fresh + keep * (h - fresh))

    def _state(self, h: Tensor) -> Tensor:
        if self.bits.activations != FULL:
            h = 2 * rounded(((h + 1) / 2).clamp(0, 1), self.bits.activations) - 1
        return quantize_gradients(h, self.bits.gradients)
