"""Operators of fireflyer.nn give torch's bits: values, gradients, layouts, special numbers, errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as theirs

from fireflyer.errors import ConfigError
from fireflyer.nn import functional as ours

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), 1e-40, -1e-40, 6.0, 7.0, float("nan"))

Operator = Callable[..., Any]
ELEMENTWISE: dict[str, tuple[Operator, Operator]] = {
    "relu": (ours.relu, theirs.relu),
    "relu6": (ours.relu6, theirs.relu6),
    "leaky_relu": (lambda x: ours.leaky_relu(x, 0.1), lambda x: theirs.leaky_relu(x, 0.1)),
    "gelu": (ours.gelu, theirs.gelu),
    "gelu, tanh": (lambda x: ours.gelu(x, "tanh"), lambda x: theirs.gelu(x, approximate="tanh")),
    "silu": (ours.silu, theirs.silu),
}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, where NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.nan_to_num(), b.nan_to_num()
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def both(pair: Any, *inputs: Tensor, seed: int = 0) -> None:
    """Checks values and gradients of an operator that returns a tensor or several."""
    results = []
    for operator in pair:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        found = operator(*(as_laid_out(x, y) for x, y in zip(leaves, inputs, strict=True)))
        outputs = found if isinstance(found, tuple) else (found,)
        generator = torch.Generator().manual_seed(seed)
        grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
        grads = [
            torch.ones_like(y) if not y.dim() else g for y, g in zip(outputs, grads, strict=True)
        ]
        torch.autograd.backward(outputs, grads)
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for mine, its in zip(*results, strict=True):
        assert same(mine, its)


def as_laid_out(leaf: Tensor, like: Tensor) -> Tensor:
    """The leaf itself, or a view of it that is not contiguous, as `like` is."""
    return leaf if like.is_contiguous() else leaf.transpose(-1, -2).contiguous().transpose(-1, -2)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(
    st.sampled_from(TYPES), st.lists(st.integers(0, 70), min_size=1, max_size=3), st.integers(0, 99)
)
def test_elementwise(name: str, dtype: torch.dtype, shape: list[int], seed: int) -> None:
    x = normal(tuple(shape), dtype, seed)
    both(ELEMENTWISE[name], x)
    if x.dim() > 1:
        both(ELEMENTWISE[name], x.transpose(-1, -2))


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
@pytest.mark.parametrize("dtype", TYPES)
def test_special_numbers(name: str, dtype: torch.dtype) -> None:
    both(ELEMENTWISE[name], torch.tensor(SPECIAL * 15).to(dtype))


@pytest.mark.parametrize("dtype", TYPES)
def test_relu6_stops_the_gradient_of_nan(dtype: torch.dtype) -> None:
    """torch's vector loops do so, too, but not its loops over the last elements."""
    both(ELEMENTWISE["relu6"], torch.tensor(SPECIAL[:-1] * 15).to(dtype))
    x = torch.full((100,), float("nan"), dtype=dtype, requires_grad=True)
    y = ours.relu6(x)
    y.sum().backward()
    assert y.isnan().all()
    assert x.grad is not None
    assert not x.grad.any()


