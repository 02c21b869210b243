"""Pairs of layers in 4 bits: equal results without the gather, and the bytes that it saves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.haiscale.tensor.models import init
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.haiscale.tensor import QuantizedPair
from fireflyer.nn.quant import Quantized, quantize

TOKENS, FEATURES, HIDDEN = 32, 16, 512


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_aware_form_saves_the_bytes_of_the_gather(
    start_gang: Callable[..., Any], store_path: str, ranks: int
) -> None:
    def body(rank: int, world: int) -> list[int]:
        init(store_path, rank, world)
        torch.manual_seed(0)
        gate, up = (torch.randn(HIDDEN, FEATURES, dtype=torch.float64) for _ in range(2))
        columns = [quantize(weight, 8, torch.rand(FEATURES)) for weight in (gate, up)]
        row = quantize(torch.randn(FEATURES, HIDDEN).double(), 32, torch.rand(HIDDEN))
        biases, bias = [torch.randn(HIDDEN).double(), None], torch.randn(FEATURES).double()
        x = torch.randn(TOKENS, FEATURES, dtype=torch.float64, requires_grad=True)

        def between(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
            return functional.silu(g) * u

        hidden = between(columns[0].linear(x, biases[0]), columns[1].linear(x))
        wanted = row.linear(hidden, bias)
        (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
        sent = []
        for aware in (True, False):
            pair = QuantizedPair(columns, row, between, biases=biases, bias=bias, aware=aware)
            pair(x.detach())  # connects the ranks
            before = pair.group.network_bytes_sent  # type: ignore[attr-defined]
            found = pair(x)
            sent.append(pair.group.network_bytes_sent - before)  # type: ignore[attr-defined]
            assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-10)
            (mine,) = torch.autograd.grad(found.square().sum(), x)
            assert torch.allclose(mine, gradient, rtol=1e-10, atol=1e-8)
        with pytest.raises(ConfigError, match="groups of 32 columns"):
            QuantizedPair([column(48 * world)], row_of(48 * world), functional.silu)
        return sent

    def column(features: int) -> Quantized:
        return quantize(torch.ones(features, FEATURES), 8)

    def row_of(features: int) -> Quantized:
        return quantize(torch.ones(FEATURES, features), 32)

    gather = TOKENS * HIDDEN * 8
    for aware, naive in start_gang(body, ranks, ranks).results():
        saved = naive - aware
        assert saved >= gather * (ranks - 1) // ranks
        assert saved - gather * (ranks - 1) // ranks <= 128 * ranks, "headers of the gather"
