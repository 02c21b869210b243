"""Weights, activations and gradients of few bits.

For training: `quantize_weights`, `quantize_activations`, `quantize_gradients` (DoReFa), `equalize`
(balanced), and the layers `Linear`, `Conv2d` and `Recurrent` with `Bits`. For inference:
`BitLinear` on bit planes. `quantize` rounds trained weights to 4-bit integers in groups. `shards`
divides column layers and a row layer of such weights for tensor parallelism.
"""

from fireflyer.nn.quant.dorefa import (
    bin_entropy,
    equalize,
    quantize_activations,
    quantize_gradients,
    quantize_weights,
    quantized_gradient,
)
from fireflyer.nn.quant.groups import Quantized, quantize
from fireflyer.nn.quant.layers import Bits, Conv2d, Linear, Recurrent
from fireflyer.nn.quant.pair import Shard, shards
from fireflyer.nn.quant.planes import BitLinear, Panels, bit_product, pack

__all__ = [
    "BitLinear",
    "Bits",
    "Conv2d",
    "Linear",
    "Panels",
    "Quantized",
    "Recurrent",
    "Shard",
    "bin_entropy",
    "bit_product",
    "equalize",
    "pack",
    "quantize",
    "quantize_activations",
    "quantize_gradients",
    "quantize_weights",
    "quantized_gradient",
    "shards",
]
