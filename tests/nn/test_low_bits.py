"""Few bits: formulas against arithmetic, bins of equal counts, bit planes against integer products."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.errors import ConfigError
from fireflyer.nn.quant import (
    BitLinear,
    Bits,
    Conv2d,
    Linear,
    Panels,
    Recurrent,
    bin_entropy,
    bit_product,
    equalize,
    pack,
    quantize_activations,
    quantize_gradients,
    quantize_weights,
    quantized_gradient,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_weights_of_one_bit_are_signs_of_their_mean_size() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.0, 5.0]], requires_grad=True)
    found = quantize_weights(weight, 1)
    assert found.tolist() == [[2, -2], [2, 2]]
    found.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 2], [3, 4]]


@given(st.integers(2, 8), st.integers(0, 99))
def test_weights_of_more_bits(bits: int, seed: int) -> None:
    weight = normal(9, 7, seed=seed).requires_grad_()
    found = quantize_weights(weight, bits)
    most = 2**bits - 1
    squashed = weight.tanh() / weight.tanh().abs().max()
    assert (found - squashed).abs().max() <= 1 / most + 1e-6
    places = (found.detach() + 1) / 2 * most
    assert torch.allclose(places, places.round(), atol=1e-4)
    found.sum().backward()
    assert weight.grad is not None
    expected = (1 - weight.tanh() ** 2) / weight.tanh().abs().max()
    assert torch.allclose(weight.grad, expected.detach(), atol=1e-6)


def test_activations() -> None:
    x = torch.tensor([-1.0, 0.2, 0.5, 0.9, 2.0], requires_grad=True)
    found = quantize_activations(x, 2)
    assert torch.allclose(found, torch.tensor([0, 1 / 3, 2 / 3, 1, 1]))
    found.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


def test_gradients_are_right_in_the_mean_and_keep_their_rows_scale() -> None:
    g = normal(3, 50)
    torch.manual_seed(0)
    mean = torch.stack([quantized_gradient(g, 2) for _ in range(2000)]).mean(0)
    step = 2 * g.abs().amax(1, keepdim=True) / 3
    assert ((mean - g).abs() <= 0.1 * step).all()  # nine standard errors of uniform noise
    x = normal(3, 50, seed=1).requires_grad_()
    y = quantize_gradients(x, 3)
    assert torch.equal(y, x)
    y.backward(g)
    assert x.grad is not None
    assert all(len(row.unique()) <= 8 for row in x.grad)
    assert quantized_gradient(torch.zeros(2, 0), 2).shape == (2, 0)
    assert torch.allclose(quantized_gradient(torch.zeros(2, 3), 2), torch.zeros(2, 3), atol=1e-37)


@given(st.integers(1, 6), st.integers(1, 400), st.integers(0, 99))
def test_medians_fill_bins_equally(bits: int, count: int, seed: int) -> None:
    weight = normal(count, seed=seed) ** 3
    found = equalize(weight, bits)
    values, counts = found.unique(return_counts=True)
    assert counts.max() - counts.min() <= 1
    assert len(values) == min(count, 2**bits)
    order = weight.argsort()
    assert (found[order].diff() >= 0).all()
    assert found.abs().max() <= weight.abs().max() * (1 + 1e-6)


def test_bins_of_trained_sizes_are_as_full_as_can_be() -> None:
    weight = normal(300, 300)
    for bits in (1, 2, 4):
        assert bin_entropy(weight, bits) >= 0.98 * bits
        assert bin_entropy(weight, bits, "mean") >= 0.95 * bits
    plain = ((quantize_weights(weight, 2).flatten() + 1) * 1.5).round().long()
    shares = torch.bincount(plain) / plain.numel()
    assert -(shares * shares.log2()).sum() < bin_entropy(weight, 2)


def test_the_fitted_scale_has_the_least_error() -> None:
    weight = normal(40, 40)
    fitted = equalize(weight, 2, scale="fit")
    error = (fitted - weight).square().sum()
    assert all((fitted * f - weight).square().sum() > error for f in (0.95, 1.05))
    leaf = weight.clone().requires_grad_()
    equalize(leaf, 2, "mean", "fit").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.unique().tolist() == [1]


def test_wrong_arguments() -> None:
    weight = torch.ones(3)
    for call in (
        lambda: quantize_weights(weight, 0),
        lambda: quantize_activations(weight, 17),
        lambda: quantize_gradients(weight, -1),
        lambda: Bits(weights=33),
        lambda: pack(weight[None], 9),
    ):
        with pytest.raises(ConfigError, match="invalid bits"):
            call()
    with pytest.raises(ConfigError, match="invalid by 'mode'"):
        equalize(weight, 2, "mode")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="invalid scale 'min'"):
        equalize(weight, 2, scale="min")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="invalid kind 'RNN'"):
        Recurrent("RNN", 1, 1, Bits())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not fit in 2 bits"):
        pack(torch.tensor([[4]]), 2)
    with pytest.raises(ConfigError, match="have no product"):
        bit_product(pack(torch.ones(1, 64), 1), Panels.of(pack(torch.ones(1, 65), 1)))
    with pytest.raises(ConfigError, match="at most 8"):
        BitLinear(Linear(2, 2, Bits()))


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 70),
    st.integers(1, 20),
    st.integers(1, 300),
)
def test_the_product_of_planes(a: int, b: int, rows: int, columns: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randint(2**a, (rows, depth), generator=generator)
    right = torch.randint(2**b, (columns, depth), generator=generator)
    found = bit_product(pack(left, a), Panels.of(pack(right, b)))
    assert torch.equal(found.long(), left @ right.t())


@pytest.mark.parametrize(
    "bits", [Bits(1, 2), Bits(2, 2), Bits(4, 3), Bits(2, 2, balanced="median")]
)
def test_a_layer_on_planes_is_the_trained_one(bits: Bits) -> None:
    layer = Linear(70, 21, bits)
    x = torch.rand(3, 5, 70) * 1.5 - 0.2
    assert torch.allclose(BitLinear(layer)(x), layer(x), atol=1e-4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_without_bits_are_torchs(kind: str) -> None:
    torch.manual_seed(0)
    its: nn.Module = getattr(nn, kind)(6, 8)
    mine = Recurrent(kind, 6, 8, Bits())  # type: ignore[arg-type]
    mine.load_state_dict(its.state_dict())
    x = normal(7, 3, 6)
    y, state = its(x)
    found, last = mine(x)
    assert torch.allclose(found, y, atol=1e-6)
    parts = state if kind == "GRU" else torch.stack([part[0] for part in state])
    assert torch.allclose(last, parts[0] if kind == "GRU" else parts, atol=1e-6)
    again, _ = mine(x, last)
    assert not torch.allclose(again, found)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states_have_few_levels(kind: str) -> None:
    layer = Recurrent(kind, 6, 8, Bits(2, 2, 6, balanced="mean"))  # type: ignore[arg-type]
    found, _ = layer(normal(7, 3, 6))
    assert len(found.unique()) <= 4
    found.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_a_net_of_few_bits_learns() -> None:
    torch.manual_seed(0)
    bits = Bits(1, 2, 6)
    bright = torch.rand(64, 1, 1, 1)
    x, labels = bright * torch.rand(64, 1, 8, 8), (bright.flatten() > 0.5).long()
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), Conv2d(8, 8, 3, bits), nn.BatchNorm2d(8),
        nn.Flatten(), Linear(128, 2, bits),
    )  # fmt: skip
    first = copy.deepcopy(net)
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(40):
        adam.zero_grad()
        loss = functional.cross_entropy(net(x), labels)
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert math.isfinite(losses[-1])
    assert first[2].bits == bits
