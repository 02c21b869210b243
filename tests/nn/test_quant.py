"""Weights in 4-bit groups: errors within one step, layout of the bytes, cuts of pairs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.nn.quant import Quantized, quantize, shards


@given(
    st.integers(1, 4),
    st.sampled_from([2, 4, 16]),
    st.integers(1, 4),
    st.booleans(),
    st.floats(-3, 3),
    st.integers(0, 1000),
)
def test_each_value_is_within_one_step(
    out: int, group: int, groups: int, ordered: bool, mean: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, group * groups, generator=generator, dtype=torch.float64) + mean
    sizes = torch.rand(group * groups, generator=generator) if ordered else None
    found = quantize(weight, group, sizes)
    assert found.packed.shape == (out, group * groups // 2)
    assert found.group == group
    steps = torch.empty_like(weight)
    steps[:, found.order] = found.scales.repeat_interleave(group, 1)
    # Half a step of rounding, and half a step by which the zero point shifts the range.
    assert ((found.dequantize() - weight).abs() <= steps + 1e-12).all()
    assert torch.allclose(
        found.linear(weight), functional.linear(weight, found.dequantize()), atol=1e-10
    )


def test_the_layout_of_the_bytes() -> None:
    weight = torch.tensor([[0.0, 15.0, 5.0, 2.0], [-8.0, 7.0, 0.0, 0.0]])
    found = quantize(weight, group=2, activations=torch.tensor([1.0, 2.0, 4.0, 3.0]))
    assert found.order.tolist() == [2, 3, 1, 0]
    assert found.scales.tolist() == [[pytest.approx(5 / 15), 1], [0, 1]]
    assert found.zeros.tolist() == [[0, 0], [0, 8]]
    assert found.packed.tolist() == [[15 | 6 << 4, 15 | 0 << 4], [0, 15 | 0 << 4]]
    assert torch.allclose(found.dequantize(), weight)


def test_act_order_helps_where_columns_differ() -> None:
    torch.manual_seed(0)
    sizes = torch.rand(256) ** 4
    weight = torch.randn(32, 256) / (sizes + 0.05)
    x = torch.randn(64, 256) * sizes
    exact = functional.linear(x, weight)
    plain, ordered = (
        float((quantize(weight, 32, order).linear(x) - exact).norm()) for order in (None, sizes)
    )
    assert ordered < 0.8 * plain


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_a_pair_add_up_to_the_whole(ranks: int) -> None:
    gate, up, row = pair()
    x = torch.randn(3, 16, dtype=torch.float64)
    hidden = functional.silu(gate.linear(x)) * up.linear(x)
    whole = row.linear(hidden)
    aware, naive = (shards((gate, up), row, ranks, aware=a) for a in (True, False))
    total = torch.zeros_like(whole)
    for part in aware:
        mine = functional.silu(part.columns[0].linear(x)) * part.columns[1].linear(x)
        total += functional.linear(mine, part.row.stored())
    assert torch.allclose(total, whole, rtol=1e-12, atol=1e-12)
    for rank, part in enumerate(naive):
        assert part.outputs.tolist() == list(range(rank * 32 // ranks, (rank + 1) * 32 // ranks))
        assert torch.equal(part.row.packed, aware[rank].row.packed)


def pair() -> tuple[Quantized, Quantized, Quantized]:
    torch.manual_seed(0)
    gate, up = (
        quantize(torch.randn(32, 16, dtype=torch.float64), 8, torch.rand(16)) for _ in range(2)
    )
    return gate, up, quantize(torch.randn(4, 32, dtype=torch.float64), 8, torch.rand(32))


def test_what_cannot_be_quantized_or_cut() -> None:
    weight = torch.ones(4, 12)
    for group in (8, 3, 0):
        with pytest.raises(ConfigError, match=f"invalid group {group}"):
            quantize(weight, group)
    with pytest.raises(ConfigError, match="NaN or infinite"):
        quantize(weight / 0, 4)
    with pytest.raises(ConfigError, match=r"\(out, in\), floating"):
        quantize(weight.long(), 4)
    with pytest.raises(ConfigError, match="12 finite sizes"):
        quantize(weight, 4, torch.ones(3))
    gate, _, row = pair()
    with pytest.raises(ConfigError, match="groups of 8 columns do not divide"):
        shards((gate,), row, 8)
    with pytest.raises(ConfigError, match="3 ranks do not divide 32 features"):
        shards((gate,), row, 3)
    with pytest.raises(ConfigError, match="4 outputs does not fit a row layer with 32 inputs"):
        shards((row,), row, 2)
