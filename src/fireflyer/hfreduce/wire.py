"""Formats of sums in transfers between hosts."""

from typing import Any

import torch

from fireflyer._native import hfreduce as native
from fireflyer.errors import ConfigError

_CODECS = {
    "fp32": native.Codec.FP32,
    "bf16": native.Codec.BF16,
    "fp16": native.Codec.FP16,
    "int8": native.Codec.INT8,
}
_SUMS = (native.ReduceOp.SUM, native.ReduceOp.AVG)


class Wire:
    """Codec for the transfer between hosts only. Error bounds: docs/guide/hfreduce.md.

    Args:
        codec: "bf16", "fp16" (2 bytes per element), "int8" (blocks of 256 with one scale, 1.02
            bytes), or "fp32". With "fp32", partial sums of 16-bit and 8-bit types travel unrounded.
        stochastic: round stochastically, so that the errors of many calls cancel instead of adding
            up.
        error_feedback: add the rounding error of a call to the next call (Seide et al., 2014). The
            object then belongs to one tensor, whose size must stay the same.

    Raises:
        ConfigError: the codec is unknown.
    """

    def __init__(
        self, codec: str, *, stochastic: bool = False, error_feedback: bool = False
    ) -> None:
        if codec not in _CODECS:
            raise ConfigError(f"invalid wire codec {codec!r}: expected one of {', '.join(_CODECS)}")
        self.codec = codec
        self.stochastic = stochastic
        self.error_feedback = error_feedback
        self._calls = 0
        self._residual: torch.Tensor | None = None

    def options(
        self, dtype: torch.dtype, count: int, op: native.ReduceOp, rank: int
    ) -> dict[str, Any]:
        """Returns the engine's non-default options for a call on `count` elements.

        Raises:
            ConfigError: error feedback is on and the tensor's size differs from before.
        """
        narrow = dtype.is_floating_point and dtype != torch.float64
        if op not in _SUMS or not narrow:
            return {}  # only sums of floating-point types narrower than float64 use a codec
        options: dict[str, Any] = {"wire": _CODECS[self.codec]}
        self._calls += 1
        if self.stochastic:
            options["seed"] = (self._calls << 24) + (rank << 8) + 1
        if self.error_feedback:
            if self._residual is None:
                self._residual = torch.zeros(count)
            if self._residual.numel() != count:
                raise ConfigError(
                    f"this Wire keeps the error of a tensor of {self._residual.numel()} elements, not of "
                    f"{count}: use one for each tensor"
                )
            options["residual"] = self._residual.data_ptr()
        return options
