"""
Kernels of the operators of fireflyer.nn, on addresses. `type`: 0 float32, 1 float64, 2 float16, 3 bfloat16.
"""

from collections.abc import Sequence


def forward(activation: int, type: int, x: int, y: int, bits: int, count: int, slope: float, threads: int) -> None:
    """
    Applies activation 0 (ReLU), 1 (ReLU6) or 2 (leaky ReLU), and sets the bits of elements whose gradient passes. `bits`: address of memory whose size is a multiple of 8 bytes.
    """

def backward(leaking: bool, type: int, g: int, bits: int, dx: int, count: int, slope: float, threads: int) -> None:
    """
    Writes the gradient where its bit is set; elsewhere 0 or, if `leaking`, the gradient times `slope`.
    """

def dropout(type: int, x: int, y: int, count: int, seed: int, threshold: int, scale: float, threads: int) -> None:
    """
    Multiplies by 0 where the hash of the seed and the element's number is below `threshold`, elsewhere by `scale`.
    """

def swiglu(type: int, gate: int, up: int, y: int, count: int, unit: int, threads: int) -> None:
    """
    Computes silu(gate) * up. Not for float64. `unit`: number of elements in two of torch's SIMD vectors.
    """

def swiglu_backward(type: int, g: int, gate: int, up: int, d_gate: int, d_up: int, count: int, unit: int, threads: int) -> None:
    """Computes the gradients of gate and up."""

def rms_norm(type: int, memory: Sequence[int], rows: int, width: int, eps: float, threads: int) -> None:
    """
    Computes the RMS norm of rows; `memory`: addresses of x, residual, weight, h, y, scales (nn/kernels.hpp), 0 for none.
    """

def rms_norm_backward(type: int, memory: Sequence[int], rows: int, width: int, threads: int) -> None:
    """
    Computes the gradients of rms_norm; `memory`: addresses of h, weight, scales, g, gh, dh, apart, products, 0 for none.
    """

def bit_product(a: int, planes_a: int, b: int, planes_b: int, rows: int, panels: int, words: int, out: int, threads: int) -> None:
    """Product of bit planes (nn/kernels.hpp) to int32."""

def encode_places(pooling: Sequence[int], indices: int, planes: int, codes: int, threads: int) -> None:
    """
    Converts positions of maxima in planes to positions in their pooling windows, coded in 2, 4 or 8 bits; `pooling`: see nn/pool.hpp.
    """

def decode_places(pooling: Sequence[int], codes: int, planes: int, indices: int, threads: int) -> None:
    """Converts the codes of `encode_places` to positions in planes."""
