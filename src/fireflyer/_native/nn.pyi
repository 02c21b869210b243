"""
Kernels of the operators of fireflyer.nn, on addresses. `type`: 0 float32, 1 float64, 2 float16, 3 bfloat16.
"""

from collections.abc import Sequence


def forward(activation: int, type: int, x: int, y: int, bits: int, count: int, slope: float, threads: int) -> None:
    """
    Activation 0 ReLU, 1 ReLU6, 2 leaky ReLU, and a bit an element: the gradient passes. Bits: a multiple of 8 bytes.
    """

def backward(leaking: bool, type: int, g: int, bits: int, dx: int, count: int, slope: float, threads: int) -> None:
    """
    The gradient where its bit is set; elsewhere 0, or the gradient times `slope`.
    """

def dropout(type: int, x: int, y: int, count: int, seed: int, threshold: int, scale: float, threads: int) -> None:
    """
    Times 0 where the hash of the seed and the element's number is below `threshold`, times `scale` elsewhere.
    """

def bit_product(a: int, planes_a: int, b: int, planes_b: int, rows: int, panels: int, words: int, out: int, threads: int) -> None:
    """Product of bit planes (nn/kernels.hpp) to int32."""

def encode_places(pooling: Sequence[int], indices: int, planes: int, codes: int, threads: int) -> None:
    """
    Places of maxima in their windows, in 2, 4 or 8 bits, of places in planes; `pooling` as in nn/pool.hpp.
    """

def decode_places(pooling: Sequence[int], codes: int, planes: int, indices: int, threads: int) -> None:
    """The reverse of `encode_places`."""