def test_many_elements_are_shared_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal((3, 200_003), torch.float32)
    torch.manual_seed(1)
    one = ours.dropout(x, 0.3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # of the kernels alone
    torch.manual_seed(1)
    assert torch.equal(ours.dropout(x, 0.3), one)
    both(ELEMENTWISE["relu"], x)


@pytest.mark.parametrize("name", ["relu", "relu6", "leaky_relu"])
def test_in_place_and_twice_backward(name: str) -> None:
    mine, _ = ELEMENTWISE[name]
    x = normal((50,), torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(mine, (x,))
    assert torch.autograd.gradgradcheck(mine, (x,))
    extra = {"inplace": True}
    functions: dict[str, Any] = {
        "relu": (ours.relu, theirs.relu),
        "relu6": (ours.relu6, theirs.relu6),
    }
    functions["leaky_relu"] = (ours.leaky_relu, theirs.leaky_relu)
    both(tuple((lambda t, f=f: f(t * 1, **extra)) for f in functions[name]), x.detach())
    leaf = x.detach().requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        functions[name][0](leaf, inplace=True)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_given_its_mask(dtype: torch.dtype, p: float) -> None:
    x = normal((40, 50), dtype)
    x[0, :9] = torch.tensor(SPECIAL).to(dtype)
    x.requires_grad_()
    torch.manual_seed(3)
    kept = ours.dropout(torch.ones_like(x), p) != 0
    torch.manual_seed(3)
    y = ours.dropout(x, p)
    noise = kept.to(dtype).div_(1 - p)  # as torch makes its mask
    assert same(y, x * noise)
    g = normal((40, 50), dtype, 5)
    y.backward(g)
    assert x.grad is not None
    assert same(x.grad, g * noise)
    assert abs(kept.double().mean().item() - (1 - p)) < 0.05


def test_dropout_without_a_mask() -> None:
    x = normal((8,), torch.float32)
    assert ours.dropout(x, 0.5, training=False) is x
    assert torch.equal(ours.dropout(x, 1.0), torch.zeros(8) * x)
    assert torch.equal(ours.dropout(x, 0.0), x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        ours.dropout(x, 1.5)


@given(
    st.sampled_from(TYPES),
    st.sampled_from(
        [(2, 0, 1, 2), (3, 1, 1, 2), (2, 0, 2, 1), (5, 2, 1, 3), ((2, 3), (1, 1), 1, 2)]
    ),
    st.integers(7, 12),
    st.booleans(),
    st.integers(0, 99),
)
def test_max_pool(dtype: torch.dtype, options: Any, height: int, ceil: bool, seed: int) -> None:
    kernel, padding, dilation, stride = options
    pair = tuple(
        lambda x, f=f: f(x, kernel, stride, padding, dilation, ceil_mode=ceil)
        for f in (ours.max_pool2d, theirs.max_pool2d)
    )
    x = normal((2, 3, height, 9), dtype, seed)
    x[0, 0, 0, :2] = float("nan")
    x[1] = -float("inf")
    both(pair, x)
    both(pair, x[0])
    both(pair, x.contiguous(memory_format=torch.channels_last))


@given(
    st.sampled_from(TYPES),
    st.integers(0, 200),
    st.integers(1, 80),
    st.booleans(),
    st.integers(0, 99),
)
def test_rms_norm(dtype: torch.dtype, rows: int, width: int, scaled: bool, seed: int) -> None:
    x, residual = normal((rows, width), dtype, seed), normal((rows, width), dtype, seed + 1)
    weight = [normal((width,), dtype, seed + 2)] if scaled else []

    def added(x: Tensor, residual: Tensor, *weight: Any) -> tuple[Tensor, Tensor]:
        h = x + residual
        return h, theirs.rms_norm(h, (width,), *weight)

    def norm(operator: Operator) -> Operator:
        return lambda x, *weight: operator(x, (width,), *weight)

    both((norm(ours.rms_norm), norm(theirs.rms_norm)), x, *weight)
    both((ours.add_rms_norm, added), x, residual, *weight)


@given(st.sampled_from(TYPES), st.integers(0, 90), st.integers(1, 5), st.integers(0, 99))
def test_swiglu(dtype: torch.dtype, rows: int, sixteens: int, seed: int) -> None:
    shape = (rows, 16 * sixteens)
    inputs = normal(shape, dtype, seed), normal(shape, dtype, seed + 1)
    both((ours.swiglu, lambda a, b: theirs.silu(a) * b), *inputs)
    a, b = (x.t() for x in inputs)
    assert same(ours.swiglu(a, b), theirs.silu(a) * b)


@pytest.mark.parametrize(
    ("threads", "dtype"),
    [
        (2, torch.float32),
        *(
            pytest.param(threads, dtype, marks=pytest.mark.full)
            for threads in (1, 2, 3)
            for dtype in TYPES
        ),
    ],
)
def test_norms_and_gates_have_the_bits_of_each_number_of_threads(
    threads: int, dtype: torch.dtype
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (32_767, 65_537, 270_001):
            inputs = normal((count,), dtype, count), normal((count,), dtype, count + 1)
            both((ours.swiglu, lambda a, b: theirs.silu(a) * b), *inputs)
        for rows, width in ((1, 40_000), (2, 40_001), (40_000, 7)):
            pair = tuple(
                lambda x, w, f=f: f(x, w.shape, w) for f in (ours.rms_norm, theirs.rms_norm)
            )
            both(pair, normal((rows, width), dtype), normal((width,), dtype, 1))
    finally:
        torch.set_num_threads(before)


def test_a_torch_of_other_sums_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from fireflyer.nn import native

    x, b = normal((5, 40), torch.float32), normal((5, 40), torch.float32, 1)
    assert native.agrees()
    with monkeypatch.context() as patch:
        patch.setattr(native, "swiglu", lambda a, b: a * b)
        native.agrees.cache_clear()
        assert not native.agrees()
        both((ours.swiglu, lambda a, b: theirs.silu(a) * b), x, b)
        both(tuple(lambda x, f=f: f(x, (40,)) for f in (ours.rms_norm, theirs.rms_norm)), x)
    native.agrees.cache_clear()
    assert native.agrees()


def test_unused_outputs_have_no_gradient() -> None:
    """A norm of a sum of which one output is dropped."""
    for which in (0, 1):

        def added(x: Tensor, residual: Tensor, which: int = which) -> Tensor:
            h = x + residual
            return (h, theirs.rms_norm(h, (24,)))[which]

        pair = (lambda x, r, which=which: ours.add_rms_norm(x, r)[which], added)
        both(pair, normal((9, 24), torch.float32), normal((9, 24), torch.float32, 1))


def test_memory_is_the_cpus_whatever_the_default_device() -> None:
    with torch.device("meta"):
        inputs = [normal_on_cpu(4, 24, seed) for seed in range(2)]
        outputs = [
            ours.relu(inputs[0]),
            ours.dropout(inputs[0], 0.3),
            *ours.add_rms_norm(inputs[0], inputs[1]),
        ]
        outputs += [ours.swiglu(*inputs), ours.max_pool2d(inputs[0][None], 2)]
        torch.stack([y.sum() for y in outputs]).sum().backward()
    assert all(x.grad is not None and x.grad.device.type == "cpu" for x in inputs)


def normal_on_cpu(rows: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=generator, device="cpu").requires_grad_()


@pytest.mark.parametrize("dtype", TYPES)
def test_layer_norm(dtype: torch.dtype) -> None:
    x, weight, bias = (normal(s, dtype, i) for i, s in enumerate([(4, 9, 24), (24,), (24,)]))
    pair = tuple(
        lambda x, w, b, f=f: f(x, (24,), w, b) for f in (ours.layer_norm, theirs.layer_norm)
    )
    both(pair, x, weight, bias)


class TestLinearCrossEntropy:
    def call(self, operator: Operator, blocks: bool, **options: Any) -> list[Tensor]:
        x, weight = normal((70, 24), torch.float64), normal((50, 24), torch.float64, 1)
        bias = normal((50,), torch.float64, 2)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        target = torch.arange(70) % 50
        target[::7] = -100
        loss = operator(x, weight, target, linear_bias=bias, **options)
        (2 * loss).backward()
        return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_it_is_torchs(self, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fireflyer.nn.loss._BLOCK_LOGITS", 50 * 16)
        mine = self.call(ours.linear_cross_entropy, True, reduction=reduction)
        its = self.call(theirs.linear_cross_entropy, False, reduction=reduction)
        assert same(mine[0], its[0])
        assert same(mine[1], its[1])
        for a, b in zip(mine[2:], its[2:], strict=True):  # sums over blocks of rows
            assert torch.allclose(a, b, rtol=0, atol=4e-16 * b.abs().max().item() * 8)

    def test_the_gradient(self) -> None:
        x = normal((5, 4), torch.float64).requires_grad_()
        weight = normal((3, 4), torch.float64, 1).requires_grad_()
        target = torch.tensor([0, 2, 1, 0, -100])
        assert torch.autograd.gradcheck(
            lambda x, w: ours.linear_cross_entropy(x, w, target), (x, weight)
        )
        loss = ours.linear_cross_entropy(x, weight, target)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="the gradient of its gradient is not supported"):
            g.sum().backward()

    def test_forms_that_are_torchs(self, caplog: pytest.LogCaptureFixture) -> None:
        x, weight = normal((5, 4), torch.float32), normal((3, 4), torch.float32, 1)
        target = torch.tensor([0, 2, 1, 0, 1])
        forms: list[dict[str, Any]] = [
            {"label_smoothing": 0.1},
            {"reduction": "none"},
            {"weight": torch.ones(3)},
        ]
        for options in forms:
            mine = ours.linear_cross_entropy(x, weight, target, **options)
            assert torch.equal(mine, theirs.linear_cross_entropy(x, weight, target, **options))
            with pytest.raises(ConfigError, match="no fused operator"):
                ours.linear_cross_entropy(x, weight, target, strict=True, **options)


def test_a_second_backward_is_refused() -> None:
    for operator in (
        lambda x: ours.rms_norm(x, (4,)),
        lambda x: ours.swiglu(x, x),
        lambda x: ours.max_pool2d(x[None], 2),
    ):
        x = normal((4, 4), torch.float32).requires_grad_()
        (g,) = torch.autograd.grad(operator(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="the gradient of its gradient is not supported"):
            g.sum().backward()


def test_what_has_no_kernel_falls_back_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    from fireflyer.nn import backend

    backend._said.clear()
    x = torch.ones(4, device="meta", requires_grad=True)
    for _ in range(2):
        assert ours.relu(x).device.type == "meta"
    said = [record.getMessage() for record in caplog.records]
    assert said == ["relu: device meta has no kernel: torch's operator is used"]
    for operator in (ours.relu, ours.dropout, ours.relu6, ours.leaky_relu):
        with pytest.raises(ConfigError, match="device meta has no kernel; without strict=True"):
            operator(x, strict=True)
    with pytest.raises(ConfigError, match="device meta"):
        ours.rms_norm(x, (4,), strict=True)
    with pytest.raises(ConfigError, match="device meta"):
        ours.max_pool2d(x.view(1, 2, 2), 2, strict=True)


def test_integers_are_torchs() -> None:
    x = torch.arange(-3, 3)
    assert torch.equal(ours.relu(x, strict=True), theirs.relu(x))
