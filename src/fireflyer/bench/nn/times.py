"""Times of single operators, forward and backward, against eager and compiled torch."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as theirs

from fireflyer.bench.harness.interleaving import interleaved
from fireflyer.bench.harness.report import Row
from fireflyer.bench.nn.kept import HEAD, peak_of
from fireflyer.nn import functional as ours
from fireflyer.nn.quant import Panels, bit_product, pack

Operator = Callable[..., Tensor | tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """Operator, ours and torch's, with its inputs; `goal` and `aim` are ratios against eager.

    Attributes:
        inputs: number of inputs of the whole shape.
        weights: number of further inputs, of the last dimension's size.
    """

    name: str
    ours: Operator
    theirs: Operator
    inputs: int
    goal: float | None = None
    aim: float | None = None
    weights: int = 0


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return h, theirs.rms_norm(h, h.shape[-1:], weight)


CASES = (
    Case("ReLU", ours.relu, theirs.relu, 1, 1.1, 1.25),
    Case("leaky ReLU", ours.leaky_relu, theirs.leaky_relu, 1),
    Case("dropout", lambda x: ours.dropout(x, 0.1), lambda x: theirs.dropout(x, 0.1), 1, 8, 11),
    Case("RMSNorm + residual", ours.add_rms_norm, _add_rms_norm, 2, 1.5, 2, weights=1),
    Case("SwiGLU", ours.swiglu, lambda a, b: theirs.silu(a) * b, 2, 1.2, 1.5),
)


def operators(
    rounds: int, threads: int, compiled: bool, shape: tuple[int, int], said: Callable[[str], None]
) -> list[Row]:
    """Measures forward and backward of float32 tensors of `shape`."""
    rows = []
    for case in CASES:
        said(f"{case.name}, {threads} threads")
        candidates = {"ours": case.ours, "eager": case.theirs}
        if compiled:
            candidates["compiled"] = torch.compile(case.theirs, dynamic=False)
        runs = {
            name: _forward_backward(operator, case.inputs, shape, case.weights)
            for name, operator in candidates.items()
        }
        found = interleaved(runs, rounds)
        name = f"{case.name} {shape[0]} x {shape[1]}, {threads} threads"
        rows.append(
            Row.of_times(
                name, "ms", found["ours"], "eager", found["eager"], (), case.goal, case.aim
            )
        )
        if compiled:
            rows.append(Row.of_times(name, "ms", found["ours"], "compiled", found["compiled"]))
    pool = _pool(rounds, threads)
    return [*rows, pool]


def _forward_backward(
    operator: Operator, inputs: int, shape: tuple[int, ...], weights: int = 0
) -> Callable[[], float]:
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(inputs)]
    leaves += [torch.randn(shape[-1:], requires_grad=True) for _ in range(weights)]
    given: list[Tensor] = []

    def run() -> float:
        begun = time.perf_counter()
        y = operator(*leaves)
        between = time.perf_counter()
        outputs = y if isinstance(y, tuple) else (y,)
        if not given:
            given.extend(torch.randn_like(one) for one in outputs)
        resumed = time.perf_counter()
        torch.autograd.grad(outputs, leaves, given)
        return (time.perf_counter() - resumed + between - begun) * 1e3

    return run


def _pool(rounds: int, threads: int) -> Row:
    def run_of(pool: Callable[[Tensor, int], Tensor]) -> Callable[[], float]:
        return _forward_backward(lambda x: pool(x, 2), 1, (8, 64, 112, 112))

    runs = {"ours": run_of(ours.max_pool2d), "eager": run_of(theirs.max_pool2d)}
    found = interleaved(runs, rounds)
    return Row.of_times(
        f"max-pool 2 x 2, {threads} threads", "ms", found["ours"], "eager", found["eager"]
    )


def head(rounds: int, threads: int, rows: int, words: int) -> list[Row]:
    """Measures the last linear layer with cross-entropy: peak of memory, and time."""
    torch.manual_seed(0)
    x = torch.randn(rows, 256, requires_grad=True)
    weight = (torch.randn(words, 256) / 16).requires_grad_()
    targets = torch.randint(words, (rows,))

    def run_of(operator: Operator) -> Callable[[], float]:
        def run() -> float:
            begun = time.perf_counter()
            torch.autograd.grad(operator(x, weight, targets), (x, weight))
            return (time.perf_counter() - begun) * 1e3

        return run

    runs = {"ours": run_of(ours.linear_cross_entropy), "eager": run_of(theirs.linear_cross_entropy)}
    own = (weight.nbytes + x.nbytes) / (1 << 20)  # the gradients, equal for both
    mine, its = (peak_of(run) - own for run in runs.values())
    found = interleaved(runs, rounds)
    name = f"linear + cross-entropy, {rows} x {words}, {threads} threads"
    return [
        Row.of_times(f"{name}, peak beside gradients", "MiB", [mine], "eager", [its], (), HEAD),
        Row.of_times(name, "ms", found["ours"], "eager", found["eager"], (), 1.0, 1.2),
    ]


def bits(rounds: int, threads: int, size: int) -> list[Row]:
    """Measures the product of 1-bit and 2-bit integers, against float32, torch's quantized Linear, and
    the packing of the 2-bit integers."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(4, (size, size), generator=generator)
    b = torch.randint(2, (size, size), generator=generator)
    planes, panels = pack(a, 2), Panels.of(pack(b, 1))
    fa, fb = a.float(), b.float()
    if not torch.equal(bit_product(planes, panels).float(), fa @ fb.t()):
        raise AssertionError("the product of bit planes differs from float32's, which is exact")
    quantized = _quantized_linear(fb)
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: bit_product(planes, panels),
        "float32": lambda: fa @ fb.t(),
        "quantized Linear": lambda: quantized(fa),
        "packing of activations": lambda: pack(a, 2),
    }
    found = interleaved({name: _timed(run) for name, run in runs.items()}, rounds)
    name = f"1-bit x 2-bit product, {size}^3, {threads} threads"
    first = Row.of_times(name, "ms", found["ours"], "float32", found["float32"], (), 3, 6)
    names = ("quantized Linear", "packing of activations")
    return [first, *(Row.of_times(name, "ms", found["ours"], peer, found[peer]) for peer in names)]


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def timed() -> float:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e3

    return timed


def _quantized_linear(weight: Tensor) -> Callable[[Tensor], Tensor]:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad(), warnings.catch_warnings():
        # quantize_dynamic warns that it is deprecated, but it makes torch's only quantized layer on
        # CPUs.
        warnings.simplefilter("ignore")
        layer.weight.copy_(weight)
        model: torch.nn.Module = torch.ao.quantization.quantize_dynamic(
            torch.nn.Sequential(layer), {torch.nn.Linear}
        )
    return model
