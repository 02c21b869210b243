"""Matrix products with a known answer, bit for bit, on each core.

The elements are small integers, so every partial sum is exact in any order of additions. A single
wrong bit of a multiplier, an adder, a cache or a register changes the result. The answer comes from
integer arithmetic, which uses other units of the core.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fireflyer.validator.checks.cpu import on_each_cpu
from fireflyer.validator.model import Check, Figure, Measured, Settings

CHECKS = (
    Check(
        name="gemm",
        figures=(Figure("gemm", "GFLOP/CPU-s"),),
        duration_s=3.0,
        function="fireflyer.validator.checks.gemm:run",
    ),
)

SIZE = 320
QUICK_S = 1.0
FULL_S = 60.0

DTYPES: tuple[tuple[type[np.floating], int], ...] = ((np.float64, 1 << 20), (np.float32, 127))
"""Element types, each with its largest element: sums of `SIZE` products stay below 2^53 and
2^24."""

Array = NDArray[np.floating]
Disturb = Callable[[Array, int], None]
"""Callback that receives each product and its number; tests and drills flip a bit in a product."""


class Wrong(Exception):
    """A product differs from the known answer; the text is the number of wrong elements."""


def run(settings: Settings) -> Iterator[Measured]:
    """Multiplies on all cores at once: for a second of CPU time if quick, else for a minute."""
    disturb = flip_one_bit if settings.drill == "gemm" else _leave
    seconds = QUICK_S if settings.quick else FULL_S

    def on_core(cpu: int) -> float:
        try:
            return multiply(seconds, disturb, seed=cpu)
        except Wrong as wrong:
            return -float(str(wrong))

    speeds = on_each_cpu(on_core)
    bad = {cpu: -count for cpu, count in speeds.items() if count < 0}
    if bad:
        text = ", ".join(f"{count:.0f} on CPU {cpu}" for cpu, count in bad.items())
        yield Measured("gemm", None, f"products differ from the known answer; elements: {text}")
    else:
        yield Measured("gemm", min(speeds.values()), samples=tuple(speeds.values()))


def multiply(seconds: float, disturb: Disturb, seed: int = 0, size: int = SIZE) -> float:
    """Multiplies for this much CPU time, at least once per type, and checks each product.

    Returns:
        GFLOP per second of CPU time, without the comparisons.

    Raises:
        Wrong: a product differs; the text is the number of wrong elements.
    """
    draw = np.random.default_rng(seed)
    cases = [_case(draw, dtype, largest, size) for dtype, largest in DTYPES]
    spent, rounds, begin = 0.0, 0, time.process_time()
    product = {a.dtype: np.empty((size, size), a.dtype) for a, _, _ in cases}
    while rounds < len(cases) or time.process_time() - begin < seconds:
        left, right, answer = cases[rounds % len(cases)]
        out = product[left.dtype]
        start = time.process_time()
        np.matmul(left, right, out=out)
        spent += time.process_time() - start
        disturb(out, rounds)
        wrong = int(np.count_nonzero(out.view(answer.dtype) != answer))
        if wrong:
            raise Wrong(str(wrong))
        rounds += 1
    return 2 * size**3 * rounds / max(spent, 1e-9) / 1e9


def _case(
    draw: np.random.Generator, dtype: type[np.floating], largest: int, size: int
) -> tuple[Array, Array, NDArray[np.integer]]:
    """Returns two matrices and the bits of their exact product."""
    bound = largest if size * largest**2 < 2 ** (np.finfo(dtype).nmant + 1) else 127
    left, right = draw.integers(-bound, bound + 1, (2, size, size))
    exact = (left @ right).astype(dtype)
    bits = np.int64 if dtype is np.float64 else np.int32
    # `exact` has +0.0 for a sum of 0. The product has -0.0 only if all its summands are -0.0, which
    # does not happen with this many random elements.
    return left.astype(dtype), right.astype(dtype), exact.view(bits)


def flip_one_bit(product: Array, number: int) -> None:
    """Flips the lowest bit of one element of the second product."""
    if number == 1:
        bits = product.view(np.int64 if product.dtype == np.float64 else np.int32)
        bits[product.shape[0] // 2, product.shape[1] // 3] ^= 1


def _leave(product: Array, number: int) -> None:
    del product, number
